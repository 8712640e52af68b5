"""Factors of matrices, and the linear algebra on them whose bits are the same on every CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringstrategy.buckets.residuals import may_read

_BLOCK = 1 << 18  # elements of a product that is added to others while it is in the cache


class Factors:
    """One factor of each matrix, shape (rank, length), those of equal length side by side in one flat buffer.

    Attributes:
        flat: the buffer.
        groups: those of one length each, shape (how many, rank, length).
        each: those of each matrix, in the order of `lengths`.
    """

    def __init__(self, lengths: Sequence[int], rank: int, like: Tensor) -> None:
        self.flat = like.new_zeros(rank * sum(lengths))
        places = sorted(range(len(lengths)), key=lambda place: lengths[place])
        each: dict[int, Tensor] = {}
        self.groups: list[Tensor] = []
        offset = 0
        for length in sorted(set(lengths)):
            members = [place for place in places if lengths[place] == length]
            group = self.flat[offset : offset + len(members) * rank * length].view(len(members), rank, length)
            offset += group.numel()
            self.groups.append(group)
            each.update(zip(members, group, strict=True))
        self.each = [each[place] for place in range(len(lengths))]


def multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """out = left^T right for factors (rank, n) and (rank, m), rank by rank: the same bits on every CPU."""
    # no fused multiply-add, which not every CPU has: each product is rounded, then added
    rows = out.shape[0] if out.device.type != "cpu" else max(1, _BLOCK // out.shape[1])
    if len(left) == 1:
        rows = out.shape[0]
    for begin in range(0, out.shape[0], rows):
        block = out[begin : begin + rows]
        torch.mul(left[0, begin : begin + rows, None], right[0], out=block)
        for column, row in zip(left[1:, begin : begin + rows, None], right[1:], strict=True):
            block.add_(column * row)


def subtract(matrix: Tensor, left: Tensor, right: Tensor, share: float, before: Tensor, *, out: Tensor) -> None:
    """out = matrix - share * left^T right, or `before` (perhaps `out` itself) if `right` is NaN."""
    sound = right[0, 0].isfinite()
    on_cpu = may_read(sound)
    if on_cpu and not sound:
        out.copy_(before)
        return
    rest = out if on_cpu else torch.empty_like(out)
    torch.addr(matrix, left[0], right[0], alpha=-share, out=rest)
    for column, row in zip(left[1:], right[1:], strict=True):
        rest.addr_(column, row, alpha=-share)
    if not on_cpu:
        torch.where(sound, rest, before, out=out)

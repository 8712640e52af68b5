"""How much of each mean an optimizer stepped, and residuals that go only so far: in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.kernels.sample import PLACES, some

FADES = 0.9  # per step, decay of the largest recent part


def sample(tensors: Sequence[Tensor | None]) -> Tensor:
    """512 values of each, the same places each time: float64 (tensors, 512).

    0 where a tensor has fewer, for what is not finite, and for None, but not all are None.
    """
    each = [some(tensor) for tensor in tensors if tensor is not None]
    sampled = torch.zeros(len(tensors), PLACES, dtype=torch.float64, device="cpu")
    if each:
        there = _there(tuple(0 if tensor is None else min(tensor.numel(), PLACES) for tensor in tensors))
        sampled.masked_scatter_(there, torch.cat(each).double().nan_to_num_(0, 0, 0))
    return sampled


def stepped_parts(
    then: Tensor, tensors: Sequence[Tensor | None], late: Tensor | None, scale: Tensor | None, stepped: Tensor | bool
) -> Tensor:
    """Of each tensor the part that it still holds of what `sample` gave `then`: float64 (tensors,), 1 for None.

    That is <now, then> / <then, then>, at least 0; for a tensor that was zero, this of all together.

    Args:
        then: as `sample` gave it.
        tensors: like those; None: not asked for.
        late: the decayed maximum of each tensor's part, float64 (tensors,), to be updated: parts are divided by it.
            None: they are not, and at most 1.
        scale: a number on the device, by which parts are multiplied before they are compared with it; None: 1.
        stepped: false: all parts are 0. A boolean on the device where only that knows.
    """
    there = torch.tensor([tensor is not None for tensor in tensors], device="cpu")
    both, norm = ((values * then).sum(1).mul_(there) for values in (sample(tensors), then))
    if scale is not None:
        both.mul_(scale)
    total = norm.sum()
    # a gradient that was zero at all sampled places follows the others
    of_all = torch.where(total == 0, 1.0, both.sum() / total)
    parts = torch.where(norm == 0, of_all, both / norm).clamp_(min=0)
    if late is None:
        parts.clamp_(max=1)
    else:
        parts = torch.where(torch.as_tensor(stepped, device="cpu"), parts, 0.0)
        before = late.clone()
        late.copy_(torch.where(there & (parts > 0), torch.maximum(parts, FADES * before), before))
        parts = (parts / torch.maximum(parts, before)).nan_to_num_(0, 0, 0)
    return torch.where(there, parts, 1.0)


def go_(now: Tensor, before: Tensor, edges: Sequence[int], parts: Tensor) -> None:
    """For each segment i, from edge i to edge i + 1: now = lerp(before, now, parts[i]), exact at 0 and 1."""
    for begin, end, part in zip(edges, edges[1:], parts.tolist(), strict=False):
        if part == 0:
            now[begin:end].copy_(before[begin:end])
        elif part != 1:
            torch.lerp(before[begin:end], now[begin:end], part, out=now[begin:end])  # exact at 0 and 1


@lru_cache(1024)
def _there(counts: tuple[int, ...]) -> Tensor:
    """Which places of the samples hold a value: bool (tensors, PLACES)."""
    return torch.arange(PLACES, device="cpu") < torch.tensor(counts, device="cpu")[:, None]

"""How much of each mean an optimizer stepped, and residuals that go only so far: in torch, the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.kernels.sample import PLACES, some

FADES = 0.9  # per step, decay of the largest recent part


def sample(tensors: Sequence[Tensor | None]) -> Tensor:
    """See `Engine.sample`."""
    each = [some(tensor) for tensor in tensors if tensor is not None]
    sampled = torch.zeros(len(tensors), PLACES, dtype=torch.float64, device="cpu")
    if each:
        there = _there(tuple(0 if tensor is None else min(tensor.numel(), PLACES) for tensor in tensors))
        sampled.masked_scatter_(there, torch.cat(each).double().nan_to_num_(0, 0, 0))
    return sampled


def stepped_parts(
    then: Tensor, tensors: Sequence[Tensor | None], late: Tensor | None, scale: Tensor | None, stepped: Tensor | bool
) -> Tensor:
    """See `Engine.stepped_parts`."""
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
    """See `Engine.go_`."""
    for begin, end, part in zip(edges, edges[1:], parts.tolist(), strict=False):
        if part == 0:
            now[begin:end].copy_(before[begin:end])
        elif part != 1:
            torch.lerp(before[begin:end], now[begin:end], part, out=now[begin:end])  # exact at 0 and 1


@lru_cache(1024)
def _there(counts: tuple[int, ...]) -> Tensor:
    """Which places of the samples hold a value: bool (tensors, PLACES)."""
    return torch.arange(PLACES, device="cpu") < torch.tensor(counts, device="cpu")[:, None]

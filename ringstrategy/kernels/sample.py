"""A few values of a tensor, spread over all of it: enough to see that somebody changed or scaled it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PLACES = 512
_TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sample(tensor: Tensor) -> Tensor:
    """A flat copy of 512 of its values, the same ones each time; of all where there are no more."""
    return some(tensor).clone()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two samples of tensors of one dtype have the same bits."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def some(tensor: Tensor) -> Tensor:
    """What `sample` gives, flat; of small contiguous tensors a view."""
    if tensor.numel() <= PLACES:
        return tensor.reshape(-1)
    chosen = places(tensor.numel(), tensor.device)
    if not tensor.is_contiguous() and tensor.dtype in _TAKEN:
        return torch.take(tensor, chosen)  # without a copy of all
    return tensor.reshape(-1)[chosen]


@cache
def places(numel: int, device: torch.device) -> Tensor:
    """Where `sample` takes the values of a tensor of more than 512 elements: int64 (512,)."""
    # in no row and no column in particular: multiples of the golden ratio
    return ((torch.arange(PLACES, device=device) * 0x9E3779B1 % 2**32) >> 8) * numel >> 24

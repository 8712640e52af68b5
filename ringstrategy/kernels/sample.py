"""A few values of a tensor, spread over all of it: enough to see that somebody changed or scaled it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_PLACES = 512
_TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sample(tensor: Tensor) -> Tensor:
    """A flat copy of 512 of its values, the same ones each time; of all where there are no more."""
    return _some(tensor).clone()


def samples(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """`sample` of each tensor, in one flat float64 tensor, and how many values each of them gave."""
    each = [_some(tensor) for tensor in tensors]
    return torch.cat(each).double(), [values.numel() for values in each]


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits, in two samples of tensors of one dtype?"""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _some(tensor: Tensor) -> Tensor:
    """Flat; of small contiguous tensors a view."""
    if tensor.numel() <= _PLACES:
        return tensor.reshape(-1)
    places = _places(tensor.numel(), tensor.device)
    if not tensor.is_contiguous() and tensor.dtype in _TAKEN:
        return torch.take(tensor, places)  # without a copy of all
    return tensor.reshape(-1)[places]


@cache
def _places(numel: int, device: torch.device) -> Tensor:
    # in no row and no column in particular: multiples of the golden ratio
    return ((torch.arange(_PLACES, device=device) * 0x9E3779B1 % 2**32) >> 8) * numel >> 24

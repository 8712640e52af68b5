"""A few values of a tensor, spread over all of it: enough to see that somebody changed or scaled it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_PLACES = 512


def sample(tensor: Tensor) -> Tensor:
    """A copy of 512 of its values, the same ones each time; some twice where there are not so many, zeros of none."""
    if tensor.numel() == 0:
        return tensor.new_zeros(_PLACES)
    return torch.take(tensor, _places(tensor.numel(), tensor.device))


@cache
def _places(numel: int, device: torch.device) -> Tensor:
    # in no row and no column in particular: multiples of the golden ratio
    return ((torch.arange(_PLACES, device=device) * 0x9E3779B1 % 2**32) >> 8) * numel >> 24

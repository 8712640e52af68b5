"""What shows that a tensor was changed, or scaled: a few of its values, or the sum of all its words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

PLACES = 512
_TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's words, as integers modulo 2**64: int64 (tensors,), on the device of the first.

    One pass over the memory. A change of a single word always shows, of several with all likelihood.
    """
    sums = [_words(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_WORDS[real.element_size()])

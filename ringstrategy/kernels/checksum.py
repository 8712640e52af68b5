"""A number for the bits of a tensor, to detect that two copies of it differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's words, as integers modulo 2**64: int64 (tensors,), on the device of the first.

    One pass over the memory. A change of a single word always shows, of several with all likelihood.
    """
    sums = [_words(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_WORDS[real.element_size()])

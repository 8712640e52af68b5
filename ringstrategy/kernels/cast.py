"""What rounding to 16 bits loses, in torch, on any device: the reference for the kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def lose(values: Tensor, rounded: Tensor, lost: Tensor) -> None:
    """See `Engine.lose`."""
    rest = values - rounded
    lost.copy_(torch.where(rest.isfinite(), rest, lost))

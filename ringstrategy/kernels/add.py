"""The values of several ranks added to a rank's own, in torch, on any device: the reference for the kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def add_(out: Tensor, parts: Sequence[Tensor]) -> None:
    """See `Engine.add_`."""
    for part in parts:
        out.add_(part)

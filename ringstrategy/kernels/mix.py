"""What neighbours' values make of a rank's own, in torch, on any device: the reference for the kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mix(own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """See `Engine.mix`."""
    out.zero_()
    own = own.to(out.dtype)
    for values, weight in zip(theirs, weights, strict=True):
        out.add_(values.to(out.dtype).sub(own).mul_(weight))

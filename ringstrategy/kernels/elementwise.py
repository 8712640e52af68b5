"""Sums, differences and steps, element by element, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Add the parts, like `out` of any dtype and length, in this order; each sum is rounded to that dtype."""
    for part in parts:
        out.add_(part)


def lose(values: Tensor, rounded: Tensor, lost: Tensor) -> None:
    """Write `values - rounded`, float16 or bfloat16, to `lost` wherever that is finite. All are (n,)."""
    rest = values - rounded
    lost.copy_(torch.where(rest.isfinite(), rest, lost))


def mix(own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Write the sum of weight * (theirs - own), added in that order, to `out`.

    Args:
        own: floating-point (n,), perhaps narrower than `out`.
        theirs: like `own`.
        weights: one for each of them.
        out: (n,); its dtype is that of differences, products and sums.
    """
    out.zero_()
    own = own.to(out.dtype)
    for values, weight in zip(theirs, weights, strict=True):
        out.add_(values.to(out.dtype).sub(own).mul_(weight))


def nesterov_(values: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], lr: float, momentum: float) -> None:
    """For each tensor: momenta = momentum * momenta + gradients; values -= lr * (gradients + momentum * momenta).

    All are contiguous and alike. Each operation is rounded to their dtype.
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    steps = list(torch._foreach_mul(momenta, momentum))
    torch._foreach_add_(steps, gradients)
    torch._foreach_mul_(steps, lr)
    torch._foreach_sub_(values, steps)

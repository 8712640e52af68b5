"""A step with Nesterov momentum, in torch, on any device: the reference for the kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def nesterov_(values: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], lr: float, momentum: float) -> None:
    """See `Engine.nesterov_`."""
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    steps = list(torch._foreach_mul(momenta, momentum))
    torch._foreach_add_(steps, gradients)
    torch._foreach_mul_(steps, lr)
    torch._foreach_sub_(values, steps)

"""Outer optimizers: they step the parameters that all ranks share, by what the ranks did since they last met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.kernels import operations

Outer = Callable[[Iterable[Parameter]], Optimizer]


@dataclass(frozen=True)
class Nesterov:
    """Makes an SGD with Nesterov momentum, the outer optimizer of DiLoCo (Douillard et al. 2023).

    With outer gradient g: momentum = mu momentum + g; parameters -= lr (g + mu momentum). Every operation rounds alike
    on all processors, so ranks with different ones agree bit for bit. `torch.optim.SGD` computes the same, to rounding.

    Args:
        lr: step size. 1 and no momentum: the plain mean of all ranks. Larger: faster, and less stable.
        momentum: part of the last step that the next one keeps, 0 <= momentum < 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float) or not self.lr > 0:
            raise ValueError(f"lr is a number > 0, got {self.lr!r}")
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is a number, 0 <= momentum < 1, got {self.momentum!r}")

    def __call__(self, parameters: Iterable[Parameter]) -> Optimizer:
        """The optimizer of these."""
        return _Nesterov(parameters, {"lr": float(self.lr), "momentum": float(self.momentum)})


class _Nesterov(Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See `Nesterov`. Additions and multiplications apart, because only some processors fuse them."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients: list[Tensor] = [parameter.grad for parameter in parameters]
            lr, mu = group["lr"], group["momentum"]
            if not parameters:
                continue
            if not mu:
                torch._foreach_sub_(parameters, torch._foreach_mul(gradients, lr))
                continue
            for parameter in parameters:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            operations.nesterov_.on(parameters[0].device)(parameters, gradients, momenta, lr, mu)


def described_outer(outer: Outer | None) -> str:
    """Its class and options, which ranks compare; TypeError unless it makes an optimizer of torch's."""
    if outer is None:
        return "None"
    cure = "outer makes an optimizer: ringstrategy.Nesterov(), or functools.partial(torch.optim.SGD, lr=0.7)"
    if not callable(outer):
        raise TypeError(f"{cure}; got {outer!r}")
    try:
        optimizer = outer([Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise TypeError(f"{cure}; got {outer!r}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{cure}; got {outer!r}, which made {optimizer!r}")
    options = ", ".join(f"{name}={value!r}" for name, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({options})"

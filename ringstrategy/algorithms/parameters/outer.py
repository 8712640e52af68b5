"""Outer optimizers: they step the parameters that all ranks share, by what the ranks did since they last met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.parameters.rows import cut_like, row_of
from ringstrategy.kernels.engine import engine

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
            engine(parameters[0].device).nesterov_(parameters, gradients, momenta, lr, mu)


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


class Shared:
    """Shared values of parameters, and their outer optimizer.

    Args:
        names: of the parameters.
        parameters: the values begin as theirs.
        outer: None: parameters move by exactly what they are given.

    Attributes:
        values: flat, in the dtype of sums.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], outer: Outer | None) -> None:
        self.names = names
        self.values = row_of(parameters)
        self._parts = [Parameter(part, requires_grad=False) for part in cut_like(self.values, parameters)]
        self._optimizer = None if outer is None else outer(self._parts)

    @torch.no_grad()
    def step(self, progress: Tensor, *, plain: bool = False) -> None:
        """Step by the outer gradient -progress, flat, which may be used as scratch.

        Args:
            progress: by how much the ranks moved since the last step.
            plain: add it, without the optimizer.
        """
        if plain or self._optimizer is None:
            self.values.add_(progress)
            return
        for part, gradient in zip(self._parts, cut_like(progress.neg_(), self._parts), strict=True):
            part.grad = gradient
        self._optimizer.step()
        for part in self._parts:
            part.grad = None

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By parameter name: its values, and what the optimizer keeps for it. Tensors are views."""
        kept = {} if self._optimizer is None else self._optimizer.state
        return {
            name: {"values": part.detach(), "outer": dict(kept.get(part, {}))}
            for name, part in zip(self.names, self._parts, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> bool:
        """Take it back; False if it lacks a parameter."""
        if not all(name in state for name in self.names):
            return False
        for name, part in zip(self.names, self._parts, strict=True):
            part.copy_(state[name]["values"])
            if self._optimizer is not None and state[name]["outer"]:
                self._optimizer.state[part] = {
                    key: _like(value, part) if isinstance(value, Tensor) else value
                    for key, value in state[name]["outer"].items()
                }
        return True


def _like(value: Tensor, part: Tensor) -> Tensor:
    """A copy where the part lies; in its dtype, if it is a value for each of its elements."""
    alike = value.shape == part.shape and value.is_floating_point() and part.dim() > 0
    return value.to(part.device, part.dtype if alike else value.dtype, copy=True)

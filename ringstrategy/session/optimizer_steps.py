"""Notice every step of every torch optimizer, whoever calls it: Lightning, a user, or another optimizer around it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerSteps:
    """Between its birth and `close`: `before` and `after` are called around each step that no `expecting` announces.

    A step within another one (an optimizer that wraps others) is part of that one.

    Args:
        before: called with the optimizer. Not if the step computes its own gradients, by a closure.
        after: called with the optimizer when its parameters are final.
    """

    def __init__(self, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
        self._before, self._after = before, after
        self._under_way: list[Optimizer] = []
        self._expected: list[Tensor | bool] | None = None
        self._hooks = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]

    def close(self) -> None:
        """Look away."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """No step is under way: one that was ended in an exception."""
        self._under_way, self._expected = [], None

    @contextmanager
    def expecting(self) -> Generator[list[Tensor | bool], None, None]:
        """Collects, for each step within, whether it was one: a tensor where only the device knows (`found_inf`)."""
        around, seen = self._expected, list[Tensor | bool]()
        self._expected = seen
        try:
            yield seen
        finally:
            self._expected = around

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer in self._under_way:  # its last step ended in an exception, which somebody caught
            del self._under_way[self._under_way.index(optimizer) :]
        self._under_way.append(optimizer)
        computes = len(args) > 1 or kwargs.get("closure") is not None
        if self._expected is None and len(self._under_way) == 1 and not computes:
            self._before(optimizer)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._under_way and self._under_way.pop() is not optimizer:
            pass
        if self._expected is not None:
            # a fused optimizer skips by itself what a loss scaler has found
            found_inf = getattr(optimizer, "found_inf", None)
            self._expected.append(True if found_inf is None else found_inf.reshape(()) == 0)
        elif not self._under_way:
            self._after(optimizer)


def announces_steps(optimizer: object) -> bool:
    """Does torch call hooks at its steps? Not if it is none of torch's, or never called `super().__init__`."""
    return isinstance(optimizer, Optimizer) and getattr(type(optimizer).step, "hooked", False)


def any_of(steps: list[Tensor | bool]) -> Tensor | bool:
    """Was any of them a step?"""
    on_device = [step for step in steps if isinstance(step, Tensor)]
    if len(on_device) < len(steps):
        return any(step for step in steps if not isinstance(step, Tensor))
    return torch.stack(on_device).any() if on_device else False

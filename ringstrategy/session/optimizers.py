"""What optimizers step, when they step, and what of them must be the same on all ranks where replicas are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_EXCHANGING = {  # of torch, and of apex
    "ZeroRedundancyOptimizer",
    "PostLocalSGDOptimizer",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
}


def stepped_by(optimizer: Optimizer) -> set[Parameter]:
    """Its parameters."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """That of a loss scaler, on the device, without waiting for it; not changed when the scaler's own is."""
    return None if scaler is None else scaler.scale(torch.ones((), device=device))


def check_registered(optimizers: Sequence[Optimizer], registered: Collection[Parameter]) -> None:
    """ValueError if one steps a parameter that is none of these, which nobody would average."""
    for place, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                stays = not parameter.requires_grad or getattr(parameter, "ring_local", False)
                if not stays and parameter not in registered:
                    raise ValueError(
                        f"optimizer {place}, a {type(optimizer).__name__}, steps in group {i} a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the module, so it would be averaged nowhere, and "
                        "replicas would drift apart: register it in the module that is trained (self.temperature = "
                        "nn.Parameter(...), or make the loss that has it a submodule); with Fabric set up all models "
                        "before the optimizer. If each rank is to have its own, set parameter.ring_local = True"
                    )


def check_alone(optimizers: Sequence[Optimizer]) -> None:
    """ValueError if one exchanges parameters or gradients itself, though each rank steps its own gradients."""
    for optimizer in optimizers:
        ours = {cls.__name__ for cls in type(optimizer).__mro__} & _EXCHANGING
        if ours:
            raise ValueError(
                f"{min(ours)} exchanges parameters or gradients within its step, for ranks with equal gradients, and "
                "here each rank steps its own: pass the optimizer that is in it, such as torch.optim.AdamW, or use a "
                "synchronous strategy such as 'ring'"
            )


def options(optimizers: Sequence[Optimizer], equal: Collection[Parameter]) -> Iterator[str]:
    """A line an option of a group that steps any of `equal`: what makes an optimizer step the same gradients alike.

    Those that its class has defaults for: what a user puts beside them does not count.
    """
    for place, optimizer, i, group in _groups(optimizers, equal):
        whose = f"optimizer {place}, a {type(optimizer).__name__}, group {i}"
        for name in sorted((getattr(optimizer, "defaults", None) or group).keys() & group.keys()):
            value = _rounded(group[name])
            if value is not None:
                yield f"{whose}: {name}={value}"


def rates(optimizers: Sequence[Optimizer], equal: Collection[Parameter]) -> Iterator[str]:
    """A line a group that steps any of `equal`: its learning rate, but not one on a GPU, for which it would wait."""
    for place, _, i, group in _groups(optimizers, equal):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and rate.numel() == 1 and rate.device.type == "cpu":
            rate = rate.item()
        if isinstance(rate, int | float):
            yield f"optimizer {place}, group {i}: lr={_rounded(rate)}"


def _groups(
    optimizers: Sequence[Optimizer], equal: Collection[Parameter]
) -> Iterator[tuple[int, Optimizer, int, dict[str, Any]]]:
    for place, optimizer in enumerate(optimizers if equal else ()):  # none is, where ranks train apart
        for i, group in enumerate(optimizer.param_groups):
            if any(parameter in equal for parameter in group["params"]):
                yield place, optimizer, i, group


def _rounded(value: Any) -> str | None:
    """With as many digits as machines with different mathematics libraries agree in; None if not a number or text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        parts = [_rounded(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return str(value) if isinstance(value, bool | int | str) else None


class _UnderWay(threading.local):
    """The steps that this thread is in, outermost first, each with the frame of torch's that calls it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Optimizer, FrameType]] = []
        self.expected: list[Tensor | bool] | None = None


class OptimizerSteps:
    """Between its birth and `close`: `before` and `after` are called around each step that no `expecting` announces.

    A step within another one (an optimizer that wraps others, or that calls its base class's `step`) is part of that
    one. Steps of other threads have nothing to do with those of this one.

    Args:
        before: called with the optimizer; if a closure computes the gradients, only after the step.
        after: called with the optimizer when its parameters are final.
        within_backward: called with the optimizer before a step within a backward pass, whoever announces it.
    """

    def __init__(
        self,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
        within_backward: Callable[[Optimizer], None],
    ) -> None:
        self._before, self._after, self._within_backward = before, after, within_backward
        self._here = _UnderWay()
        self._hooks = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]

    def close(self) -> None:
        """Look away."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """No step is under way: one that was ended in an exception."""
        self._here.steps, self._here.expected = [], None

    @contextmanager
    def expecting(self) -> Generator[list[Tensor | bool], None, None]:
        """Collects, for each step within, whether it was one: a tensor where only the device knows (`found_inf`)."""
        around, seen = self._here.expected, list[Tensor | bool]()
        self._here.expected = seen
        try:
            yield seen
        finally:
            self._here.expected = around

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_within_backward():
            self._within_backward(optimizer)
        caller = sys._getframe(1)
        for place, (known, frame) in enumerate(self._here.steps):
            if known is optimizer and not _is_running(frame, caller):  # it ended in an exception, which somebody caught
                del self._here.steps[place:]
                break
        self._here.steps.append((optimizer, caller))
        if self._here.expected is None and len(self._here.steps) == 1 and not _has_closure(args, kwargs):
            self._before(optimizer)

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while self._here.steps and self._here.steps.pop()[0] is not optimizer:
            pass
        if self._here.expected is not None:
            # a fused optimizer skips by itself what a loss scaler has found
            found_inf = getattr(optimizer, "found_inf", None)
            self._here.expected.append(True if found_inf is None else found_inf.reshape(()) == 0)
        elif not self._here.steps:
            if _has_closure(args, kwargs):
                self._before(optimizer)
            self._after(optimizer)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step computes its own gradients."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def is_within_backward() -> bool:
    """Whether this thread runs a hook or a function of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def stepped_within_backward(name: str) -> RuntimeError:
    """The error for an optimizer that steps a parameter before its gradient is averaged."""
    return RuntimeError(
        f"an optimizer steps {name} within backward, where its gradient is this rank's alone, so replicas would "
        "differ: step after backward, not in a hook such as register_post_accumulate_grad_hook"
    )


def _is_running(frame: FrameType, caller: FrameType | None) -> bool:
    """Whether it is the caller, or one of those that called it."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def announces_steps(optimizer: object) -> bool:
    """Does torch call hooks at its steps? Not if it is none of torch's, or never called `super().__init__`."""
    return isinstance(optimizer, Optimizer) and getattr(type(optimizer).step, "hooked", False)


def any_of(steps: list[Tensor | bool]) -> Tensor | bool:
    """Whether any of them was a step."""
    on_device = [step for step in steps if isinstance(step, Tensor)]
    if len(on_device) < len(steps):
        return any(step for step in steps if not isinstance(step, Tensor))
    return torch.stack(on_device).any() if on_device else False

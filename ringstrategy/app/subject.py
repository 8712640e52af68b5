"""The user's model, of which `ringstrategy-plan` needs the shapes, and what a step of it takes here."""

from __future__ import annotations

import logging
import pkgutil
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module, Parameter
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

_WARM, _COUNTED = 3, 10  # steps
_LONG = 20.0  # seconds after which so many steps are enough


@dataclass(frozen=True)
class Step:
    """A training step of one process here.

    Attributes:
        seconds: of one, in the median.
        backward: of them, in the backward.
        flops: floating-point operations of a step, as torch counts them. None: not counted.
        optimizer: bytes of its state.
        device: where it ran.
    """

    seconds: float
    backward: float
    flops: int | None
    optimizer: int
    device: str


def made(what: str) -> Any:
    """What `module:name`, called without arguments, returns. The module may be in the current folder."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        make = pkgutil.resolve_name(what)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what!r} is not found: {error}; write it like my_module:MyModel") from error
    if not callable(make):
        raise ValueError(f"{what!r} is to be a class or a function without arguments, such as my_module:MyModel")
    try:
        return make()
    except TypeError as error:
        raise ValueError(
            f"{what}() failed: {error}; write a function without arguments that returns the model, and name that"
        ) from error


def trained(module: Module) -> dict[str, Parameter]:
    """Its parameters that get gradients, without memory."""
    found = {
        name: Parameter(torch.empty_like(parameter, device="meta"))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    if not found:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    return found


def measure(module: Module, data: Any, *, count: bool) -> Step:
    """Train some steps in this process, as `Trainer(devices=1)` does. `count` the operations of one step instead."""
    if not isinstance(module, lightning.LightningModule):
        raise ValueError(
            f"--step-ms is needed: a {type(module).__name__} is no LightningModule, which could be trained"
        )
    if data is None and not is_overridden("train_dataloader", module):
        raise ValueError(f"--data or --step-ms is needed: {type(module).__name__} has no train_dataloader")
    clock = _Clock(count)
    logs = logging.getLogger("lightning.pytorch")
    before = logs.level
    logs.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=-1, max_steps=1 if count else _WARM + _COUNTED, devices=1, callbacks=[clock], barebones=True
            )
            trainer.fit(module, data)
    finally:
        logs.setLevel(before)
    if not clock.steps:
        raise ValueError(f"{type(module).__name__} has no batch with which a step could be measured")
    seconds, backward = zip(*clock.steps[-_COUNTED:], strict=True)
    device = trainer.strategy.root_device.type
    return Step(median(seconds), median(backward), clock.flops, clock.optimizer, device)


class _Clock(lightning.Callback):
    """Seconds of each step, and of its backward."""

    def __init__(self, count: bool) -> None:
        self.steps, self.optimizer = list[tuple[float, float]](), 0
        self.flops: int | None = None
        self._count, self._counting = count, ExitStack()
        self._counter: FlopCounterMode | None = None

    @override
    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._count:
            self._counter = self._counting.enter_context(FlopCounterMode(display=False))
        self._begin, self._backward = _now(trainer), 0.0

    @override
    def on_before_backward(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._backward -= _now(trainer)

    @override
    def on_after_backward(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._backward += _now(trainer)

    @override
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.steps.append((_now(trainer) - self._begin, self._backward))
        self._counting.close()
        if self._counter is not None:
            self.flops = self._counter.get_total_flops()
        self.optimizer = sum(
            value.nbytes
            for each in trainer.optimizers
            for state in each.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        took = sum(seconds for seconds, _ in self.steps)
        trainer.should_stop = len(self.steps) > _WARM and took > _LONG


def _now(trainer: lightning.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


def nbytes(parameters: Mapping[str, Parameter]) -> int:
    """Of the parameters; of their gradients as many."""
    return sum(parameter.nbytes for parameter in parameters.values())

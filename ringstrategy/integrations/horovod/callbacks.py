"""Horovod's callbacks for a Lightning `Trainer`. They work with any strategy; nobody calls `hvd.init`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ringstrategy.integrations.horovod.schedules import warmup_factor


class LearningRateWarmupCallback(Callback):
    """The rates of all optimizers grow from 1/N of theirs to theirs, where N is the number of ranks.

    Within each step it scales what the optimizers, or their schedulers, say. So schedulers go on as without it, and
    monitors between steps see their rates.

    Args:
        steps: optimizer steps after which rates are as they would be without it.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps is a whole number of optimizer steps >= 1, got {steps}")
        self.steps = steps
        self._hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the steps of the optimizers."""
        for optimizer in trainer.optimizers:
            unscaled: list[float] = []

            def scale(optimizer: Optimizer, args: Any, kwargs: Any, unscaled: list[float] = unscaled) -> None:
                factor = warmup_factor(trainer.global_step, self.steps, trainer.world_size)
                unscaled[:] = [group["lr"] for group in optimizer.param_groups] if factor < 1 else []
                for group, rate in zip(optimizer.param_groups, unscaled, strict=False):
                    group["lr"] = rate * factor

            def restore(optimizer: Optimizer, args: Any, kwargs: Any, unscaled: list[float] = unscaled) -> None:
                for group, rate in zip(optimizer.param_groups, unscaled, strict=False):
                    group["lr"] = rate

            self._hooks += [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class MetricAverageCallback(Callback):
    """At the end of each validation, logged metrics become their averages over all ranks, without `sync_dist=True`.

    Put it before callbacks that read metrics, such as `ModelCheckpoint`.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average."""
        metrics = trainer.callback_metrics
        names = sorted(metrics)
        if names and trainer.world_size > 1:
            values = torch.stack([metrics[name].detach().double().to(pl_module.device) for name in names])
            means = trainer.strategy.reduce(values, reduce_op="mean")
            for name, mean in zip(names, means, strict=True):
                metrics[name].copy_(mean)

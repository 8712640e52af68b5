"""Lightning callbacks."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ringstrategy.collectives.stats import Stats
from ringstrategy.strategy import RingStrategy


class CommunicationMonitor(Callback):
    """Log what each step sent and how long it waited to the trainer's loggers.

    Every `log_every_n_steps` of the trainer it logs, as means per optimizer step since it last logged:
    `communication/bytes_sent` (this rank's), `communication/exposed_ms` (training waited) and
    `communication/communication_ms` (hidden or not).
    """

    def __init__(self) -> None:
        self._before = Stats()
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another strategy."""
        if not isinstance(trainer.strategy, RingStrategy):
            raise ValueError(
                f"CommunicationMonitor reads the statistics of a RingStrategy, but the trainer's strategy is "
                f"{type(trainer.strategy).__name__}: pass Trainer(strategy='ring')"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from here."""
        self._remember(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the difference."""
        steps = trainer.global_step - self._step_before
        if steps <= 0 or not trainer._logger_connector.should_update_logs:
            return
        now, before = self._stats(trainer), self._before
        metrics = {
            "communication/exposed_ms": 1000 * (now.exposed_seconds - before.exposed_seconds) / steps,
            "communication/communication_ms": 1000 * (now.communication_seconds - before.communication_seconds) / steps,
        }
        if now.bytes_sent is not None and before.bytes_sent is not None:
            metrics["communication/bytes_sent"] = (now.bytes_sent - before.bytes_sent) / steps
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)
        self._remember(trainer)

    def _remember(self, trainer: Trainer) -> None:
        self._before = dataclasses.replace(self._stats(trainer))
        self._step_before = trainer.global_step

    @staticmethod
    def _stats(trainer: Trainer) -> Stats:
        assert isinstance(trainer.strategy, RingStrategy)
        return trainer.strategy.stats

"""Lightning callbacks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ringstrategy.integrations.lightning.strategy import RingStrategyMixin
from ringstrategy.kernels.sample import checksums
from ringstrategy.transport.stats import Stats

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object

_SAMPLE = 1 << 18  # values by which the consensus distance is estimated: about 1 MB to send


class CommunicationMonitorMixin(Callback):
    """Log what each step sent, how long it waited, and how far replicas are apart, to the trainer's loggers.

    Every `log_every_n_steps` of the trainer it logs, as means per optimizer step since it last logged:
    `communication/bytes_sent` (this rank's, without what `ring_auto` needs to choose), `communication/exposed_ms`
    (training waited) and `communication/communication_ms` (hidden or not). The progress bar has the first two, as
    `sent_MB` and `waited_ms`. With `LocalSGD` it logs after each agreement
    `communication/outer_gradient_norm` and `communication/direction_agreement`: see `LocalSGD.metrics`.

    Args:
        consensus_every_n_steps: where ranks have parameters of their own, after so many steps it logs
            `communication/consensus_distance` too: the mean over ranks of the squared distance of all averaged
            parameters from their mean. Of models of more than 262,144 parameters it is estimated from as many, drawn at
            random each time: all ranks wait for each other, and each sends up to 2 MB, which `bytes_sent` counts. 0:
            never.
    """

    def __init__(self, consensus_every_n_steps: int = 50) -> None:
        if isinstance(consensus_every_n_steps, bool) or not isinstance(consensus_every_n_steps, int):
            raise TypeError(f"consensus_every_n_steps is a whole number, got {consensus_every_n_steps!r}")
        if consensus_every_n_steps < 0:
            raise ValueError(f"consensus_every_n_steps is at least 1, or 0 for never, got {consensus_every_n_steps}")
        self.consensus_every_n_steps = consensus_every_n_steps
        self._before = Stats()
        self._step_before = self._asked_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another strategy."""
        if not isinstance(trainer.strategy, RingStrategyMixin):
            raise ValueError(
                f"CommunicationMonitor reads the statistics of a RingStrategy, but the trainer's strategy is "
                f"{type(trainer.strategy).__name__}: pass Trainer(strategy='ring')"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from here."""
        self._remember(trainer)
        self._asked_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the difference."""
        self._log_traffic(trainer, pl_module)
        self._log_agreement(trainer)
        self._log_consensus(trainer)

    def _log_traffic(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.global_step - self._step_before
        if steps <= 0 or not trainer._logger_connector.should_update_logs:
            return
        made = self._strategy(trainer).stats.since(self._before)
        metrics = {
            "communication/exposed_ms": 1000 * (made.exposed_seconds or 0.0) / steps,
            "communication/communication_ms": 1000 * made.communication_seconds / steps,
        }
        if made.bytes_sent is not None:
            metrics["communication/bytes_sent"] = made.bytes_sent / steps
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)
        for column, metric, unit in (("sent_MB", "bytes_sent", 1e6), ("waited_ms", "exposed_ms", 1)):
            if (value := metrics.get(f"communication/{metric}")) is not None:
                pl_module.log(column, torch.tensor(value / unit), prog_bar=True, logger=False)  # stays on the CPU
        self._remember(trainer)

    def _log_agreement(self, trainer: Trainer) -> None:
        algorithm = self._strategy(trainer).algorithm
        told = algorithm.metrics()
        for logger in trainer.loggers if told else ():
            metrics = {f"communication/{name}": value for name, value in told.items()}
            logger.log_metrics(metrics, step=trainer.global_step - 1)

    def _log_consensus(self, trainer: Trainer) -> None:
        # by steps alone, so that all ranks ask at once: `should_update_logs` is true on a rank that is to stop, too
        every, now = self.consensus_every_n_steps, trainer.global_step
        if not every or now // every == self._asked_before // every:
            return
        self._asked_before = now
        session = self._strategy(trainer).session
        distance = None if session is None else session.algorithm.consensus_distance(_SAMPLE)
        if distance is not None:
            for logger in trainer.loggers:
                logger.log_metrics({"communication/consensus_distance": distance}, step=now - 1)

    def _remember(self, trainer: Trainer) -> None:
        self._before = dataclasses.replace(self._strategy(trainer).stats)
        self._step_before = trainer.global_step

    @staticmethod
    def _strategy(trainer: Trainer) -> RingStrategyMixin:
        assert isinstance(trainer.strategy, RingStrategyMixin)
        return trainer.strategy


class ReplicaCheckMixin(Callback):
    """Every few steps compare the parameters of all ranks, bit for bit; where they differ, stop with an error.

    Replicas stay identical by construction. This finds what breaks that from outside: memory that flips bits, or code
    of a user that changes parameters on one rank. All ranks raise the same RuntimeError, which names the ranks that
    differ from most others, and a parameter. A check reads all parameters once and sends 8 bytes for each parameter.
    Parameters that are never averaged (`ring_local`) are left out. With `LocalSGD` it compares the shared parameters.
    Not for gossip, whose replicas differ.

    Args:
        every_n_steps: check after so many optimizer steps. Less: found sooner, more time.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps is a whole number of optimizer steps >= 1, got {every_n_steps!r}")
        self.every_n_steps = every_n_steps
        self._checked_at = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another strategy, and gossip."""
        strategy = trainer.strategy
        if not isinstance(strategy, RingStrategyMixin) or not strategy.algorithm.replicates:
            other = strategy.algorithm if isinstance(strategy, RingStrategyMixin) else type(strategy).__name__
            raise ValueError(
                f"ReplicaCheck compares replicas that a RingStrategy keeps identical, and with {other} they differ "
                "or belong to others: leave it out, or pass Trainer(strategy='ring')"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from here."""
        self._checked_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare, if it is time."""
        every, now = self.every_n_steps, trainer.global_step
        if now // every == self._checked_at // every:
            return
        self._checked_at = now
        assert isinstance(trainer.strategy, RingStrategyMixin)
        session = trainer.strategy.session
        if session is None or trainer.world_size == 1:
            return
        parameters = session.equal_values()
        mine = checksums(list(parameters.values())).to(trainer.strategy.root_device)
        rows = trainer.strategy.all_gather(mine).view(trainer.world_size, -1).cpu()
        differing = _differing(rows)
        if differing:
            names = list(parameters)
            said = [f"rank {rank} in {names[place]} ({count} in all)" for rank, (place, count) in differing.items()]
            raise RuntimeError(
                f"the replicas differ after step {now}: {', '.join(said)}. Does a callback, a hook or a random number "
                "change parameters on some ranks only? If not, test the memory of their hosts. Resume from an earlier "
                "checkpoint"
            )


def _differing(rows: torch.Tensor) -> dict[int, tuple[int, int]]:
    """By rank the first parameter, and how many, in which it differs from most ranks (the lowest, if two halves do)."""
    usual = torch.stack([max(column.unbind(), key=lambda value: int((column == value).sum())) for column in rows.T])
    wrong = {rank: (row != usual).nonzero().flatten().tolist() for rank, row in enumerate(rows)}
    return {rank: (places[0], len(places)) for rank, places in wrong.items() if places}

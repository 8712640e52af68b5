"""A signal to any rank stops all ranks at the same batch, with a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ringstrategy.session import Session

_LOOK_SECONDS = 1.0  # between two looks of rank 0 for what other ranks were asked
_GO_ON, _STOP, _REQUEUE = range(3)


class Stopping:
    """Takes the place of Lightning's handlers of SIGTERM and of Slurm's requeue signal, for one fit of several ranks.

    Lightning's call collectives within the signal handler, in which this rank may wait for a rank that is dead, or that
    has got no signal. These only remember the signal. A rank that is not rank 0 writes it to the store at its next
    batch, where rank 0 looks once a second. Lightning lets rank 0 tell all others before each batch whether to stop,
    and this is what rank 0 tells. Then all ranks save the last checkpoint of `ModelCheckpoint(save_last=True)`, and
    stop.

    Args:
        trainer: of this fit.
        session: of this fit, connected.
        naming_lost_peers: entered around the collective.
    """

    def __init__(
        self, trainer: Trainer, session: Session, naming_lost_peers: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._session, self._naming_lost_peers = trainer, session, naming_lost_peers
        self._asked = _GO_ON
        self._told = False
        self._looked_at = 0.0
        connector = trainer._signal_connector
        self._requeue = connector._slurm_sigusr_handler_fn
        # Lightning registers the handlers later, and looks them up here
        connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[assignment, method-assign]
        connector._slurm_sigusr_handler_fn = self._on_requeue  # type: ignore[assignment, method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._before_batch  # type: ignore[method-assign]

    def close(self) -> None:
        """Give Lightning its own back."""
        for owner, name in (
            (self._trainer._signal_connector, "_sigterm_notifier_fn"),
            (self._trainer._signal_connector, "_slurm_sigusr_handler_fn"),
            (self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
        ):
            vars(owner).pop(name, None)

    def _on_sigterm(self, signum: Any, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and self._asked != _STOP:
            launcher.kill(signum)
        self._asked = _STOP

    def _on_requeue(self, signum: Any, frame: Any) -> None:
        if self._asked == _GO_ON:
            self._asked = _REQUEUE

    def _before_batch(self) -> None:
        decided = torch.tensor([self._look()], device=self._trainer.strategy.root_device)
        with self._naming_lost_peers():
            dist.broadcast(decided, src=0)
        decision = int(decided)
        if decision == _STOP:
            self._stop()
        elif decision == _REQUEUE:
            self._asked, self._told = _GO_ON, False
            if self._session.lifeline is not None and self._trainer.is_global_zero:
                self._session.lifeline.ask(str(_GO_ON))
            self._requeue(0, None)  # type: ignore[arg-type]

    def _look(self) -> int:
        """On rank 0 what any rank was asked; the others write theirs to the store."""
        lifeline = self._session.lifeline
        assert lifeline is not None
        with contextlib.suppress(RuntimeError):  # a store that is lost will be an error of the exchange
            if self._trainer.is_global_zero:
                if self._asked == _GO_ON and time.monotonic() > self._looked_at + _LOOK_SECONDS:
                    self._looked_at = time.monotonic()
                    return int(lifeline.asked() or _GO_ON)
            elif self._asked != _GO_ON and not self._told:
                self._told = True
                lifeline.ask(str(self._asked))
        return self._asked

    def _stop(self) -> None:
        trainer = self._trainer
        paths = []
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last:
                if not callback.last_model_path:
                    names = callback._monitor_candidates(trainer), callback.CHECKPOINT_NAME_LAST
                    callback.last_model_path = callback.format_checkpoint_name(*names)
                trainer.save_checkpoint(callback.last_model_path)
                paths.append(callback.last_model_path)
        rank_zero_info(
            f"SIGTERM: all ranks stop before step {trainer.global_step}. "
            + (f"Saved {', '.join(paths)}" if paths else "Nothing is saved without ModelCheckpoint(save_last=True)")
        )
        raise SIGTERMException

"""A signal to any rank stops all ranks at the same batch, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from ringstrategy.integrations.lightning.files import finish_writing
from ringstrategy.integrations.lightning.package import Package
from ringstrategy.membership.members import Members
from ringstrategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

_LOOK_SECONDS = 1.0  # between two looks of rank 0 for what other ranks were asked
_GO_ON, _TAKE_IN, _REQUEUE, _STOP = range(4)  # a later one counts more
_ASKED = {_STOP: "asked/stop", _REQUEUE: "asked/requeue"}  # keys of the store


class Newcomers(Exception):
    """Raised before a batch on all ranks: replacements wait to be taken in."""


class Stopping:
    """Takes the place of Lightning's handlers of SIGTERM and of Slurm's requeue signal, for one fit of several ranks.

    Lightning's call collectives within the signal handler, in which this rank may wait for a rank that is dead, or that
    has got no signal. These only remember the signal. A rank that is not rank 0 writes it to the store at its next
    batch, where rank 0 looks once a second. Lightning lets rank 0 tell all others before each batch whether to stop,
    and this is what rank 0 tells. Then all ranks save the last checkpoint of `ModelCheckpoint(save_last=True)`, and
    stop.

    Args:
        trainer: of this fit.
        package: of the trainer.
        session: of this fit, connected.
        members: of the job, whose replacements for lost ranks are taken in; None if nobody takes the place of one.
    """

    def __init__(self, trainer: Trainer, package: Package, session: Session, members: Members | None) -> None:
        self._trainer, self._package, self._session, self._members = trainer, package, session, members
        self._asked = self._told = _GO_ON
        self._looked_at = 0.0
        self._closed = False
        self._process = os.getpid()
        connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._requeue = connector._slurm_sigusr_handler_fn
        # read first: if another version of Lightning has no such names, that is an error here
        assert callable(connector._sigterm_notifier_fn)
        assert callable(loop._broadcast_sigterm_tensor)
        # Lightning registers the handlers later, and looks them up here
        connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[assignment, method-assign]
        connector._slurm_sigusr_handler_fn = self._on_requeue  # type: ignore[assignment, method-assign]
        loop._broadcast_sigterm_tensor = self._before_batch  # type: ignore[method-assign]

    def close(self) -> None:
        """Give Lightning its own back, and what it needs to know of a signal that came too late for this fit."""
        self._closed = True  # first: the handler is called at any point, and until Lightning takes it away
        if self._asked == _STOP:
            self._trainer._signal_connector.received_sigterm = True
        for owner, name in (
            (self._trainer._signal_connector, "_sigterm_notifier_fn"),
            (self._trainer._signal_connector, "_slurm_sigusr_handler_fn"),
            (self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
        ):
            vars(owner).pop(name, None)

    @property
    def asked(self) -> int:
        """What this rank was asked, or all are to do before their next batch. A higher number counts more."""
        return self._asked

    def agree(self, asked: int) -> bool:
        """All ranks do what one of them was asked, before their next batch; all call it. True: they stop.

        For ranks that have told each other without rank 0, such as those that meet after a loss.

        Args:
            asked: the highest of all ranks' `asked`.
        """
        if asked > self._asked:
            self._asked = asked
        self._told = asked
        return asked == _STOP

    def check(self) -> None:
        """SIGTERMException if this rank was asked to stop: for one that waits alone, and has nothing to save."""
        if self._asked == _STOP:
            raise self._package.SIGTERMException

    def _on_sigterm(self, signum: Any, frame: Any) -> None:
        if os.getpid() != self._process:  # a child that was forked: it ends, as without a handler
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        launcher = self._trainer.strategy.launcher
        if launcher is not None and self._asked != _STOP:
            launcher.kill(signum)
        self._asked = _STOP
        if self._closed:
            self._trainer._signal_connector.received_sigterm = True

    def _on_requeue(self, signum: Any, frame: Any) -> None:
        if self._asked == _GO_ON:
            self._asked = _REQUEUE

    def _before_batch(self) -> None:
        decided = torch.tensor([self._look()], device=self._trainer.strategy.root_device)
        with self._session.link.naming_lost_peers("the broadcast before its next batch"):
            dist.broadcast(decided, src=0)
        decision = int(decided)
        if decision == _STOP:
            self._stop()
        elif decision == _TAKE_IN:
            raise Newcomers
        elif decision == _REQUEUE:
            if self._asked == _REQUEUE:
                self._asked = _GO_ON
            self._told = _GO_ON
            detector = self._session.link.detector
            if detector is not None and self._trainer.is_global_zero:
                with contextlib.suppress(RuntimeError):
                    detector.board.store.forget(_ASKED[_REQUEUE])
            self._requeue(0, None)  # type: ignore[arg-type]

    def _look(self) -> int:
        """On rank 0 what any rank was asked. The others write theirs to the store."""
        detector = self._session.link.detector
        store = None if detector is None else detector.board.store  # None if no other rank is left
        with contextlib.suppress(RuntimeError):  # if the store is lost, the exchange will say so; if it is slow, again
            if store is not None and not self._trainer.is_global_zero:
                if self._asked > self._told:
                    store.set(_ASKED[self._asked], "")
                    self._told = self._asked
            elif self._asked == _GO_ON and time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                asked = [what for what, key in _ASKED.items() if store is not None and store.has([key])]
                newcomers = 0 if self._members is None else self._members.newcomers()
                return asked[0] if asked else _TAKE_IN if newcomers else _GO_ON
        return self._asked

    def _stop(self) -> None:
        trainer = self._trainer
        self._asked = _STOP
        paths = []
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, self._package.ModelCheckpoint) and callback.save_last and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                path = _last_path(trainer, callback)
                callback.last_model_path = path
                trainer.save_checkpoint(path)
                paths.append(path)
        finish_writing(trainer.strategy.checkpoint_io)
        trainer.strategy.barrier("last checkpoint")  # a launcher may end all if one rank leaves while another writes
        rank_zero_info(
            f"SIGTERM: all ranks stop before step {trainer.global_step}. "
            + (f"Saved {', '.join(paths)}" if paths else "Nothing is saved without ModelCheckpoint(save_last=True)")
        )
        raise self._package.SIGTERMException


def _last_path(trainer: Trainer, callback: ModelCheckpoint) -> str:
    """Of the last checkpoint, with a number if the name is another run's, as ModelCheckpoint would name it."""
    metrics, name = callback._monitor_candidates(trainer), callback.CHECKPOINT_NAME_LAST
    path, version = callback.format_checkpoint_name(metrics, name), callback.STARTING_VERSION
    while callback._enable_version_counter and path != callback.last_model_path and callback.file_exists(path, trainer):
        path = callback.format_checkpoint_name(metrics, name, ver=version)
        version += 1
    return path

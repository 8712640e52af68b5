"""Where Lightning's hooks let people look at a model: they see what is the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor

from ringstrategy.buckets.sample import same
from ringstrategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Watched(Protocol):
    """What this asks of a strategy."""

    @property
    def session(self) -> Session | None:
        """While peers are connected."""

    def steps_of_batch(self) -> int | None:
        """How many optimizer steps Lightning has counted since the batch began; None: dropped ones are no steps."""

    def tell(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over ranks."""


class Looks(Callback):
    """The first callback of all: sees parameters before others put something else there, such as a moving average.

    Lightning calls the strategy last when validation starts and ends. So the mean is entered at the first batch, when
    all who swap parameters have done so, and left before the first of them could take its own back.
    """

    def __init__(self, strategy: Watched) -> None:
        self._strategy = strategy
        self._trainer: Trainer | None = None
        self._before: list[Tensor] = []
        self._due = self._replaced = False

    def begin(self, trainer: Trainer) -> None:
        """Take part in this fit."""
        self._trainer = trainer
        callbacks(trainer).insert(0, self)

    def close(self) -> None:
        """Take part no more."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and self in callbacks(trainer):
            callbacks(trainer).remove(self)
        self._due, self._before = False, []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others."""
        self._due = True
        self._remember()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others."""
        self._remember()

    def _remember(self) -> None:
        session = self._strategy.session
        if session is not None and session.algorithm.consensus:
            self._before = session.glance()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Before all others: when this ends, all exchanges of this batch have begun."""
        if self._strategy.session is not None:
            self._strategy.session.end_batch(self._strategy.steps_of_batch())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Before others save checkpoints, which may take long: the other ranks wait for this one."""
        self._strategy.tell(exception)

    def look(self) -> None:
        """After all others: from now on the mean is looked at; where replicas are equal, with rank 0's buffers."""
        session = self._strategy.session
        if not self._due or session is None:
            return
        self._due = False
        if session.algorithm.consensus:
            self._replaced = self.replaced()
            session.enter_consensus(replaced=self._replaced)
        else:
            session.send_buffers(between=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others. If nobody has swapped anything, they see the mean too."""
        self.look()  # on a rank without a batch
        if self._replaced:
            self.end()

    def end(self) -> None:
        """Each rank goes on with its own."""
        self._replaced = False
        if self._strategy.session is not None:
            self._strategy.session.algorithm.leave_consensus()

    def replaced(self) -> bool:
        """Has any rank put other values there since?"""
        session = self._strategy.session
        assert session is not None
        # an average may have the very values of the parameters, as at first, and is swapped all the same
        averages = self._trainer is not None and any(isinstance(c, WeightAveraging) for c in callbacks(self._trainer))
        mine = averages or not all(same(now, then) for now, then in zip(session.glance(), self._before, strict=True))
        return self._strategy.reduce_boolean_decision(mine, all=False)


def callbacks(trainer: Trainer) -> list[Callback]:
    """Of a trainer, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks

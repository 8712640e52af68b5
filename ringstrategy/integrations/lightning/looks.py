"""When Lightning's hooks look at the model, they see parameters that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ringstrategy.integrations.lightning.package import Package
from ringstrategy.kernels.sample import same
from ringstrategy.session import Session
from ringstrategy.session.parameters import glance

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object


class LooksMixin(Callback):
    """Called before all callbacks: sees parameters before others put something else there, such as a moving average.

    Lightning calls the strategy last when validation starts and ends. So the mean is entered at the first batch, when
    all who swap parameters have done so, and left before the first of them could take its own back.

    Args:
        trainer: of this fit.
        session: of this fit.
        tell: tells the other ranks why this one goes.
    """

    package: Package

    def __init__(self, trainer: Trainer, session: Session, tell: Callable[[BaseException], None]) -> None:
        self._trainer, self._session, self._tell = trainer, session, tell
        self._before: list[Tensor] = []
        self._due = self._replaced = False
        self._global_step = 0  # at this batch's beginning
        self._in_batch = False
        self._put(_Callbacks(callbacks(trainer), self))

    @property
    def attends(self) -> bool:
        """Whether it is called: not while a tuner tries something with callbacks of its own, and takes it back then."""
        there = callbacks(self._trainer)
        return isinstance(there, _Callbacks) and there.first is self

    def close(self) -> None:
        """Take part no more."""
        if self.attends:
            self._put(callbacks(self._trainer)[:])

    def _put(self, callbacks: list[Callback]) -> None:
        self._trainer.callbacks = callbacks  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others."""
        self._due = True
        self._remember()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others, who see what training returns."""
        raises = trainer.strategy.on_peer_loss == "raise"  # type: ignore[attr-defined]  # of this package
        self._session.end_training(together=raises)
        if self._session.algorithm.consensus or not self._session.algorithm.decentralized:
            self._session.finish()
        if self._session.algorithm.consensus:
            self._session.enter_consensus()
        self._remember()

    def after_train_end(self) -> None:
        """After all others: what they have put in is averaged too."""
        if not self._session.algorithm.consensus or not self.replaced():
            return
        replaced = self.replaced(buffers=False)
        self._session.algorithm.leave_consensus()  # but for what was put in
        self._session.enter_consensus(replaced=replaced)
        if replaced:
            self._session.algorithm.forget()

    def _remember(self) -> None:
        if self._session.algorithm.consensus:
            self._before = glance(self._session.module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Before all others."""
        self._global_step = trainer.global_step
        self._in_batch = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Before all others: when this ends, all exchanges of this batch have begun."""
        self._in_batch = False
        counts = pl_module.automatic_optimization and not trainer.interrupted
        self._session.end_batch(trainer.global_step - self._global_step if counts else None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others. Lightning ends no batch whose `on_train_batch_start` returned -1."""
        if self._in_batch:
            self._in_batch = False
            self._session.end_batch(None, skipped=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Before others save checkpoints, which may take long: the other ranks wait for this one."""
        self._tell(exception)

    def look(self) -> None:
        """After all others: from now on the mean is looked at; where replicas are equal, with rank 0's buffers."""
        if not self._due:
            return
        self._due = False
        if self._session.algorithm.consensus:
            self._replaced = self.replaced()
            self._session.enter_consensus(replaced=self._replaced)
        else:
            self._session.send_buffers(between=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others. If nobody has swapped anything, they see the mean too."""
        self.look()  # on a rank without a batch
        if self._replaced:
            self.end()

    def end(self) -> None:
        """Each rank goes on with its own."""
        self._replaced = False
        self._session.algorithm.leave_consensus()

    def replaced(self, *, buffers: bool = True) -> bool:
        """Whether any rank has put other values into parameters since, or into buffers."""
        # an average may have the very values of the parameters, as at first, and is swapped all the same
        averages = any(isinstance(callback, self.package.WeightAveraging) for callback in callbacks(self._trainer))
        now = glance(self._session.module, buffers=buffers)
        mine = averages or not all(same(*pair) for pair in zip(now, self._before[: len(now)], strict=True))
        return self._trainer.strategy.reduce_boolean_decision(mine, all=False)


class _Callbacks(list[Callback]):
    """Those of a trainer, by their places. Whoever iterates over them meets another one first."""

    def __init__(self, callbacks: list[Callback], first: LooksMixin) -> None:
        super().__init__(callbacks)
        self.first = first

    def __iter__(self) -> Iterator[Callback]:
        yield self.first
        yield from super().__iter__()


def callbacks(trainer: Trainer) -> list[Callback]:
    """Of a trainer, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks

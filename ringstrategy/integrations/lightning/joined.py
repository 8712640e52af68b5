"""Lightning's loop gets as many batches on all ranks, where some have fewer: `uneven="join"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ringstrategy.integrations.lightning.package import Package
from ringstrategy.session import Session
from ringstrategy.session.uneven import NO_BATCH

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
else:
    _PrefetchDataFetcher = object

_TAKES_ITERATOR = (
    "a training_step that takes a `dataloader_iter` fetches batches by itself, so with uneven='join' no rank could "
    "give it a batch again: take `batch`, or give all ranks the same number of batches and leave uneven at 'error'"
)


class JoinedFetcherMixin(_PrefetchDataFetcher):
    """Takes the place of a fetcher that has begun. It is `done` when no rank has another batch.

    Args:
        fetcher: of this rank's batches.
        session: of this fit.
    """

    def __init__(self, fetcher: _PrefetchDataFetcher, session: Session) -> None:
        super().__init__()
        self._session = session
        vars(self).update(vars(fetcher))
        self._begin()

    def _begin(self) -> None:
        self.done = False  # nor if there is no batch: that is an error, and not a shorter epoch
        self._has_more = True  # this rank
        self._last: Any = None

    def __iter__(self) -> JoinedFetcherMixin:
        """An epoch begins."""
        super().__iter__()
        self._begin()
        return self

    def __next__(self) -> Any:
        """The next batch, or the last one again."""
        if self.done:
            raise StopIteration
        # not if this fit resumes within an epoch, behind this rank's last batch
        has = self._has_more and (self.length is None or self.fetched < self.length)
        if has or self._last is None:
            try:
                self._last = super().__next__()
            except StopIteration:
                raise ValueError(NO_BATCH if self._last is None else self._too_few()) from None
            self._has_more = has and not self.done
        self.done = not self._session.uneven.next_batch(has, self._has_more)
        return self._last

    def _too_few(self) -> str:
        return (
            f"the loader of this rank gave {self.fetched} batches and not {self.length}, as its length says, after the "
            "other ranks were told that there is one more: correct its __len__, or leave it out"
        )


class Joining:
    """Gives a trainer's fit such fetchers, and makes its ranks agree on how long an epoch is.

    Args:
        trainer: of this fit.
        session: of this fit, whose ranks may have different numbers of batches.
        package: of the trainer.
        joined_fetcher: for that package.
    """

    def __init__(
        self, trainer: Trainer, session: Session, package: Package, joined_fetcher: type[JoinedFetcherMixin]
    ) -> None:
        self._trainer, self._session, self._package = trainer, session, package
        self._joined_fetcher = joined_fetcher
        self._set_up = trainer.fit_loop.setup_data
        trainer.fit_loop.setup_data = self._setup_data  # type: ignore[method-assign]

    def close(self) -> None:
        """Give Lightning its own back."""
        vars(self._trainer.fit_loop).pop("setup_data", None)

    def _setup_data(self) -> None:
        loop = self._trainer.fit_loop
        before = loop._data_fetcher
        self._set_up()
        fetcher = loop._data_fetcher
        if fetcher is before or fetcher is None:
            return
        if not isinstance(fetcher, self._package.PrefetchDataFetcher):
            raise ValueError(_TAKES_ITERATOR)
        self._agree()
        loop._data_fetcher = self._joined_fetcher(fetcher, self._session)

    def _agree(self) -> None:
        """An epoch is as long as on the rank with most batches, and validation comes at the same one."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        mine = torch.tensor(float(loop.max_batches), dtype=torch.float64, device=trainer.strategy.root_device)
        numbers = trainer.strategy.all_gather(mine).tolist()
        if 0 in numbers:
            raise ValueError(f"rank {numbers.index(0)}: {NO_BATCH}")
        most = max(numbers)
        loop.max_batches = most if most == float("inf") else int(most)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
            trainer.val_check_batch = max(1, int(most * trainer.val_check_interval))

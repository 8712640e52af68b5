"""Uneven inputs: a rank that runs out of batches repeats its last one with weight zero, until no rank has more."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter, SyncBatchNorm

from ringstrategy.session.link import Link
from ringstrategy.transport.backend import backend_of

Batch = TypeVar("Batch")

NO_BATCH = (
    "this rank has no batch in this epoch, and with uneven='join' a rank that runs out repeats its last one: give each "
    "rank at least one batch, or leave it out of the run"
)


class UnevenInputs:
    """What a rank knows of who still has batches, and what of a repeated batch must not stay.

    A repeated batch runs forward, so that the collectives in it meet those of the other ranks. It runs no backward, so
    that this rank adds no gradient. The mean is over the ranks that have data.

    Until `open` nothing is sent, and nothing changes.

    Args:
        module: its buffers are put back after a repeated batch.
        link: to the other ranks.

    Attributes:
        is_open: ranks may have different numbers of batches.
        idle: this rank's batch is a repeated one.
    """

    def __init__(self, module: Module, link: Link) -> None:
        self.is_open = self.idle = False
        self._module, self._link = module, link
        self._device = torch.device("cpu")
        self._size = self._with_data = 1  # ranks
        self._ranks_with_data: list[int] = []  # in each backward since the last exchange
        self._own = 0  # of these backwards, those in which this rank had data
        self._backwards = 0  # with data of this rank, since the beginning
        self._stepped_at: dict[Parameter, int] = {}  # how many there were at a parameter's last step
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []

    def open(self, size: int, device: torch.device, *, scales_local: bool) -> None:
        """ValueError for what cannot work on a rank that runs no backward.

        Args:
            size: how many ranks there are.
            device: of the parameters.
            scales_local: a loss scaler looks at gradients of this rank alone.
        """
        names = [name for name, part in self._module.named_modules() if isinstance(part, SyncBatchNorm)]
        if names:
            raise ValueError(
                f"{names[0]} ({len(names)} in all) is a SyncBatchNorm, whose backward waits for all ranks, and with "
                "uneven='join' a rank without data runs none: use a norm without statistics of a batch, such as "
                "nn.GroupNorm, or give all ranks the same number of batches and leave uneven at 'error'"
            )
        if scales_local:
            raise ValueError(
                "with uneven='join' a rank without data has no gradients, in which a loss scaler could look for "
                "infinities: train in bf16-mixed or 32-bit precision, or average gradients (AllReduce)"
            )
        self.is_open = True
        self._device = torch.device("cpu") if backend_of("cpu") == "gloo" else device
        self._size = self._with_data = size

    def over(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """See `Session.join`."""
        if not self.is_open:
            yield from loader
            return
        any_more = True
        batches = _with_following(loader)
        while any_more:
            batch, has, more = next(batches)
            any_more = self.next_batch(has, more)
            yield batch
        # what comes before the next batch is as if all ranks had data
        self.idle, self._with_data = False, self._size

    def next_batch(self, has: bool, more: bool) -> bool:
        """Before `begin_batch`, for a loop that cannot use `over`: ranks tell each other who still has batches.

        Args:
            has: this rank has a batch now; else it repeats its last one.
            more: it has another one after that.

        Returns:
            Does any rank have another one? The same on all ranks.
        """
        assert self.is_open, "the algorithm says uneven='error', or there is one rank"
        counts = torch.tensor([has, more], dtype=torch.int64, device=self._device)
        with self._link.naming_lost_peers():
            dist.all_reduce(counts)
        self.idle = not has
        self._with_data, any_more = map(int, counts)
        return any_more > 0

    # Gradients

    def divisor(self, *, exchanged: bool) -> float | None:
        """A backward begins. What to divide this rank's gradients by, if they are `exchanged`; None: the default.

        That is the mean number of ranks with data in the backwards since the last exchange: the sum over ranks is then
        the mean over all their batches, times the number of backwards. Infinity if this rank had data in none: what its
        gradients hold is older.
        """
        if not self.is_open:
            return None
        self._ranks_with_data.append(self._with_data)
        self._own += not self.idle
        self._backwards += not self.idle
        if not exchanged:
            return None
        mean = sum(self._ranks_with_data) / len(self._ranks_with_data)
        divisor = mean if self._own else math.inf
        self._ranks_with_data, self._own = [], 0
        return divisor

    def before_step(self, parameters: Collection[Parameter]) -> None:
        """Drop gradients of this rank alone that hold no data since their last step: an optimizer passes them over."""
        for parameter in parameters if self.idle else ():
            if self._stepped_at.get(parameter, 0) == self._backwards:
                parameter.grad = None

    def after_step(self, parameters: Collection[Parameter]) -> None:
        """An optimizer has stepped these."""
        if self.is_open:
            self._stepped_at.update(dict.fromkeys(parameters, self._backwards))

    # Buffers

    def keep_buffers(self) -> None:
        """A forward begins: remember the buffers, if its batch is a repeated one."""
        self._buffers = [
            (owner._buffers, name, buffer, buffer.detach().clone())
            for owner in (self._module.modules() if self.idle else ())
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_buffers_back(self) -> None:
        """The forward has ended: buffers are as they were."""
        for buffers, name, buffer, kept in self._buffers:
            buffer.copy_(kept)
            buffers[name] = buffer


def _with_following(loader: Iterable[Batch]) -> Iterator[tuple[Batch, bool, bool]]:
    """Batches without an end, the last one again and again: a batch, whether it is new, and whether a new one follows.

    ValueError if there is none.
    """
    batches = iter(loader)
    following = list(islice(batches, 1))
    if not following:
        raise ValueError(NO_BATCH)
    while True:
        new = bool(following)
        if new:
            batch = following.pop()
            following = list(islice(batches, 1))
        yield batch, new, bool(following)

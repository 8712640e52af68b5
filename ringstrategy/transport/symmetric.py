"""GPU memory of the ranks of a host that each of them reads by address: torch's symmetric memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.transport.base import Windows
from ringstrategy.transport.stats import Stats

_ALIGNED = 16  # bytes: what a GPU reads at once
_RIDERS = 1 << 20  # bytes
_log = logging.getLogger(__name__)
_stuck: list[Any] = []  # memory of peers that were aborted: to free it waits for the device, which may wait for a peer


class SymmetricWindow(Windows):
    """One of the two windows of each rank of the host."""

    def __init__(self, memory: Mapping[int, Tensor], handle: Any, timeout: timedelta, stats: Stats) -> None:
        self.memory = memory
        self._handle, self._stats = handle, stats
        self._milliseconds = int(timeout.total_seconds() * 1000)

    def barrier(self, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
        """See `Windows.barrier`. The device waits as long as a peer may stay silent, and then ends in an error."""
        self._stats.count(sum(run.nbytes for run in leaving), sum(run.nbytes for run in arriving))
        # one channel is enough: a signal waits until the one before it has been taken
        self._handle.barrier(channel=0, timeout_ms=self._milliseconds)


class SymmetricMemory:
    """Two windows for each rank of this host, allocated by all ranks together; a call that fits allocates nothing.

    All ranks of `everyone` make the same calls in the same order, in the thread and on the stream that use the group.
    They share one decision: if memory cannot be shared on one host, no rank uses any, and rank 0 logs why.

    Args:
        everyone: all ranks, over NCCL.
        ranks: their global ranks.
        hosts: of each rank which host it is on.
        rank: this one.
        device: of this rank.
        timeout: how long a peer may stay silent.
        stats: counters to add to.
    """

    def __init__(
        self,
        everyone: dist.ProcessGroup,
        ranks: Sequence[int],
        hosts: Sequence[str],
        rank: int,
        device: torch.device,
        timeout: timedelta,
        stats: Stats,
    ) -> None:
        self._everyone, self._ranks, self._hosts, self._rank = everyone, ranks, hosts, rank
        self._device, self._timeout, self._stats = device, timeout, stats
        self._on_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._group: dist.ProcessGroup | None = None  # of the ranks of this host
        self._asked = 0  # the most bytes so far, and what may ride along
        self._tries = 0
        self._fails = False
        self._whole: Tensor | None = None
        self._handle: Any = None
        self._pair: list[SymmetricWindow] = []
        self._calls = 0

    def windows(self, nbytes: int) -> Windows | None:
        """See `Peers.windows`. None too if this rank is alone on its host."""
        if nbytes > self._asked and not self._fails:
            self._grow(nbytes)
        self._calls += 1
        return self._pair[self._calls % 2] if self._pair else None

    def _grow(self, nbytes: int) -> None:
        self._pair, self._handle, self._whole = [], None, None  # first give back what there was
        if self._asked == 0:
            self._connect()
        self._asked = nbytes + nbytes // 16 + _RIDERS  # a bucket was warmed up without the small ones that ride with it
        self._tries += 1
        # each step waits for ranks that the step before has left out if it failed: so all ranks compare after each
        steps = (self._allocate, self._rendezvous, self._try) if len(self._on_host) > 1 else (_nothing,) * 3
        self._fails = not all(self._all_can(step) for step in steps)
        if self._fails:
            self._pair, self._handle, self._whole = [], None, None

    def _connect(self) -> None:
        """A group for the ranks of each host: all ranks make all of them, in one order."""
        for host in dict.fromkeys(self._hosts):
            members = [rank for rank, other in zip(self._ranks, self._hosts, strict=True) if other == host]
            if len(members) > 1:
                group = dist.new_group(members, timeout=self._timeout, backend="gloo")
                if host == self._hosts[self._rank]:
                    self._group = group

    def _all_can(self, step: Callable[[], None]) -> bool:
        """Do it, and hear whether all ranks could."""
        why = ""
        try:
            step()
        except Exception as error:  # what torch has there is no API: it may change in any way
            why = f"rank {self._rank}: {type(error).__name__}: {error}"
        reasons: list[Any] = [""] * len(self._hosts)
        dist.all_gather_object(reasons, why, group=self._everyone)
        first = next(filter(None, reasons), None)
        if first is not None and self._rank == 0:
            _log.warning("ranks of one host send messages to each other, since they cannot share memory: %s", first)
        return first is None

    def _allocate(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        half = -(-self._asked // _ALIGNED) * _ALIGNED
        self._whole = symmetric.empty(2 * half, dtype=torch.uint8, device=self._device)

    def _rendezvous(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        assert self._whole is not None
        assert self._group is not None
        size = self._whole.numel()
        self._handle = symmetric.rendezvous(self._whole, self._group)
        wholes = {
            rank: self._whole if rank == self._rank else self._handle.get_buffer(place, (size,), torch.uint8)
            for place, rank in enumerate(self._on_host)
        }
        for half in (slice(0, size // 2), slice(size // 2, size)):
            memory = {rank: whole[half] for rank, whole in wholes.items()}
            self._pair.append(SymmetricWindow(memory, self._handle, self._timeout, self._stats))

    def _try(self) -> None:
        """Each rank writes its number to both ends of its memory, and reads all others': silently wrong ones exist."""
        ends = (0, -1)
        for window, end in zip(self._pair, ends, strict=True):
            window.memory[self._rank][end] = self._number(self._rank)
        self._pair[0].barrier([], [])
        for window, end in zip(self._pair, ends, strict=True):
            for rank, memory in window.memory.items():
                if int(memory[end]) != self._number(rank):
                    raise RuntimeError(f"it reads something else in the memory of rank {rank} than that rank wrote")

    def _number(self, rank: int) -> int:
        """Of a rank, in this try: never 0, which fresh memory holds, and none that an earlier try has left."""
        return 1 + (7 * rank + self._tries) % 251

    def close(self, *, aborted: bool) -> None:
        """Give memory and group back. The device must be done with it; after an abort it may not be: then keep it."""
        if aborted:
            _stuck.append((self._pair, self._handle, self._whole))
        self._pair, self._handle, self._whole, self._fails = [], None, None, True
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _nothing() -> None:
    """A rank that is alone on its host only hears whether the others could."""

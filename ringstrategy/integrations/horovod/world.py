"""Who the ranks are: `init`, `shutdown`, and what the other files ask of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ringstrategy.errors import last_words
from ringstrategy.failure.board import has_agent_store
from ringstrategy.failure.orphans import end_with_agent
from ringstrategy.failure.store import poll_seconds
from ringstrategy.integrations.encoded import at_exit
from ringstrategy.integrations.horovod.members import Members
from ringstrategy.integrations.horovod.operations import barrier
from ringstrategy.integrations.horovod.process_sets import NOT_INITIALIZED, ProcessSet, global_process_set
from ringstrategy.membership.rendezvous import store_of_attempt
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.connect import this_host
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.trace import timeline

_GOODBYE_SECONDS = 10.0


@dataclass
class World:
    """All ranks, from `init` to `shutdown`.

    Attributes:
        rank: this one.
        size: how many there are.
        places: of each rank the node that it is on.
        timeout: how long a rank may stay silent.
        group: of all ranks.
        owned: the process group ends with it.
        store: of these ranks.
        has_failed: an error has ended it, on this rank.
        stats: bytes of the operations; sessions count their own.
        ids: of process sets to come.
        sets: in use, by id.
        optimizers: that average.
        recording: the timeline that `start_timeline` began.
    """

    rank: int
    size: int
    places: list[str]
    timeout: timedelta
    group: dist.ProcessGroup | None
    owned: bool
    store: dist.Store
    has_failed: bool = False
    stats: Stats = field(default_factory=Stats)
    ids: Iterator[int] = field(default_factory=itertools.count)
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    recording: ExitStack = field(default_factory=ExitStack)

    @property
    def is_over(self) -> bool:
        """Whether somebody else has destroyed the process group. There may be another one by now."""
        return self.group is not dist.group.WORLD

    def say_goodbye(self) -> None:
        """This rank needs the store no more. Who has the store waits until that is true of all, within limits."""
        if self.size == 1 or self.has_failed or self.is_over:
            return
        end = time.monotonic() + _GOODBYE_SECONDS
        with contextlib.suppress(RuntimeError):  # it is gone
            gone = self.store.add("gone", 1)
            while self.rank == 0 and not has_agent_store() and gone < self.size and time.monotonic() < end:
                time.sleep(poll_seconds(self.size))
                gone = self.store.add("gone", 0)

    def neighbours(self) -> list[int]:
        """The ranks of this node."""
        return [rank for rank, place in enumerate(self.places) if place == self.places[self.rank]]

    def across(self) -> list[int]:
        """The ranks that have this one's local rank on their nodes."""
        here = self.neighbours().index(self.rank)
        by_node: dict[str, list[int]] = {}
        for rank, place in enumerate(self.places):
            by_node.setdefault(place, []).append(rank)
        return [ranks[here] for ranks in by_node.values() if len(ranks) > here]


_now: list[World] = []
_store_kept: list[dist.Store] = []


def world() -> World:
    """ValueError with the cure before `init`."""
    if not _now:
        raise ValueError(NOT_INITIALIZED)
    return _now[0]


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta = default_pg_timeout,
) -> None:
    """Join all processes that a launcher such as torchrun has started; without one, this process alone.

    Every process calls it. A second call does nothing, unless the process group has been destroyed since.

    Args:
        comm: a list of all ranks, or None. Horovod takes fewer ranks, or a communicator of MPI; here that is an error.
        process_sets: see `add_process_set`. "dynamic" changes nothing: sets may be added at any time.
        backend: of torch's process group. None: gloo, with NCCL for CUDA tensors where there are GPUs. If there is a
            process group already, it is used.
        timeout: how long a rank may stay silent before it counts as lost.
    """
    if _now and _now[0].is_over:
        shutdown()
    if _now:
        return
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ValueError(f'process_sets is a list of process sets, or "dynamic", got {process_sets!r}')
        process_sets = None
    owned = not dist.is_initialized()
    size = int(os.environ.get("WORLD_SIZE", 1)) if owned else dist.get_world_size()
    if comm is not None and list(comm) != list(range(size)):
        raise ValueError(
            f"comm is None or a list of all {size} ranks, got {comm!r}: start fewer processes, or use a process set"
        )
    if owned:
        _join(backend, timeout)
    rank = dist.get_rank()
    end_with_agent()
    store = _store(rank)
    _now.append(World(rank, size, _places(store, rank, size), timeout, dist.group.WORLD, owned, store))
    _take_into_use(global_process_set, range(size))
    at_exit(_end)
    for each in process_sets or ():
        add_process_set(each)


def _join(backend: str | None, timeout: timedelta) -> None:
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    # kept after `shutdown`: a rank that begins again sooner than rank 0 would join a store that is about to end
    _store_kept[:] = [store_of_attempt(rank, size, timeout)]
    dist.init_process_group(backend, store=_store_kept[0], rank=rank, world_size=size, timeout=timeout)


def _store(rank: int) -> dist.Store:
    """For one time from `init` to `shutdown`."""
    base = dist.distributed_c10d._get_default_store()
    generation = base.add(f"ringstrategy/horovod/init/{rank}", 1)
    return dist.PrefixStore(f"ringstrategy/horovod/{generation}", base)


def _places(store: dist.Store, rank: int, size: int) -> list[str]:
    """Of each rank: its agent of torchrun, or its host."""
    store.set(f"place/{rank}", f"{os.environ.get('GROUP_RANK', '')} {this_host()}")
    return [store.get(f"place/{each}").decode() for each in range(size)]


def _take_into_use(process_set: ProcessSet, ranks: Sequence[int]) -> None:
    this = world()
    nccl = backend_of("cuda") == "nccl"
    count = 1 if process_set is global_process_set else 2
    backend = "cpu:gloo,cuda:nccl" if nccl else None
    groups = [dist.new_group(list(ranks), timeout=this.timeout, backend=backend) for _ in range(count)]
    members = Members(groups[0], this.timeout, this.stats) if this.rank in ranks else None
    number = next(this.ids)
    process_set.begin(number, ranks, members, groups)
    this.sets[number] = process_set


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Take a process set into use; all ranks call it, those outside of the set too. Returns the set.

    ValueError for a set that is in use already, or with ranks that there are not.
    """
    this = world()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = list(range(this.size)) if process_set.ranks is None else process_set.ranks
    if not ranks or ranks[0] < 0 or ranks[-1] >= this.size:
        raise ValueError(f"{process_set} has ranks that there are not: they are 0 to {this.size - 1}")
    if process_set.in_use or any(ranks == other.ranks for other in this.sets.values()):
        raise ValueError(f"a process set of the ranks {ranks} is in use already: use that one")
    _take_into_use(process_set, ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """It ends, and its connections are closed; all ranks call it. Optimizers that average over it keep theirs.

    False if it was not in use, or is the one of all ranks.
    """
    this = world()
    number = process_set.process_set_id
    if number is None or number == 0 or this.sets.get(number) is not process_set:
        return False
    if process_set.included():  # who is within an operation would take the end of the others for a loss
        barrier(process_set)
    del this.sets[number]
    process_set.end()
    process_set.destroy_groups()
    return True


def shutdown() -> None:
    """End threads and connections; the process group ends too if `init` made it.

    The process with the store waits a few seconds for the others, whose last operations may need it.
    """
    if not _now:
        return
    this = _now.pop()
    this.say_goodbye()
    with ExitStack() as ends:
        if this.owned and not this.is_over:
            ends.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        for process_set in this.sets.values():
            ends.callback(process_set.destroy_groups)
            ends.callback(process_set.end)
        for optimizer in this.optimizers:
            ends.callback(optimizer._exchange.close)
        ends.enter_context(this.recording)


def _end(error: BaseException | None) -> None:
    if error is not None:
        tell(error)
    shutdown()


def tell(error: BaseException) -> None:
    """This rank ends in an error: tell the other ranks why. No collective."""
    for this in _now:
        this.has_failed = True
        for optimizer in this.optimizers:
            optimizer.session.tell(error)
        for process_set in this.sets.values():
            if process_set.included():
                process_set.members.tell(last_words(error))


def stats() -> Stats:
    """What the operations of this rank have sent so far; of an optimizer's gradients, see `optimizer.session.stats`."""
    return world().stats


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what this rank exchanges, until `stop_timeline` or `shutdown`: see `ringstrategy.timeline`.

    Each rank writes a file of its own. There are no cycles to mark. RuntimeError if a timeline is being recorded.
    """
    del mark_cycles
    world().recording.enter_context(timeline(file_path))


def stop_timeline() -> None:
    """Write the rest of the timeline; nothing to do if there is none."""
    world().recording.close()


# Horovod's questions


def is_initialized() -> bool:
    """Whether it is between `init` and `shutdown`."""
    return bool(_now)


def rank() -> int:
    """Of this process, from 0."""
    return world().rank


def size() -> int:
    """How many processes there are."""
    return world().size


def local_rank() -> int:
    """Of this process among those of its node."""
    return world().neighbours().index(world().rank)


def local_size() -> int:
    """How many processes this node has."""
    return len(world().neighbours())


def cross_rank() -> int:
    """The place of this node among those that have a process of this local rank."""
    return world().across().index(world().rank)


def cross_size() -> int:
    """How many nodes have a process of this local rank."""
    return len(world().across())


def is_homogeneous() -> bool:
    """Whether each node has as many processes."""
    places = world().places
    return len({places.count(place) for place in places}) == 1


def _never() -> bool:
    """False: this package has no such part."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _never


def gloo_built() -> bool:
    """True."""
    return True


def gloo_enabled() -> bool:
    """Whether CPU tensors travel over gloo."""
    return bool(world()) and backend_of("cpu") == "gloo"


def nccl_built() -> bool:
    """Whether this torch has NCCL."""
    return dist.is_nccl_available()


def cuda_built() -> bool:
    """Whether this torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch has ROCm."""
    return torch.version.hip is not None

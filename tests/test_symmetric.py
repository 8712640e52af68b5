"""What torch's symmetric memory is asked for, when and in which order: with a stand-in, on the CPU, in threads."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import LIMIT, FakePeers
from test_nccl import THREAD, Calls, _of_thread, calls, current, loss_of, net, on_all_gpus
from test_windows import data
from torch import Tensor

from ringstrategy import AllReduce, BlockInt, Collective, Hierarchical, TwoShot
from ringstrategy.collectives import mean_
from ringstrategy.transport import symmetric
from ringstrategy.transport.nccl import NcclPeers

__all__ = ["calls"]


class Fabric:
    """GPUs that reach each other's memory.

    Attributes:
        made: of each rank the sizes that it allocated.
        groups: of each rank the groups that it made.
        met: how many ranks came to a rendezvous.
        fails: `fails(rank, step)` may raise, before what torch is asked to do.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls, self._lock = calls, threading.Lock()
        self.made: defaultdict[int, list[int]] = defaultdict(list)
        self.groups: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        self.destroyed: list[Any] = []
        self.alive: list[weakref.ref[Tensor]] = []
        self.met = 0
        self.fails: Callable[[int, str], None] = lambda rank, step: None
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._tables: defaultdict[tuple[int, ...], dict[int, Tensor]] = defaultdict(dict)
        self._said: dict[int, Any] = {}

    def new_group(self, members: list[int], *, timeout: timedelta, backend: str) -> Any:
        rank = _of_thread.rank
        assert (timeout, backend) == (timedelta(seconds=7), "gloo")
        self.groups[rank].append(tuple(members))
        with self._lock:
            self._barriers.setdefault(tuple(members), threading.Barrier(len(members)))
        return tuple(members) if rank in members else None

    def all_gather_object(self, into: list[Any], mine: Any, *, group: FakePeers) -> None:
        self._calls.note()
        self._said[group.rank] = mine
        group.network.barrier.wait(LIMIT)
        into[:] = [self._said[rank] for rank in range(group.size)]
        group.network.barrier.wait(LIMIT)

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert threading.current_thread().name == THREAD
        self.fails(_of_thread.rank, "empty")
        self.made[_of_thread.rank].append(nbytes)
        memory = torch.zeros(nbytes, dtype=dtype, device=device)
        assert memory.data_ptr() % 16 == 0
        self.alive.append(weakref.ref(memory.untyped_storage()))  # type: ignore[arg-type]
        return memory

    def rendezvous(self, memory: Tensor, group: tuple[int, ...]) -> Handle:
        with self._lock:
            self.met += 1
        rank = _of_thread.rank
        self._tables[group][rank] = memory
        self._barriers[group].wait(LIMIT)
        assert len({self._tables[group][member].numel() for member in group}) == 1
        handle = Handle(self, group, [self._tables[group][member].view(-1) for member in group])
        self._barriers[group].wait(LIMIT)
        del self._tables[group][rank]
        self.fails(rank, "rendezvous")
        return handle

    def arrive(self, group: tuple[int, ...]) -> None:
        self._calls.note()
        assert current().priority == -1
        self._barriers[group].wait(LIMIT)

    def living(self) -> int:
        gc.collect()
        return sum(memory() is not None for memory in self.alive)


class Handle:
    def __init__(self, fabric: Fabric, group: tuple[int, ...], wholes: list[Tensor]) -> None:
        self._fabric, self._group, self._wholes = fabric, group, wholes

    def get_buffer(self, place: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = self._wholes[place]
        assert (sizes, dtype) == ((whole.numel(),), torch.uint8)
        try:
            self._fabric.fails(_of_thread.rank, "get_buffer")
        except LookupError:  # another memory
            return torch.full_like(whole, 0xEE)
        return whole

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms == 7000, "a device would wait for a dead peer forever"
        self._fabric.arrive(self._group)


@pytest.fixture
def fabric(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    fabric = Fabric(calls)
    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", fabric.empty)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", fabric.rendezvous)
    monkeypatch.setattr(dist, "new_group", fabric.new_group)
    monkeypatch.setattr(dist, "all_gather_object", fabric.all_gather_object)
    monkeypatch.setattr(dist, "destroy_process_group", fabric.destroyed.append)
    monkeypatch.setattr(symmetric, "_stuck", [])
    return fabric


def on_gpus(size: int, function: Callable[[NcclPeers], Any], hosts: str) -> list[Any]:
    """Run `function` on every rank, whose communication thread the stand-in knows by its rank."""

    def one(peers: NcclPeers) -> Any:
        peers.submit(lambda: setattr(_of_thread, "rank", peers.rank), "at first").wait()
        return function(peers)

    return on_all_gpus(size, one, hosts)


def within(peers: NcclPeers, work: Callable[[], Any]) -> Any:
    """What it returns, done as an exchange is."""
    made: list[Any] = []
    peers.finish([peers.submit(lambda: made.append(work()), "here")])
    return made[0]


def means(peers: NcclPeers, collective: Collective, lengths: list[int]) -> list[Tensor]:
    made = []
    for step, numel in enumerate(lengths):
        values, residual = data(100 * step + peers.rank, numel), data(100 * step + 50 + peers.rank, numel) / 100
        mean_(values, peers, collective, BlockInt(8), residual=residual, seed=step)
        made += [values, residual]
    return made


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def refuse(fabric: Fabric, culprit: int, at: str, error: Exception) -> None:
    def fails(rank: int, step: str) -> None:
        if (rank, step) == (culprit, at):
            raise type(error)(*error.args)  # another one, since a traceback would hold memory

    fabric.fails = fails
    fabric.made.clear()


@pytest.mark.parametrize("collective", [TwoShot(), Hierarchical()], ids=str)
def test_all_is_allocated_at_setup_and_no_step_allocates(fabric: Fabric, calls: Calls, collective: Collective) -> None:
    posted: list[int] = []

    def train(peers: NcclPeers) -> list[Tensor]:
        model, algorithm = net(), AllReduce(BlockInt(8), collective, error_feedback=False, bucket_mb=0.004)
        algorithm.setup(dict(model.named_parameters()), peers)
        allocated, made = list(fabric.made[peers.rank]), []
        for _ in range(3):
            model.zero_grad()
            loss = loss_of(model, peers.rank)
            algorithm.before_backward(loss)
            loss.backward()
            algorithm.after_backward()
            made += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert len(algorithm.launches) > 1
        assert fabric.made[peers.rank] == allocated
        posted.append(len(peers._group.network.posts[peers.rank]))  # type: ignore[union-attr]
        assert peers.stats.bytes_sent
        algorithm.close()
        return made

    ours = on_gpus(3, train, "aaa")
    assert posted == [0, 0, 0]
    assert set(calls.threads) == {THREAD}
    assert fabric.made[0] == fabric.made[1] == fabric.made[2] != []
    refuse(fabric, 0, "empty", RuntimeError("none today"))
    assert same(ours, on_gpus(3, train, "aaa"))
    assert all(posted[3:])
    assert all(torch.equal(a, b) for made in ours for a, b in zip(made, ours[0], strict=True))


def test_calls_alternate_between_two_windows_and_grow_together(fabric: Fabric) -> None:
    def one(peers: NcclPeers) -> None:
        def work() -> None:
            places = []
            large = 5_000_000
            for nbytes in (1001, 16, 1001 + (1 << 20), 1000, large, large + large // 16, 1):  # riders have room
                windows = peers.windows(nbytes)
                assert windows is not None
                assert set(windows.memory) == {0, 1, 2}
                windows.barrier([], [])
                for memory in windows.memory.values():
                    assert memory.dtype == torch.uint8
                    assert memory.numel() >= nbytes
                    assert memory.data_ptr() % 16 == 0
                places.append([memory.data_ptr() for memory in windows.memory.values()])
            for before, after in (places[0:2], places[1:3], places[4:6], places[5:7]):
                assert not set(before) & set(after)
            assert places[0] == places[2]
            assert places[4] == places[6]

        within(peers, work)
        room = 1 << 20
        assert fabric.made[peers.rank] == [2 * (1072 + room), 2 * (5_312_512 + room)]  # multiples of 16

    on_gpus(3, one, "aaa")
    assert fabric.living() == 0


def test_the_ranks_of_each_host_are_a_group_that_all_ranks_make_in_one_order(fabric: Fabric) -> None:
    hosts = "abbabcb"
    lengths = [9000, 700, 20_000]

    def one(peers: NcclPeers) -> list[Tensor]:
        made: list[Tensor] = within(peers, lambda: means(peers, Hierarchical(), lengths))
        return made

    ours = on_gpus(len(hosts), one, hosts)
    assert all(fabric.groups[rank] == [(0, 3), (1, 2, 4, 6)] for rank in range(len(hosts)))
    assert [bool(fabric.made[rank]) for rank in range(len(hosts))] == [host != "c" for host in hosts]
    assert [fabric.destroyed.count(group) for group in [(0, 3), (1, 2, 4, 6)]] == [2, 4]
    refuse(fabric, 6, "empty", RuntimeError("none today"))
    theirs = on_gpus(len(hosts), one, hosts)
    assert same(ours, theirs)
    assert all(torch.equal(made[0], ours[0][0]) for made in ours)


@pytest.mark.parametrize(
    ("culprit", "step", "error", "why"),
    [
        (1, "empty", torch.OutOfMemoryError("no room"), "rank 1: OutOfMemoryError: no room"),
        (0, "empty", ImportError("no such module"), "rank 0: ImportError: no such module"),
        (2, "empty", AttributeError("no empty"), "rank 2: AttributeError: no empty"),
        (2, "rendezvous", RuntimeError("overlapping devices"), "rank 2: RuntimeError: overlapping devices"),
        (1, "get_buffer", LookupError(), r"rank 1: RuntimeError: it reads something else in the memory of rank 0"),
    ],
)
def test_if_one_rank_cannot_no_rank_does_and_rank_0_says_why_once(
    fabric: Fabric, caplog: pytest.LogCaptureFixture, culprit: int, step: str, error: Exception, why: str
) -> None:
    refuse(fabric, culprit, step, error)

    def one(peers: NcclPeers) -> list[Tensor]:
        def work() -> list[Tensor]:
            assert peers.windows(100) is None
            allocated = list(fabric.made[peers.rank])
            made = means(peers, Hierarchical(), [9000, 20_000])
            assert fabric.made[peers.rank] == allocated
            return made

        made: list[Tensor] = within(peers, work)
        assert fabric.living() == 0
        return made

    with caplog.at_level(logging.WARNING):
        results = on_gpus(3, one, "aaa")
    assert fabric.met == (0 if step == "empty" else 3), "who cannot allocate would be waited for"
    [said] = [record.getMessage() for record in caplog.records]
    assert why in said
    assert all(torch.equal(made[2], results[0][2]) for made in results)


def test_a_rank_alone_on_its_host_shares_nothing(fabric: Fabric) -> None:
    def one(peers: NcclPeers) -> bool:
        shares: bool = within(peers, lambda: peers.windows(10) is not None)
        return shares

    assert on_gpus(3, one, "aba") == [True, False, True]


def test_after_an_abort_memory_is_kept_since_to_free_it_waits_for_the_device(fabric: Fabric) -> None:
    def one(peers: NcclPeers) -> None:
        within(peers, lambda: peers.windows(10))
        peers._group._get_backend = lambda device: SimpleNamespace(abort=lambda: None)  # type: ignore[union-attr,method-assign]
        peers.abort("somebody died")

    on_gpus(2, one, "aa")
    assert fabric.living() == 2
    assert fabric.destroyed.count((0, 1)) == 2

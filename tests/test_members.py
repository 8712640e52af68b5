"""Survivors of a loss meet again in the same processes: whoever was lost, at most one part goes on, newcomers join."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_failures import Job, note, wait_until
from test_failures import job as job  # a fixture

from ringstrategy.errors import LeftBehindError, PeerLostError
from ringstrategy.transport import members as members_module
from ringstrategy.transport.connect import connect
from ringstrategy.transport.members import Members, Membership

pytestmark = pytest.mark.timeout(180)
PATIENCE = timedelta(seconds=3)
TIMEOUT = timedelta(seconds=5)
_ROUNDS = 40


# Processes that are killed


def _sums(members: Members, label: str, ends_with: int) -> None:
    """Add until there are `ends_with` ranks that have added often enough; note each world at its first sum."""
    rounds = 0
    while True:
        place = members.now
        assert place is not None
        try:
            peers = connect(torch.device("cpu"), TIMEOUT)
            assert peers.lifeline is not None
            peers.lifeline.lingers = False
            try:
                while True:
                    members.beat()
                    invites = torch.tensor([float(members.newcomers() if place.rank == 0 else 0)])
                    dist.broadcast(invites, 0)
                    if invites.item():
                        break
                    total = torch.tensor([2.0**place.rank, 1.0 + rounds * 0])
                    dist.all_reduce(total)
                    assert total.tolist() == [2.0**place.size - 1, place.size]
                    if rounds == 0:
                        note(f"world{label}.{place.generation}.json", rank=place.rank, size=place.size)
                    rounds += 1
                    if place.size == ends_with and rounds > _ROUNDS:
                        return
                    time.sleep(0.01)
            finally:
                peers.abort(None)
                peers.close()
        except RuntimeError:
            invites = torch.zeros(1)
        rounds = 0
        while True:
            members.regroup(invite=bool(invites.item()))
            try:
                members.apply(TIMEOUT)
                break
            except PeerLostError:
                continue


def _train(ends_with: int) -> None:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size, timeout=TIMEOUT)
    members = Members(PATIENCE)
    place = members.found()
    assert (place.rank, place.size, place.generation) == (rank, size, 0)
    note(f"met{rank}.json", pid=os.getpid(), addresses=place.addresses)
    _sums(members, str(rank), ends_with)
    dist.destroy_process_group()


def _worlds(running: Job, label: str) -> list[dict[str, Any]]:
    """Of a rank, by generation."""
    files = sorted(running.folder.glob(f"world{label}.*.json"), key=lambda file: int(file.name.split(".")[1]))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    "killed", [pytest.param([2], marks=pytest.mark.slow), [0, 1], pytest.param([3, 0], marks=pytest.mark.slow)]
)
def test_survivors_go_on(job: Callable[..., Job], killed: list[int]) -> None:
    running = job(4, _train, 4 - len(killed))
    wait_until(lambda: all(_worlds(running, str(rank)) for rank in range(4)), 60, "trained")
    begin = time.time()
    for rank in killed:
        os.kill(running.ranks[rank].pid or 0, signal.SIGKILL)
    left = [rank for rank in range(4) if rank not in killed]
    assert running.wait(left) == [0] * len(left)
    for new, rank in enumerate(left):
        last = _worlds(running, str(rank))[-1]
        assert (last["rank"], last["size"]) == (new, len(left))
        assert last["time"] - begin < 8


@pytest.mark.slow
def test_a_frozen_rank_is_left_behind(job: Callable[..., Job]) -> None:
    running = job(3, _train, 2)
    wait_until(lambda: all(_worlds(running, str(rank)) for rank in range(3)), 60, "trained")
    os.kill(running.ranks[0].pid or 0, signal.SIGSTOP)
    assert running.wait([1, 2]) == [0, 0]
    os.kill(running.ranks[0].pid or 0, signal.SIGCONT)
    assert running.wait([0]) == [1]
    assert running.record(0)["kind"] == "LeftBehindError"


def _regroup_often(times: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2, timeout=TIMEOUT)
    members = Members(PATIENCE)
    members.found()
    held = []
    for number in range(times):
        members.regroup()
        assert members.apply(TIMEOUT).size == 2
        peers = connect(torch.device("cpu"), TIMEOUT)
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        assert total.item() == 3
        peers.close()
        if number >= times // 5:
            held.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    note(f"held{rank}.json", held=held)
    members.close()


@pytest.mark.slow
def test_regroups_leave_nothing_behind(job: Callable[..., Job]) -> None:
    running = job(2, _regroup_often, 50)
    assert running.wait([0, 1]) == [0, 0], running.output(0)
    for rank in range(2):
        held = json.loads((running.folder / f"held{rank}.json").read_text())["held"]
        assert max(held[-10:]) <= [value + 2 for value in max(held[:10])], held


# Members that cannot reach each other, in threads


class Net:
    """Who reaches whom: a wrong answer of the network is a time-out, which proves nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, hosts: list[int] | None = None) -> None:
        self._connect = members_module._connect
        monkeypatch.setattr(members_module, "_connect", self._try)
        monkeypatch.setattr(members_module, "leave_groups", lambda: None)  # one process, whose group is none of theirs
        self._caller = threading.local()
        self.cut: set[tuple[int, int]] = set()
        self.all = [Members(timedelta(seconds=0.4), "127.0.0.1") for _ in range(size)]
        for number, members in enumerate(self.all):
            members.me = members.me._replace(network=str(number if hosts is None else hosts[number]))
        self._numbers = {members.me.address: number for number, members in enumerate(self.all)}
        for members in self.all:
            members.begin([other.me for other in self.all])

    def _try(self, address: str) -> dist.Store:
        if (self._caller.number, self._numbers.get(address)) in self.cut:
            raise TimeoutError("no way")
        return self._connect(address)

    def part(self, *sides: list[int]) -> None:
        of = {number: side for side, numbers in enumerate(sides) for number in numbers}
        self.cut = {(one, other) for one in of for other in of if of[one] != of[other]}

    def regroup(self, numbers: list[int], *, invite: bool = False) -> dict[int, Membership | LeftBehindError]:
        """What each of them gets."""
        results: dict[int, Membership | LeftBehindError] = {}

        def one(number: int) -> None:
            self._caller.number = number
            try:
                results[number] = self.all[number].regroup(invite=invite)
            except LeftBehindError as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results

    def can_form(self) -> list[str]:
        """Decisions that all whom they name have taken."""
        taken = {members.me.name: members._taken for members in self.all}
        decisions = {decision.key: decision for decision in taken.values() if decision is not None}
        return [
            key
            for key, decision in decisions.items()
            if all(taken.get(name) is not None and taken[name].key == key for name in decision.world.names)
        ]


@pytest.mark.parametrize(
    ("sides", "winner"),
    [
        ([[0, 1], [2, 3]], [0, 1]),
        ([[0], [1, 2, 3]], [1, 2, 3]),
        ([[0, 3], [1, 2, 4]], [1, 2, 4]),
        ([[2, 0], [1]], [0, 2]),
    ],
)
def test_one_part_of_a_network_goes_on(
    monkeypatch: pytest.MonkeyPatch, sides: list[list[int]], winner: list[int]
) -> None:
    net = Net(monkeypatch, sum(map(len, sides)))
    net.part(*sides)
    results = net.regroup(list(range(len(net.all))))
    for number, result in results.items():
        if number in winner:
            assert isinstance(result, Membership)
            assert result.names == tuple(net.all[each].me.name for each in winner)
            assert result.rank == winner.index(number)
        else:
            assert isinstance(result, LeftBehindError)
            assert "majority" in str(result) or "train on without" in str(result)


def test_dead_members_of_this_host_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, 5, hosts=[0] * 5)
    for number in (0, 2, 4, 1):
        net.all[number].close()
    results = net.regroup([3])
    assert isinstance(results[3], Membership)
    assert (results[3].rank, results[3].size) == (0, 1)


def test_dead_members_of_other_hosts_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, 5, hosts=[0, 0, 0, 1, 1])
    for number in (0, 1, 2):
        net.all[number].close()
    assert all(isinstance(result, LeftBehindError) for result in net.regroup([3, 4]).values())


def test_a_world_that_may_not_have_formed_does_not_replace_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, 5)
    net.part([0, 1, 2], [3, 4])
    founded = net.all[2]._worlds
    assert all(isinstance(result, Membership) for result in net.regroup([0, 1, 2]).values())
    net.all[2]._worlds, net.all[2]._taken = founded, None  # the decision has not come to it
    net.part([0, 1], [2, 3, 4])
    results = net.regroup([0, 1, 2, 3, 4])
    assert [isinstance(results[number], Membership) for number in range(5)] == [False, False, True, True, True]


def test_dead_members_beside_a_follower_are_proven_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, 6, hosts=[0, 0, 0, 1, 1, 1])
    for number in (1, 2, 4, 5):
        net.all[number].close()
    begin = time.monotonic()
    results = net.regroup([0, 3])
    assert [result.size for result in results.values() if isinstance(result, Membership)] == [2, 2]
    assert time.monotonic() - begin < net.all[0]._patience + 2


@pytest.mark.parametrize("seed", range(8))
def test_never_two_worlds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever connections fail, in each direction, while members come late, twice in a row."""
    draw = random.Random(seed)
    net = Net(monkeypatch, draw.choice([3, 4, 5]))
    everyone = list(range(len(net.all)))
    for _ in range(2):
        net.cut = {(one, other) for one in everyone for other in everyone if one != other and draw.random() < 0.3}
        net.regroup(draw.sample(everyone, draw.randint(1, len(everyone))))
        assert len(net.can_form()) <= 1
    net.cut = set()
    net.regroup(everyone)
    assert len(net.can_form()) <= 1


def test_newcomers_come_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(monkeypatch, 2)
    joined: list[Membership] = []
    newcomers = [Members(timedelta(seconds=0.4), "127.0.0.1") for _ in range(2)]

    def join(members: Members) -> None:
        net._caller.number = -1
        joined.append(members.join([net.all[1].me.address], timedelta(seconds=20), lambda: None))

    threads = [threading.Thread(target=join, args=(members,), daemon=True) for members in newcomers]
    for thread in threads:
        thread.start()
    net._caller.number = 0
    wait_until(lambda: net.all[0].newcomers() == 2, 10, "knocked")
    assert all(result.size == 2 for result in net.regroup([0, 1]).values())  # not invited
    for members, place in zip(net.all, (0, 1), strict=True):
        members._form(members._taken.world)
        assert members.now.rank == place
    results = net.regroup([0, 1], invite=True)
    for thread in threads:
        thread.join(20)
    names = {place.names for place in (*results.values(), *joined)}
    assert len(names) == 1
    assert [results[0].rank, results[1].rank] == [0, 1]
    assert sorted(place.rank for place in joined) == [2, 3]
    assert net.all[0].newcomers() == 0

"""Survivors of a loss meet again in the same processes: whoever was lost, at most one part goes on, newcomers join."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from clocks import Clock

from ringstrategy.errors import LeftBehindError
from ringstrategy.membership import members as members_module
from ringstrategy.membership.members import Members
from ringstrategy.membership.worlds import Membership

PATIENCE = timedelta(seconds=3)


# Members that cannot reach each other, in threads


class Net:
    """Who reaches whom: a wrong answer of the network is a time-out, which proves nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, hosts: list[int] | None = None) -> None:
        self._connect = members_module._connect
        monkeypatch.setattr(members_module, "_connect", self._try)
        monkeypatch.setattr(members_module, "leave_groups", lambda: None)  # one process, whose group is none of theirs
        monkeypatch.setattr(members_module, "_ANSWER_SECONDS", 60.0)  # of this busy process
        monkeypatch.setattr(members_module, "_CONNECT_SECONDS", 60.0)
        self._caller = threading.local()
        self._caller.number = -1
        self.clock = Clock()
        self.cut: set[tuple[int, int]] = set()
        self.all = [self.member() for _ in range(size)]
        for number, members in enumerate(self.all):
            members.me = members.me._replace(network=str(number if hosts is None else hosts[number]))
        self._numbers = {members.me.address: number for number, members in enumerate(self.all)}
        for members in self.all:
            members.begin([other.me for other in self.all])

    def member(self) -> Members:
        return Members(PATIENCE, "127.0.0.1", self.clock)

    def _try(self, address: str) -> dist.Store:
        if (self._caller.number, self._numbers.get(address)) in self.cut:
            raise TimeoutError("no way")
        return self._connect(address)

    def part(self, *sides: list[int]) -> None:
        of = {number: side for side, numbers in enumerate(sides) for number in numbers}
        self.cut = {(one, other) for one in of for other in of if of[one] != of[other]}

    def regroup(
        self, numbers: list[int], *others: Callable[[], Any], invite: bool = False
    ) -> dict[int, Membership | LeftBehindError]:
        """What each of them gets; `others` do something else meanwhile."""

        def one(number: int) -> Membership:
            self._caller.number = number
            return self.all[number].regroup(invite=invite)

        results = self.clock.run(*(lambda number=number: one(number) for number in numbers), *others)
        return dict(zip(numbers, results, strict=False))

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
    hosts = Net(monkeypatch, sum(map(len, sides)))
    hosts.part(*sides)
    for number, result in hosts.regroup(list(range(len(hosts.all)))).items():
        if number in winner:
            assert isinstance(result, Membership), result
            assert result.names == tuple(hosts.all[each].me.name for each in winner)
            assert result.rank == winner.index(number)
        else:
            assert isinstance(result, LeftBehindError)
            assert "majority" in str(result) or "train on without" in str(result)


@pytest.mark.parametrize(
    ("hosts", "gone", "left", "go_on"),
    [
        ([0, 0, 0, 0, 0], [0, 2, 4, 1], [3], True),
        ([0, 0, 0, 1, 1], [0, 1, 2], [3, 4], False),  # a host that is cut off may go on
        ([0, 0, 0, 1, 1, 1], [1, 2, 4, 5], [0, 3], True),  # rank 3 proves the deaths on its host
    ],
)
def test_members_that_are_proven_dead_do_not_count(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], gone: list[int], left: list[int], go_on: bool
) -> None:
    members = Net(monkeypatch, len(hosts), hosts=hosts)
    for number in gone:
        members.all[number].close()
    results = members.regroup(left)
    for place, number in enumerate(left):
        result = results[number]
        if go_on:
            assert isinstance(result, Membership), result
            assert (result.rank, result.size) == (place, len(left))
        else:
            assert isinstance(result, LeftBehindError)
    if go_on:
        assert members.clock.now < PATIENCE.total_seconds(), "nobody waits for the dead"


def test_a_world_that_may_not_have_formed_does_not_replace_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Net(monkeypatch, 5)
    hosts.part([0, 1, 2], [3, 4])
    founded = hosts.all[2]._worlds
    assert all(isinstance(result, Membership) for result in hosts.regroup([0, 1, 2]).values())
    hosts.all[2]._worlds, hosts.all[2]._taken = founded, None  # the decision has not come to it
    hosts.part([0, 1], [2, 3, 4])
    results = hosts.regroup([0, 1, 2, 3, 4])
    assert [isinstance(results[number], Membership) for number in range(5)] == [False, False, True, True, True]


def test_who_is_not_in_the_others_world_of_the_same_generation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 have taken a decision without rank 0, and rank 0 one with somebody else."""
    hosts = Net(monkeypatch, 3)
    hosts.part([0], [1, 2])
    hosts.regroup([1, 2])
    hosts.cut = set()
    mine = hosts.all[0]._worlds[-1]
    hosts.all[0]._worlds = (*hosts.all[0]._worlds, mine._replace(generation=mine.generation + 1))
    [result] = hosts.regroup([0]).values()
    assert isinstance(result, LeftBehindError)
    assert "train on without this process, in generation 1" in str(result)


def test_each_decision_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process group meets nobody may have written before: the spare store is the same."""
    hosts, keys = Net(monkeypatch, 2), []
    for _ in range(2):
        hosts.regroup([0, 1])
        keys.append(hosts.can_form())
    assert [len(key) for key in keys] == [1, 1]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("seed", range(6))
def test_never_two_worlds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever connections fail, in each direction, while members come late, twice in a row."""
    draw = random.Random(seed)
    hosts = Net(monkeypatch, draw.choice([3, 4, 5]))
    everyone = list(range(len(hosts.all)))
    for _ in range(2):
        hosts.cut = {(one, other) for one in everyone for other in everyone if one != other and draw.random() < 0.3}
        hosts.regroup(draw.sample(everyone, draw.randint(1, len(everyone))))
        assert len(hosts.can_form()) <= 1
    hosts.cut = set()
    hosts.regroup(everyone)
    assert len(hosts.can_form()) <= 1


def test_newcomers_come_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Net(monkeypatch, 2)
    newcomers = [hosts.member() for _ in range(2)]

    def join(members: Members) -> Membership:
        hosts._caller.number = -1
        return members.join([hosts.all[1].me.address], timedelta(minutes=5), lambda: None)

    def go_on() -> Any:
        while hosts.all[0].newcomers() < 2:
            hosts.clock.sleep(0.1)
        assert all(result.size == 2 for result in hosts.regroup([0, 1]).values())  # not invited
        for members, place in zip(hosts.all, (0, 1), strict=True):
            members._form(members._taken.world)
            assert members.now.rank == place
        return hosts.regroup([0, 1], invite=True)

    old, *joined = hosts.clock.run(go_on, *(lambda members=members: join(members) for members in newcomers))
    assert len({place.names for place in (*old.values(), *joined)}) == 1
    assert [old[0].rank, old[1].rank] == [0, 1]
    assert sorted(place.rank for place in joined) == [2, 3]
    assert hosts.all[0].newcomers() == 0


def test_a_newcomer_is_let_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have gone yet from where it waited when ranks look for newcomers again."""
    hosts = Net(monkeypatch, 1)
    [member] = hosts.all
    member._own.set("newcomer/1", json.dumps(("its ticket", hosts.member().me)))
    member._own.add("newcomers", 1)
    assert member.newcomers() == 1
    assert hosts.regroup([0], invite=True)[0].size == 2
    assert member.newcomers() == 0

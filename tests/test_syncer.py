"""A syncer and its learners, without sockets and with a clock that tests turn; and the page of the syncer."""

from __future__ import annotations

import contextlib
import copy
import heapq
import html
import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from syncing import Here, learner_of, model_of, take_all
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.oracle import recomputed
from ringstrategy import BlockInt, Cast, Gaussian, Identity, Nesterov, Rotated, TopK
from ringstrategy.app.syncer_page import Page, as_html, as_text
from ringstrategy.app.syncer_scalars import Scalars
from ringstrategy.requests import RefusedError
from ringstrategy.server import plan
from ringstrategy.server import syncer as syncer_module
from ringstrategy.server.folder import Folder, events
from ringstrategy.server.learner import meets, turns
from ringstrategy.server.merges import mean, radial_directional


class Trains:
    """A learner whose optimizer adds drawn numbers to its parameters."""

    def __init__(self, here: Here, name: str, seed: int, sizes: tuple[int, ...] = (5, 3), **options: Any) -> None:
        self.here, self.model, self.lives = here, model_of(seed, *sizes), count()
        self.learner = learner_of(self.model, name, **options)
        self._draws, self._options = torch.Generator().manual_seed(seed), options
        self.connect()

    def connect(self) -> None:
        self.peer = f"{self.learner.name}/{next(self.lives)}"
        self._ask = self.here.asker(self.peer)

    def restart(self, state: dict[str, Any], model: list[dict[str, Tensor]]) -> None:
        """From its checkpoint, which stays as it is."""
        self.model = [{name: each.clone() for name, each in part.items()} for part in model]
        self.learner = learner_of(self.model, state["name"], **self._options)
        self.learner.load_state_dict(state)
        self.connect()

    def checkpoint(self) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        model = [{name: each.clone() for name, each in part.items()} for part in self.model]
        return self.learner.state_dict(), model

    def step(self, weight: float = 1.0) -> None:
        for part in self.model:
            for parameter in part.values():
                parameter.add_(torch.randn(parameter.shape, generator=self._draws), alpha=0.1)
        self.learner.after_step(weight)

    def exchange(self) -> bool:
        """Whether the syncer was there."""
        try:
            self.learner.exchange(self._ask)
        except ConnectionError:
            return False
        return True

    def go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step()
            self.exchange()
            take_all(self.learner)

    def flat(self) -> Tensor:
        return torch.cat([each for part in self.model for each in part.values()])


def theta_of(here: Here) -> list[Tensor]:
    assert here.syncer is not None
    pulled = [here.syncer._store.pull(fragment) for fragment in range(len(here.report()["versions"]))]
    return [each[1] for each in pulled if each is not None]


# What enters Theta


@pytest.mark.parametrize(
    ("codec", "merge", "outer"),
    [
        (Identity(), mean, Nesterov()),
        (BlockInt(8), radial_directional, partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01)),
        (Rotated(Gaussian(4)), radial_directional, Nesterov(0.5, 0.0)),
        (TopK(64), mean, partial(torch.optim.SGD, lr=1.0)),
    ],
    ids=["identity", "int8", "gaussian", "topk"],
)
def test_an_oracle_has_the_bits_of_every_merge(tmp_path: Path, codec: Any, merge: Any, outer: Any) -> None:
    here = Here(tmp_path, keep_wires=True)
    options = {"codec": codec, "merge": merge, "outer": outer, "broadcast": Cast("bfloat16")}
    three = [Trains(here, name, seed, (300, 257), **options) for seed, name in enumerate("abc")]
    initial = [each.clone() for part in three[0].model for each in part.values()]
    three[0].exchange()
    draws = random.Random(0)
    for turn in range(60):
        each = draws.choice(three)
        each.go(draws.randrange(1, 5))
        here.merge()
        if turn % 20 == 15:
            here.kill()
            each.go()
            here.start()
    versions = recomputed(tmp_path, initial, codec, merge, outer)
    assert [len(each) - 1 for each in versions] == here.report()["versions"]
    assert min(here.report()["versions"]) > 4
    assert all(torch.equal(each[-1], theta) for each, theta in zip(versions, theta_of(here), strict=True))
    for each in three:
        assert each.learner.counts["taken"] > 3


def test_what_is_late_is_dropped_and_kept_by_its_learner(tmp_path: Path) -> None:
    here = Here(tmp_path)
    options: dict[str, Any] = {"quorum": 1, "outer": partial(torch.optim.SGD, lr=1.0), "blend": 0.25}
    fast, slow = (Trains(here, name, seed, (6,), **options) for seed, name in enumerate(("fast", "slow")))
    fast.exchange()
    slow.exchange()
    assert take_all(fast.learner) == take_all(slow.learner) == 1
    assert torch.equal(fast.flat(), slow.flat()), "the first one brought the parameters"
    for _ in range(4):
        fast.step()
        slow.step()
    fast.exchange()
    here.merge()
    merged, own = fast.flat().clone(), slow.flat().clone()
    assert torch.allclose(theta_of(here)[0], merged, atol=1e-6), "alone, at rate 1, without momentum"
    slow.exchange()
    assert slow.learner.counts["late"] == 1
    here.merge()
    assert torch.allclose(theta_of(here)[0], merged, atol=1e-6)
    slow.step()
    own = slow.flat().clone()
    assert here.report()["versions"] == [1]
    assert take_all(slow.learner) == 1
    assert torch.allclose(slow.flat(), 0.25 * merged + 0.75 * own, atol=1e-6)
    slow.go(7)
    assert slow.learner.counts["taken"] == 1
    assert here.report()["learners"]["slow"]["late"] == 1
    assert here.report()["goodput"] == pytest.approx(0.5)


def left_behind(path: Path) -> tuple[Here, Trains]:
    """A learner that has made no step, and the syncer that has merged another one's four."""
    here = Here(path)
    fast, slow = joined(here, "fast", "slow", sizes=(6, 6), quorum=1)
    fast.go(4)
    here.merge()
    return here, slow


def test_a_version_is_taken_between_two_turns_so_that_the_next_push_counts(tmp_path: Path) -> None:
    """A learner at half speed, of whose pushes from old bases none would count."""
    here, slow = left_behind(tmp_path)
    assert here.report()["goodput"] == 1.0
    slow.go(1)
    told = here.report()["learners"]["slow"]
    assert (told["bytes in"], told["late"], slow.learner.counts["taken over"]) == (0, 0, 4)
    assert here.report()["goodput"] == 6 / 8, "its step from the old base was blended, in both fragments"
    slow.go(4)
    assert (slow.learner.counts["taken"], slow.learner.counts["late"]) == (2, 0)


def test_a_learner_that_knows_that_it_is_late_sends_nothing(tmp_path: Path) -> None:
    here, slow = left_behind(tmp_path)
    slow.step()
    slow.learner._hear(slow._ask("look", {}, ()).meta)
    slow.step()
    slow.step()
    slow.go(1)
    told = here.report()["learners"]["slow"]
    assert (told["bytes in"], told["late"], slow.learner.counts["late"]) == (0, 2, 2)
    assert slow.learner.counts["taken over"] == 4


def test_what_encoding_lost_comes_with_the_next_push_if_the_first_entered(tmp_path: Path) -> None:
    here = Here(tmp_path, keep_wires=True)
    options: dict[str, Any] = {"quorum": 1, "outer": partial(torch.optim.SGD, lr=1.0), "codec": TopK(4, 8)}
    one = Trains(here, "one", 0, (8,), **options)
    one.exchange()
    take_all(one.learner)
    start = one.flat().clone()
    one.step()
    one.go(3)
    here.merge()
    [first] = theta_of(here)
    moved = one.flat() - start
    assert int((first != start).sum()) == 4
    sent = first - start
    one.exchange()
    assert take_all(one.learner) == 0, "overlap"
    one.learner.after_step(1.0)
    assert take_all(one.learner) == 1
    for _ in range(3):
        one.learner.after_step(1.0)
    one.exchange()
    here.merge()
    [second] = theta_of(here)
    assert torch.allclose(second - start, moved, rtol=0.01), "no other step was made: all of it has entered, once"
    assert not torch.allclose(sent, moved, atol=1e-3)


def test_what_encoding_lost_of_a_late_push_is_still_in_the_parameters(tmp_path: Path) -> None:
    here = Here(tmp_path)
    options: dict[str, Any] = {"quorum": 1, "outer": partial(torch.optim.SGD, lr=1.0), "codec": TopK(4, 8)}
    fast, slow = joined(here, "fast", "slow", sizes=(8,), **options)
    for _ in range(4):
        slow.step()
    fast.go(4)
    here.merge()
    slow.exchange()
    assert slow.learner.counts["late"] == 1, "it was sent: it did not know"
    slow.step()
    own = slow.flat().clone()
    assert take_all(slow.learner) == 1
    [theta] = theta_of(here)
    [base] = [part["base"] for part in slow.learner.state_dict()["fragments"]]
    assert torch.equal(base, theta)
    assert torch.allclose(slow.flat() - base, (own - theta) / 2, atol=1e-6)


def test_there_is_one_push_from_one_base(tmp_path: Path) -> None:
    here = Here(tmp_path)
    one, _ = joined(here, "a", "b", sizes=(5,))
    one.go(4)
    before = one.learner.state_dict()["fragments"][0]["outgoing"]
    one.go(9)
    here.merge()
    assert here.report()["versions"] == [0], "the other one has not pushed"
    after = one.learner.state_dict()["fragments"][0]["outgoing"]
    assert torch.equal(after.pop("progress"), before.pop("progress"))
    assert after == before
    assert one.learner.counts["taken"] == 1


def dies_after(steps: int) -> Callable[[str], None]:
    """What a folder calls at each step of its saves."""
    left = count(steps, -1)

    def step(name: str) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt(name)

    return step


HAPPENS = [
    *["step"] * 8,
    "exchange",
    "merge",
    "leave",
    "come back",
    "syncer dies",
    "syncer dies in a save",
    "checkpoint",
]


LIVES = st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 2)), min_size=50, max_size=110)


@given(LIVES, st.integers(1, 3))
@settings(max_examples=10, phases=[Phase.generate])  # to make a failure shorter would take minutes
def test_whatever_dies_a_push_enters_once_and_no_version_goes_back(
    tmp_path_factory: pytest.TempPathFactory, happens: list[tuple[str, int]], quorum: int
) -> None:
    live(tmp_path_factory.mktemp("syncer"), happens, quorum)


@pytest.mark.nightly
@given(LIVES, st.integers(1, 3))
@settings(max_examples=500)
def test_so_it_is_in_many_lives(
    tmp_path_factory: pytest.TempPathFactory, happens: list[tuple[str, int]], quorum: int
) -> None:
    live(tmp_path_factory.mktemp("syncer"), happens, quorum)


def live(path: Path, happens: list[tuple[str, int]], quorum: int) -> None:
    """Kills of the syncer between any two steps of its saves; of learners at any time, with old checkpoints or none."""
    here = Here(path, keep_wires=True)
    three = [Trains(here, f"learner{seed}", seed, (4, 3), quorum=quorum, interval=2) for seed in range(3)]
    initial = [each.clone() for part in three[0].model for each in part.values()]
    three[0].exchange()
    saved = [each.checkpoint() for each in three]
    there = [True] * 3
    highest = [0, 0]
    for turn, (what, who) in enumerate(happens):
        each = three[who]
        if what == "syncer dies":
            here.kill()
        elif what == "syncer dies in a save":
            here.step = dies_after(turn % 7)
        elif what == "checkpoint":
            saved[who] = each.checkpoint()
        elif what == "leave" and there[who]:
            there[who] = False
            if here.syncer is not None:
                here.syncer.gone(each.peer)
        elif what == "come back" and not there[who]:
            there[who] = True
            each.restart(*saved[who])
        elif what == "step" and there[who]:
            each.step(1.0 + who)
            take_all(each.learner)
        try:
            if here.syncer is None and what not in ("syncer dies", "step"):
                here.start()
            if there[who] and what in ("exchange", "step"):
                each.exchange()
            if what in ("merge", "step", "leave") and here.syncer is not None:
                here.merge()
        except KeyboardInterrupt:
            here.step = lambda name: None
            here.kill()
        if here.syncer is not None:
            versions = here.report()["versions"] or [0, 0]
            assert all(now >= before for now, before in zip(versions, highest, strict=True))
            highest = versions
    here.step = lambda name: None
    here.kill()
    here.start()
    merges = [len(each) - 1 for each in recomputed(path, initial, Identity(), mean, Nesterov())]
    assert merges == here.report()["versions"]
    assert all(now >= before for now, before in zip(merges, highest, strict=True))
    counted, bases = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    for event in events(path):
        counted += [(event["fragment"], push["learner"], push["sequence"]) for push in event["pushes"]]
        bases += [(event["fragment"], push["learner"], push["base"]) for push in event["pushes"]]
    assert len(counted) == len(set(counted))
    assert len(bases) == len(set(bases)), "two pushes from one base have the same steps in them"
    here.kill()


@pytest.mark.parametrize("step", range(8))
def test_a_save_that_is_killed_leaves_the_merge_or_what_was_before(tmp_path: Path, step: int) -> None:
    """At each of its steps. Nobody has seen the version by then, and no learner's push is lost."""
    here = Here(tmp_path)
    two = joined(here, "a", "b", sizes=(5,))
    for each in two:
        each.go(4)
    names, dies = list[str](), dies_after(step)
    here.step = lambda name: (names.append(name), dies(name))[1]
    try:
        here.merge()
    except KeyboardInterrupt:
        assert step < 5
        syncer = here.syncer
        assert syncer is not None
        with pytest.raises(RuntimeError, match="has failed"):
            two[0].learner.exchange(two[0]._ask)
    else:
        assert step >= 5
        assert names == ["log", "write", "write on", "rename", "flush"]
    here.step = lambda name: None
    here.kill()
    here.start()
    assert here.report()["versions"] == [1 if step > 3 else 0]
    for each in two:
        each.learner.joined = False
        each.exchange()
    here.merge()
    for each in two:
        each.exchange()
        each.step()
        assert take_all(each.learner) == 1
    assert here.report()["versions"] == [1]
    assert len(events(tmp_path)) == 1


def test_when_a_learner_dies_the_quorum_is_checked_again(tmp_path: Path) -> None:
    here = Here(tmp_path)
    two = joined(here, "a", "b", sizes=(5,), quorum=None)
    two[0].go(4)
    here.merge()
    assert here.report()["versions"] == [0]
    assert here.syncer is not None
    here.syncer.gone(two[1].peer)
    here.merge()
    assert here.report()["versions"] == [1]
    assert not here.report()["learners"]["b"]["there"]


def test_a_grace_is_waited_for_and_no_longer(tmp_path: Path) -> None:
    here = Here(tmp_path)
    three = joined(here, *"abc", sizes=(5,), quorum=1, grace=2.0)
    assert here.merge() is None
    three[0].go(4)
    here.now = 1.5
    assert here.merge() == 0.5
    three[1].go(4)
    assert here.merge() == 0.5, "the first one's"
    assert here.report()["versions"] == [0]
    here.now = 2.0
    here.merge()
    assert here.report()["versions"] == [1]
    assert [push["learner"] for push in events(tmp_path)[0]["pushes"]] == ["a", "b"]


def test_a_merge_that_takes_long_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer_module, "_A_MOMENT", 0.01)
    here = Here(tmp_path)
    two = joined(here, "a", "b", sizes=(5,))
    beats: list[dict[str, Any]] = []

    def beats_meanwhile(name: str) -> None:
        if name == "write":
            asks = threading.Thread(target=lambda: beats.append(here.asker(two[0].peer)("beat", {}, ()).meta))
            asks.start()
            asks.join(60)

    here.step = beats_meanwhile
    for each in two:
        each.go(4)
    here.merge()
    assert beats == [{"merging": True}]
    told = here.asker(two[0].peer)("beat", {}, ()).meta
    assert (told["versions"], told["learners"], told["joined"]) == ([1], 2, True)


# The late rule


class Classifies(Trains):
    """Trains a small network to tell six classes, at a pace of its own."""

    def __init__(self, here: Here, name: str, seed: int, **options: Any) -> None:
        self.network = network_of(seed)
        options |= {"interval": 16, "overlap": 2}
        super().__init__(here, name, seed, (), **options)
        layers = dict(self.network.named_parameters())
        self.model = [{key: layers[key] for key in layers if key[0] in digits} for digits in ("0", "24")]
        self.learner = learner_of(self.model, name, **options)
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self._x, self._y = examples(1000 + seed, 4000)

    def step(self, weight: float = 32.0) -> None:
        chosen = torch.randint(0, len(self._x), (32,), generator=self._draws)
        cross_entropy(self.network(self._x[chosen]), self._y[chosen]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.learner.after_step(weight)


def network_of(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 6))


def examples(seed: int, many: int) -> tuple[Tensor, Tensor]:
    teacher, draws = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    first, second = torch.randn(16, 24, generator=teacher) / 2, torch.randn(24, 6, generator=teacher)
    x = torch.randn(many, 16, generator=draws)
    return x, (torch.tanh(x @ first) @ second).argmax(1)


def theta_loss(path: Path, quorum: int | None, seed: int, steps: int = 800) -> float:
    """Of what four learners, one at half speed, make of Theta with so many steps in all; in virtual time."""
    here, pace = Here(path), random.Random(seed)
    four = [Classifies(here, f"{place}", 10 * seed + place, quorum=quorum, **LIKE_THE_PAPER) for place in range(4)]
    for each in four:
        each.exchange()
        take_all(each.learner)
    times = [(1.0 + (place == 3), place) for place in range(4)]
    for _ in range(steps):
        here.now, place = heapq.heappop(times)
        four[place].go()
        here.merge()
        heapq.heappush(times, (here.now + (1.0 + (place == 3)) * pace.uniform(0.9, 1.1), place))
    network = network_of(0)
    with torch.no_grad():
        for part, theta in zip(("0", "24"), theta_of(here), strict=True):
            mine = [each for name, each in network.named_parameters() if name[0] in part]
            for each, run in zip(mine, theta.split([each.numel() for each in mine]), strict=True):
                each.copy_(run.view(each.shape))
        x, y = examples(5, 4000)
        loss = float(cross_entropy(network(x), y))
    if quorum is not None:
        assert here.report()["learners"]["3"]["taken"] > 5, "the slow one's progress counts too"
        assert here.report()["goodput"] > 0.8, "and of those at nearly equal speed nobody starves"
    here.kill()
    return loss


LIKE_THE_PAPER: dict[str, Any] = {
    "grace": "auto",
    "merge": radial_directional,
    "codec": BlockInt(8),
    "broadcast": Cast("bfloat16"),
}


@pytest.mark.slow
def test_a_quorum_that_drops_what_is_late_learns_as_much_as_one_that_waits(tmp_path: Path) -> None:
    """At equal steps, within 3 %, over three seeds."""
    waits, drops = (
        sum(theta_loss(tmp_path / f"{quorum}{seed}", quorum, seed) for seed in range(3)) for quorum in (None, 2)
    )
    assert drops < 1.03 * waits < 3.0


# Coming, going, and coming to the wrong place


def joined(here: Here, *names: str, **options: Any) -> list[Trains]:
    """Learners that have the first version."""
    made = [Trains(here, name, seed, **options) for seed, name in enumerate(names)]
    for each in made:
        each.exchange()
        take_all(each.learner)
    return made


def test_a_learner_trains_on_while_the_syncer_is_away_and_comes_back(tmp_path: Path) -> None:
    here = Here(tmp_path)
    one, two = joined(here, "a", "b")
    for each in (one, two):
        each.go(8)
    here.merge()
    versions = here.report()["versions"]
    assert versions == [1, 1]
    here.kill()
    before = one.flat().clone()
    for each in (one, two):
        for _ in range(9):
            each.step()
            assert not each.exchange()
            take_all(each.learner)
        assert not each.learner.joined
    assert not torch.equal(one.flat(), before)
    here.start()
    assert here.report()["versions"] == versions
    for _ in range(6):
        for each in (one, two):
            each.go()
        here.merge()
    assert min(here.report()["versions"]) >= 2
    assert one.learner.counts["unknown"] == 0


def test_who_comes_while_the_syncer_is_away_begins_with_its_own(tmp_path: Path) -> None:
    """With nothing it takes Theta whole; with a checkpoint it blends, and has lost no step."""
    here = Here(tmp_path)
    [one] = joined(here, "a", quorum=1)
    one.go(8)
    here.merge()
    one.go(1)
    state, model = one.checkpoint()
    here.kill()
    fresh = Trains(here, "fresh", 7, quorum=1)
    one.restart(state, model)
    assert torch.equal(one.flat(), torch.cat([each for part in model for each in part.values()]))
    for each in (fresh, one):
        each.go(3)
    own = one.flat().clone()
    here.start()
    fresh.exchange()
    assert take_all(fresh.learner) == 2
    assert torch.equal(fresh.flat(), torch.cat(theta_of(here)))
    one.exchange()
    assert torch.equal(one.flat(), own)
    assert one.learner.joined
    one.go(8)
    here.merge()
    assert one.learner.counts["taken"] >= 3


def test_the_first_learner_brings_what_it_has_though_the_syncer_comes_late(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.kill()
    one = Trains(here, "a", 0)
    one.go(3)
    here.start()
    assert one.exchange()
    assert not one.learner.joined, "parameters are read by the training thread alone"
    one.step()
    now = one.flat().clone()
    one.exchange()
    assert torch.equal(torch.cat(theta_of(here)), now)


def test_two_learners_from_one_checkpoint_are_two(tmp_path: Path) -> None:
    here = Here(tmp_path)
    [one] = joined(here, "a", quorum=1)
    one.step()
    twin = Trains(here, "a", 5, quorum=1)
    twin.restart(*one.checkpoint())
    twin.exchange()
    assert not twin.learner.joined
    assert twin.learner.name.startswith("a~")
    twin.exchange()
    assert take_all(twin.learner) == 2, "whole: its progress is the other's"
    assert torch.equal(twin.flat(), torch.cat(theta_of(here)))
    assert sorted(here.report()["learners"]) == ["a", twin.learner.name]


@pytest.mark.parametrize("others", [False, True])
def test_an_older_folder_is_noticed_and_learners_fetch_anew(tmp_path: Path, others: bool) -> None:
    """Also where others have made another version of the same number there meanwhile."""
    here = Here(tmp_path / "folder")
    one, two = joined(here, "a", "b", quorum=1)
    one.go(8)
    here.merge()
    two.go(2)
    two.step()
    old = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    one.go(8)
    here.merge()
    one.go(2)
    assert here.report()["versions"] == [2, 2]
    here.kill()
    for name, content in old.items():
        (tmp_path / "folder" / name).write_bytes(content)
    here.start()
    assert here.report()["versions"] == [1, 1]
    if others:
        two.go(12)
        here.merge()
        assert here.report()["versions"] == [2, 2]
    one.go(8)
    assert one.learner.counts["unknown"] == 2
    assert one.learner.counts["taken over"] == 8
    one.go(4)
    here.merge()
    assert min(here.report()["versions"]) == 2 + others


@pytest.mark.parametrize(
    ("other", "sizes", "words"),
    [
        ({}, (5, 4), r'its fragment 1 has \["p1", \[4\], "float32"\], where the syncer\'s has \["p1", \[3\]'),
        ({}, (5,), "it has 1 fragments, and the syncer 2"),
        (
            {"codec": Cast("float16")},
            (5, 3),
            r"its codec is \[.Cast., {.dtype.: .float16.}\], and the syncer's \[.Identity",
        ),
        ({"outer": Nesterov(0.1)}, (5, 3), r"its outer is .*0\.1"),
        ({"merge": radial_directional}, (5, 3), "its merge is"),
        ({"quorum": 1}, (5, 3), "its quorum is 1, and the syncer's 2"),
        ({"broadcast": Cast("bfloat16")}, (5, 3), "its broadcast is"),
    ],
)
def test_who_trains_something_else_is_refused_by_both_sides(
    tmp_path: Path, other: dict[str, Any], sizes: tuple[int, ...], words: str
) -> None:
    here = Here(tmp_path / "one")
    [one] = joined(here, "a")
    stranger = Trains(here, "stranger", 1, sizes, **other)
    with pytest.raises(RefusedError, match=f"stranger trains something else: {words}"):
        stranger.exchange()
    assert here.report()["learners"].keys() == {"a"}
    elsewhere = Here(tmp_path / "two")
    Trains(elsewhere, "b", 1, sizes, **other).exchange()
    with pytest.raises(RefusedError, match="another plan"):
        elsewhere.asker("a/9")("pull", {"plan": one.learner.digest, "fragment": 0, "have": -1}, ())
    lies = here.asker("a/0")

    def another(operation: str, meta: Any, buffers: Any) -> Any:
        answer = lies(operation, meta, buffers)
        return answer._replace(meta={**answer.meta, "plan": "other"})

    one.learner.joined = False
    with pytest.raises(ValueError, match="the syncer has another plan than a"):
        one.learner.exchange(another)


def test_another_version_of_the_package_is_refused(tmp_path: Path) -> None:
    here = Here(tmp_path)
    [one] = joined(here, "a")
    plan = {**one.learner.plan, "ringstrategy": "0.0.1"}
    text = json.dumps(plan).encode()
    with pytest.raises(RefusedError, match=r'its ringstrategy is "0\.0\.1", and the syncer\'s'):
        here.asker("b/0")("join", {"plan": len(text), "learner": "b"}, [text])


@pytest.mark.parametrize(
    ("operation", "wrong", "content", "words"),
    [
        ("push", {}, bytes(19), "fragment 0 travels in 20 bytes, got 19"),
        ("push", {}, torch.tensor([0, 1, float("inf"), 0, 0]), "fragment 0 is not finite: resume"),
        ("push", {"plan": "other"}, bytes(20), "another plan"),
        ("join", {"plan": 1 << 27}, b"{}", "a plan has at most"),
        ("leave", {}, b"", "does not know 'leave'"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    tmp_path: Path, operation: str, wrong: dict[str, Any], content: Any, words: str
) -> None:
    here = Here(tmp_path)
    [one] = joined(here, "a")
    meta = {"plan": one.learner.digest, "fragment": 0, "boot": "", "base": 0, "sequence": 1, "weight": 1.0}
    before = here.report()["learners"]["a"]
    with pytest.raises(RefusedError, match=words):
        here.asker(one.peer)(operation, {**meta, **wrong}, [content])
    assert here.report()["learners"]["a"] == before


def test_a_learner_whose_parameters_are_not_finite_stops(tmp_path: Path) -> None:
    here = Here(tmp_path)
    [one] = joined(here, "a")
    one.model[0]["p0"][2] = float("nan")
    with pytest.raises(ValueError, match="the parameters of a are not finite: resume"):
        one.go(4)
    broken = Here(tmp_path / "other")
    one = Trains(broken, "a", 0)
    one.learner = learner_of([{"p": torch.tensor([float("inf")])}])
    with pytest.raises(RefusedError, match="not finite"):
        one.exchange()
    assert broken.report()["versions"] == []


def test_who_runs_the_syncer_may_set_the_quorum(tmp_path: Path) -> None:
    here = Here(tmp_path, quorum=1, grace=0.0)
    one, _ = joined(here, "a", "b", quorum=2, grace=9.0)
    one.go(4)
    here.merge()
    assert here.report()["versions"] == [1, 1]


# What is on the disk


@pytest.mark.parametrize("name", ["plan", "fragment0", "fragment1"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_file_is_named_with_the_cure(tmp_path: Path, name: str, damage: str) -> None:
    here = Here(tmp_path)
    joined(here, "a")
    here.kill()
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    if (name, damage) == ("plan", "gone"):
        here.start()
        assert here.report()["versions"] == [], "as if it had been killed before it had begun"
        return
    words = rf"{name} is {'missing' if damage == 'gone' else 'damaged'}: put back a copy of the whole folder"
    with pytest.raises(ValueError, match=words):
        here.start()


def test_one_folder_is_for_one_syncer(tmp_path: Path) -> None:
    here = Here(tmp_path)
    with pytest.raises(ValueError, match="another syncer writes to"):
        Folder(tmp_path)
    here.kill()
    Folder(tmp_path).close()


def test_a_line_that_was_cut_is_cut_off(tmp_path: Path) -> None:
    here = Here(tmp_path)
    [one] = joined(here, "a", quorum=1)
    one.go(4)
    here.merge()
    here.kill()
    whole = events(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as log:
        log.write('{"fragment": 0, "ver')
    assert events(tmp_path) == whole
    here.start()
    one.go(4)
    here.merge()
    assert events(tmp_path)[: len(whole)] == whole
    assert len(events(tmp_path)) > len(whole)


# Plans, turns, the page


PARTS_OF_ALL = [BlockInt(8), Cast("bfloat16"), Identity(), Rotated(Gaussian(4)), TopK(4, 8), Nesterov(0.4, 0.8), mean]


@pytest.mark.parametrize("part", [*PARTS_OF_ALL, partial(torch.optim.SGD, lr=0.1, nesterov=False)])
def test_a_part_comes_back_from_its_description(part: Any) -> None:
    known = {**plan.PARTS, "Nesterov": Nesterov}
    again = plan.built(json.loads(json.dumps(plan.described(part))), known)
    if isinstance(part, partial):
        assert (again.func, again.keywords) == (part.func, part.keywords)
    else:
        assert again == part


def test_nothing_else_is_built(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the syncer has no eval: take a part"):
        plan.built(["eval", {}], plan.PARTS)
    with pytest.raises(TypeError, match="cannot be described"):
        plan.described(object())
    for outer, words in ((partial(os.system), "the syncer has no system"), (torch.optim.LBFGS, "closure")):
        with pytest.raises(RefusedError, match=f"cannot do what the first learner plans: .*{words}"):
            Trains(Here(tmp_path / outer.__class__.__name__), "a", 0, outer=outer).exchange()


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.integers(0, 300))
def test_each_fragment_has_its_turn_once_an_interval_and_all_processes_know_when(
    fragments: int, more: int, overlap: int, begin: int
) -> None:
    interval = fragments + more
    given = [turns(step, interval, fragments).get(0) for step in range(begin, begin + interval)]
    assert sorted(each for each in given if each is not None) == list(range(fragments))
    for step in range(begin, begin + interval):
        pushed = 0 in turns(step, interval, fragments)
        used = overlap % interval in turns(step, interval, fragments)
        assert meets(step, interval, overlap, fragments) == (pushed or used)


def test_the_page_says_the_same_as_the_text_and_runs_nothing(tmp_path: Path) -> None:
    here = Here(tmp_path)
    assert "waiting for the first learner" in as_text(here.report())
    names = "<script>alert(1)</script>", "b"
    one, two = joined(here, *names)
    for each in (one, two):
        each.go(8)
    here.merge()
    here.syncer.gone(two.peer) if here.syncer else None
    text, page = as_text(here.report()), as_html(here.report())
    assert "1 there, 2 since the start" in text
    assert "versions of fragments: 1 1" in text
    assert "script" not in page.replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
    cells = re.findall(r"<td>(.*?)</td>", page)
    assert cells == [html.escape(cell) for line in text.splitlines()[-2:] for cell in re.split(r"  +", line)]
    with contextlib.closing(Page(("127.0.0.1", 0), here.report)) as served:
        for path, wanted in (("/", page), ("/text", text)):
            with urllib.request.urlopen("http://{}:{}{}".format(*served.address, path), timeout=60) as answer:
                got = answer.read().decode()
            assert re.sub(r"\d+ s\b", "", got) == re.sub(r"\d+ s\b", "", wanted)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen("http://{}:{}/etc/passwd".format(*served.address), timeout=60)


def test_tensorboard_has_the_numbers_of_the_page_over_merges(tmp_path: Path) -> None:
    here = Here(tmp_path / "theta")
    for name in ("one", "two"):  # a second life goes on in the same folder
        with contextlib.closing(Scalars(tmp_path / "scalars", here.report, every=1000.0)):
            [learner] = joined(here, name)
            learner.go(8)
            here.merge()
            learner.go(8)
            here.syncer.gone(learner.peer) if here.syncer and name == "one" else None
    report, events = here.report(), EventAccumulator(str(tmp_path / "scalars"))
    events.Reload()
    found = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    assert {each.step for each in found.values()} == {sum(report["versions"])} != {0}
    assert found["syncer/learners"].value == 1
    assert found["syncer/taken"].value == sum(told["taken"] for told in report["learners"].values()) > 2
    assert found["syncer/MB in"].value == pytest.approx(1e-6 * sum(t["bytes in"] for t in report["learners"].values()))
    assert [found[f"goodput/{name}"].value for name in ("one", "two")] == [1.0, 1.0]
    assert [event.value for event in events.Scalars("syncer/learners")] == [0, 1], "one is gone"
    assert len(events.Scalars("staleness/one")) == 2


@pytest.mark.parametrize("sizes", [(5,), (5, 7)])
def test_what_a_checkpoint_has_does_not_change_while_it_is_written(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Memory is prepared for progress, once for each."""
    here, model = Here(tmp_path), model_of(0, *sizes)
    learner = learner_of(model, quorum=1)
    ask = here.asker("a/1")
    learner.exchange(ask)
    take_all(learner)
    kept: list[tuple[Any, Any]] = []
    for _ in range(24):
        for part in model:
            next(iter(part.values())).add_(torch.randn(()))
        learner.after_step(1.0)
        state = learner.state_dict()
        kept.append((state, copy.deepcopy(state)))
        learner.exchange(ask)
        here.merge()
        learner.exchange(ask)
        take_all(learner)
    assert learner.counts["taken"] > 3
    for state, then in kept:
        for part, before in zip(state["fragments"], then["fragments"], strict=True):
            assert (part["outgoing"] is None) == (before["outgoing"] is None)
            if part["outgoing"] is not None:
                assert torch.equal(part["outgoing"]["progress"], before["outgoing"]["progress"])
            assert (part["base"] is None) == (before["base"] is None)
            assert part["base"] is None or torch.equal(part["base"], before["base"])

"""What a server keeps, without sockets and with a clock that tests turn: it merges each push at most once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from ringstrategy import Nesterov
from ringstrategy.server.fragment import Fragment, Place
from ringstrategy.server.merges import mean, radial_directional
from ringstrategy.server.rules import NEVER, Async, Quorum, Rule, Staleness, Sync
from ringstrategy.server.store import Push, Store, Taken

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def numbers(seed: int, numel: int = 7) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def store_of(
    rule: Rule, optimizer: Any = SGD, merge: Any = mean, *, progress: bool = False, fragments: int = 1
) -> Store:
    made = [Fragment(numbers(100 + each), optimizer) for each in range(fragments)]
    return Store(made, rule, merge, progress=progress)


def push(store: Store, learner: str, values: Tensor, **more: Any) -> Taken:
    """As one who has what the store has now, unless `more` says otherwise."""
    fragment, now = more.pop("fragment", 0), more.pop("now", 0.0)
    known = {"sequence": store.versions[fragment], "boot": store.boot, "base": store.versions[fragment], "weight": 1.0}
    return store.push(fragment, Push(learner=learner, values=values, **{**known, **more}), now)


def values_of(store: Store, fragment: int = 0) -> Tensor:
    pulled = store.pull(fragment)
    assert pulled is not None
    return pulled[1]


# Gradients


@pytest.mark.parametrize(
    "optimizer", [SGD, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize(("learners", "apart"), [(2, 0.0), (8, 1e-6)])
def test_in_step_it_is_one_process_that_has_all_gradients(
    optimizer: Callable[..., torch.optim.Optimizer], learners: int, apart: float
) -> None:
    store, reversed_ = (store_of(Sync(learners), optimizer) for _ in range(2))
    alone = Parameter(numbers(100))
    steps = optimizer([alone])
    for step in range(40):
        gradients = [numbers(1000 * step + learner) for learner in range(learners)]
        lr = 0.1 / (1 + step // 10)  # a schedule's
        for learner in range(learners):
            assert store.due(0.0) == []
            assert push(store, f"{learner}", gradients[learner], options=[{"lr": lr}]) == Taken.TAKEN
            push(reversed_, f"{learners - 1 - learner}", gradients[-1 - learner], options=[{"lr": lr}])
        alone.grad = torch.stack(gradients).mean(0)
        for group in steps.param_groups:
            group["lr"] = lr
        steps.step()
        assert store.due(0.0) == reversed_.due(0.0) == [0]
        assert store.merge(0, 0.0)["after"] == reversed_.merge(0, 0.0)["after"], "not by order of arrival"
    assert torch.allclose(values_of(store), alone, rtol=0, atol=apart)


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_pull_a_row_to_their_points_end_where_a_loop_in_numpy_does(seed: int) -> None:
    """SEEDS, system 6: gradient = parameters - point, ten pushes each, in a drawn order of pulls and pushes."""
    draws = np.random.default_rng(seed)
    points = draws.normal(size=(4, 5)).astype(np.float32)
    store = Store([Fragment(torch.zeros(5), partial(torch.optim.SGD, lr=0.01))], Async(), mean, progress=False)
    row = np.zeros(5, np.float32)
    pulled = {worker: (0, torch.zeros(5), row) for worker in range(4)}
    stale = set()
    for version, worker in enumerate(draws.permutation(np.repeat(range(4), 10)).tolist()):
        base, theirs, twin = pulled[worker]
        gradient = theirs - torch.from_numpy(points[worker])
        assert push(store, f"{worker}", gradient, sequence=version, base=base) == Taken.TAKEN
        assert store.due(0.0) == [0]
        store.merge(0, 0.0)
        row = row - np.float32(0.01 / (1 + version - base)) * (twin - points[worker])
        stale.add(version - base)
        if draws.random() < 0.7:
            pulled[worker] = version + 1, values_of(store), row
    assert np.abs(values_of(store).numpy() - row).max() < 1e-6
    assert max(stale) > 2


def test_a_parameter_that_nobody_used_is_not_stepped_and_a_gradient_is_clipped_before_its_step() -> None:
    """Two parameters, one of them a matrix in its own strides, in a fragment with two values of padding."""
    places = [Place(0, (3,), (1,)), Place(3, (2, 2), (1, 2))]
    fragment = Fragment(numbers(1, 9), partial(torch.optim.Adam, lr=0.1), places)
    store = Store([fragment], Sync(2), mean, progress=False, digests=False)
    twins = [Parameter(parameter.detach().clone()) for parameter in fragment.parameters]
    steps = torch.optim.Adam(twins, lr=0.1)
    for number, used in enumerate([[0, 1], [1], [0, 1], []]):
        gradients = [numbers(10 * number + learner, 9) for learner in range(2)]
        for learner in range(2):
            assert push(store, f"{learner}", gradients[learner], used=used if learner else used[:1]) == Taken.TAKEN
        total = (gradients[0] + gradients[1]) / 2
        assert torch.equal(store.gradient(0), total)
        event = store.merge(0, 0.0, scale=0.5)
        assert (event["scale"], event["after"]) == (0.5, None)
        for place, twin, which in zip(places, twins, range(2), strict=True):
            twin.grad = place.of(total * 0.5) if which in used else None
        steps.step()
        assert all(torch.equal(*pair) for pair in zip(twins, fragment.parameters, strict=True))
    assert torch.equal(fragment.values[7:], numbers(1, 9)[7:])
    assert int(steps.state[twins[0]]["step"]) == 2


def test_asynchronous_momentum_diverges_without_regard_to_staleness_and_not_with_it() -> None:
    """Four workers, one at a quarter of the others' speed, with the gradient of one bowl."""

    class Blind(Async):
        def rate(self, staleness: int) -> float:
            return 1.0

    ends = {}
    for rule in (Async(), Blind()):
        store = Store([Fragment(torch.ones(3), SGD)], rule, mean, progress=False)
        pulled = {worker: (0, values_of(store)) for worker in range(4)}
        for turn in range(1200):
            worker = turn % 4
            if worker == 3 and turn % 16 != 15:
                continue
            base, values = pulled[worker]
            push(store, f"{worker}", values, sequence=turn, base=base)
            store.merge(0, 0.0)
            pulled[worker] = store.versions[0], values_of(store)
        ends[type(rule)] = float(values_of(store).abs().max())
    assert ends[Async] < 1
    assert not ends[Blind] < 1e6


def test_nobody_is_too_far_ahead_and_nobody_waits_for_who_has_left() -> None:
    store = store_of(Staleness(2))
    for learner in ("fast", "slow"):
        store.join(learner)
    for learner in ("fast", "slow"):
        push(store, learner, numbers(0), sequence=0)
        store.merge(0, 0.0)
    for step in range(1, 4):
        assert store.may_go_on("fast")
        push(store, "fast", numbers(step), sequence=step)
        store.merge(0, 0.0)
    assert not store.may_go_on("fast")
    assert store.may_go_on("slow")
    store.join("new")
    store.leave("slow")
    assert store.may_go_on("new")
    assert not store.may_go_on("fast")
    push(store, "new", numbers(5), sequence=5)
    store.merge(0, 0.0)
    assert store.may_go_on("fast"), "the new one began where the slowest was"
    push(store, "fast", numbers(6), sequence=6)
    assert not store.may_go_on("fast")
    store.leave("new")
    assert store.may_go_on("fast")


# Progress


def test_a_quorum_waits_for_others_as_long_as_it_may_and_for_no_dead() -> None:
    store = store_of(Quorum(2, grace=1.0), Nesterov(), progress=True)
    for learner in "abcd":
        store.join(learner)
    push(store, "a", numbers(1), now=10.0)
    assert store.due(99.0) == []
    assert push(store, "a", numbers(9), sequence=1) == Taken.REPEATED, "the same steps, and perhaps more"
    push(store, "b", numbers(2), now=20.0)
    assert (store.due(20.9), store.due(21.0)) == ([], [0])
    push(store, "c", numbers(3), now=20.5)
    assert store.due(20.9) == []
    store.leave("d")
    assert store.due(20.9) == [0], "all that live have pushed"
    merged = store.merge(0, 21.0)["pushes"]
    assert [(each["learner"], each["sequence"]) for each in merged] == [("a", 0), ("b", 0), ("c", 0)]
    assert push(store, "d", numbers(4), sequence=9, base=0) == Taken.LATE
    for learner in "abc":
        store.leave(learner)
    push(store, "d", numbers(4), sequence=10)
    assert store.due(0.0) == [0], "a quorum is no more than those that live"


def test_by_itself_a_quorum_waits_an_eighth_of_what_it_took() -> None:
    """So a learner that is a little slower than the others counts, whatever the steps take."""
    store = store_of(Quorum(2, "auto"), Nesterov(), progress=True, fragments=2)
    for learner in "abc":
        store.join(learner)
    assert store.soon() == NEVER
    last = None
    for begin, took in ((0.0, 8.0), (100.0, 80.0), (300.0, 0.8)):
        now = begin + took
        push(store, "a", numbers(1), now=begin + took / 2)
        assert store.soon() == NEVER
        push(store, "b", numbers(2), now=now)
        since = begin + took / 2 if last is None else last
        assert store.soon() == pytest.approx(now + (now - since) / 8)
        assert store.due(now) == []
        assert store.due(store.soon()) == [0]
        last = store.soon()
        store.merge(0, last)
    at_least = store_of(Quorum(2, "auto", 3.0), Nesterov(), progress=True)
    for learner in "abc":
        at_least.join(learner)
    push(at_least, "a", numbers(1), now=1.0)
    push(at_least, "b", numbers(2), now=8.0)
    assert at_least.soon() == 11.0


HAPPENS = ["push", "push", "push", "merge", "merge", "again", "stale", "restart", "leave"]


@given(
    st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 3)), min_size=40, max_size=80),
    st.integers(1, 3),
    st.sampled_from([mean, radial_directional]),
)
def test_whatever_happens_each_push_counts_once_and_the_log_tells_the_bits(
    happens: list[tuple[str, int]], quorum: int, merge: Callable[..., Tensor]
) -> None:
    """An oracle makes each version anew from the events and the pushes that they name."""
    wires: dict[str, Tensor] = {}
    sent: list[Push] = []
    counted: list[tuple[str, int]] = []
    store = store_of(Quorum(quorum), Nesterov(), merge, progress=True)
    saved, old_boots = store.state_dict(0), list[str]()
    oracle = Parameter(numbers(100))
    steps = Nesterov()([oracle])
    for number, (what, who) in enumerate(happens):
        before = store.versions[0]
        if what == "restart":
            old_boots.append(store.boot)
            store = store_of(Quorum(quorum), Nesterov(), merge, progress=True)
            store.load_state_dict(0, saved)
        elif what == "leave":
            store.leave(f"{who}")
        elif what == "merge" and store.due(0.0):
            event = store.merge(0, 0.0)
            digests = [each["digest"] for each in event["pushes"]]
            oracle.grad = -merge([wires[digest] for digest in digests], [each["weight"] for each in event["pushes"]])
            steps.step()
            assert event["after"] == hashlib.sha256(oracle.detach().numpy().tobytes()).hexdigest()
            counted += [(each["learner"], each["sequence"]) for each in event["pushes"]]
            assert all(each["base"] == before == event["version"] - 1 for each in event["pushes"])
            saved = {**store.state_dict(0), "values": values_of(store).clone()}
            saved["optimizer"] = Nesterov()([oracle]).state_dict() | {"state": _copied(saved["optimizer"]["state"])}
        elif what == "again" and sent:
            taken = store.push(0, sent[who % len(sent)], 0.0)
            assert taken != Taken.TAKEN or sent[who % len(sent)].boot in old_boots, (
                "what was under way is lost with a life"
            )
        elif what in ("push", "stale"):
            base = before - 1 if what == "stale" and before else before
            made = Push(f"{who}", number, store.boot, base, 1.0 + who, numbers(number))
            wires[hashlib.sha256(made.values.numpy().tobytes()).hexdigest()] = made.values
            taken = store.push(0, made, 0.0)
            sent.append(made)
            assert taken in ((Taken.LATE,) if base < before else (Taken.TAKEN, Taken.REPEATED))
        assert store.versions[0] in (before, before + (what == "merge"))
    assert len(counted) == len(set(counted))


def _copied(state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: {name: value.clone() for name, value in of.items()} for key, of in state.items()}


def test_what_was_computed_from_versions_that_a_restart_has_lost_is_unknown() -> None:
    store = store_of(Quorum(1), Nesterov(), progress=True)
    push(store, "a", numbers(1), sequence=1)
    store.merge(0, 0.0)
    saved, lost = store.state_dict(0), store.boot
    push(store, "a", numbers(2), sequence=2)
    store.merge(0, 0.0)  # never saved
    again = store_of(Quorum(1), Nesterov(), progress=True)
    again.load_state_dict(0, saved)
    push(again, "b", numbers(3), sequence=3)
    again.merge(0, 0.0)  # another version 2
    assert push(again, "a", numbers(4), sequence=4, boot=lost, base=2) == Taken.UNKNOWN
    assert push(again, "a", numbers(4), sequence=4, boot=lost, base=1) == Taken.LATE
    assert push(again, "a", numbers(4), sequence=4, boot="never", base=0) == Taken.UNKNOWN
    assert push(again, "a", numbers(4), sequence=1) == Taken.REPEATED
    assert push(again, "a", numbers(4), sequence=4) == Taken.TAKEN


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"values": torch.zeros(3)}, r"is \(7,\) torch.float32, and a pushed \(3,\).*the same model"),
        ({"values": torch.zeros(7, dtype=torch.float64)}, "float64"),
        *(
            ({"values": torch.zeros(7), "weight": weight}, "no number > 0")
            for weight in (0.0, -1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_what_can_be_no_push_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        push(store_of(Sync(1)), "a", **wrong)


# Merges


@pytest.mark.parametrize("many", [1, 2, 4, 16])
def test_a_radial_merge_is_as_long_as_what_it_merges(many: int) -> None:
    pushes, weights = [numbers(seed, 10_000) * (1 + seed) for seed in range(many)], [1.0 + seed for seed in range(many)]
    merged, plain = radial_directional(pushes, weights), mean(pushes, weights)
    lengths = np.average([float(push.norm()) for push in pushes], weights=weights)
    assert float(merged.norm()) == pytest.approx(lengths, rel=1e-5)
    assert torch.allclose(
        plain, torch.from_numpy(np.average([push.numpy() for push in pushes], 0, weights)).float(), atol=1e-5
    )
    if many == 1:
        assert torch.allclose(merged, pushes[0], rtol=1e-5)


def test_directions_that_cancel_out_leave_no_noise() -> None:
    one = numbers(1, 1000)
    assert radial_directional([one, -one], [1.0, 1.0]).norm() < 1e-5 * one.norm()
    nearly = radial_directional([one, -one + 0.01 * numbers(2, 1000)], [1.0, 1.0])
    assert nearly.norm() < 0.1 * one.norm()
    nothing = torch.zeros(1000)
    assert torch.equal(radial_directional([nothing, nothing], [1.0, 2.0]), nothing)
    assert torch.allclose(radial_directional([nothing, one], [1.0, 1.0]), one / 2, rtol=1e-5)

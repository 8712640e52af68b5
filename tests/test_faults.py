"""The campaign of faults: some of it, and whether it would see what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts import lines_of

from benchmarks import faults
from benchmarks.faulted import STRATEGIES
from benchmarks.faults import Case

nightly = pytest.mark.nightly


def test_a_thousand_faults_are_of_all_kinds(tmp_path: Path) -> None:
    cases = [Case.draw(number, tmp_path) for number in range(1000)]
    assert cases[417] == Case.draw(417, tmp_path)
    for policy in ("raise", "shrink"):
        of_policy = [case for case in cases if case.plan.policy == policy]
        assert {case.plan.strategy for case in of_policy} == set(STRATEGIES)
        assert {case.plan.size for case in of_policy} == {2, 3, 4}
    drawn = {(case.plan.fault, case.plan.place) for case in cases}
    known = {(fault, place) for fault, (_, places) in faults.FAULTS.items() for place in places}
    assert known - drawn == {("kill all", "send")}
    assert drawn <= known
    assert {case.launcher for case in cases} == {"environment", "lightning", "spawn", "fork", "torchrun"}


@nightly
def test_faults_are_clean(tmp_path: Path) -> None:
    """`--faults 1000` takes an hour, so this is a few of it."""
    rows = lines_of("faults", tmp_path / "faults.jsonl", "--faults", "6", "--first", "1000")
    assert sum(row["faults"] for row in rows) == 6
    for row in rows:
        assert [row[kind] for kind in ("hung", "wrong", "torn", "orphans", "unnamed")] == [0] * 5


def _changed(start: Any, rank: int, which: Callable[[dict[str, Any]], bool], **facts: Any) -> Any:
    """With other facts in a rank's last note of a kind."""
    start = copy.copy(start)
    start.notes = copy.deepcopy(start.notes)
    next(note for note in reversed(start.notes[rank]) if which(note)).update(facts)
    return start


@nightly
def test_what_is_wrong_after_a_restart_is_seen(tmp_path: Path) -> None:
    """A kill in step 4, what the ranks noted, and what they noted when they went on; what they should have."""
    case = Case.draw(0, tmp_path)
    plan = replace(case.plan, strategy="ring", policy="raise", size=2, victims=(1,), fault="kill", place="backward")
    case = Case(replace(plan, step=4, start_method="popen", timeout=30.0), "environment")
    expected = faults.Judge(tmp_path).undisturbed("ring", 2)
    start = faults.Start(case.plan, "environment")
    resumed = faults.Start(replace(case.plan, attempt=1, fault="", victims=()), "environment")
    assert not start.hung
    assert not faults.unnamed(case, start)
    assert not faults.other_bits(start, expected)
    assert not faults.of_resumed(case, start.notes, resumed.notes, expected)

    def tampered(of: Any, what: str, **facts: Any) -> Any:
        return _changed(of, 0, lambda note: note["what"] == what, **facts)

    assert faults.other_bits(tampered(start, "step", digest="0"), expected)
    assert faults.unnamed(case, tampered(start, "error", rank=0))
    assert faults.unnamed(case, tampered(start, "error", kind="RuntimeError"))
    for what, harm in (("begin", {"digest": "0"}), ("begin", {"step": 0}), ("step", {"digest": "0"})):
        assert faults.of_resumed(case, start.notes, tampered(resumed, what, **harm).notes, expected), (what, harm)


@nightly
@pytest.mark.parametrize("strategy", faults._TOLERANCES)
def test_wrong_means_and_lost_samples_are_seen(tmp_path: Path, strategy: str) -> None:
    plan = replace(Case.draw(0, tmp_path).plan, strategy=strategy, policy="shrink", size=3, fault="kill", victims=(0,))
    start = faults.Start(replace(plan, place="send", step=4, delay=1, start_method="popen"), "environment")
    assert not faults.wrong_means(start, strategy, [1, 2], 3)
    assert not faults.lost_samples(start, 3)
    [batch] = [note for note in start.of("batch")[1] if note["step"] == 6]

    def drawn(samples: list[int]) -> Any:
        return _changed(start, 1, lambda note: note["what"] == "batch" and note["step"] == 6, samples=samples)

    others = drawn(batch["samples"][1:] + batch["samples"][:1])
    assert not faults.wrong_means(others, strategy, [1, 2], 3), "the order changes no mean"
    doubled = drawn(batch["samples"][:3] + batch["samples"][:1])
    assert faults.wrong_means(doubled, strategy, [1, 2], 3)
    assert faults.lost_samples(doubled, 3)

"""The campaign of faults: one of each launcher and kind, and whether it would see what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts import lines_of

from benchmarks import faults
from benchmarks.faulted import Plan
from benchmarks.ranks import noted

slow, nightly = pytest.mark.slow, pytest.mark.nightly


def test_a_thousand_faults_are_of_all_kinds(tmp_path: Path) -> None:
    plans = [faults.draw(number, tmp_path) for number in range(1000)]
    assert plans[417] == faults.draw(417, tmp_path)
    for policy in ("raise", "shrink"):
        of_policy = [plan for plan in plans if plan.policy == policy]
        assert {plan.strategy for plan in of_policy} == set(faults.DRAWN)
        assert {plan.size for plan in of_policy} == {2, 3, 4}
    drawn = {(plan.fault, plan.place) for plan in plans}
    assert drawn <= {(fault, place) for fault, (_, places) in faults.FAULTS.items() for place in places}
    assert {plan.launcher for plan in plans} == {"environment", "lightning", "spawn", "fork", "torchrun"}


@slow
@pytest.mark.parametrize(
    ("fault", "launcher"), [("kill", "torchrun"), ("kill", "lightning"), ("terminate", "spawn"), ("raise", "fork")]
)
def test_a_fault_under_each_launcher_is_clean(tmp_path: Path, fault: str, launcher: Any) -> None:
    """All survivors end, name who was lost, leave no process, and a new start ends as an undisturbed run."""
    plan = Plan(str(tmp_path / "1"), "ring_int8, feedback", size=2, fault=fault, place="backward", step=4, victims=(1,))
    assert not faults.Judge(tmp_path)(replace(plan, launcher=launcher))


@nightly
def test_faults_are_clean(tmp_path: Path) -> None:
    """`--faults 1000` takes an hour, so this is a few of it."""
    rows = lines_of("faults", tmp_path / "faults.jsonl", "--faults", "6", "--first", "1000")
    assert sum(row["faults"] for row in rows) == 6
    for row in rows:
        assert [row[kind] for kind in ("hung", "wrong", "torn", "orphans", "unnamed")] == [0] * 5


@slow
@pytest.mark.parametrize("strategy", faults.TOLERANCES)
def test_wrong_means_and_lost_samples_are_seen(tmp_path: Path, strategy: str) -> None:
    strike = {"fault": "kill", "place": "send", "step": 4, "delay": 1, "victims": (0,)}
    plan = Plan(str(tmp_path), strategy, "shrink", **strike)  # type: ignore[arg-type]
    assert not [*faults.Start(plan).found, *faults.missed(plan)]
    assert not faults.of_survivors(plan)
    file = plan.notes(1)
    notes = noted(file)
    [batch] = [note for note in notes if note["what"] == "batch" and note["step"] == 6]

    def drawn(samples: list[int]) -> None:
        lines = [{**note, "samples": samples} if note is batch else note for note in notes]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    drawn(batch["samples"][1:] + batch["samples"][:1])
    assert not faults.wrong_means(plan, [1, 2]), "the order changes no mean"
    drawn(batch["samples"][:3] + batch["samples"][:1])
    assert faults.wrong_means(plan, [1, 2])
    assert faults.lost_samples(plan)

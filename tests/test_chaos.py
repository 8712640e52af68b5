"""The benchmark that kills learners: its schedule, and what it finds in the log of a syncer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.machines import SYNCER, drawn
from benchmarks.oracle import went_back


@pytest.mark.parametrize("seed", range(5))
def test_machines_go_and_come_in_turns_and_are_away_a_fifth_of_the_time(seed: int) -> None:
    options = argparse.Namespace(learners=8, seconds=2000.0, period=20.0)
    changes = drawn(seed, options)
    assert changes == drawn(seed, options) != drawn(seed + 1, options)
    away = 0.0
    for rank in range(8):
        own = [(when, comes) for when, each, comes in changes if each == rank]
        assert [comes for _, comes in own] == [bool(place % 2) for place in range(len(own))]
        times = [when for when, _ in own] + [options.seconds] * (len(own) % 2)
        away += sum(came - went for went, came in zip(times[::2], times[1::2], strict=True))
    assert 0.18 < away / 8 / options.seconds < 0.22
    assert [comes for _, rank, comes in changes if rank == SYNCER] == [False, True] * 2


@pytest.mark.parametrize(
    ("restarted_at", "used", "lost"),
    [(2, None, 0), (1, None, 0), (1, 2, 1), (0, None, 1), (0, 2, 2)],
    ids=["none", "in its save", "in its save, but seen", "saved", "both seen"],
)
def test_a_merge_that_is_undone_is_found(tmp_path: Path, restarted_at: int, used: int | None, lost: int) -> None:
    lines = [{"boot": "a", "versions": [0]}]
    lines += [{"fragment": 0, "version": version, "boot": "a"} for version in (1, 2)]
    lines += [{"boot": "b", "versions": [restarted_at]}]
    lines += [{"fragment": 0, "version": version, "boot": "b"} for version in range(restarted_at + 1, 4)]
    lines += [{"boot": "c", "versions": [3]}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert went_back(tmp_path, set() if used is None else {(0, "a", used)}) == lost

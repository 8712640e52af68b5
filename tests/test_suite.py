"""Rows, the harness that makes them, and the campaign; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from scripts import ROOT

from benchmarks import campaign, harness, lab, rows
from benchmarks.rows import Row, append, read

RESULTS = ROOT / "benchmarks" / "results"


# Rows


def test_published_rows_can_be_read_and_are_of_the_campaign():
    count = 0
    for path in sorted(RESULTS.rglob("*.jsonl")):
        if path.name == "accuracy.jsonl":
            continue
        found = read(path)
        assert found, path
        for row, line in zip(found, path.read_text().splitlines(), strict=True):
            known = asdict(row)
            assert all(known[name] == value for name, value in json.loads(line).items()), path
        count += len(found) * (path.parent.name != "gpu")  # those are no step of the campaign
    assert len(list(rows.campaign(RESULTS))) == count > 1000


def test_what_is_written_comes_back_and_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    made = {"device": "cpu", "torch": "2.13", "commit": "abc"}
    written = Row(**made, benchmark="training", case="ring", seconds=[1.0, 2.0], seconds_median=1.5, hosts=4, ratio=0.5)
    append([written], path)
    append([Row(**made, benchmark="codecs", codec="Sign()")], path)
    assert repr(read(path)[0]) == repr(written)  # NaN is not equal to itself
    assert [row.benchmark for row in read(path)] == ["training", "codecs"]
    assert "predicted_seconds" not in path.read_text()
    path.write_text('{"benchmark": "training", "device": "cpu", "torch": "2", "commit": "abc", "secs": 1}\n')
    with pytest.raises(TypeError, match="secs"):
        read(path)


# The harness


def _interleaved():
    """Two cases on a clock that each run sets forward, on rank 1 twice as far."""
    dist.init_process_group("gloo")
    clock, share = SimpleNamespace(now=0.0, sent=0, waited=0.0), 1 + dist.get_rank()
    order = []

    def case(name, seconds, nbytes, steps):
        def run():
            order.append(name)
            clock.now += seconds * share
            clock.waited += seconds / share
            clock.sent += nbytes * share

        def result():
            return [torch.full((3,), float(share if name == "b" else 1))]

        counts = {"bytes_sent": lambda: clock.sent, "waited": lambda: clock.waited}
        return harness.Case(name, run, result, **counts, steps=steps)

    cases = [case("a", 1.0, 100, 1), case("b", 8.0, 600, 2)]
    before, harness.time = harness.time, SimpleNamespace(perf_counter=lambda: clock.now)
    try:
        harness.interleave(cases, rounds=3, warmup=1)
    finally:
        harness.time = before
    same = [harness.identical_on_all_ranks(case.result()) for case in cases]
    return [(case.seconds, case.waits, case.sent) for case in cases], order, same


def test_the_slowest_rank_of_each_counted_round_is_what_a_step_takes(ranks):
    for found, order, same in ranks(2, _interleaved):
        assert found[0] == ([2.0] * 3, [1.0] * 3, 200)
        assert found[1] == ([8.0] * 3, [4.0] * 3, 600), "for one of its two steps"
        assert "".join(order) == "abbaabba"
        assert same == [True, False]


def test_a_row_is_what_its_case_gave(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(harness.COMMIT, "abc-dirty")
    monkeypatch.setenv("RINGSTRATEGY_BENCH_THROUGHPUT", "12e6")

    def case(name, seconds, **gave):
        made = harness.Case(name, run=print, result=list)
        made.__dict__.update(seconds=seconds, **gave)
        return made

    gave = {"sent": 100, "at_interface": 110, "waits": [0.1, 0.3, 0.2], "error": 0.5, "identical": False, "steps": 7}
    cases = [case("ddp", [4.0, 6.0, 5.0]), case("ring", [1.0, 3.0, 2.0], **gave, limit_seconds=0.5)]
    options = argparse.Namespace(hosts=4, processes=2, rate="100mbit", out=tmp_path / "rows.jsonl")
    harness.report("training", "MLP", cases, options, ["a note"], lambda case: {"cpu_seconds": {case.name: 1.0}})
    ddp, ring = read(options.out)
    expected = {"benchmark": "training", "case": "ring", "baseline": "ddp", "size": "MLP", "rate": "100mbit"}
    expected |= {"hosts": 4, "processes": 2, "throughput": 12e6, "seconds": [1.0, 3.0, 2.0], "seconds_median": 2.0}
    expected |= {"ratio": 2.5, "bytes_sent": 100, "bytes_at_interface": 110, "waited_seconds": 0.2, "steps": 7}
    expected |= {"error": 0.5, "ranks_identical": False, "limit_seconds": 0.5, "cpu_seconds": {"ring": 1.0}}
    expected |= {"device": "cpu", "torch": torch.__version__, "commit": "abc-dirty", "cores": os.cpu_count()}
    assert {name: value for name, value in asdict(ring).items() if name in expected} == expected
    assert (ddp.ratio, ddp.ranks_identical, ddp.bytes_sent, ddp.waited_seconds) == (1.0, True, None, None)
    printed = capsys.readouterr().out
    assert re.search(r"│ ring +│ 2.000 s", printed)
    assert "a note" in printed


def test_the_commit_says_whether_what_measures_was_changed(tmp_path, monkeypatch):
    def git(*command):
        made = ["git", "-c", "user.name=me", "-c", "user.email=me@here", *command]
        return subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.delenv(harness.COMMIT, raising=False)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "benchmarks" / "harness.py"))
    files = [tmp_path / name for name in ("docs/a.md", "benchmarks/results/a", "code/a.py")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("first")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    found = []
    for file in files:
        file.write_text("second")
        found.append(harness.commit().removeprefix(git("rev-parse", "HEAD")))
    assert found == ["", "", "-dirty"]


def test_a_rank_that_failed_is_named(monkeypatch):
    monkeypatch.setenv(harness.COMMIT, "abc")
    started = []

    def popen(rank, command, told):
        started.append((rank, command[1:], told[harness.COMMIT]))

    made = SimpleNamespace(bits_per_second=None, hosts=2, world_size=2, popen=popen, wait=lambda: [0, 3])
    with pytest.raises(SystemExit, match=r"^rank 1 ended with 3$"):
        harness._in_lab(contextlib.nullcontext(made), ["training", "--steps=2"])
    assert started == [(rank, ["-m", "benchmarks", "training", "--steps=2"], "abc") for rank in (0, 1)]


def link(part: float) -> lab.Link:
    return lab.Link(0, 1, "100mbit", part * 1e8 / 8, 0.001)


def test_only_a_throttle_that_holds_is_taken_and_a_busy_second_forgiven():
    for part in (0.5, 0.89, 1.01):
        with pytest.raises(lab.LabError, match=r"100mbit.*90 to 100 %.*another network.*--rate none"):
            harness.check_throttle(lambda part=part: link(part))
    measured = iter([link(0.5), link(0.956), link(0.91)])
    assert harness.check_throttle(lambda: next(measured)) == link(0.956).bytes_per_second


def test_cases_are_chosen_by_part_or_exactly():
    def chosen(cases: str | None) -> list[str]:
        return harness.chosen(("ring", "ring_fp16", "ring_int8"), cases)

    assert chosen("=ring,int8") == ["ring", "ring_int8"]
    assert chosen(None) == ["ring", "ring_fp16", "ring_int8"]
    assert chosen("none") == []
    with pytest.raises(ValueError, match="'=ring_int' is in no case's name; they are ring, ring_fp16, ring_int8"):
        chosen("ring,=ring_int")


# The campaign


MAIN = """
import os, pathlib, sys
_, _, argument, _, out = sys.argv
with (pathlib.Path(__file__).parent / "calls").open("a") as calls:
    calls.write(argument + "\\n")
if argument != "silent":
    pathlib.Path(out).write_text(argument + "\\n" + os.environ["RINGSTRATEGY_BENCH_COMMIT"] * (argument == "commit"))
sys.exit(argument == "bad")
"""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run a campaign of one benchmark; returns what it was called with."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__main__.py").write_text(MAIN)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(campaign, "_HERE", package)
    monkeypatch.setattr(lab, "missing", lambda: None)

    def measure(steps: dict[str, str], *arguments: str, fails: str = "") -> list[str]:
        (package / "calls").write_text("")
        made = [campaign.Step(key, f"benchmark {argument}", 1) for key, argument in steps.items()]
        monkeypatch.setattr(campaign, "steps", lambda *_: made)
        with pytest.raises(SystemExit, match=fails) if fails else contextlib.nullcontext():
            campaign.main(["--out", str(tmp_path / "results"), *arguments])
        return (package / "calls").read_text().split()

    return measure


def test_what_is_done_is_not_done_again(measured, tmp_path, capsys):
    both = {"a/one": "1", "b/two": "2"}
    first, second = (tmp_path / "results" / f"{key}.jsonl" for key in both)
    assert measured(both, "--list") == []
    assert "2 of 2 steps left" in capsys.readouterr().out
    assert measured(both) == ["1", "2"]
    assert measured(both) == []
    for how in ("bad", "silent"):
        assert measured(both | {"a/one": how}, fails=f"a/one .*benchmark {how}") == [how], "it stops the campaign"
        assert [path.name for path in first.parent.iterdir()] == ["one.jsonl"]
        assert first.read_text() == "1\n", "the old rows stay"
    assert measured(both) == [], "and are still those of their command"
    assert measured(both | {"b/two": "other"}) == ["other"], "its command has changed"
    assert second.read_text() == "other\n", "the old rows are gone"
    first.unlink()
    assert measured(both | {"b/two": "other"}, "--only", "b/*") == []
    assert measured(both | {"b/two": "other"}) == ["1"]
    assert measured({"a/one": "1"}, "--short") == ["1"], "the short form measures anew"


def test_rows_are_of_the_commit_that_the_run_began_with(measured, tmp_path, monkeypatch):
    commits = iter(["before", "after"])
    monkeypatch.setattr(harness, "commit", lambda: next(commits))
    measured({"a/one": "commit"})
    assert rows.steps(tmp_path / "results")["a/one"]["commit"] == "before"
    assert (tmp_path / "results" / "a" / "one.jsonl").read_text() == "commit\nbefore"


def test_without_a_lab_the_short_form_says_so_and_the_campaign_refuses(measured, monkeypatch, capsys):
    monkeypatch.setattr(lab, "missing", lambda: "network namespaces need root")
    assert measured({"a/one": "1"}, "--short") == ["1"]
    assert measured({"a/one": "1"}, fails="2") == []
    printed = capsys.readouterr()
    assert re.search(r"need root.*loopback.*information only", printed.out, re.S)
    assert "the campaign needs the lab: network namespaces need root" in printed.err


def test_nobody_claims_a_limit_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSTRATEGY_BENCH_THROUGHPUT", raising=False)
    assert harness.throughput() is harness.wire_seconds(1e6) is None, "whatever --rate says"

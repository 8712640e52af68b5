"""Rows, the harness that makes them, and the campaign; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fakes import on_all_ranks
from scripts import ROOT

from benchmarks import campaign, collectives, harness, lab, rows
from benchmarks.rows import Row, append, read
from ringstrategy import Direct, Hierarchical, Identity, Ring
from ringstrategy.collectives.base import Summand
from ringstrategy.names import STRATEGIES

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
    files = {
        name: tmp_path / name for name in ("code.py", "docs/a.md", "benchmarks/results/a", "benchmarks/harness.py")
    }
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    head = git("rev-parse", "HEAD")
    for name, changed in (("docs/a.md", False), ("benchmarks/results/a", False), ("code.py", True)):
        files[name].write_text("second")
        assert harness.commit() == head + "-dirty" * changed, name


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


def test_what_must_cross_a_link_is_what_crosses_it():
    layouts = [(2, 1), (2, 2), (4, 2), (3, 3)]
    for (hosts, processes), collective in itertools.product(layouts, [Ring(), Direct(), Hierarchical()]):
        names = [f"host{rank // processes}" for rank in range(hosts * processes)]
        values = torch.ones(hosts * processes * processes * 32)

        def crossing(peers, names=names, values=values, collective=collective):
            collective.sum_(Summand(values.clone(), Identity()), peers)
            return sum(count for other, count in peers.sent_to.items() if names[other] != names[peers.rank])

        sent = on_all_ranks(len(names), crossing, names)
        by_host = [sum(sent[first : first + processes]) for first in range(0, len(names), processes)]
        must = collectives.link_share(collective, hosts, processes) * values.nbytes
        assert max(by_host) == must, (collective, hosts, processes)
    assert collectives.link_share(Ring(), 1, 4) == collectives.link_share(Direct(), 1, 4) == 0


# The campaign


CAMPAIGN, SHORT, LOOPBACK = campaign.steps("campaign"), campaign.steps("short"), campaign.steps("short", "loopback")


def test_the_large_model_is_trained_with_every_name():
    parts = {step.key: shlex.split(step.arguments)[-1] for step in CAMPAIGN if "/mlp-4-1gbit-" in step.key}
    assert len(parts) == 5
    prefix = ("long-race/steps-", "long-race/seconds-")
    cases = [*parts.values(), *[shlex.split(step.arguments)[-1] for step in CAMPAIGN if step.key.startswith(prefix)]]
    assert {name for name in STRATEGIES if any(harness.wanted(name, part) for part in cases)} == set(STRATEGIES)
    near = parts["training/mlp-4-1gbit-near"]
    assert all(harness.wanted(name, near) for name in ("ring", "ring_int8", "ring_auto")), "one run, to be compared"


def test_the_campaign_knows_what_is_done(tmp_path):
    known = rows.steps(RESULTS)
    assert {step.key for step in CAMPAIGN if step.made(RESULTS) is not None} <= set(known)
    assert all((RESULTS / f"{key}.jsonl").exists() for key in known)
    (tmp_path / "one.jsonl").touch()
    (tmp_path / rows.CAMPAIGN).write_text('{"one": {"command": "python -m benchmarks one"}}')
    assert campaign.Step("one", "one", 1).made(tmp_path) is not None
    assert campaign.Step("one", "one --rounds 9", 1).made(tmp_path) is None


def test_the_short_form_is_short_and_needs_no_root():
    for plan in (CAMPAIGN, SHORT, LOOPBACK):
        assert len({step.key for step in plan}) == len({step.command for step in plan}) == len(plan)
    assert sum(step.minutes for step in SHORT) < 10
    assert {step.key.split("/")[0] for step in SHORT} == {step.key.split("/")[0] for step in CAMPAIGN}
    assert "--rate 100mbit" in SHORT[0].arguments
    for step in LOOPBACK:
        assert "bit" not in step.arguments
        assert "loopback" in step.arguments or step.arguments.startswith(
            ("codecs", "overhead", "soak", "fuzz", "faults")
        )


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
    """Run a campaign of one benchmark that says what it was called with; what it was called with."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__main__.py").write_text(MAIN)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(campaign, "_HERE", package)
    monkeypatch.setattr(lab, "missing", lambda: None)
    results = tmp_path / "results"

    def measure(steps: dict[str, str], *arguments: str) -> list[str]:
        calls = package / "calls"
        calls.write_text("")
        made = [campaign.Step(key, f"benchmark {argument}", 1) for key, argument in steps.items()]
        monkeypatch.setattr(campaign, "steps", lambda *_: made)
        try:
            campaign.main(["--out", str(results), *arguments])
        finally:
            measure.calls = calls.read_text().split()  # type: ignore[attr-defined]
        return measure.calls  # type: ignore[attr-defined]

    measure.results = results  # type: ignore[attr-defined]
    return measure


def test_what_is_done_is_not_done_again(measured, capsys):
    assert measured({"a/one": "1", "b/two": "2"}, "--list") == []
    assert "2 of 2 steps left" in capsys.readouterr().out
    assert measured({"a/one": "1", "b/two": "2"}) == ["1", "2"]
    assert measured({"a/one": "1", "b/two": "2"}) == []
    assert measured({"a/one": "1", "b/two": "other"}) == ["other"], "its command has changed"
    assert (measured.results / "b" / "two.jsonl").read_text() == "other\n", "the old rows are gone"
    (measured.results / "a" / "one.jsonl").unlink()
    assert measured({"a/one": "1", "b/two": "other"}, "--only", "b/*") == []
    assert measured({"a/one": "1", "b/two": "other"}) == ["1"]
    assert measured({"a/one": "1"}, "--short") == ["1"], "the short form measures anew"
    known = json.loads((measured.results / "campaign.json").read_text())
    assert {key: made["command"] for key, made in known.items()} == {
        "a/one": "python -m benchmarks benchmark 1",
        "b/two": "python -m benchmarks benchmark other",
    }
    assert all({"commit", "date", "seconds", "processor"} <= made.keys() for made in known.values())


def test_rows_are_of_the_commit_that_the_run_began_with(measured, monkeypatch):
    commits = iter(["before", "after"])
    monkeypatch.setattr(harness, "commit", lambda: next(commits))
    measured({"a/one": "commit"})
    assert rows.steps(measured.results)["a/one"]["commit"] == "before"
    assert (measured.results / "a" / "one.jsonl").read_text() == "commit\nbefore"


def test_a_step_that_fails_stops_the_campaign(measured):
    measured({"a/one": "1"})
    for how in ("bad", "silent"):
        with pytest.raises(SystemExit, match=f"a/one .*benchmark {how}"):
            measured({"a/one": how, "b/two": "2"})
        assert measured.calls == [how]
        assert [path.name for path in (measured.results / "a").iterdir()] == ["one.jsonl"]
        assert (measured.results / "a" / "one.jsonl").read_text() == "1\n", "the old rows stay"
    assert measured({"a/one": "1", "b/two": "2"}) == ["2"], "and are still those of their command"


def test_without_a_lab_the_short_form_says_so_and_the_campaign_refuses(measured, monkeypatch, capsys):
    monkeypatch.setattr(lab, "missing", lambda: "network namespaces need root")
    measured({"a/one": "1"}, "--short")
    assert re.search(r"need root.*loopback.*information only", capsys.readouterr().out, re.S)
    with pytest.raises(SystemExit):
        measured({"a/one": "1"})
    assert "the campaign needs the lab: network namespaces need root" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measured({"a/one": "1"}, "--only", "c*")
    assert "a/one" in capsys.readouterr().err

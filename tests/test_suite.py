"""The harness and the campaign; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex

import pytest
import torch
from fakes import on_all_ranks
from scripts import ROOT, lines_of, on_ranks

from benchmarks import campaign, collectives, harness, lab, rows
from ringstrategy import Direct, Hierarchical, Identity, Ring
from ringstrategy.collectives.base import Summand
from ringstrategy.names import STRATEGIES

RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.timeout(120)
needs_namespaces = pytest.mark.skipif(lab.missing() is not None, reason=f"no network namespaces: {lab.missing()}")


# The harness: several ranks a host, several sizes, a throttle that holds


@pytest.mark.parametrize(("hosts", "processes"), [(2, 1), (2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("collective", [Ring(), Direct(), Hierarchical()], ids=repr)
def test_what_must_cross_a_link_is_what_crosses_it(collective, hosts, processes):
    names = [f"host{rank // processes}" for rank in range(hosts * processes)]
    values = torch.ones(hosts * processes * processes * 32)

    def crossing(peers):
        collective.sum_(Summand(values.clone(), Identity()), peers)
        return sum(count for other, count in peers.sent_to.items() if names[other] != names[peers.rank])

    sent = on_all_ranks(len(names), crossing, names)
    by_host = [sum(sent[first : first + processes]) for first in range(0, len(names), processes)]
    assert max(by_host) == collectives.link_share(collective, hosts, processes) * values.nbytes


def test_one_host_has_no_link():
    assert collectives.link_share(Ring(), 1, 4) == collectives.link_share(Direct(), 1, 4) == 0


@pytest.mark.slow
def test_sizes_and_layouts_in_one_run(ranks, tmp_path):
    cases = "=ring identity,=direct int8,=hierarchical int8"
    arguments = ["--mb", "0.015625,1", "--rounds", "2", "--cases", cases]
    two_a_host = {"LOCAL_WORLD_SIZE": "2"}
    rows, _ = on_ranks(ranks, 4, "collectives", tmp_path / "rows.jsonl", *arguments, environment=two_a_host)
    names = ["gloo fp32", "ring identity", "direct int8", "hierarchical int8"]
    assert [(row["size"], row["case"]) for row in rows] == [
        (f"{size} MB of fp32", name) for size in ("0.015625", "1") for name in names
    ]
    for row in rows:
        assert (row["hosts"], row["processes"], len(row["seconds"])) == (2, 2, 2)
        assert row["ranks_identical"] is True
        assert 0 < row["error"] < (0.05 if "int8" in row["case"] else 1e-6), "each run sums fresh values"
    small, large = (row["bytes_sent"] for row in rows if row["case"] == "ring identity")
    assert small == 2**14 * 3 // 2, "however often a run repeats it"
    assert large == 2**20 * 3 // 2


@pytest.mark.slow
@needs_namespaces
def test_a_host_link_carries_what_the_limit_says(tmp_path):
    cases = "=ring identity,=direct identity,=hierarchical identity"
    arguments = ["--hosts", "2", "--processes", "2", "--rate", "1gbit", "--mb", "4", "--rounds", "2"]
    rows = lines_of("collectives", tmp_path / "rows.jsonl", *arguments, "--cases", cases)
    carried = {row["case"]: row["bytes_at_interface"] / 2**22 for row in rows}
    assert carried["ring identity"] == pytest.approx(1.5, rel=0.05)
    assert carried["direct identity"] == pytest.approx(2, rel=0.05)
    assert carried["hierarchical identity"] == pytest.approx(1, rel=0.05)
    limits = {row["case"]: row["limit_seconds"] * row["throughput"] / 2**22 for row in rows}
    assert limits == pytest.approx(
        {"gloo fp32": 1, "ring identity": 1.5, "direct identity": 2, "hierarchical identity": 1}
    )


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


@pytest.mark.slow
def test_growth_on_loopback(tmp_path):
    arguments = ["--rate", "loopback", "--hosts", "2,3,4", "--mb", "0.125", "--rounds", "1"]
    rows = lines_of("collectives", tmp_path / "rows.jsonl", "--growth", *arguments)
    assert [row["hosts"] for row in rows] == [size for size in (2, 3, 4) for _ in range(5)]
    for row in rows:
        assert row["benchmark"] == "scaling"
        assert row["ranks_identical"] is True
        assert 0 < row["error"] < (0.05 if "int8" in row["case"] else 1e-6)
    mixings = [row["bytes_sent"] for row in rows if row["case"] == "gossip, one mixing"]
    nbytes = 2**17
    assert mixings == [nbytes, 2 * nbytes, 2 * nbytes], "one neighbour, then two"


# The campaign


CAMPAIGN, SHORT, LOOPBACK = campaign.steps("campaign"), campaign.steps("short"), campaign.steps("short", "loopback")


def test_every_step_is_another():
    for plan in (CAMPAIGN, SHORT, LOOPBACK):
        assert len({step.key for step in plan}) == len(plan)
        assert len({step.command for step in plan}) == len(plan)


def test_steps_use_options_that_their_benchmarks_have(monkeypatch):
    def options_of(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
        raise Parsed(parse(parser, [*given, "--out", "rows.jsonl"]))

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", options_of)
    for step in [*CAMPAIGN, *SHORT, *LOOPBACK]:
        name, *arguments = shlex.split(step.arguments)
        module = importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(Parsed):
            module.main(arguments)


def test_the_large_model_is_trained_with_every_name():
    parts = {step.key: shlex.split(step.arguments)[-1] for step in CAMPAIGN if "/mlp-4-1gbit-" in step.key}
    assert len(parts) == 5
    prefix = ("long-race/steps-", "long-race/seconds-")
    cases = [*parts.values(), *[shlex.split(step.arguments)[-1] for step in CAMPAIGN if step.key.startswith(prefix)]]
    assert {name for name in STRATEGIES if any(harness.wanted(name, part) for part in cases)} == set(STRATEGIES)
    near = parts["training/mlp-4-1gbit-near"]
    assert all(harness.wanted(name, near) for name in ("ring", "ring_int8", "ring_auto")), "one run, to be compared"


def test_records_of_when_benchmarks_were_scripts_are_understood(tmp_path):
    known = rows.steps(RESULTS)
    assert any(made["command"].startswith("python benchmarks/training.py ") for made in known.values())
    done = [step for step in CAMPAIGN if step.made(RESULTS) is not None]
    moved = (step.key for step in CAMPAIGN if step.key.startswith(("scaling/", "prediction/")))
    again = {key for key in moved if known[key]["command"].startswith("python benchmarks/")}
    assert {step.key for step in done} == set(known) - again, "these are modes of other benchmarks now"
    (tmp_path / "one.jsonl").touch()
    (tmp_path / rows.CAMPAIGN).write_text('{"one": {"command": "python benchmarks/one.py"}}')
    assert campaign.Step("one", "one", 1).made(tmp_path) is not None
    assert campaign.Step("one", "one --rounds 9", 1).made(tmp_path) is None


def test_the_short_form_is_short_and_needs_no_root():
    assert sum(step.minutes for step in SHORT) < 10
    assert {step.key.split("/")[0] for step in SHORT} == {step.key.split("/")[0] for step in CAMPAIGN}
    assert "--rate 100mbit" in SHORT[0].arguments
    for step in LOOPBACK:
        assert "bit" not in step.arguments
        assert "loopback" in step.arguments or step.arguments.startswith(
            ("codecs", "overhead", "restart", "shrink", "soak", "fuzz", "faults")
        )


MAIN = """
import pathlib, sys
_, _, argument, _, out = sys.argv
with (pathlib.Path(__file__).parent / "calls").open("a") as calls:
    calls.write(argument + "\\n")
if argument != "silent":
    pathlib.Path(out).write_text(argument + "\\n")
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
    measured({"a/one": "1"})
    assert rows.steps(measured.results)["a/one"]["commit"] == "before"
    assert campaign.code_changed(f"{'0' * 40}"), "nobody knows that commit"
    assert campaign.code_changed("HEAD-dirty"), "nobody knows what that was"


@pytest.mark.parametrize("how", ["bad", "silent"])
def test_a_step_that_fails_stops_the_campaign(measured, how):
    measured({"a/one": "1"})
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


def test_an_unknown_pattern_is_refused(measured, capsys):
    with pytest.raises(SystemExit):
        measured({"a/one": "1"}, "--only", "c*")
    assert "a/one" in capsys.readouterr().err

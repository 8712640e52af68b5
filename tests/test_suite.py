"""Rows, the harness that makes them, the campaign, and what is measured; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import scripts
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from scripts import ROOT, lines_of

from benchmarks import campaign, fair_race, harness, lab, rows
from benchmarks.contenders import OuterStepDDP, PostLocalSGD, sgd
from benchmarks.long_race import lines, racers
from benchmarks.powersgd_peer import PowerSGDOnOneThread
from benchmarks.rows import Row, append, read
from benchmarks.time_to_accuracy import Curve
from ringstrategy import BlockInt, Nesterov

RESULTS = ROOT / "benchmarks" / "results"


# Rows


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


def test_the_published_page_is_what_the_rows_say() -> None:
    from benchmarks.report import frame, page

    text = page.text(frame.load(RESULTS), "benchmarks")
    assert (ROOT / "docs" / "benchmarks.md").read_text() == text, "python -m benchmarks report"


def test_a_race_that_was_missed_is_no_win_and_a_rare_average_no_strongest_peer() -> None:
    from benchmarks.report import frame

    rows = frame.load(RESULTS)
    missed = (rows.case == "ring_int8") & (rows.benchmark == "time to accuracy") & (rows.seed == 1)
    rows.loc[missed, "seconds_to_target"] = float("nan")
    races = frame.races(rows)
    assert list(races[(races.case == "ring_int8") & (races.seeds == 2)].ratio) == [0]
    run = rows[rows.run.isin(rows[(rows.benchmark == "training") & (rows.case == "post-local sgd every 4")].run)]
    assert (run[run.case.str.startswith("ddp")].groupby("run").beside_peer.max() > 0.8).all()


def test_the_long_race_is_what_the_rows_say() -> None:
    losses = [row for file in sorted(RESULTS.glob("long-race/losses-*.jsonl")) for row in read(file)]
    timed = [row for file in sorted(RESULTS.glob("long-race/seconds-*.jsonl")) for row in read(file)]
    table = "".join(f"{line}\n" for line in lines(racers(losses, timed, after=1088), 1088))
    assert harness.table_on((ROOT / "docs" / "local_sgd.md").read_text(), "long_race") == table


def test_the_fair_race_is_what_the_rows_say() -> None:
    raced = [row for file in sorted(RESULTS.glob("fair-race/*.jsonl")) for row in read(file)]
    table = "".join(f"{line}\n" for line in fair_race.lines(raced))
    assert harness.table_on((ROOT / "docs" / "local_sgd.md").read_text(), "fair_race") == table


def raced(
    case: str, losses: dict[int, float], optimizer: str = "adamw", rate: float = 1e-3, outer: str = ""
) -> list[Row]:
    how = {"benchmark": "fair race", "device": "cpu", "torch": "2", "commit": "c", "size": "GPT", "most_steps": 64}
    chosen = {"case": case, "optimizer": optimizer, "learning_rate": rate, "outer": outer}
    return [Row(**how, **chosen, seed=seed, curve={"steps": [64], "losses": [loss]}) for seed, loss in losses.items()]


def test_the_fair_race_takes_each_at_the_best_of_its_finalists(capsys, tmp_path):
    told = [
        *raced("ddp", {0: 2.0, 1: 4.0, 2: 2.0}),
        *raced("ddp", {0: 3.0, 1: 0.1}, rate=2e-3),
        *raced("ddp", {0: 1.0}, "muon"),
        *raced("late", {0: 2.1}),
        *raced("diloco", {0: 2.2, 1: 4.0, 2: 2.2}, outer="0.4/0.8"),
        *raced("diloco", {0: 2.1, 1: 5.0, 2: 2.2}, outer="0.9/0.8"),
        *raced("diloco", {1: None}, "muon", outer="0.9/0.8"),
    ]
    append(told, tmp_path / "rows.jsonl")
    worse = "+6.7 % (+0.0 % to +10.0 %)"
    fair_race.main(["--read", str(tmp_path / "rows.jsonl")])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `late` | AdamW | 0.001 | - | 1 | 1 | 2.100 | +5.0 % | +5.0 % |",
        "| `ddp` | AdamW | 0.001 | - | 2 | 3 | 2.667 | +0.0 % | +0.0 % |",
        f"| `diloco` | AdamW | 0.001 | 0.4/0.8 | 2 | 3 | 2.800 | {worse} | {worse} |",
        "| `ddp` | Muon | 0.001 | - | 1 | 1 | 1.000 | +0.0 % | -50.0 % |",
        "| `diloco` | Muon | 0.001 | 0.9/0.8 | 1 | 1 | diverged | - | - |",
    ]
    for wrong in (["--steps", "96"], ["--optimizers", "sgd", "--cases", "=ddp"], []):
        with pytest.raises(SystemExit):
            fair_race.main(["--rate", "loopback", *wrong])


@on_ranks(2)
def test_ddp_with_an_outer_step_is_diloco_of_one_worker() -> None:
    dist.init_process_group("gloo")

    def batch(rank, step):
        data = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(4, 3, generator=data), torch.randn(4, 1, generator=data)

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    training = OuterStepDDP(model(), [batch(dist.get_rank(), step) for step in range(32)], Nesterov(0.7, 0.6))
    training.run()
    alone = model()
    optimizer, slow = sgd(alone), [parameter.detach().clone() for parameter in alone.parameters()]
    momenta = [torch.zeros_like(each) for each in slow]
    for step in range(32):
        for inputs, targets in (batch(rank, step) for rank in range(2)):
            (torch.nn.functional.mse_loss(alone(inputs), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for own, shared, momentum in zip(alone.parameters(), slow, momenta, strict=True):
            if step % 16 == 15:
                gradient = shared - own.detach()
                momentum.mul_(0.6).add_(gradient)
                shared.sub_(0.7 * (gradient + 0.6 * momentum))
                own.data.copy_(shared)
    for found, expected in zip(training.result(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-6)


# The harness


@on_ranks(2)
def test_the_slowest_rank_of_each_counted_round_is_what_a_step_takes():
    """Of two cases on a clock that each run sets forward, on rank 1 twice as far."""
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
    assert (cases[0].seconds, cases[0].waits, cases[0].sent) == ([2.0] * 3, [1.0] * 3, 200)
    assert (cases[1].seconds, cases[1].waits, cases[1].sent) == ([8.0] * 3, [4.0] * 3, 600), "for one of its two steps"
    assert "".join(order) == "abbaabba"
    assert [harness.identical_on_all_ranks(case.result()) for case in cases] == [True, False]


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
        started.append((rank, command[1:], told[harness.COMMIT], told["NCCL_HOSTID"]))

    how = {"bits_per_second": None, "hosts": 2, "world_size": 2, "interface": "eth0"}
    made = SimpleNamespace(**how, popen=popen, wait=lambda: [0, 3])
    with pytest.raises(SystemExit, match=r"^rank 1 ended with 3$"):
        harness._in_lab(contextlib.nullcontext(made), ["training", "--steps=2"])
    ours = ["-m", "benchmarks", "training", "--steps=2"]
    assert started == [(rank, ours, "abc", f"host{rank}") for rank in (0, 1)]


def link(part: float) -> lab.Link:
    return lab.Link(0, 1, "100mbit", part * 1e8 / 8, 0.001)


def test_only_a_throttle_that_holds_is_taken_and_a_busy_second_forgiven():
    for part in (0.5, 0.89, 1.01):
        with pytest.raises(lab.LabError, match=r"100mbit.*90 to 100 %.*another network.*--rate none"):
            harness.check_throttle(lambda part=part: link(part))
    measured = iter([link(0.5), link(0.956), link(0.91)])
    assert harness.check_throttle(lambda: next(measured)) == link(0.956).bytes_per_second


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


@pytest.mark.slow
def test_the_campaign_uses_options_that_its_commands_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    def options_of(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
        raise Parsed(parse(parser, [*given, "--out", "rows.jsonl"]))

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", options_of)
    for step in [*campaign.steps("campaign"), *campaign.steps("short"), *campaign.steps("short", "loopback")]:
        name, *arguments = shlex.split(step.arguments)
        with pytest.raises(Parsed):
            importlib.import_module(f"benchmarks.{name}").main(arguments)


SHORT = {step.key: step.arguments for step in campaign.steps("short", lab.LOOPBACK)}


@pytest.mark.nightly
@pytest.mark.parametrize("key", [key for key in SHORT if not key.startswith(("faults", "fuzz", "soak"))])
def test_each_benchmark_runs_and_its_rows_say_what_they_must(key: str, tmp_path: Path) -> None:
    """Of faults, fuzz and soak see test_soak.py."""
    name, *arguments = shlex.split(SHORT[key])
    for row in lines_of(name, tmp_path / "rows.jsonl", *arguments):
        case, family = row["case"] or "", key.split("/")[0]
        if family == "chaos":
            assert row["hung"] == 0 < row["chaos"]["steps"], row
            assert case.startswith("ddp") or row["chaos"]["went back"] == 0 < row["chaos"]["merges"], row
        elif family not in ("codecs", "prediction"):
            alike = None if case.startswith("decoupled") else not case.startswith(rows.ALONE)
            assert row.get("ranks_identical") is alike, row
        if family in ("collectives", "layouts", "scaling"):
            assert row["error"] < (1e-5 if "fp32" in case or "identity" in case else 2), row
        if family == "training" and case == "ring":
            assert row["error"] < 1e-3, row


# What is measured


SMALL = ["--width", "64"]
VALUES = 1024 * 64 + 64 + 5 * (64 * 64 + 64) + 64 * 512 + 512  # parameters of that model


def test_a_training_step_its_limit_and_what_was_tried_before(ranks: Pool, tmp_path: Path) -> None:
    """As the driver would start it, on a network of which it has been told what it carries."""
    arguments = ["--rate", "10mbit", *SMALL, "--optimizer", "adamw"]
    arguments += ["--cases", "=ring,=ring_int8,=ring_auto,=gossip_exponential,post-local"]
    told = {"RINGSTRATEGY_BENCH_THROUGHPUT": str(10e6 / 8)}
    arguments += ["--rounds", "2"]
    found, printed = scripts.on_ranks(ranks, 2, "training", tmp_path / "rows.jsonl", *arguments, environment=told)
    rows = {row["case"]: row for row in found}
    byte = 8 / 10e6
    alone = {row["steps"]: row["limit_seconds"] for name, row in rows.items() if name.startswith("compute alone")}
    wire = {
        "ddp": byte * 4 * VALUES,
        "compute alone": 0,
        "compute alone, 4 in a row": 0,
        "compute alone, 16 in a row": 0,
        "ring": byte * 4 * VALUES,
        "ring_int8": byte * BlockInt(8).nbytes(VALUES, torch.float32),
        "ring_auto": byte * rows["ring_auto"]["bytes_sent"],  # measured: it chose by itself
        "gossip_exponential": byte * 4 * VALUES,
        "post-local sgd every 4": byte * 4 * VALUES / 4,
        "post-local sgd every 16": byte * 4 * VALUES / 16,
    }
    assert rows.keys() == wire.keys()
    for name, row in rows.items():
        assert (row["rate"], row["throughput"], len(row["seconds"])) == ("10mbit", 10e6 / 8, 2)
        assert row["size"].endswith(", AdamW")
        assert wire[name] <= row["limit_seconds"] < wire[name] + 1.001 * alone[row["steps"]], name
        assert row["ranks_identical"] is (not name.startswith("compute alone")), name
        [line] = [line for line in printed.splitlines() if re.match(rf"│ {name} +│", line)]
        assert f" {row['limit_seconds'] / row['seconds_median']:.0%} ".replace("%", " %") in line
    for steps in (4, 16):
        name = f"post-local sgd every {steps}"
        assert rows[name]["limit_seconds"] == pytest.approx(wire[name] + alone[steps]), "nothing is computed beside it"
    assert min(alone.values()) > 0
    assert rows["ring"]["error"] < 1e-3 < rows["compute alone"]["error"]
    assert rows["ring_auto"]["error"] < 0.1, "what it tried is in no weight and in no moment of AdamW"
    assert rows["ring_int8"]["bytes_sent"] < 0.3 * rows["ring"]["bytes_sent"]
    assert re.search(r"ring_auto: ring_auto tried .* candidates and keeps", printed, re.S)


@on_ranks(2)
def test_post_local_sgd_averages_at_the_end_of_each_period() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training = PostLocalSGD(torch.nn.Linear(3, 2), [], period=4)
    torch.manual_seed(1 + dist.get_rank())
    agreed = []
    for step in range(1, 13):
        training.batches = [(torch.randn(4, 3), torch.randn(4, 2))]
        training.run()
        weights = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, torch.cat([value.flatten() for value in training.result()]))
        if torch.equal(*weights):
            agreed.append(step)
    assert agreed == [4, 8, 12]


def powersgd_of(rank: int, low: int) -> list[torch.Tensor]:
    """Inputs, means and errors of two steps; the input's matrix has the rank `low`."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    hook = PowerSGDOnOneThread(dist.group.WORLD, rank)
    inputs, means = torch.zeros(0, 40 * 30 + 7), torch.zeros(0, 40 * 30 + 7)
    for _ in range(2):
        flat = torch.cat([(torch.randn(40, low) @ torch.randn(low, 30)).flatten(), torch.randn(7)])
        inputs = torch.cat([inputs, flat[None]])
        hook._mean_(0, flat, [flat[:1200].view(40, 30), flat[1200:]])
        means = torch.cat([means, flat[None]])
    hook.close()
    return [inputs, means, hook._errors[0]]


def test_the_powersgd_hook_beside_us_is_right(ranks: Pool) -> None:
    for rank in (1, 4):
        ours, theirs = ranks(2, powersgd_of, rank, 20)
        assert torch.equal(ours[1], theirs[1]), "the same bits on both"
        mean = (ours[0] + theirs[0]) / 2
        assert torch.allclose(ours[1][:, 1200:], mean[:, 1200:], atol=1e-6), "vectors are exact"
        assert (ours[1] - mean)[:, :1200].norm() > 0.1 * mean.norm()
        held = (ours[2] + theirs[2]) / 2
        assert torch.allclose(ours[1].sum(0) + held, mean.sum(0), atol=1e-4), "what was not delivered is held"
    ours, theirs = ranks(2, powersgd_of, 4, 2)
    mean = (ours[0] + theirs[0]) / 2
    assert torch.allclose(ours[1], mean, atol=1e-3), "a mean of that rank is delivered whole"


def test_the_target_is_reached_where_a_straight_line_crosses_it() -> None:
    curve = Curve([0, 10, 20, 30], [0.0, 1.0, 3.0, 4.0], [5.0, 4.0, 3.0, None])
    assert curve.reached(4.0) == (10, 1.0)
    assert curve.reached(3.25) == (17.5, 2.5)
    assert curve.reached(2.9) is None
    assert curve.best == 3.0

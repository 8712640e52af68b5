"""The benchmarks run, and their rows say what they must; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankFailed
from scripts import ROOT, lines_of, on_ranks, refusal

from benchmarks import campaign, harness
from benchmarks.__main__ import main
from benchmarks.contenders import SELDOM, PostLocalSGD
from benchmarks.powersgd_peer import PowerSGDOnOneThread, factors
from benchmarks.slow_rank import steps_ahead_limit
from benchmarks.tasks import TASKS
from benchmarks.time_to_accuracy import Curve
from ringstrategy import BlockInt, Gossip, Identity, LocalSGD
from ringstrategy.algorithms.auto import Auto
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import OnePeerExponential

SMALL = ["--width", "64"]
VALUES = 1024 * 64 + 64 + 5 * (64 * 64 + 64) + 64 * 512 + 512  # parameters of that model
CONTROL = 2000  # bytes a step that ranks may exchange beside gradients


# Commands


@pytest.mark.slow
def test_every_command_is_listed_and_the_campaign_uses_options_that_it_has(monkeypatch, capsys):
    pytest.importorskip("ray", reason="`data_service` reads with Ray Data: pip install '.[ray]'")
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^(\w+)  +(.*)$", capsys.readouterr().out.partition("--help")[2], re.M)
    assert {name for name, _ in listed} >= {"training", "collectives", "campaign", "lab", "report"}
    for name, described in listed:
        assert described.endswith("."), name
        if name == "accuracy":
            continue  # Hydra's
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"python -m benchmarks {name}" in capsys.readouterr().out

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


REFUSED = [
    ("collectives", ["--rate=fast"]),
    ("collectives", ["--mb=1,two"]),
    ("collectives", ["--mb=0"]),
    ("collectives", ["--processes=0"]),
    ("collectives", ["--hosts=2,x"]),
    ("training", ["--predict", "--rate=none"]),
    ("training", ["--hosts=0"]),
    ("training", ["--overlap-of=ring_int8"]),
    ("training", ["--model=gpt", "--width=30"]),
    ("training", ["--model=cnn", "--layers=3"]),
    ("time_to_accuracy", ["--rounds=3"]),
    ("time_to_accuracy", ["--most-steps=5"]),
    ("time_to_accuracy", ["--width=30"]),
    ("time_to_accuracy", ["--cases=none", "--no-target"]),
]


def test_a_bad_argument_is_refused_with_words(capsys):
    for name, arguments in REFUSED:
        words = refusal([name, *arguments], capsys)
        assert any(part in words for part in arguments[-1].split("=")), (name, arguments)


def checked(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for row in rows:
        assert (row["device"], row["torch"]) == ("cpu", torch.__version__)
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?|unknown", row["commit"])
        assert row["baseline"] == rows[0]["case"]
        assert min(row["seconds"]) <= row["seconds_median"] <= max(row["seconds"])
        assert row["ratio"] > 0
    assert rows[0]["ratio"] == 1
    return {row["case"]: row for row in rows}


def training_of(ranks: Pool, out: Path, *arguments: str, told: dict[str, str] | None = None) -> dict[str, Any]:
    """Two ranks', and what the first prints."""
    rows, printed = on_ranks(ranks, 2, "training", out, "--rounds", "2", *arguments, environment=told)
    return {**checked(rows), "printed": printed}


# Steps


def test_a_training_step_its_limit_and_what_was_tried_before(ranks, tmp_path):
    """As the driver would start it, on a network of which it has been told what it carries."""
    assert Auto().state_dict()["tuned"] is False, "benchmarks wait for it"
    arguments = ["--rate", "10mbit", *SMALL, "--optimizer", "adamw"]
    arguments += ["--cases", "=ring,=ring_int8,=ring_auto,=gossip_exponential,post-local"]
    told = {"RINGSTRATEGY_BENCH_THROUGHPUT": str(10e6 / 8)}
    rows = training_of(ranks, tmp_path / "rows.jsonl", *arguments, told=told)
    printed = rows.pop("printed")
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
        assert rows[name]["steps"] == steps
        assert rows[name]["limit_seconds"] == pytest.approx(wire[name] + alone[steps]), "nothing is computed beside it"
    assert min(alone.values()) > 0
    assert rows["ring"]["error"] < 1e-3 < rows["compute alone"]["error"]
    assert rows["ring_auto"]["error"] < 0.1, "what it tried is in no weight and in no moment of AdamW"
    assert rows["ring_int8"]["bytes_sent"] < 0.3 * rows["ring"]["bytes_sent"]
    assert re.search(r"ring_auto: ring_auto tried .* candidates and keeps", printed, re.S)


def test_nobody_claims_a_limit_that_was_not_measured(monkeypatch):
    monkeypatch.delenv("RINGSTRATEGY_BENCH_THROUGHPUT", raising=False)
    assert harness.throughput() is harness.wire_seconds(1e6) is None, "whatever --rate says"


@pytest.mark.nightly
def test_a_training_step_with_every_name(ranks, tmp_path):
    rows = training_of(ranks, tmp_path / "rows.jsonl", *SMALL, "--steps", "4")
    del rows["printed"]
    assert set(STRATEGIES) - set(rows) == set()
    for name, row in rows.items():
        # ranks that never talk train apart, and the check sees it; of those that mix, it sees the mean
        assert row["ranks_identical"] is (not name.startswith("compute alone"))
        assert (row["bytes_sent"] or 0) > 0 or name not in STRATEGIES
        assert (row["waited_seconds"] or 0) > 0 or name not in STRATEGIES
    assert rows["ddp"]["waited_seconds"] is None
    spent = {name: row["cpu_seconds"] for name, row in rows.items()}
    assert all(each["backward"] > 0 and each["gloo"] > 0 for each in spent.values())
    for part, in_case in {"encode": "ring_int8", "decode": "ring_int8", "packing": "ring"}.items():
        assert spent[in_case][part] > 0
        assert spent["ddp"][part] == spent["compute alone"][part] == 0
    assert spent["ring"]["encode"] == 0, "what lies in memory as it travels is not encoded"
    made = {name: make() for name, make in {**STRATEGIES, **SELDOM}.items()}
    seldom = {name: each.interval for name, each in made.items() if isinstance(each, LocalSGD)}
    whole = {name: seldom.get(name, 16) for name in rows if "every 16" in name or name in seldom}
    in_a_row = {name: int(name.split()[2]) for name in rows if name.endswith("in a row")}
    assert {16, 32} == set(in_a_row.values())
    assert {name: row["steps"] for name, row in rows.items() if row["steps"] > 4} == {**whole, **in_a_row}
    assert rows["ring"]["error"] < 1e-4 < rows["compute alone"]["error"]
    assert rows["ring_fp16"]["bytes_sent"] < 0.6 * rows["ring"]["bytes_sent"]
    assert rows["gossip"]["bytes_sent"] == 4 * VALUES, "a run of four steps holds four exchanges, no more and no less"
    assert 0 < rows["gossip"]["error"] < 0.1 * rows["compute alone"]["error"], "the mean is near DDP, no rank alone is"
    assert 0 < rows["post-local sgd every 4"]["error"] < 0.1 * rows["compute alone"]["error"]
    assert rows["post-local sgd every 16"]["error"] is None, "whole periods: more steps than DDP's"
    powersgd = rows["ddp powersgd rank 4"]["error"], rows["ddp powersgd rank 1"]["error"]
    assert 0 < powersgd[0] < powersgd[1] < rows["compute alone"]["error"]


@pytest.mark.slow
def test_training_of_other_models(ranks, tmp_path):
    for model, size in (
        ("gpt", "byte GPT of 0.0 M parameters, batch 1 x 64 bytes a rank"),
        ("cnn", "CNN of 0.0 M parameters, batch 8 images of 8x8 a rank"),
    ):
        arguments = ["--cases", "ring,powersgd", "--model", model, "--width", "16"]
        rows = training_of(ranks, tmp_path / f"{model}.jsonl", *arguments)
        assert rows["ring"]["size"] == size
        assert rows["ring"]["error"] < 1e-4 < rows["compute alone"]["error"], "each rank has data of its own"
        shapes = [parameter.shape for parameter in TASKS[model](width=16).model(0).parameters()]
        has_to = {"ring_powersgd": 4 * sum(factors(shapes, 1)), "ring_powersgd rank 4": 4 * sum(factors(shapes, 4))}
        has_to["ring"] = 4 * sum(shape.numel() for shape in shapes)
        for name, nbytes in has_to.items():  # of two ranks each sends all that is summed
            assert nbytes <= rows[name]["bytes_sent"] < nbytes + CONTROL, (model, name)


@pytest.mark.slow
def test_predictions_stand_beside_the_steps(ranks, tmp_path):
    arguments = ["--predict", "--rate", "10mbit", *SMALL, "--cases", "=ring_int8"]
    told = {"RINGSTRATEGY_BENCH_THROUGHPUT": str(10e6 / 8)}
    rows = training_of(ranks, tmp_path / "rows.jsonl", *arguments, told=told)
    assert "deviation" in rows.pop("printed")
    assert list(rows) == ["ddp", "ring_int8"]
    for row in rows.values():
        assert row["benchmark"] == "prediction"
        assert row["deviation"] == pytest.approx(row["predicted_seconds"] / row["seconds_median"] - 1)
    predicted = [row["predicted_seconds"] for row in rows.values()]
    assert predicted[0] > 3 * predicted[1], "a quarter of the bytes on a slow link"


def steps_after_which_ranks_agree(period: int) -> list[int]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training = PostLocalSGD(torch.nn.Linear(3, 2), [], period)
    torch.manual_seed(1 + dist.get_rank())
    agreed = []
    for step in range(1, 3 * period + 1):
        training.batches = [(torch.randn(4, 3), torch.randn(4, 2))]
        training.run()
        weights = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, torch.cat([value.flatten() for value in training.result()]))
        if torch.equal(*weights):
            agreed.append(step)
    return agreed


def test_post_local_sgd_averages_at_the_end_of_each_period(ranks):
    assert ranks(2, steps_after_which_ranks_agree, 4) == [[4, 8, 12]] * 2


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


def test_the_powersgd_hook_beside_us_is_right(ranks):
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


@pytest.mark.slow
def test_intervals_that_hide_the_exchange(ranks, tmp_path):
    arguments = [*SMALL, "--cases", "none", "--overlap-of", "gossip,gossip_int8"]
    rows = training_of(ranks, tmp_path / "rows.jsonl", *arguments)
    del rows["printed"]
    assert list(rows)[:2] == ["ddp", "compute alone"]
    alone = {row["steps"] for name, row in rows.items() if name.startswith("compute alone")}
    names = [name for name in rows if " every " in name]
    assert len(names) == 4
    for name, without in zip(names[::2], names[1::2], strict=True):
        assert without == f"{name}, no overlap"
        kind, interval = name.split(" every ")
        codec = Identity() if kind == "gossip" else BlockInt(8)
        nbytes = round(codec.nbytes(VALUES, torch.float32) / int(interval))
        assert rows[name]["bytes_sent"] == rows[without]["bytes_sent"] == nbytes
        assert rows[name]["ranks_identical"] is rows[without]["ranks_identical"] is True
        assert rows[name]["steps"] == rows[without]["steps"] in alone


@pytest.mark.slow
def test_exchanges_alone(ranks, tmp_path):
    rows = training_of(ranks, tmp_path / "rows.jsonl", *SMALL, "--exchanges")
    del rows["printed"]
    assert {"gloo all-reduce", "gossip", "gossip_exponential", "gossip_int8", "push_sum"} <= set(rows)
    for row in rows.values():
        assert row["benchmark"] == "exchange"
        assert row["ranks_identical"] is True
        assert row["error"] < 1e-6, "the mean is kept"
    assert rows["gossip"]["bytes_sent"] == 4 * VALUES
    assert rows["gossip_int8"]["bytes_sent"] < 0.26 * rows["gossip"]["bytes_sent"]


# Sums


@pytest.mark.slow
def test_sums_on_loopback(tmp_path):
    """Started by hand: the driver starts a process a rank."""
    arguments = ["--hosts", "2", "--rate", "loopback", "--mb", "1", "--rounds", "2"]
    arguments += ["--cases", "=ring identity,=direct identity,=ring fp16,=ring bf16,=native identity"]
    rows = checked(lines_of("collectives", tmp_path / "deep" / "rows.jsonl", *arguments))
    for name, row in rows.items():
        assert row["limit_seconds"] is None, "loopback has no limit"
        assert row["ranks_identical"] is True
        assert 0 < row["error"] < (1e-6 if "fp32" in name or "identity" in name else 1.5), name
    assert rows["ring identity"]["bytes_sent"] == rows["direct identity"]["bytes_sent"] == 2**20
    assert rows["ring fp16"]["bytes_sent"] == rows["ring bf16"]["bytes_sent"] == 2**19
    assert rows["gloo fp32"]["bytes_sent"] is rows["native identity"]["bytes_sent"] is None


@pytest.mark.slow
def test_sums_of_several_sizes_layouts_and_numbers_of_hosts(ranks, tmp_path):
    arguments = ["--mb", "0.015625,1", "--rounds", "2", "--cases", "=ring identity,=direct int8,=hierarchical int8"]
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
    assert (small, large) == (2**14 * 3 // 2, 2**20 * 3 // 2), "however often a run repeats it"
    for hosts, neighbours in ((2, 1), (3, 2)):
        out = tmp_path / f"{hosts}.jsonl"
        rows, _ = on_ranks(ranks, hosts, "collectives", out, "--growth", "--mb", "0.125", "--rounds", "1")
        assert {(row["benchmark"], row["hosts"], row["ranks_identical"]) for row in rows} == {("scaling", hosts, True)}
        [mixing] = [row for row in rows if row["case"] == "gossip, one mixing"]
        assert mixing["bytes_sent"] == neighbours * 2**17
        assert 0 < mixing["error"] < 1e-6


# A loss


def test_the_target_is_reached_where_a_straight_line_crosses_it():
    curve = Curve([0, 10, 20, 30], [0.0, 1.0, 3.0, 4.0], [5.0, 4.0, 3.0, None])
    assert curve.reached(4.0) == (10, 1.0)
    assert curve.reached(3.25) == (17.5, 2.5)
    assert curve.reached(2.9) is None
    assert curve.best == 3.0


QUICK = ["--hosts", "2", "--rate", "loopback", "--width", "16", "--learning-rate", "0.01"]


def accuracy_rows_of(ranks: Pool, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    rows, _ = on_ranks(ranks, 2, "time_to_accuracy", out, *QUICK, *arguments)
    for row in rows:
        assert (row["hosts"], row["rate"], row["cores"]) == (2, "loopback", os.cpu_count())
        assert row["size"].startswith("byte GPT")
        curve = row["curve"]
        assert len(curve["steps"]) == len(curve["seconds"]) == len(curve["losses"]) > 1
        assert curve["steps"] == [row["every"] * turn for turn in range(len(curve["steps"]))]
        assert all(before < after for before, after in pairwise(curve["seconds"]))
        assert row["best_loss"] == min(curve["losses"])
        assert row["compute_seconds"] > 0
        assert (row["bytes_sent"] or 0) > 0 or row["case"] not in STRATEGIES
        assert row["ranks_identical"] is True
    return {row["case"]: row for row in rows}


@pytest.mark.slow
def test_time_to_an_easy_target(ranks, tmp_path):
    cases = ["ring_int8", "gossip_exponential every 4", "post-local sgd every 4", "ring_auto"]
    asked = ",".join(f"={case}" for case in cases)
    rows = accuracy_rows_of(ranks, tmp_path / "rows.jsonl", "--target", "4.4", "--cases", asked)
    hooks = ["ddp fp16 hook", "ddp powersgd rank 1"]
    assert list(rows)[:3] == ["ddp", *hooks]
    assert set(rows) == {"ddp", *hooks, *cases}
    for row in rows.values():
        steps, seconds, losses = (row["curve"][of][-2:] for of in ("steps", "seconds", "losses"))
        assert losses[0] > 4.4 >= losses[1], "it ends where it is there"
        assert steps[0] < row["steps_to_target"] <= steps[1]
        part = (losses[0] - 4.4) / (losses[0] - losses[1])
        assert row["steps_to_target"] == pytest.approx(steps[0] + part * (steps[1] - steps[0]))
        assert row["seconds_to_target"] == pytest.approx(seconds[0] + part * (seconds[1] - seconds[0]))
        assert row["ratio"] == pytest.approx(rows["ddp"]["seconds_to_target"] / row["seconds_to_target"])
        for hook in hooks:
            assert row["ratios"][hook] == pytest.approx(rows[hook]["seconds_to_target"] / row["seconds_to_target"])
    for name, row in rows.items():
        assert row["curve"]["losses"][0] == rows["ddp"]["curve"]["losses"][0], "all start alike"
        if name not in ("ddp", "ring_auto"):  # which may choose to round nothing
            assert row["curve"]["losses"][1] != rows["ddp"]["curve"]["losses"][1]


@pytest.mark.nightly
def test_a_target_that_is_missed_one_that_there_is_not_and_a_run_that_diverges(ranks, tmp_path):
    arguments = ["--target", "0.1", "--most-steps", "32", "--cases", "=ring,=gossip_exponential"]
    rows = accuracy_rows_of(ranks, tmp_path / "missed.jsonl", *arguments)
    for row in rows.values():
        assert row["seconds_to_target"] is row["steps_to_target"] is row["ratio"] is None
        assert set(row["ratios"].values()) == {None}
        assert row["curve"]["steps"] == [0, 16, 32]
    assert rows["ring"]["curve"]["losses"] == rows["ddp"]["curve"]["losses"], "the same weights, data and order"
    arguments = ["--no-target", "--most-steps", "32", "--cases", "=ddp,=ring", "--layers", "1"]
    rows = accuracy_rows_of(ranks, tmp_path / "none.jsonl", *arguments)
    assert list(rows) == ["ddp", "ring"]
    for row in rows.values():
        assert (row["benchmark"], row["curve"]["steps"]) == ("loss by step", [0, 16, 32])
        assert math.isnan(row["target"])
        assert row["seconds_to_target"] is row["ratio"] is None
    arguments = ["--target", "0.1", "--most-steps", "320", "--cases", "none", "--learning-rate", "1e30"]
    diverged, _ = on_ranks(ranks, 2, "time_to_accuracy", tmp_path / "diverged.jsonl", *QUICK, *arguments)
    for row in diverged:
        assert row["seconds_to_target"] is row["curve"]["losses"][-1] is None
        assert row["curve"]["steps"][-1] < 320
    with pytest.raises(RankFailed, match=r"SystemExit: --target 9: before the first step the loss is 5\.5"):
        on_ranks(ranks, 2, "time_to_accuracy", tmp_path / "rows.jsonl", *QUICK, "--target", "9")


@pytest.mark.slow
def test_others_run_ahead_of_a_slow_rank_only_so_far(ranks, tmp_path):
    arguments = ["--steps", "8"]
    arguments += ["--compute-ms", "15", "--slowdown", "4", "--rounds", "1", "--cases", "gossip_int8"]
    rows, _ = on_ranks(ranks, 2, "slow_rank", tmp_path / "rows.jsonl", *arguments)
    slowed = {row["case"]: row for row in rows if row["slow_rank"] == 1}
    assert [row["case"] for row in rows] == 2 * ["ddp", "gossip_int8", "gossip_int8 every 4"]
    assert slowed["ddp"]["steps_ahead_limit"] is None
    assert slowed["ddp"]["steps_ahead"] == [0, 0]
    for name, limit in (("gossip_int8", 2), ("gossip_int8 every 4", 8)):
        assert slowed[name]["steps_ahead_limit"] == [limit, 0]
        assert 0 < slowed[name]["steps_ahead"][0] <= limit
    for row in slowed.values():
        assert row["ranks_identical"] is True
        assert len(row["steps_per_second"]) == 2


def test_how_far_ahead_of_a_slow_rank():
    limit = steps_ahead_limit
    assert limit(Gossip(overlap=False), 8, 1) == [1, 0, 1, 2, 3, 4, 3, 2]  # the distance on the ring
    assert limit(Gossip(), 8, 1) == [2, 0, 2, 3, 4, 5, 4, 3]
    assert limit(Gossip(interval=4), 4, 0) == [0, 8, 12, 8]
    assert limit(Gossip(OnePeerExponential(), overlap=False), 4, 1) == [2, 0, 2, 2]


@pytest.mark.slow
def test_overhead_at_world_size_one(ranks, tmp_path):
    rows, _ = on_ranks(
        ranks, 1, "overhead", tmp_path / "rows.jsonl", "--steps", "20", "--rounds", "2", "--models", "tiny"
    )
    rows = checked(rows)
    assert rows["ring"]["bytes_sent"] == 0
    assert rows["ring"]["error"] == 0, "one process trains bit for bit as without a strategy"


# What each wire does to training


def accuracy_cases(*overrides: str) -> list[Any]:
    from hydra import compose, initialize_config_dir

    from benchmarks import accuracy

    with initialize_config_dir(str(ROOT / "benchmarks"), version_base="1.3"):
        return accuracy.cases(compose("accuracy", list(overrides)))


def test_cases_of_accuracy_are_those_that_were_published():
    from benchmarks import accuracy

    cases = {stage: accuracy_cases(f"stage={stage}") for stage in ("rates", "paired", "gossip")}
    for stage, found in cases.items():
        assert len({case.key for case in found}) == len(found) > 10, stage
        assert found[0].task == "text"
    plain = [
        row
        for row in accuracy.read_rows(accuracy.RESULTS)
        if (row["stage"], row["name"]) in (("rates", "fp32"), ("paired", "ring"))
    ]
    assert len(plain) == 32
    assert {row["key"] for row in plain} <= {case.key for stage in ("rates", "paired") for case in cases[stage]}
    gossip = cases["gossip"]
    assert {name for name, make in STRATEGIES.items() if isinstance(make(), Decentralized)} <= {e.name for e in gossip}
    assert [case.seed for case in gossip] == sorted(case.seed for case in gossip)
    data = [(case.ranks, case.settings["data"]) for case in gossip if case.task == "digits"]
    assert {(ranks, each["batch_size"], each.get("skew")) for ranks, each in data} == {
        (ranks, 64 // ranks, skew) for ranks in (4, 8) for skew in (None, 1.0)
    }
    with pytest.raises(ValueError, match=r"'diloco every 5' is none of ddp, .*diloco every 16"):
        accuracy_cases("stage=seldom", "seldom.digits.names=[ddp,diloco every 5]")


TINY = ["tasks=[digits]", "optimizers=[sgd]", "ranks=[2]", "steps=20", "limit=300"]


def sweep(out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run it in this process; all rows of the file."""
    from hydra import compose, initialize_config_dir

    from benchmarks import accuracy

    with initialize_config_dir(str(ROOT / "benchmarks"), version_base="1.3"):
        accuracy.sweep(compose("accuracy", [*TINY, f"out={out}", *overrides]))
    return accuracy.read_rows(out)


@pytest.mark.slow
def test_accuracy_trains_skips_what_is_done_and_keeps_what_fails(tmp_path: Path) -> None:
    from benchmarks.report import main as report

    out = tmp_path / "deep" / "accuracy.jsonl"
    rows = sweep(out, "wires=[fp32,int4 rotated absmax]")
    assert [row["name"] for row in rows[:2]] == ["fp32, ring", "fp32, direct"]
    assert len(rows) == 2 + 4
    for row in rows:
        assert row["status"] == "finished", row
        assert row["replicas_identical"] is True
        assert [step for step, _ in row["curve"]] == [5, 10, 15, 20]
        assert row["curve"][-1][1] == row["val_loss"]
        assert 0 < row["val_accuracy"] < 1
        assert {"seconds", "cpu_seconds", "commit", "torch", "device", "settings"} <= set(row)
    # both ranks' share of 21386 gradients, four bytes each, and some control messages
    assert 4 * 21386 < rows[0]["bytes_sent_per_step"] < 4 * 21386 + 2000
    assert rows[2]["bytes_sent_per_step"] < rows[0]["bytes_sent_per_step"] / 6
    assert len({row["val_loss"] for row in rows}) > 2, "a wire does change what is learnt"
    assert {row["feedback"] for row in rows[2:]} == {False, True}

    assert sweep(out, "wires=[fp32]") == rows, "done before"
    failed = sweep(out, "wires=[fp32]", "~collectives.direct", "digits.model.classes=5")[len(rows) :]
    assert [row["status"] for row in failed] == ["failed"]
    assert "out of bounds" in failed[0]["error"]
    diverged = sweep(out, "wires=[fp32]", "~collectives.direct", "digits.rate.sgd=1e30")[len(rows) + 1 :]
    assert [(row["status"], row["val_loss"]) for row in diverged] == [("diverged", None)]
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        report([f"--results={out.parent}", f"--page={tmp_path / 'deep' / 'page.md'}"])
    text = (out.parent / "accuracy.md").read_text()
    assert text.count("- failed: ") == text.count("- diverged: ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"], "Hydra leaves nothing behind"


@pytest.mark.nightly
def test_accuracy_of_gossip_and_of_few_meetings_is_beside_ddp(tmp_path: Path) -> None:
    ways = "wires=[ddp,gossip]", "seeds=[0]", "gossip.digits.skews=[1.0]"
    rows = sweep(tmp_path / "gossip.jsonl", "stage=gossip", *ways)
    assert [row["name"] for row in rows] == ["ddp", "gossip", "gossip unequal data", "gossip interval 4"]
    named = {row["name"]: row for row in rows}
    # all parameters to the only neighbour, without the means for ten validations
    assert 4 * 21386 < named["gossip"]["bytes_sent_per_step"] < 4 * 21386 + 100
    assert 21386 < named["gossip interval 4"]["bytes_sent_per_step"] < 21386 + 100
    assert named["ddp"]["bytes_sent_per_step"] is None
    assert {row["settings"]["data"]["skew"] for row in rows} == {1.0}
    few = sweep(tmp_path / "few.jsonl", "stage=seldom", "wires=[ddp,local_sgd every 4,diloco every 16]", "seeds=[0]")
    assert [row["name"] for row in few] == ["ddp", "local_sgd every 4", "diloco every 16"]
    for row in (*rows, *few):
        assert row["status"] == "finished", row
        assert row["replicas_identical"] is True, "after the last mean"
        assert [step for step, _ in row["curve"]] == list(range(2, 21, 2)), "validated at the end once in all"
    diloco = few[2]["curve"]
    assert len({loss for _, loss in diloco[:7]}) == 1, "until the first agreement all see the first weights"
    assert len({loss for _, loss in diloco[7:]}) == 2, "of the agreement, and of the mean at the end"
    # half of the parameters to each of two ranks, there and back, five times in 20 steps, then the mean
    assert 4 * 21386 / 4 < few[1]["bytes_sent_per_step"] < 4 * 21386 * 6 / 20 + 100

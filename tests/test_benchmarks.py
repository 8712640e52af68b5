"""The benchmarks run, and their rows say what they must; how fast anything is, is not tested."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from scripts import on_ranks, refusal

from benchmarks import campaign
from benchmarks.contenders import PostLocalSGD
from benchmarks.powersgd_peer import PowerSGDOnOneThread
from benchmarks.slow_rank import steps_ahead_limit
from benchmarks.tasks import TASKS
from benchmarks.time_to_accuracy import Curve
from ringstrategy import BlockInt, Gossip
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import OnePeerExponential

SMALL = ["--width", "64"]
VALUES = 1024 * 64 + 64 + 5 * (64 * 64 + 64) + 64 * 512 + 512  # parameters of that model


# Commands


@pytest.mark.slow
def test_the_campaign_uses_options_that_its_commands_have(monkeypatch):
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
    ("collectives", ["--processes=0"]),
    ("collectives", ["--hosts=2,x"]),
    ("training", ["--predict", "--rate=none"]),
    ("training", ["--overlap-of=ring_int8"]),
    ("training", ["--model=gpt", "--width=30"]),
    ("time_to_accuracy", ["--rounds=3"]),
    ("time_to_accuracy", ["--most-steps=5"]),
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
        assert rows[name]["limit_seconds"] == pytest.approx(wire[name] + alone[steps]), "nothing is computed beside it"
    assert min(alone.values()) > 0
    assert rows["ring"]["error"] < 1e-3 < rows["compute alone"]["error"]
    assert rows["ring_auto"]["error"] < 0.1, "what it tried is in no weight and in no moment of AdamW"
    assert rows["ring_int8"]["bytes_sent"] < 0.3 * rows["ring"]["bytes_sent"]
    assert re.search(r"ring_auto: ring_auto tried .* candidates and keeps", printed, re.S)


@pytest.mark.nightly
def test_a_training_step_with_every_name(ranks, tmp_path):
    rows = training_of(ranks, tmp_path / "rows.jsonl", *SMALL, "--steps", "4")
    del rows["printed"]
    assert set(STRATEGIES) <= set(rows)
    for name, row in rows.items():
        # ranks that never talk train apart, and the check sees it; of those that mix, it sees the mean
        assert row["ranks_identical"] is (not name.startswith("compute alone"))
    assert rows["gossip"]["bytes_sent"] == 4 * VALUES, "a run of four steps holds four exchanges, no more and no less"
    apart = rows["compute alone"]["error"]
    assert rows["ring"]["error"] < 1e-4 < 0.1 * apart
    assert 0 < rows["gossip"]["error"] < 0.1 * apart, "the mean is near DDP, no rank alone is"
    assert 0 < rows["ddp powersgd rank 4"]["error"] < rows["ddp powersgd rank 1"]["error"] < apart


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
def test_predictions_and_intervals_that_hide_the_exchange(ranks, tmp_path):
    arguments = ["--predict", "--rate", "10mbit", *SMALL, "--cases", "=ring_int8"]
    told = {"RINGSTRATEGY_BENCH_THROUGHPUT": str(10e6 / 8)}
    rows = training_of(ranks, tmp_path / "predicted.jsonl", *arguments, told=told)
    assert "deviation" in rows.pop("printed")
    for row in rows.values():
        assert row["deviation"] == pytest.approx(row["predicted_seconds"] / row["seconds_median"] - 1)
    assert rows["ddp"]["predicted_seconds"] > 3 * rows["ring_int8"]["predicted_seconds"], "a quarter of the bytes"

    arguments = ["--model", "cnn", "--width", "16", "--cases", "none", "--overlap-of", "gossip_int8"]
    rows = training_of(ranks, tmp_path / "overlap.jsonl", *arguments)
    [name] = [name for name in rows if re.search(r" every \d+$", name)]
    values = sum(parameter.numel() for parameter in TASKS["cnn"](width=16).model(0).parameters())
    nbytes = round(BlockInt(8).nbytes(values, torch.float32) / int(name.split()[2]))
    assert rows[name]["bytes_sent"] == rows[f"{name}, no overlap"]["bytes_sent"] == nbytes


# Sums


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
    rows, _ = on_ranks(ranks, 3, "collectives", tmp_path / "3.jsonl", "--growth", "--mb", "0.125", "--rounds", "1")
    assert {(row["benchmark"], row["hosts"], row["ranks_identical"]) for row in rows} == {("scaling", 3, True)}
    [mixing] = [row for row in rows if row["case"] == "gossip, one mixing"]
    assert mixing["bytes_sent"] == 2 * 2**17
    assert 0 < mixing["error"] < 1e-6


# A loss


def test_the_target_is_reached_where_a_straight_line_crosses_it():
    curve = Curve([0, 10, 20, 30], [0.0, 1.0, 3.0, 4.0], [5.0, 4.0, 3.0, None])
    assert curve.reached(4.0) == (10, 1.0)
    assert curve.reached(3.25) == (17.5, 2.5)
    assert curve.reached(2.9) is None
    assert curve.best == 3.0


QUICK = ["--hosts", "2", "--rate", "loopback", "--width", "16", "--learning-rate", "0.01"]


def race_of(ranks: Pool, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    rows, _ = on_ranks(ranks, 2, "time_to_accuracy", out, *QUICK, *arguments)
    for row in rows:
        curve = row["curve"]
        assert curve["steps"] == [row["every"] * turn for turn in range(len(curve["losses"]))]
        assert all(before < after for before, after in pairwise(curve["seconds"]))
        assert row["best_loss"] == min(loss for loss in curve["losses"] if loss is not None)
    return {row["case"]: row for row in rows}


@pytest.mark.slow
def test_time_to_an_easy_target(ranks, tmp_path):
    cases = ["ring_int8", "gossip_exponential every 4", "post-local sgd every 4", "ring_auto"]
    asked = ",".join(f"={case}" for case in cases)
    rows = race_of(ranks, tmp_path / "rows.jsonl", "--target", "4.4", "--cases", asked)
    hooks = ["ddp fp16 hook", "ddp powersgd rank 1"]
    assert set(rows) == {"ddp", *hooks, *cases}
    for row in rows.values():
        assert row["curve"]["losses"][-2] > 4.4 >= row["curve"]["losses"][-1], "it ends where it is there"
        assert (row["steps_to_target"], row["seconds_to_target"]) == Curve(**row["curve"]).reached(4.4)
        assert row["ratio"] == pytest.approx(rows["ddp"]["seconds_to_target"] / row["seconds_to_target"])
        for hook in hooks:
            assert row["ratios"][hook] == pytest.approx(rows[hook]["seconds_to_target"] / row["seconds_to_target"])
        assert row["curve"]["losses"][0] == rows["ddp"]["curve"]["losses"][0], "all start alike"
        assert row["ranks_identical"] is True
    assert rows["ring_int8"]["curve"]["losses"][1] != rows["ddp"]["curve"]["losses"][1]


@pytest.mark.nightly
def test_a_target_that_there_is_not_and_a_run_that_diverges(ranks, tmp_path):
    arguments = ["--no-target", "--most-steps", "32", "--cases", "=ddp,=ring"]
    rows = race_of(ranks, tmp_path / "curves", *arguments)
    for row in rows.values():
        assert row["seconds_to_target"] is row["steps_to_target"] is row["ratio"] is None
        assert (row["benchmark"], row["curve"]["steps"]) == ("loss by step", [0, 16, 32])
    assert rows["ring"]["curve"]["losses"] == rows["ddp"]["curve"]["losses"], "the same weights, data and order"
    arguments = ["--target", "0.1", "--most-steps", "320", "--cases", "none", "--learning-rate", "1e30"]
    for row in race_of(ranks, tmp_path / "diverged", *arguments).values():
        assert row["seconds_to_target"] is row["curve"]["losses"][-1] is None
        assert row["curve"]["steps"][-1] < 320


@pytest.mark.slow
def test_others_run_ahead_of_a_slow_rank_only_so_far(ranks, tmp_path):
    arguments = ["--steps", "8", "--compute-ms", "15", "--slowdown", "4", "--rounds", "1", "--cases", "gossip_int8"]
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

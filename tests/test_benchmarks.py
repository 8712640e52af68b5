"""The benchmarks run, and their rows say what they must; how fast anything is, is not tested."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringstrategy import BlockInt, Gossip, Identity
from ringstrategy.registry import STRATEGIES
from ringstrategy.topologies import OnePeerExponential

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROMISED = {
    *("benchmark", "case", "baseline", "seconds_median", "seconds", "ratio", "bytes_sent", "error", "ranks_identical"),
    *("waited_seconds", "hosts", "rate", "device", "torch", "commit"),
}
SMALL = ["--width", "64", "--layers", "2"]
VALUES = 1024 * 64 + 64 + 64 * 64 + 64 + 64 * 512 + 512  # parameters of that model

pytestmark = pytest.mark.timeout(120)


def lines_of(script: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def rows_of(script: str, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    rows = lines_of(script, out, *arguments)
    for row in rows:
        assert set(row) >= PROMISED
        assert row["baseline"] == rows[0]["case"]
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["seconds_median"] <= max(row["seconds"])
        assert row["ratio"] > 0
        assert row["limit_seconds"] is None, "loopback has no limit"
    assert rows[0]["ratio"] == 1
    return {row["case"]: row for row in rows}


def test_collectives_on_loopback(tmp_path):
    arguments = ["--hosts", "2", "--rate", "loopback", "--mb", "1", "--rounds", "2"]
    rows = rows_of("collectives.py", tmp_path / "deep" / "rows.jsonl", *arguments)
    bounds = {"fp32": 1e-6, "identity": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
    bounds |= {"fp8": 0.1, "int8": 0.05, "int4": 0.4, "int2": 0.9, "sign": 1.5, "topk": 1.1}
    for name, row in rows.items():
        assert row["ranks_identical"] is True
        assert 0 < row["error"] < next(bound for part, bound in bounds.items() if part in name)
    assert rows["ring identity"]["bytes_sent"] == rows["direct identity"]["bytes_sent"] == 2**20
    assert rows["ring fp16"]["bytes_sent"] == rows["ring bf16"]["bytes_sent"] == 2**19
    assert rows["gloo fp32"]["bytes_sent"] is None
    assert rows["native identity"]["bytes_sent"] is None


def test_training_on_loopback(tmp_path):
    arguments = ["--hosts", "2", "--rate", "loopback", *SMALL, "--rounds", "2"]
    rows = rows_of("training.py", tmp_path / "rows.jsonl", *arguments)
    assert set(STRATEGIES) - set(rows) == set()
    for name, row in rows.items():
        # ranks that never talk train apart, and the check sees it; of those that mix, it sees the mean
        assert row["ranks_identical"] is (name != "compute alone")
        assert (row["bytes_sent"] or 0) > 0 or name not in STRATEGIES
        assert (row["waited_seconds"] or 0) > 0 or name not in STRATEGIES
    assert rows["ddp"]["waited_seconds"] is None
    assert rows["ring"]["error"] < 1e-4 < rows["compute alone"]["error"]
    assert rows["ring_fp16"]["bytes_sent"] < 0.6 * rows["ring"]["bytes_sent"]
    assert rows["gossip"]["bytes_sent"] == 4 * VALUES, "a run of two steps holds two exchanges, no more and no less"
    assert 0 < rows["gossip"]["error"] < 0.1 * rows["compute alone"]["error"], "the mean is near DDP, no rank alone is"


def test_intervals_that_hide_the_exchange(tmp_path):
    arguments = ["--hosts", "2", "--rate", "loopback", *SMALL, "--rounds", "2", "--cases", "none of them"]
    rows = rows_of("training.py", tmp_path / "rows.jsonl", *arguments, "--overlap-of", "gossip,gossip_int8")
    assert list(rows)[:2] == ["ddp", "compute alone"]
    names = list(rows)[2:]
    assert len(names) == 4
    for name, without in zip(names[::2], names[1::2], strict=True):
        assert without == f"{name}, no overlap"
        kind, interval = name.split(" every ")
        codec = Identity() if kind == "gossip" else BlockInt(8)
        nbytes = round(codec.nbytes(VALUES, torch.float32) / int(interval))
        assert rows[name]["bytes_sent"] == rows[without]["bytes_sent"] == nbytes
        assert rows[name]["ranks_identical"] is rows[without]["ranks_identical"] is True


def test_exchanges_alone(tmp_path):
    arguments = ["--hosts", "2", "--rate", "loopback", *SMALL, "--rounds", "2"]
    rows = rows_of("training.py", tmp_path / "rows.jsonl", *arguments, "--exchanges")
    assert {"gloo all-reduce", "gossip", "gossip_exponential", "gossip_int8", "push_sum"} <= set(rows)
    for row in rows.values():
        assert row["benchmark"] == "exchange"
        assert row["ranks_identical"] is True
        assert row["error"] < 1e-6, "the mean is kept"
    assert rows["gossip"]["bytes_sent"] == 4 * VALUES
    assert rows["gossip_int8"]["bytes_sent"] < 0.26 * rows["gossip"]["bytes_sent"]


def test_others_run_ahead_of_a_slow_rank_only_so_far(tmp_path):
    arguments = ["--hosts", "2", "--rate", "loopback", "--steps", "8", "--interval", "4", "--width", "32"]
    arguments += ["--compute-ms", "15", "--slowdown", "4", "--rounds", "1", "--cases", "gossip_int8"]
    rows = lines_of("slow_rank.py", tmp_path / "rows.jsonl", *arguments)
    slowed = {row["case"]: row for row in rows if row["slow_rank"] == 1}
    assert [row["case"] for row in rows] == 2 * ["ddp", "gossip_int8", "gossip_int8 every 4"]
    assert slowed["ddp"]["steps_ahead_limit"] is None
    assert slowed["ddp"]["steps_ahead"] == [0, 0]
    for name, limit in (("gossip_int8", 2), ("gossip_int8 every 4", 8)):
        assert slowed[name]["steps_ahead_limit"] == [limit, 0]
        assert limit / 4 < slowed[name]["steps_ahead"][0] <= limit
    for row in slowed.values():
        assert row["ranks_identical"] is True
        assert len(row["steps_per_second"]) == 2
        assert row["kept"] < 0.9, "in the long run the others wait for it"


def test_how_far_ahead_of_a_slow_rank(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    limit = importlib.import_module("slow_rank").steps_ahead_limit
    assert limit(Gossip(overlap=False), 8, 1) == [1, 0, 1, 2, 3, 4, 3, 2]  # the distance on the ring
    assert limit(Gossip(), 8, 1) == [2, 0, 2, 3, 4, 5, 4, 3]
    assert limit(Gossip(interval=4), 4, 0) == [0, 8, 12, 8]
    assert limit(Gossip(OnePeerExponential(), overlap=False), 4, 1) == [2, 0, 2, 2]


def test_overhead_at_world_size_one(tmp_path):
    arguments = ["--steps", "20", "--rounds", "2", "--models", "tiny"]
    rows = rows_of("overhead.py", tmp_path / "rows.jsonl", *arguments)
    assert rows["ring"]["bytes_sent"] == 0
    assert rows["ring"]["error"] == 0, "one process trains bit for bit as without a strategy"


@pytest.mark.parametrize(
    ("script", "argument"),
    [("collectives.py", "--rate=fast"), ("training.py", "--hosts=0"), ("training.py", "--overlap-of=ring_int8")],
)
def test_a_bad_argument_is_refused_with_words(script, argument):
    command = [sys.executable, str(BENCHMARKS / script), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert argument.split("=")[1] in done.stderr

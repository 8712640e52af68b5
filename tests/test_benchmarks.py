"""The benchmarks run, and their rows say what they must; how fast anything is, is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringstrategy.registry import STRATEGIES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROMISED = {
    *("benchmark", "case", "baseline", "seconds_median", "seconds", "ratio", "bytes_sent", "error", "ranks_identical"),
    *("hosts", "rate", "device", "torch", "commit"),
}

pytestmark = pytest.mark.timeout(120)


def rows_of(script: str, out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
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
    arguments = ["--hosts", "2", "--rate", "loopback", "--width", "64", "--layers", "2", "--rounds", "2"]
    rows = rows_of("training.py", tmp_path / "rows.jsonl", *arguments)
    assert set(STRATEGIES) - set(rows) == set()
    for name, row in rows.items():
        # ranks that never talk train apart, and the check sees it; so do those that gossip
        assert row["ranks_identical"] is (name != "compute alone" and "gossip" not in name)
        assert (row["bytes_sent"] or 0) > 0 or name not in STRATEGIES
    assert rows["ring"]["error"] < 1e-4 < rows["compute alone"]["error"]
    assert rows["ring_fp16"]["bytes_sent"] < 0.6 * rows["ring"]["bytes_sent"]


def test_overhead_at_world_size_one(tmp_path):
    arguments = ["--steps", "20", "--rounds", "2", "--models", "tiny"]
    rows = rows_of("overhead.py", tmp_path / "rows.jsonl", *arguments)
    assert rows["ring"]["bytes_sent"] == 0
    assert rows["ring"]["error"] == 0, "one process trains bit for bit as without a strategy"


@pytest.mark.parametrize(("script", "argument"), [("collectives.py", "--rate=fast"), ("training.py", "--hosts=0")])
def test_a_bad_argument_is_refused_with_words(script, argument):
    command = [sys.executable, str(BENCHMARKS / script), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert argument.split("=")[1] in done.stderr

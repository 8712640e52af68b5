"""`make gpu` without a GPU: its parts run small on the CPU, and one that fails stops no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from pool import Pool
from scripts import ROOT, on_ranks

from benchmarks import gpu
from benchmarks.__main__ import main


def script(name: str, code: str, seconds: float = 60) -> gpu.Part:
    return gpu.Part(name, seconds, [sys.executable, "-c", code])  # type: ignore[arg-type]


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    child = "import os, time; print('begun', flush=True); os.fork(); time.sleep(99)"
    parts = [
        script("fails", "print('what'); raise SystemExit(3)"),
        script("hangs, as does its child", child, 5),
        script("works", "import os; print(os.getcwd())"),
    ]
    results = gpu.check(parts, 300, tmp_path)
    assert [(name, wrong) for name, _, wrong in results] == [
        ("fails", "ended with 3"),
        ("hangs, as does its child", "not done within 5 s"),
        ("works", None),
    ]
    said = [(tmp_path / f"{part.name}.log").read_text().splitlines() for part in parts]
    assert said == [["what"], ["begun"], [str(ROOT)]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
def test_each_command_is_one_that_exists(tmp_path: Path) -> None:
    for part in gpu._parts(tmp_path):
        if "benchmarks" in part.command:
            arguments = list(part.command[part.command.index("benchmarks") + 1 :])
            with pytest.raises(SystemExit, match="torch sees none here"):
                main(arguments)
        else:
            tests = "".join((ROOT / name).read_text() for name in part.command if name.startswith("tests/"))
            words = part.command[part.command.index("-k") + 1] if "-k" in part.command else ""
            for word in re.findall(r"\w{4,}", words):
                assert re.search(rf"def test_\w*{word}", tests), word
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["gpu"])


def test_what_comes_through_delayed_streams_has_the_bits_of_the_cpu(ranks: Pool, tmp_path: Path) -> None:
    rows, _ = on_ranks(ranks, 2, "shared_gpu", tmp_path / "rows.jsonl")
    assert len(rows) == 6
    assert all(row["ranks_identical"] and row["error"] == 0 for row in rows)

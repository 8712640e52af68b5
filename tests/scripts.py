"""Benchmark scripts without processes of their own: each would import lightning first, which takes seconds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _be_a_rank(script: str, arguments: list[str], environment: dict[str, str]) -> str:
    """As a launcher would start it, in a process of the pool; returns what it prints."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(BENCHMARKS))
    os.environ.update(environment)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        for name in environment:
            del os.environ[name]
    return printed.getvalue()


def on_ranks(
    ranks: Pool, size: int, script: str, out: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The rows that `size` ranks of a benchmark write, and what the first prints."""
    command = [*arguments, "--out", str(out)]
    printed = ranks(size, _be_a_rank, str(BENCHMARKS / script), command, dict(environment or {}), limit=120)
    return [json.loads(line) for line in out.read_text().splitlines()], printed[0]


def refusal(
    script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What it says when it ends with status 2, started by hand."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = str(BENCHMARKS / script)
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ended.value.code == 2
    return capsys.readouterr().err

"""Benchmarks without processes of their own: each would import lightning first, which takes seconds."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pool import Pool

from benchmarks.__main__ import main
from benchmarks.rows import read

ROOT = Path(__file__).parents[1]


def lines_of(name: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that a benchmark writes, started by hand."""
    command = [sys.executable, "-m", "benchmarks", name, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [asdict(row) for row in read(out)]


def _be_a_rank(arguments: list[str], environment: dict[str, str]) -> str:
    """As a launcher would start it, in a process of the pool; returns what it prints."""
    os.environ.update(environment)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main(arguments)
    finally:
        for name in environment:
            del os.environ[name]
    return printed.getvalue()


def on_ranks(
    ranks: Pool, size: int, name: str, out: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The rows that `size` ranks of a benchmark write, and what the first prints."""
    printed = ranks(size, _be_a_rank, [name, *arguments, "--out", str(out)], dict(environment or {}))
    return [asdict(row) for row in read(out)], printed[0]

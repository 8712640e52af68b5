"""Ranks that may die, and whole programs, for tests: see `benchmarks.ranks`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import Job, Program

HERE = Path(__file__).parent
ROOT = HERE.parent


def die() -> None:
    """At once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start one as `job(size, function, *args)`."""
    jobs: list[Job] = []

    def start(size: int, function: Callable[..., None], *args: Any) -> Job:
        jobs.append(Job(tmp_path, size, function, *args))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Start one as `program(*command)`; it may import tests."""
    programs: list[Program] = []

    def start(*command: str, **environment: str) -> Program:
        path = os.pathsep.join(map(str, (HERE, ROOT)))
        programs.append(Program(tmp_path, command, **{"PYTHONPATH": path, **environment}))
        return programs[-1]

    yield start
    for one in programs:
        one.close()
        print(one.printed[-20_000:], one.errors[-20_000:])

"""Ranks that may die: processes of their own, not the pool's. Each writes its output and its errors to a file."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import Patience
from pool import IMPORTED, reserve_port

from ringstrategy import PeerLostError

HERE = Path(__file__).parent


class Job:
    """Ranks of a run, each a fork of the pool's server.

    Args:
        folder: in which they run.
        size: how many.
        function: what each does; of a module.
        args: of the function.
    """

    def __init__(self, folder: Path, size: int, function: Callable[..., None], *args: Any) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._holder = reserve_port()
        self.folder = folder
        self.ranks: list[Any] = [None] * size
        for rank in range(size):
            self.add(rank, function, *args)

    def add(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        """Start a process, also in the place of a rank that has ended."""
        given = (str(self.folder), rank, len(self.ranks), self._holder.getsockname()[1], function, args)
        self.ranks[rank] = self._context.Process(target=_rank, args=given, daemon=True)
        self.ranks[rank].start()

    def wait(self, ranks: list[int]) -> list[int | None]:
        """Exit codes of `ranks`, which must end."""
        self.until(lambda: not any(self.ranks[rank].is_alive() for rank in ranks), f"ranks {ranks} ended", ranks)
        return [self.ranks[rank].exitcode for rank in ranks]

    def until(self, condition: Callable[[], Any], what: str, ranks: list[int] | None = None) -> None:
        """Wait for what these ranks, by default all, bring about while they do not hang."""
        ranks = list(range(len(self.ranks))) if ranks is None else ranks
        try:
            until(condition, what, lambda: [self.ranks[rank].pid for rank in ranks])
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._where(ranks)}") from None

    def _where(self, ranks: list[int]) -> str:
        """What each rank has printed, and the stacks of those that have not ended."""
        for rank in ranks:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"rank {rank}, exit code {self.ranks[rank].exitcode}:\n{self.output(rank)}" for rank in ranks)

    def signal(self, rank: int, signum: int) -> None:
        """Send it, if that rank has not ended."""
        if self.ranks[rank].is_alive():
            os.kill(self.ranks[rank].pid, signum)

    def record(self, rank: int) -> dict[str, Any]:
        """The error in which it ended."""
        assert (self.folder / f"record{rank}.json").exists(), f"rank {rank} recorded no error:\n{self.output(rank)}"
        return self.notes(f"record{rank}")

    def named(self, rank: int) -> tuple[int, str]:
        """The rank that a rank has lost, and its words."""
        record = self.record(rank)
        assert record["kind"] == PeerLostError.__name__, self.output(rank)
        return record["rank"], record["message"]

    def notes(self, name: str) -> dict[str, Any]:
        """What a rank has noted in a file of this name."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def output(self, rank: int) -> str:
        """What it has printed."""
        path = self.folder / f"output{rank}"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """End all."""
        for process in self.ranks:
            process.kill()
            process.join()
        self._holder.close()


def _rank(folder: str, rank: int, size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(NODE_RANK="0", OMP_NUM_THREADS="1")
    os.chdir(folder)
    log = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        note(f"record{rank}.json", kind=type(error).__name__, message=str(error), rank=getattr(error, "rank", None))
        raise


def until(condition: Callable[[], Any], what: str, pids: Callable[[], list[int]]) -> None:
    """Wait for what these processes bring about while they do not hang."""
    patience, looked_at = Patience(pids), time.monotonic()
    while not condition():
        time.sleep(0.05)
        if time.monotonic() > looked_at + 1.0:
            looked_at = time.monotonic()
            why = patience.gone()
            assert why is None, f"not yet: {what}; they {why}"


def shell(**environment: str) -> dict[str, str]:
    """The environment of a shell in which no launcher has left anything."""
    launchers = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    return {k: v for k, v in os.environ.items() if k not in launchers} | {"OMP_NUM_THREADS": "1", **environment}


def run_script(folder: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may import tests, by `command` (default: this Python), as a shell would; it must not hang."""
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{text}")
    started = [*(command or (sys.executable,)), str(script)]
    with open(folder / "printed", "w+") as out, open(folder / "errors", "w+") as errors:
        running = subprocess.Popen(
            started, env=shell(), cwd=folder, stdout=out, stderr=errors, text=True, start_new_session=True
        )
        try:
            until(lambda: running.poll() is not None, "the script ends", lambda: [running.pid])
        except BaseException:  # whoever outlives the first process otherwise is a test's to find
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            raise
    printed, said = (folder / "printed").read_text(), (folder / "errors").read_text()
    return subprocess.CompletedProcess(started, running.returncode, printed, said)


def note(path: str, **facts: Any) -> None:
    """Write at once whole."""
    Path(f"{path}.part").write_text(json.dumps(facts))
    os.rename(f"{path}.part", path)


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

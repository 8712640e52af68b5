"""Start ranks and programs on this machine, wait for them while they do not hang, and read what they say."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

IDLE = 20.0  # seconds without any use of a CPU: a hang, which a busy machine is not
END = 500.0  # seconds, whatever they do: on a machine that is thirty times too busy, tests of 15 CPU seconds end
_TRACE = 0.05  # CPU seconds of a process in that time that are none: a thread that looks around once a second
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PORTS = range(20_000, 32_768)  # below those that Linux hands out, also to launchers that look for a free port
_OF_LAUNCHERS = {"LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED"}
_MARK = "RINGSTRATEGY_PROGRAM"  # in the environment of a program, which the processes that it starts inherit
_STARTING = threading.Lock()  # a fork server serves one at a time


def reserve_port() -> socket.socket:
    """A socket that holds a port of 127.0.0.1 until it is closed: only a store that is told of it can listen there."""
    while True:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", random.SystemRandom().choice(_PORTS)))
        except OSError:
            holder.close()
            continue
        # only now: who binds without it, as the line above, is refused; who binds with it, as torch's store, is not
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder


class Patience:
    """For processes and all that they started. Begins to count when it is made.

    Args:
        pids: the processes, asked for at each look; they hang after IDLE seconds without any use of a CPU.
        end: seconds after which waiting ends anyway.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], end: float = END) -> None:
        self._pids, self._end = pids, end
        self._begin = self._moved = time.monotonic()
        self._used, self._count = _used(pids())

    def gone(self) -> str | None:
        """Why nobody should wait any longer, or None. Ask about once a second."""
        now = time.monotonic()
        used, count = _used(self._pids())
        if abs(used - self._used) > _TRACE * count or count != self._count:
            self._used, self._count, self._moved = used, count, now
        if now - self._moved > IDLE:
            return f"used no CPU for {IDLE:.0f} s"
        if now - self._begin > self._end:
            return f"did not end within {self._end:.0f} s"
        return None


def _used(pids: Iterable[int]) -> tuple[float, int]:
    """CPU seconds of these processes and their descendants, and how many they are."""
    children, ticks = defaultdict(list), {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(path.name))
            ticks[int(path.name)] = sum(map(int, fields[11:15]))  # its own, and of children that it has waited for
    tree, left = set[int](), [pid for pid in pids if pid in ticks]
    while left:
        pid = left.pop()
        if pid not in tree:
            tree.add(pid)
            left += children[pid]
    return sum(ticks[pid] for pid in tree) * _TICK, len(tree)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], Any], what: str, pids: Callable[[], Iterable[int]], end: float = END) -> None:
    """Wait for what these processes bring about. An AssertionError if they hang, or after `end` seconds."""
    patience, looked_at = Patience(pids, end=end), time.monotonic()
    while not condition():
        time.sleep(0.02)
        if time.monotonic() > looked_at + 1.0:
            looked_at = time.monotonic()
            why = patience.gone()
            assert why is None, f"not yet: {what}; they {why}"


def note(file: str | Path, **facts: Any) -> None:
    """Add a line of JSON."""
    with Path(file).open("a") as lines:
        lines.write(json.dumps(facts) + "\n")


def noted(file: Path) -> list[dict[str, Any]]:
    """What a process has noted in a file so far, whole lines only; nothing if there is no file."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Job:
    """Ranks of a run, forks of one server. Each writes what it prints to a file, and notes the error in which it ends.

    Args:
        folder: in which they run.
        size: how many.
        function: what each does; of a module.
        args: of the function.
    """

    def __init__(self, folder: Path, size: int, function: Callable[..., None], *args: Any) -> None:
        self.folder, self._holder = folder, reserve_port()
        self.ranks: list[Any] = [None] * size
        for rank in range(size):
            self.add(rank, function, *args)

    def add(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        """Start a process, also in the place of a rank that has ended."""
        given = (str(self.folder), rank, len(self.ranks), self._holder.getsockname()[1], function, args)
        context = multiprocessing.get_context("forkserver")
        self.ranks[rank] = context.Process(target=_be_a_rank, args=given, daemon=True)
        with _STARTING:
            self.ranks[rank].start()

    def wait(self, ranks: Sequence[int] | None = None, end: float = END) -> list[int | None]:
        """Exit codes of these ranks, by default of all, which must end."""
        ranks = range(len(self.ranks)) if ranks is None else ranks
        self.until(lambda: not any(self.ranks[rank].is_alive() for rank in ranks), f"ranks {ranks} ended", ranks, end)
        return [self.ranks[rank].exitcode for rank in ranks]

    def until(
        self, condition: Callable[[], Any], what: str, ranks: Sequence[int] | None = None, end: float = END
    ) -> None:
        """Wait for what these ranks, by default all, bring about while they do not hang."""
        ranks = range(len(self.ranks)) if ranks is None else ranks
        try:
            until(condition, what, lambda: [self.ranks[rank].pid for rank in ranks], end)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._where(ranks)}") from None

    def _where(self, ranks: Sequence[int]) -> str:
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
        """The error in which it ended: `kind`, `message`, and the `rank` that it names."""
        errors = noted(self.folder / f"error{rank}.jsonl")
        assert errors, f"rank {rank} recorded no error:\n{self.output(rank)}"
        return errors[-1]

    def named(self, rank: int) -> tuple[int, str]:
        """The rank that a rank has lost, and its words."""
        record = self.record(rank)
        assert record["kind"] == "PeerLostError", self.output(rank)
        return record["rank"], record["message"]

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


def _be_a_rank(folder: str, rank: int, size: int, port: int, function: Callable[..., None], args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.chdir(folder)
    log = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        facts = {"kind": type(error).__name__, "message": str(error), "rank": getattr(error, "rank", None)}
        note(f"error{rank}.jsonl", **facts)
        raise


def _do_all(
    work: Callable[[Any], Any], given: Sequence[Any], within: Callable[[], AbstractContextManager[Any]]
) -> None:
    with within():
        for each in given:
            note(f"results{os.environ['RANK']}.jsonl", result=work(each))


def results_of(
    size: int,
    work: Callable[[Any], Any],
    given: Sequence[Any],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    end: float = END,
) -> tuple[list[list[Any]], list[str]]:
    """The results of all ranks for each of what is given, as far as they came; and what was wrong with the next.

    Args:
        size: how many ranks.
        work: what each does with each of it; of a module.
        given: to it.
        within: what is open meanwhile.
        end: seconds that all of it may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, wrong = Job(Path(folder), size, _do_all, work, given, within), list[str]()
        try:
            codes = job.wait(end=end)
            wrong = [f"rank {rank}: {_last_words(job, rank, code)}" for rank, code in enumerate(codes) if code]
        except AssertionError as error:
            wrong = [str(error)]
        finally:
            job.close()
        noted_by = [noted(Path(folder) / f"results{rank}.jsonl") for rank in range(size)]
        results = [[note["result"] for note in notes] for notes in zip(*noted_by, strict=False)]
    return results, wrong


def _last_words(job: Job, rank: int, code: int) -> str:
    if code < 0:
        return f"it died of signal {-code}"
    record = job.record(rank)
    return f"{record['kind']}: {record['message']}"


class Program:
    """A command as a shell starts it, and all processes that it starts.

    Args:
        folder: in which it runs; what it prints goes there too.
        command: its words.
        environment: beside that of this process, without what a launcher has left there.
    """

    def __init__(self, folder: Path, command: Sequence[str], **environment: str) -> None:
        self._mark, self._files = f"{_MARK}={uuid.uuid4().hex}", (folder / "printed", folder / "errors")
        name, _, value = self._mark.partition("=")
        inherited = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
        given = {**inherited, "OMP_NUM_THREADS": "1", **environment, name: value}
        with self._files[0].open("w") as out, self._files[1].open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=folder, env=given, stdout=out, stderr=errors, start_new_session=True
            )

    def pids(self) -> list[int]:
        """Those of its processes that have not ended."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if self._mark.encode() in (process / "environ").read_bytes() and is_alive(int(process.name)):
                    found.append(int(process.name))
        return found

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for what they bring about while they do not hang."""
        until(condition, what, self.pids)

    def wait(self) -> int:
        """The exit code of the first process, when none is left."""
        self.until(lambda: self.process.poll() is not None, "the program ends")
        self.until(lambda: not self.pids(), "no process is left")  # daemons see that their master has gone
        return self.process.returncode

    @property
    def printed(self) -> str:
        """By all of them."""
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        """What they wrote to stderr."""
        return self._files[1].read_text()

    def close(self) -> None:
        """End all."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

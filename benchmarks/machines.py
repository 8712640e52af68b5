"""Learners and a syncer, or ranks of DDP, as processes on machines that go and come by a seed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkProcess
from pathlib import Path

from benchmarks.paced import learn
from benchmarks.ranks import reserve_port
from ringstrategy.app import syncer

SYNCER = -1  # its rank among machines
_SYNCER_AWAY = 3.0  # seconds
_AWAY = 0.2  # of the time


def drawn(seed: int, options: argparse.Namespace) -> list[tuple[float, int, bool]]:
    """When each machine goes and comes."""
    draws, changes = random.Random(seed), list[tuple[float, int, bool]]()
    for rank in range(options.learners):
        now = -draws.uniform(0, options.period)
        while now < options.seconds:
            went = now + draws.uniform(0.5, 1.5) * options.period * (1 - _AWAY)
            now = went + draws.uniform(0.5, 1.5) * options.period * _AWAY
            changes += [(went, rank, False), (now, rank, True)] if went > 0 else []
    for third in (1, 2):
        went = options.seconds * (third + draws.uniform(-0.2, 0.2)) / 3
        changes += [(went, SYNCER, False), (went + _SYNCER_AWAY, SYNCER, True)]
    return sorted(change for change in changes if change[0] < options.seconds)


def _free_port() -> int:
    with reserve_port() as holder:
        port: int = holder.getsockname()[1]
    return port


def at_once(cases: Sequence[str], seed: int, options: argparse.Namespace, folder: Path) -> list[Machines]:
    """Run all cases beside each other, so that all have the same load of the machine; files are in `folder / case`."""
    with ProcessPoolExecutor(len(cases), multiprocessing.get_context("fork")) as pool:
        running = [pool.submit(Machines, case, seed, options, folder / case) for case in cases]
        return [run.result() for run in running]


class Machines:
    """Processes on machines that come and go; it is over when this is made.

    Attributes:
        living: seconds that learners' machines were there, all together.
        lives: of processes: rank, begin, end.
        counts: processes, by rank.
        kills: of learners' machines.
    """

    def __init__(self, case: str, seed: int, options: argparse.Namespace, folder: Path) -> None:
        self.ddp, self.seed, self.options, self.folder = case == "ddp, restarts", seed, options, folder
        self.there: dict[int, float] = {}  # machines, and since when
        self.processes: dict[int, ForkProcess] = {}
        self.lives: list[tuple[int, float, float]] = []  # of processes: rank, from, to
        self.began: dict[int, float] = {}
        self.counts, self.living, self.kills = Counter[int](), 0.0, 0
        self.port = _free_port()
        folder.mkdir()
        (folder / "secret").write_text("only of benchmarks, no secret")
        changes = [] if case == "undisturbed" else drawn(seed, options)
        try:
            if not self.ddp:
                self._start(SYNCER)
                self._until(time.time() + 1.0)
            begin = time.time()
            for rank in range(options.learners):
                (folder / f"notes{rank}").touch()  # a rank may be killed before it begins
                self._come(rank)
            for after, rank, comes in changes:
                self._until(begin + after)
                if rank == SYNCER:
                    if not self.ddp:
                        self._start(rank) if comes else self._kill(rank)
                else:
                    self._come(rank) if comes else self._go(rank)
                    self.kills += not comes
            self._until(begin + options.seconds)
        finally:
            for rank in list(self.processes):
                self._kill(rank)
        self.living += sum(begin + options.seconds - since for since in self.there.values())

    def _come(self, rank: int) -> None:
        self.there[rank] = time.time()
        if not self.ddp:
            self._start(rank)
        elif len(self.there) == self.options.learners:
            for each in self.there:
                self._start(each)

    def _go(self, rank: int) -> None:
        self.living += time.time() - self.there.pop(rank)
        for each in list(self.processes) if self.ddp else [rank]:
            self._kill(each)

    def _start(self, rank: int) -> None:
        if self.ddp and not self.processes:
            self.port = _free_port()
        process = multiprocessing.get_context("fork").Process(target=self._be, args=[rank])
        self.began[rank], self.processes[rank] = time.time(), process
        process.start()
        self.counts[rank] += 1

    def _kill(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.kill()
        process.join()
        self.lives.append((rank, self.began[rank], time.time()))

    def _be(self, rank: int) -> None:
        printed = os.open(self.folder / f"printed{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(printed, 1), os.dup2(printed, 2)
        if rank == SYNCER:
            bind, kept = f"127.0.0.1:{self.port}", str(self.folder / "theta")
            files = ["--secret-file", str(self.folder / "secret"), "--checkpoint", kept, "--keep-wires"]
            syncer.main(["--bind", bind, *files, "--idle", "60"])
        else:
            learn(rank, self.counts[rank], self.seed, self.options, self.folder, self.port, self.ddp)

    def _until(self, moment: float) -> None:
        """Wait, and see that nothing ends by itself."""
        while True:
            for rank, process in self.processes.items():
                if process.exitcode is not None:
                    raise RuntimeError(f"{rank} ended: {(self.folder / f'printed{rank}').read_text()[-2000:]}")
            left = moment - time.time()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

"""Ranks are killed while they train, and others take their place: the seconds to the next step, and the loss.

python -m benchmarks shrink --ranks 8 --rounds 3 --out outputs/shrink.jsonl

`RingStrategy(on_peer_loss="shrink")` trains the digits of scikit-learn. In each round half of the ranks are killed one
after another, rank 0 among them, at random moments. Then two processes join. A row has the seconds from each kill to
the end of the next step on the slowest survivor. Below it: the held-out loss beside that of an undisturbed run, the
seconds from the start of a replacement to its first step, and how long the others wait for it.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.rows import Row

CASES = ("ring", "ring_int8, feedback", "gossip")
_EPOCHS = 20
_LIMIT_SECONDS = 300.0  # of a whole run
_CALM_SECONDS = (0.3, 1.0)  # between a step of all survivors and the next kill
_JOINED = 2  # processes


class _Run:
    """Ranks of this machine, and what they note."""

    def __init__(self, case: str, size: int, folder: Path) -> None:
        self._case, self._size, self.folder = case, size, folder
        folder.mkdir(parents=True)
        with harness.reserved_port() as self._port:
            pass
        self._end = time.monotonic() + _LIMIT_SECONDS
        self.ranks = {str(rank): self._start(str(rank), rank) for rank in range(size)}  # by name

    def _start(self, name: str, local_rank: int, **more: str) -> subprocess.Popen[bytes]:
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.shrunk",
                    str(self.folder),
                    self._case,
                    name,
                    str(_EPOCHS),
                    str(self._size),
                ],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **ranks, "LOCAL_RANK": str(local_rank), **more},
                stdout=log,
                stderr=log,
            )

    def join(self, name: str, local_rank: int) -> None:
        """One more process, which any of those that train may let in."""
        addresses = self.steps(next(iter(self.ranks)))[-1]["addresses"]
        self.ranks[name] = self._start(name, local_rank, RINGSTRATEGY_JOIN=",".join(addresses))

    def kill(self, name: str) -> float:
        """Returns the time."""
        process, at = self.ranks.pop(name), time.time()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return at

    def steps(self, name: str) -> list[dict[str, Any]]:
        """All that one process has made."""
        return harness.noted(self.folder / f"{name}.steps.jsonl")

    def first_step(self, size: int, since: float = 0.0) -> float:
        """When all have made their first step since that time as so many ranks."""
        while True:
            made = [next((s for s in self.steps(n) if s["size"] == size and s["at"] > since), None) for n in self.ranks]
            if all(made):
                return float(max(step["at"] for step in made if step is not None))
            self._wait(f"trained as {size} ranks")

    def end(self) -> list[dict[str, Any]]:
        """What each has noted at its end."""
        while any(process.poll() is None for process in self.ranks.values()):
            self._wait("ended")
        assert not any(process.returncode for process in self.ranks.values()), f"see {self.folder}"
        return [harness.noted(self.folder / f"{name}.end.jsonl")[0] for name in self.ranks]

    def stop(self) -> None:
        """Whatever is left."""
        for process in self.ranks.values():
            process.kill()
            process.wait()

    def _wait(self, what: str) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"not all ranks {what} within {_LIMIT_SECONDS:.0f} s: see {self.folder}")
        time.sleep(0.02)


def _disturbed(run: _Run, size: int, draw: random.Random) -> dict[str, list[float]]:
    """Kill half of the ranks, let others join; seconds from kills to steps, of joining, and that the others waited."""
    run.first_step(size)
    lost = ["0", *draw.sample([str(rank) for rank in range(1, size)], size // 2 - 1)]
    draw.shuffle(lost)
    to_next, joining, waiting = [], [], []
    for number, name in enumerate(lost):
        time.sleep(draw.uniform(*_CALM_SECONDS))
        at = run.kill(name)
        to_next.append(run.first_step(size - number - 1, at) - at)
    for number in range(min(_JOINED, len(lost))):
        survivor, begin, left = next(iter(run.ranks)), time.time(), size - len(lost) + number
        run.join(f"new{number}", int(lost[number]))
        joined = run.first_step(left + 1, begin)
        before = max(step["at"] for step in run.steps(survivor) if step["size"] == left)
        joining.append(joined - begin)
        waiting.append(joined - before)
    return {"seconds": to_next, "joining": joining, "waiting": waiting}


def _measure(case: str, size: int, rounds: int, draw: random.Random, scratch: Path) -> tuple[Row, str]:
    together: dict[str, list[float]] = {"seconds": [], "joining": [], "waiting": []}
    losses, identical = [], True
    for round_ in range(rounds + 1):
        run = _Run(case, size, scratch / f"{round_}")
        try:
            if round_:
                for what, seconds in _disturbed(run, size, draw).items():
                    together[what] += seconds
            ends = run.end()
        finally:
            run.stop()
        losses.append(ends[0]["loss"])
        identical &= case == "gossip" or len({end["weights"] for end in ends}) == 1
    row = Row(
        benchmark="shrink",
        case=case,
        size=f"{size} ranks, {size // 2} of them killed, {min(_JOINED, size // 2)} joined",
        processes=size,
        threads=1,
        cores=os.cpu_count(),
        **harness.made_with(),
        seconds=together["seconds"],
        seconds_median=statistics.median(together["seconds"]),
        best_loss=losses[0],
        ranks_identical=identical,
        faults=len(together["seconds"]),
    )
    disturbed = ", ".join(f"{loss:.4f}" for loss in losses[1:])
    joining, waiting = statistics.median(together["joining"]), statistics.median(together["waiting"])
    words = (
        f"{case}: held-out loss {losses[0]:.4f} undisturbed, {disturbed} disturbed; a replacement made its first step "
        f"after {joining:.1f} s, and the others waited {waiting:.2f} s for it"
    )
    return row, words


def main(given: Sequence[str]) -> None:
    """Run all cases, and print a row each, with the losses below."""
    parser = harness.arguments("shrink", __doc__, rounds=3, warmup=0)
    parser.add_argument("--ranks", type=int, default=8, help="at the beginning")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    options = parser.parse_args(given)
    with harness.refusing(parser):
        names = harness.chosen(CASES, options.cases)
    measured = []
    for name in names:
        scratch = Path(tempfile.mkdtemp(prefix="ringstrategy-shrink-"))  # kept: who finds a fault wants to see
        measured.append(_measure(name, options.ranks, options.rounds, random.Random(options.seed), scratch))
    harness.publish(
        "from a kill to the next step of the others",
        [row for row, _ in measured],
        options.out,
        [w for _, w in measured],
    )

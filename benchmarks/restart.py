"""How long from the SIGKILL of a rank under torchrun to the next step, the same bit for bit as without a kill.

python -m benchmarks restart --ranks 2,4 --rounds 5 --out outputs/restart.jsonl

`torchrun --max-restarts=1` trains with `ModelCheckpoint(save_last=True)` and `ckpt_path="last"`. In each round a random
rank is killed at a random moment after the first save. Each part of a restart ends when the last rank has ended it:

- the other ranks are gone
- agent: torchrun has noticed, and started the ranks again
- python, imports, the trainer, the rendezvous, the checkpoint, set-up, first step: of the processes that come next

A restart is whole if every digest (parameters, momentum, residuals, as each epoch begins) is that of an undisturbed
run, and no save that had ended is lost. `ddp` needs `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and a c10d rendezvous to
start again at all, so all cases have them.
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

CASES = ("ddp", "ring_int8, feedback", "gossip")
_EPOCHS = 40
_LONGEST_SECONDS = 2.0  # from the first save to a kill
_LIMIT_SECONDS = 180.0  # of a whole run
_GONE = "the others gone"

Notes = dict[int, list[dict[str, Any]]]  # of each rank, in order


class _Run:
    """One torchrun, and what its ranks note."""

    def __init__(self, case: str, size: int, folder: Path) -> None:
        self._size, self._folder = size, folder
        folder.mkdir(parents=True)
        how = ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={size}"]
        command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", "benchmarks.restarted"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self._agent = subprocess.Popen(
                [*command, str(folder), case, str(_EPOCHS)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        self._end = time.monotonic() + _LIMIT_SECONDS

    def notes(self, attempt: int) -> Notes:
        """So far."""
        return {r: harness.noted(self._folder / f"attempt{attempt}.rank{r}.jsonl") for r in range(self._size)}

    def kill(self, draw: random.Random) -> tuple[float, float]:
        """One rank, some time after the first save; returns when, and how long the others lived on."""
        while not all(len(_epochs(notes)) > 1 for notes in self.notes(0).values()):
            self._wait("trained")
        time.sleep(draw.uniform(0, _LONGEST_SECONDS))
        pids = [notes[0]["pid"] for notes in self.notes(0).values()]
        victim = pids.pop(draw.randrange(self._size))
        begin = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.kill(victim, signal.SIGKILL)
        while any(harness.is_alive(pid) for pid in pids):
            self._wait("ended", 0.005)
        return begin, time.clock_gettime(time.CLOCK_BOOTTIME) - begin

    def end(self) -> bool:
        """Wait for torchrun; whether training has ended well."""
        while self._agent.poll() is None:
            self._wait("ended", 0.1)
        return self._agent.returncode == 0

    def stop(self) -> None:
        """Whatever is left; the ranks end with their agent."""
        if self._agent.poll() is None:
            self._agent.terminate()
            self._agent.wait()

    def _wait(self, what: str, seconds: float = 0.02) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"not all ranks {what} within {_LIMIT_SECONDS:.0f} s: see {self.log}")
        time.sleep(seconds)


def _epochs(notes: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The digest before each step that began an epoch."""
    return {note["step"]: note["digest"] for note in notes if note["what"] == "epoch"}


def _parts(begin: float, gone: float, notes: Notes) -> dict[str, float]:
    """Seconds of each part of a restart, in their order; together they are the whole."""
    parts = {_GONE: gone}
    before = begin + gone
    names = [note["what"] for note in notes[0] if note["what"] != "epoch"]
    for what in names[: names.index("step") + 1]:
        end = max(next(note["at"] for note in of_rank if note["what"] == what) for of_rank in notes.values())
        parts[what], before = end - before, end
    return parts


def _measure(case: str, size: int, rounds: int, draw: random.Random, scratch: Path) -> dict[str, Any]:
    """Of all rounds: seconds, their parts, and how many were whole."""
    undisturbed = _Run(case, size, scratch / "undisturbed")
    try:
        assert undisturbed.end(), f"see {undisturbed.log}"
    finally:
        undisturbed.stop()
    expected = {rank: _epochs(notes) for rank, notes in undisturbed.notes(0).items()}
    assert all(len(digests) == _EPOCHS for digests in expected.values()), f"see {undisturbed.log}"
    seconds, parts, whole = [], [], 0
    for round_ in range(rounds):
        run = _Run(case, size, scratch / f"{round_}")
        try:
            begin, gone = run.kill(draw)
            assert run.end(), f"see {run.log}"
        finally:
            run.stop()
        first, second = run.notes(0), run.notes(1)
        saved = max(max(_epochs(notes)) for notes in first.values())
        whole += all(
            min(_epochs(notes)) >= saved and expected[rank].items() >= _epochs(notes).items() and
            max(_epochs(notes)) == max(expected[rank])
            for rank, notes in second.items()
        )  # fmt: skip
        parts.append(_parts(begin, gone, second))
        seconds.append(sum(parts[-1].values()))
    medians = {what: statistics.median(of_round[what] for of_round in parts) for what in parts[0]}
    return {
        "seconds": seconds,
        "seconds_median": statistics.median(seconds),
        "restart_seconds": {what: round(value, 3) for what, value in medians.items()},
        "faults": rounds,
        "whole": whole,
        "torn": rounds - whole,
    }


def main(given: Sequence[str]) -> None:
    """Run all cases, and print a row each, with the parts below."""
    parser = harness.arguments("restart", __doc__, rounds=5, warmup=0)
    parser.add_argument("--ranks", default="2,4", help="how many, or several numbers, comma-separated")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    options = parser.parse_args(given)
    with harness.refusing(parser):
        names = harness.chosen(CASES, options.cases)
    rows = []
    for size in map(int, options.ranks.split(",")):
        for name in names:
            scratch = Path(tempfile.mkdtemp(prefix="ringstrategy-restart-"))  # kept: who finds a fault wants to see
            measured = _measure(name, size, options.rounds, random.Random(options.seed), scratch)
            rows.append(
                Row(
                    benchmark="restart",
                    case=name,
                    size=f"{size} ranks",
                    processes=size,
                    seed=options.seed,
                    threads=1,
                    cores=os.cpu_count(),
                    **harness.made_with(),
                    **measured,
                )
            )
    parts = [
        f"{row.case}, {row.size}: " + ", ".join(f"{what} {value:.2f} s" for what, value in row.restart_seconds.items())
        for row in rows
    ]
    harness.publish("from a kill to the next step", rows, options.out, parts)

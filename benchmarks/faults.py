"""How many checkpoints are whole, and how many torn, if a run is killed at random moments, in saves above all.

python -m benchmarks faults --faults 100 --out outputs/faults.jsonl

Each case trains once without faults and notes a digest of all that a rank has (parameters, optimizer, residuals) after
each epoch. Then the same run is killed at random moments, one rank or all of them, and resumed from `last.ckpt` until
it is through. It saves after each epoch of two steps, so most kills come while it saves. A checkpoint is whole if every
digest after it is that of the undisturbed run, and if no save that had ended is lost; else it is torn. A rank that does
not end by itself after another was killed is hung. A kill after the last save of a
run is not counted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import harness
from benchmarks.rows import Row
from ringstrategy import AllReduce, Cast, Gossip, RingStrategy
from ringstrategy.algorithms.base import Algorithm, GradientAlgorithm

_WIDTH = 256
_EPOCHS, _STEPS, _BATCH = 30, 2, 8
_START_SECONDS = 120.0  # from the start of the processes to the first step
_LONGEST_SECONDS = 3.0  # from the first step to a kill
_END_SECONDS = 60.0  # from a kill to the end of those that were spared

CASES: dict[str, Callable[[], Algorithm]] = {
    "checkpoint, residuals": lambda: AllReduce(Cast("bfloat16"), error_feedback=True),
    "checkpoint, gossip": lambda: Gossip(interval=3, overlap=2),
}


class _Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH))

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sin())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class _Notes(L.Callback):
    """A line of JSON as each epoch begins: how many steps are done, and the digest of what this rank has."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = trainer.optimizers[0].state
        kept = [state[parameter]["momentum_buffer"] for parameter in pl_module.parameters() if parameter in state]
        assert isinstance(trainer.strategy, RingStrategy)
        algorithm = trainer.strategy.algorithm
        if isinstance(algorithm, GradientAlgorithm):
            kept += [value for _, value in algorithm.residuals()]
        digest = harness.digest([*pl_module.parameters(), *kept])
        with self._file.open("a") as file:
            file.write(json.dumps([trainer.global_step, bytes(digest.tolist()).hex()]) + "\n")


def _be_a_rank(rank: int, size: int, port: int, case: str, folder: Path, notes: Path) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "NODE_RANK": "0"},
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    log = os.open(notes.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(size * _STEPS * _BATCH, _WIDTH, generator=generator))
    trainer = L.Trainer(
        strategy=RingStrategy(CASES[case](), timeout=timedelta(seconds=_END_SECONDS / 2)),
        accelerator="cpu",
        devices=size,
        max_epochs=_EPOCHS,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_last=True), _Notes(notes)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    trainer.fit(_Net(), DataLoader(data, batch_size=_BATCH), ckpt_path=str(last) if last.exists() else None)


class _Attempt:
    """The ranks of one start, and what they note."""

    def __init__(self, size: int, case: str, folder: Path, notes: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # so that a start costs a fork
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
        self._files = [notes.with_suffix(f".{rank}.jsonl") for rank in range(size)]
        self.processes: list[ForkServerProcess] = [
            context.Process(target=_be_a_rank, args=(rank, size, port, case, folder, file))
            for rank, file in enumerate(self._files)
        ]
        for process in self.processes:
            process.start()

    def begins(self) -> bool:
        """Wait until all ranks train, or one has ended; whether they do."""
        deadline = time.monotonic() + _START_SECONDS
        while not all(self.notes()) and all(process.exitcode is None for process in self.processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return all(self.notes())

    def notes(self) -> list[list[Any]]:
        """Of each rank: steps and digests, in order."""
        return [
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if file.exists()
            else []
            for file in self._files
        ]

    def end(self, seconds: float) -> bool:
        """Wait for all processes and end those that are left; whether all ended by themselves."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        left = [process for process in self.processes if process.exitcode is None]
        for process in left:
            process.kill()
            process.join()
        return not left


def _campaign(case: str, faults: int, size: int, draw: random.Random, scratch: Path) -> dict[str, Any]:
    """Counts of kills, and of the checkpoints that they left."""
    undisturbed = _Attempt(size, case, scratch / "undisturbed", scratch / "undisturbed.notes")
    assert undisturbed.begins(), f"see {scratch}"
    begin = time.monotonic()
    assert undisturbed.end(_START_SECONDS), f"see {scratch}"
    longest = min(_LONGEST_SECONDS, time.monotonic() - begin)
    expected = [dict(notes) for notes in undisturbed.notes()]
    assert all(len(of_rank) == _EPOCHS for of_rank in expected), f"see {scratch}"

    counts: dict[str, Any] = {"faults": 0, "whole": 0, "torn": 0, "hung": 0}
    runs = attempts = saved = 0
    killed = False  # is the checkpoint that comes next what a kill has left?
    while counts["faults"] < faults or killed:
        attempt = _Attempt(size, case, scratch / f"run{runs}", scratch / f"{attempts}.notes")
        attempts += 1
        trains = attempt.begins()
        if trains and counts["faults"] < faults:
            time.sleep(draw.uniform(0, longest))
        victims = [process for process in attempt.processes if process.exitcode is None] if trains else []
        victims = victims if draw.random() < 0.5 else victims[draw.randrange(size) :][:1]
        if counts["faults"] == faults:
            victims = []  # see how the last one goes on
        for victim in victims:
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
        counts["hung"] += not attempt.end(_END_SECONDS)
        notes = attempt.notes()
        right = trains and all(
            [theirs.get(step) for step, _ in mine] == [digest for _, digest in mine] and mine[0][0] >= saved
            for mine, theirs in zip(notes, expected, strict=True)
        )
        if killed and not trains and all(process.exitcode == 0 for process in attempt.processes):
            counts["faults"] -= 1  # it came after the last save: nothing was left to train, and so to compare
        elif killed or not right:
            counts["whole" if right else "torn"] += 1
        # as an epoch begins, the save after the one before has ended; the first line says where this attempt began
        saved = max([saved, *(step for mine in notes for step, _ in mine)])
        killed = bool(victims)
        counts["faults"] += killed
        if not killed or not right:
            runs, saved, killed = runs + 1, 0, False
    return counts


def main(given: Sequence[str]) -> None:
    """Run all cases, and print a row each."""
    parser = harness.arguments("faults", __doc__, rounds=None)
    parser.add_argument("--faults", type=int, default=100, help="kills, in each case")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    options = parser.parse_args(given)
    with harness.refusing(parser):
        names = harness.chosen(CASES, options.cases)
    rows = []
    for name in names:
        scratch = Path(tempfile.mkdtemp(prefix="ringstrategy-faults-"))  # kept: who finds a fault wants to see
        counts = _campaign(name, options.faults, options.ranks, random.Random(options.seed), scratch)
        rows.append(
            Row(
                benchmark="faults",
                case=name,
                processes=options.ranks,
                seed=options.seed,
                device="cpu",
                torch=torch.__version__,
                commit=harness.commit(),
                **counts,
            )
        )
    harness.publish(f"kills of {options.ranks} ranks that save after each epoch", rows, options.out)

"""Which files one training step, or one collective, goes through: a measure of how much one must read to follow it.

python -m benchmarks walk
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import results_of
from ringstrategy import AllReduce, BlockInt, Choco, Direct, Gaussian, LocalSGD, Nesterov, Rotated
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session import Session

_LIBRARY = str(Path(sys.modules["ringstrategy"].__file__ or "").parent)
_BESIDE = "ringstrategy-watch", "ringstrategy-store"  # threads that look for lost ranks once a second
_STEPS = 4  # the last one is watched, when all is planned, connected and compiled
WALKS: dict[str, Algorithm | None] = {
    "a gradient": AllReduce(BlockInt(8), error_feedback=True),
    "a parameter of gossip": Choco(codec=BlockInt(8)),
    "an outer gradient": LocalSGD(1, Nesterov(), Rotated(Gaussian(4)), Direct(), error_feedback=True),
    "an all_reduce of a process group": None,
}


class Walk:
    """The files of the library whose functions are called, in order, in all threads that start after this is made.

    But for those of the watchdog: a step that takes more than a second would be another walk.
    """

    def __init__(self) -> None:
        self.counts = False
        self._files: dict[int, list[str]] = {}  # by thread
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self.counts or not file.startswith(_LIBRARY):
            return
        if threading.current_thread().name in _BESIDE:
            return
        files = self._files.setdefault(threading.get_ident(), [])
        if not files or files[-1] != file:
            files.append(file)

    def end(self) -> None:
        """Watch nothing any more."""
        self.counts = False
        threading.setprofile(None)
        sys.setprofile(None)

    def found(self) -> tuple[list[str], int]:
        """The files, and how often a call leads into one that was left before."""
        seen = {Path(file).relative_to(_LIBRARY).as_posix() for files in self._files.values() for file in files}
        return sorted(seen), sum(len(files) - len(set(files)) for files in self._files.values())


@contextmanager
def _training(algorithm: Algorithm) -> Iterator[Callable[[], None]]:
    """A step of a small model."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    session = Session(module, algorithm)
    session.open(torch.device("cpu"))
    session.synchronize()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    session.bind([optimizer])

    def step() -> None:
        session.begin_batch("in a step", [optimizer], first=False, later_epoch=False)
        optimizer.zero_grad()
        session.backward(module(torch.randn(8, 64)).square().mean())
        optimizer.step()
        session.end_batch(1)
        session.algorithm.settle()  # else an exchange beside the step would be watched in part

    yield step
    session.close()


@contextmanager
def _reducing() -> Iterator[Callable[[], None]]:
    """An all-reduce of a group whose backend is ours."""
    group = dist.new_group(backend="ring_int8")
    yield lambda: dist.all_reduce(torch.randn(100_000), group=group)
    dist.destroy_process_group(group)


def walk_on_a_rank(what: str) -> tuple[list[str], int]:
    """`walked` of one rank; a launcher's environment is set."""
    dist.init_process_group("gloo")
    walk = Walk()
    algorithm = WALKS[what]
    with _reducing() if algorithm is None else _training(algorithm) as step:
        for number in range(_STEPS):
            walk.counts = number == _STEPS - 1
            step()
        walk.end()
        dist.barrier()
    return walk.found()


def walked(what: str) -> tuple[list[str], int]:
    """The files on rank 0 of two, and the returns; `what` of `WALKS`."""
    results, wrong = results_of(2, walk_on_a_rank, [what])
    if wrong:
        sys.exit(wrong[0])
    [[(files, returns), _]] = results
    return files, returns


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a walk, and with `--files` each file."""
    parser = argparse.ArgumentParser("walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name them")
    asked = parser.parse_args(arguments)
    for what in WALKS:
        files, returns = walked(what)
        print(f"{what}: {len(files)} files, {returns} calls into one that was left before")
        if asked.files:
            print(*(f"    {file}" for file in files), sep="\n")

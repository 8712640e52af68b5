"""Steps to consensus, loss against rounds and bytes of each topology and algorithm, and servers whose ranks differ.

python -m benchmarks simulation --sizes 8,64,512,4096 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import servers
from ringstrategy.algorithms.parameters.choco import Choco
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.gossip import Gossip
from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.algorithms.parameters.push_sum import PushSum
from ringstrategy.app.outputs import make_writable
from ringstrategy.app.text import text_table
from ringstrategy.codecs import BlockInt, Gaussian, Rotated
from ringstrategy.server.merges import mean, radial_directional
from ringstrategy.simulator import AllReduced, Logistic, Problem, Quadratic, Simulation
from ringstrategy.topologies import (
    Complete,
    Exponential,
    FromMatrix,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RingGraph,
    Star,
    Topology,
    Torus,
)

TOPOLOGIES: list[Topology] = [
    RingGraph(),
    Torus(),
    Hypercube(),
    Exponential(),
    OnePeerExponential(),
    RandomMatching(),
    Star(),
    Complete(),
]
_MOST = {Star(): 64, Complete(): 512}  # ranks; beyond, the hub has too much to send, or everyone
_PATIENCE = 50_000_000  # steps times ranks until consensus is given up
_EVERY = 10  # rounds of training from one look at the loss to the next
_TARGETS = (1e-1, 1e-2, 1e-3)  # of the loss at the start
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows


def steps_to_consensus(topology: Topology, size: int, outer: Nesterov | None = None) -> tuple[int, float] | None:
    """Steps of `Gossip` alone until the squared distance is 1e-6 of the first, and bytes a rank sent for each value.

    Looks at every step at first, then after every 2 % more; None: patience ended.
    """
    start = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
    simulation, nothing = Simulation(Gossip(topology, overlap=False, outer=outer), start), torch.zeros_like(start)
    first = simulation.consensus_distance()
    for step in range(1, _PATIENCE // size + 1):
        simulation.step(nothing)
        if step % max(1, step // 50) == 0 and simulation.consensus_distance() <= 1e-6 * first:
            return step, simulation.bytes_sent / start.shape[1]
    return None


def factor(eigenvalues: Tensor, outer: Nesterov) -> float:
    """By what factor a mixing shrinks differences in the long run, with a static symmetric W of these eigenvalues.

    Along an eigenvector with eigenvalue w, slow weights s and momentum m go to
    m' = mu m + (1 - w) s and s' = s - lr ((1 - w) s + mu m'). The eigenvalue 1, of the mean, is left out.
    """
    apart = 1 - eigenvalues.double().sort().values[:-1]
    lr, mu = outer.lr, outer.momentum
    of_slow = torch.stack([1 - lr * (1 + mu) * apart, torch.full_like(apart, -lr * mu * mu)], 1)
    of_momentum = torch.stack([apart, torch.full_like(apart, mu)], 1)
    return float(torch.linalg.eigvals(torch.stack([of_slow, of_momentum], 1)).abs().max())


@dataclass(frozen=True)
class Curve:
    """The mean model's excess loss over that at the start, and the bytes that a rank sent, every few rounds."""

    losses: list[float]
    bytes_sent: list[float]
    distance: float  # of a rank's parameter from the mean at the end, root of the mean square


def train(algorithm: Decentralized | LocalSGD | None, problem: Problem, rate: float, rounds: int) -> Curve:
    """SGD from zeros, with each rank's gradient at its own parameters; no algorithm: exact all-reduce."""
    start = torch.zeros(problem.size, problem.dim)
    ranks = AllReduced(start) if algorithm is None else Simulation(algorithm, start)
    first = problem.loss(start[0])
    losses, sent = [1.0], [0.0]
    for step in range(rounds):
        ranks.step(problem.gradient(ranks.values, step).mul_(-rate))
        if (step + 1) % _EVERY == 0:
            losses.append(problem.loss(ranks.mean()) / first)
            sent.append(ranks.bytes_sent)
    return Curve(losses, sent, math.sqrt(ranks.consensus_distance() / problem.dim))


def directed(size: int) -> FromMatrix:
    """Rank r shares equally between itself, r + 1 and 2 r: some hear of more ranks than others, so rows miss 1."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        targets = sorted({rank, (rank + 1) % size, 2 * rank % size})
        matrix[targets, rank] = 1 / len(targets)
    return FromMatrix(matrix.tolist())


def topologies(size: int) -> dict[str, Topology]:
    """The algorithms that can be simulated with `size` ranks, by name."""
    return {type(topology).__name__: topology for topology in TOPOLOGIES if size <= _MOST.get(topology, size)}


def algorithms(size: int) -> dict[str, Decentralized | LocalSGD | None]:
    """What trains, by name."""
    ring = RingGraph()
    return {
        "all-reduce": None,
        **{name: Gossip(topology) for name, topology in topologies(size).items()},
        "ring, overlap=False": Gossip(ring, overlap=False),
        "ring, interval=4": Gossip(ring, interval=4),
        "ring, unequal_data": Gossip(ring, unequal_data=True),
        "ring, unequal_data, overlap=False": Gossip(ring, unequal_data=True, overlap=False),
        "Choco, ring, int8": Choco(ring, BlockInt(8)),
        "Choco, ring, int4": Choco(ring, BlockInt(4)),
        "Choco, ring, rotated 2-bit": Choco(ring, Rotated(Gaussian(2))),
        "PushSum, directed": PushSum(directed(size)),
    }


def problems(size: int) -> dict[str, tuple[Problem, float]]:
    """Problems and their learning rates, by name."""
    return {
        "quadratic, equal data": (Quadratic(size), 0.1),
        "quadratic, unequal data": (Quadratic(size, unequal=1.0), 0.1),
        "logistic, equal data": (Logistic(size), 0.5),
        "logistic, unequal data": (Logistic(size, unequal=1.0), 0.5),
    }


Steps = dict[tuple[str, int], tuple[int, float] | None]


def _consensus_table(sizes: list[int], steps: Steps) -> Table:
    rows = []
    for name in topologies(1):
        row = [name]
        for size in sizes:
            found = steps.get((name, size))
            never = f"> {_PATIENCE // size}" if (name, size) in steps else "-"
            row.append(never if found is None else f"{found[0]} / {found[1]:.4g}")
        rows.append(row)
    title = (
        "Pure mixing: steps until the squared distance is 1e-6 of the first / bytes a rank sent then, for each value"
    )
    return title, ["topology", *map(str, sizes)], rows


def _momentum_table(sizes: list[int], steps: Steps) -> Table:
    rows = []
    for topology, size in itertools.product((RingGraph(), Torus(), RandomMatching()), sizes):
        name = type(topology).__name__
        outers: list[Nesterov | None] = [None, Nesterov(0.7, 0.5), Nesterov(0.7, 0.9)]
        eigenvalues, best = None, None
        if topology.static:
            eigenvalues = torch.linalg.eigvalsh(topology.matrix(size, 0))
            best = min((Nesterov(0.7, 1 - 2.0**-power) for power in range(12)), key=partial(factor, eigenvalues))
            outers.append(best)
        row = [name, str(size)]
        for outer in outers:
            found = steps[name, size] if outer is None else steps_to_consensus(topology, size, outer)
            told = f"> {_PATIENCE // size}" if found is None else str(found[0])
            if eigenvalues is not None:
                told += f" / {math.log(1e-3) / math.log(factor(eigenvalues, outer or Nesterov(1.0, 0.0))):.0f}"
            row.append(told)
        rows.append([*row, "-", "-"] if best is None else [*row, f"{best.momentum:.5g}"])
    title = "Pure mixing with an outer step of learning rate 0.7: steps, as above / by the spectrum"
    header = ["topology", "ranks", "no outer step", "momentum 0.5", "momentum 0.9", "best momentum", "which is"]
    return title, header, rows


def _size_table(sizes: list[int], rounds: int) -> Table:
    rows = []
    for name in topologies(1):
        row = [name]
        for size in sizes:
            if name not in topologies(size):
                row.append("-")
                continue
            curve = train(Gossip(topologies(size)[name]), Quadratic(size, dim=64, unequal=1.0), 0.1, rounds)
            row.append(f"{curve.losses[-1]:.2e} / {curve.distance:.2e}")
        rows.append(row)
    title = f"SGD, quadratic of 64 parameters, unequal data, learning rate 0.1: loss / distance after {rounds} rounds"
    return title, ["topology", *map(str, sizes)], rows


def _training_table(name: str, size: int, rate: float, curves: dict[str, Curve]) -> Table:
    last = len(next(iter(curves.values())).losses) - 1
    looks = [last // 8, last // 2, last]
    losses_at = [f"loss at {look * _EVERY}" for look in looks]
    header = ["", *losses_at, "distance", *(f"kB until {target:g}" for target in _TARGETS)]
    rows = []
    for algorithm, curve in curves.items():
        row = [algorithm, *(f"{curve.losses[look]:.2e}" for look in looks), f"{curve.distance:.2e}"]
        for target in _TARGETS:
            sent = [sent for loss, sent in zip(curve.losses, curve.bytes_sent, strict=True) if loss <= target]
            row.append(f"{sent[0] / 1e3:.4g}" if sent else "-")
        rows.append(row)
    return f"SGD, {name}, {size} ranks, learning rate {rate:g}", header, rows


def _server_tables(sizes: list[int], size: int, ticks: int) -> list[Table]:
    """Equal data at each size, with the default merge; and unequal data at one size, with both merges."""
    rate, default = 0.1, {"": mean}
    made = [row for each in sizes for row in servers.rows(Quadratic(each, dim=64), rate, ticks, default)]
    unequal = servers.rows(
        Quadratic(size, dim=64, unequal=1.0), rate, ticks, {**default, ", radial": radial_directional}
    )
    title = (
        f"Servers and learners, a quarter of them at half speed: SGD, quadratic of 64 parameters, {{}}, {ticks} ticks"
    )
    return [
        (title.format("equal data"), servers.HEADER, made),
        (title.format("unequal data"), servers.HEADER, list(unequal)),
    ]


_ABOUT = """# Decentralized averaging and servers, simulated

Made by `{command}` with torch {torch}.
All ranks' parameters are rows of one tensor; topologies, codecs and algorithms are the package's own, and
`tests/test_simulator.py` holds them equal to real processes. Ranks overlap the exchange with the next step, as is the
default, unless a row says otherwise; Choco's gain is 1. In pure mixing nothing is trained, and steps are exact to 2 %.

- **loss**: of the mean model on all ranks' data, above the least there is, over the same at the start (all zeros);
  looked at every 10 rounds.
- **distance**: of a rank's parameter from the mean, root of the mean square.
- **kB**, **bytes**: sent by a rank, on average over ranks (a star's hub sends as much as all others together); for
  all-reduce 2 (N-1)/N of 4 bytes a value. The exact mean that Choco needs once, at its start, is not counted.
- Trained are 256 parameters: a quadratic with curvatures from 0.1 to 1 and gradient noise of 0.1, and logistic
  regression on 32 samples a rank, 8 in a batch. Unequal data: each rank has its own optimum and curvatures, or samples
  of one label alone.

In pure mixing with an outer step, each rank's slow weights step towards what mixing gives (`Gossip(outer=...)`). The
spectrum says after how many steps the slowest difference is 1/1000; other differences are shorter-lived. The best
momentum, of 1 - 1/2^k, is that by the spectrum. Random pairs have no spectrum, and agree later with momentum.

In the last two tables each rank has its own speed. A tick is a step of a fast rank, and half a step of a slow one.
`Store`, `Learner` and `Syncer` are the package's own, with a clock that counts ticks. Learners have the defaults of
`Decoupled`, but two fragments and an interval of 16 steps. **all** and **half** are quorums. A
learner that is away 20 % is paused for 20 of 100 ticks.

- **steps**: made beside possible ones, at their own speed, of the ranks that are there.
- **bytes**: that a rank pushes, for each of its steps.
- **merges**: versions; of learners, of each fragment.
- **staleness**, **oldest**: versions between what a gradient was computed from and what it steps, on average and at
  most; of learners, for each one's last progress. **late**: share of progress that was dropped.
"""


def _markdown(table: Table) -> str:
    title, header, rows = table
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return f"\n## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(given: Sequence[str]) -> None:
    """Simulate and print; write and draw if asked."""
    parser = argparse.ArgumentParser("python -m benchmarks simulation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="8,64,512", help="ranks; 8,64,512,4096 takes twelve minutes of a core")
    parser.add_argument("--size", type=int, default=64, help="ranks that train with every algorithm")
    parser.add_argument(
        "--rounds", type=int, default=400, help="of training; half as many for each size, a quarter as many ticks"
    )
    parser.add_argument("--out", type=Path, help="folder for simulation.md; default: tables are only printed")
    options = parser.parse_args(given)
    if options.out is not None:
        make_writable(options.out, parser, "--out")
    sizes = [int(size) for size in options.sizes.split(",")]
    torch.set_num_threads(1)
    steps = {(name, size): steps_to_consensus(t, size) for size in sizes for name, t in topologies(size).items()}
    tables = [_consensus_table(sizes, steps), _momentum_table(sizes, steps), _size_table(sizes, options.rounds // 2)]
    for name, (problem, rate) in problems(options.size).items():
        curves = {
            whose: train(algorithm, problem, rate, options.rounds)
            for whose, algorithm in algorithms(options.size).items()
        }
        tables.append(_training_table(name, options.size, rate, curves))
    tables += _server_tables(sizes, options.size, options.rounds // 4)
    for title, header, rows in tables:
        print(f"{title}\n{text_table(header, rows)}\n")
    if options.out is None:
        return
    command = f"{parser.prog} --sizes {options.sizes} --size {options.size} --rounds {options.rounds}"
    about = _ABOUT.format(command=command, torch=torch.__version__)
    (options.out / "simulation.md").write_text(about + "".join(map(_markdown, tables)))
    print(f"written: {options.out / 'simulation.md'}")

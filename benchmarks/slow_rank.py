"""How fast the others train beside one slow rank: DDP, the ring and gossip, with the slow rank and without.

python benchmarks/slow_rank.py --hosts 4 --rate none --rounds 3 --out outputs/slow_rank.jsonl

Compute is emulated by sleeping, so that ranks do not compete for this machine's cores; gradients, parameters and what
is sent are real. The slow rank sleeps longer each step. It is not stopped by signals: those would hold up its messages
too, and what others lose here is to be the wait for its results alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import harness
import torch
import torch.distributed as dist
from contenders import Ours, Training, decentralized
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import Algorithm
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import Topology

_SLOW = 1
_BATCH = 4


@dataclass
class Row:
    """One line of the results file. Lists have one entry a rank: the median over the rounds, in the steady state."""

    benchmark: str
    case: str
    baseline: str
    slow_rank: int | None
    slowdown: float | None  # its compute takes this many times as long
    steps_per_second: list[float]
    waited_seconds: list[float] | None  # of one step, the training thread waited for the exchange; None: nobody counts
    steps_ahead: list[float]  # of rank 1, slow or not: the most
    steps_ahead_limit: list[int] | None  # no rank can be further ahead; None: gradients are averaged, all go in step
    ratio: float  # the other ranks' steps a second over those of the baseline, with or without the slow rank alike
    kept: float  # the other ranks' steps a second over those of the same case without the slow rank
    ranks_identical: bool
    hosts: int
    rate: str
    steps: int
    compute_seconds: float
    size: str
    device: str
    torch: str
    commit: str


class _Sleep(nn.Module):
    """Compute, emulated; remembers when each step began."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.begun: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs, later."""
        self.begun.append(time.time())
        time.sleep(self.seconds)
        return inputs


@dataclass
class _Run:
    """What one turn of a case gave; lists have one entry a rank."""

    steps_per_second: list[float]
    waited: list[float]  # NaN: nobody counts
    ahead: list[float]


class _Case:
    """One way of averaging, with and without the slow rank."""

    def __init__(self, name: str, algorithm: Algorithm | None, options: argparse.Namespace, *, slowed: bool) -> None:
        self.name, self.algorithm, self.slowed = name, algorithm, slowed
        seconds = options.compute_ms / 1e3
        self._sleep = _Sleep(seconds * options.slowdown if slowed and dist.get_rank() == _SLOW else seconds)
        torch.manual_seed(0)
        model = nn.Sequential(self._sleep, nn.Linear(options.width, options.width))
        data = torch.Generator().manual_seed(1000 + dist.get_rank())
        inputs, targets = torch.randn(2, _BATCH, options.width, generator=data)
        steps = math.ceil(options.steps / options.interval) * options.interval  # whole intervals in all cases
        batches = [(inputs, targets)] * steps
        self.training: Training = (
            Training(DistributedDataParallel(model), batches)
            if algorithm is None
            else Ours(model, batches, algorithm, timedelta(seconds=options.timeout))
        )
        self.runs: list[_Run] = []

    def run(self) -> None:
        """As many steps as it takes to run far ahead of the slow rank, then as many that count, without a break."""
        dist.barrier()
        self.training.run()
        waited = self.training.waited()
        self._sleep.begun.clear()
        self.training.run()
        begun, seconds, now = self._sleep.begun, time.time() - self._sleep.begun[0], self.training.waited()
        waited_a_step = float("nan") if waited is None or now is None else (now - waited) / len(begun)
        ranks = harness.of_all_ranks([len(begun) / seconds, waited_a_step, *begun])
        times = [begun for _, _, *begun in ranks]
        self.runs.append(
            _Run(
                steps_per_second=[rank[0] for rank in ranks],
                waited=[rank[1] for rank in ranks],
                ahead=[_most_ahead(theirs, times[_SLOW]) for theirs in times],
            )
        )
        self.training.result()  # a collective: nothing is under way when the next case begins

    def medians(self, quantity: Callable[[_Run], Sequence[float]]) -> list[float]:
        """Of each rank, over the rounds."""
        return [statistics.median(values) for values in zip(*map(quantity, self.runs), strict=True)]

    def others(self) -> float:
        """Steps a second of the other ranks: their mean."""
        rates = self.medians(lambda run: run.steps_per_second)
        return statistics.mean(rate for rank, rate in enumerate(rates) if rank != _SLOW)


def _most_ahead(begun: Sequence[float], slow: Sequence[float]) -> int:
    """The most steps that a rank had begun and the slow one had not, seen in the middle of each of the slow one's."""
    middles = [(before + after) / 2 for before, after in pairwise(slow)]
    return max(sum(time < middle for time in begun) - step for step, middle in enumerate(middles, 1))


def steps_ahead_limit(algorithm: Decentralized, size: int, slow: int) -> list[int]:
    """How many steps each rank can be ahead of the slow one.

    Nobody ends a mixing before those it exchanges with begin it, nor they before their own last one has ended. So a
    rank is ahead by no more mixings than it takes news to come from the slow one: without time-varying graphs, its
    distance. Overlap lets as many more steps pass as corrections come late.
    """
    farthest = [
        max(
            _mixings_from(algorithm.topology, size, slow, rank, last) for last in range(algorithm.topology.period(size))
        )
        for rank in range(size)
    ]
    return [mixings * algorithm.interval + algorithm.late if mixings else 0 for mixings in farthest]


def _mixings_from(topology: Topology, size: int, slow: int, rank: int, last: int) -> int:
    """Mixings up to `last` until `rank` depends on `slow`."""
    reached, mixings = {rank}, 0
    while slow not in reached:
        matrix = topology.matrix(size, (last - mixings) % topology.period(size))
        linked = (matrix != 0) | (matrix.T != 0)  # a message ends for its sender when it is received
        reached |= {peer for one in reached for peer in range(size) if linked[one, peer]}
        mixings += 1
    return mixings


def _algorithms(options: argparse.Namespace) -> dict[str, Algorithm | None]:
    algorithms: dict[str, Algorithm | None] = {"ddp": None}
    for name in ("ring_int8", *decentralized()):
        algorithms[name] = STRATEGIES[name]()
    for name in decentralized():
        rarely = STRATEGIES[name]()
        assert isinstance(rarely, Decentralized)
        rarely.interval = options.interval
        algorithms[f"{name} every {options.interval}"] = rarely
    return {name: algorithms[name] for name in dict.fromkeys(["ddp", *harness.chosen(algorithms, options)])}


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    if options.hosts <= _SLOW or options.processes > 1:
        sys.exit("one rank slows down those on other hosts: --hosts 2 or more, --processes 1")
    cases = [
        _Case(name, algorithm, options, slowed=slowed)
        for slowed in (False, True)
        for name, algorithm in _algorithms(options).items()
    ]
    for round_ in range(options.warmup + options.rounds):
        for place in range(len(cases)):
            cases[(place + round_) % len(cases)].run()
    for case in cases:
        del case.runs[: options.warmup]
    revision = harness.commit()
    rows = [_row(case, cases, revision, options) for case in cases]
    for case in cases:
        case.training.close()
    if dist.get_rank() == 0:
        _report(rows, options)


def _row(case: _Case, cases: Sequence[_Case], revision: str, options: argparse.Namespace) -> Row:
    [baseline] = [other for other in cases if other.name == "ddp" and other.slowed == case.slowed]
    [healthy] = [other for other in cases if other.name == case.name and not other.slowed]
    limit = None
    if isinstance(case.algorithm, Decentralized):
        limit = steps_ahead_limit(case.algorithm, options.hosts, _SLOW)
    return Row(
        benchmark="slow rank",
        case=case.name,
        baseline=baseline.name,
        slow_rank=_SLOW if case.slowed else None,
        slowdown=options.slowdown if case.slowed else None,
        steps_per_second=case.medians(lambda run: run.steps_per_second),
        waited_seconds=None if case.training.waited() is None else case.medians(lambda run: run.waited),
        steps_ahead=case.medians(lambda run: run.ahead),
        steps_ahead_limit=limit,
        ratio=case.others() / baseline.others(),
        kept=case.others() / healthy.others(),
        ranks_identical=harness.identical_on_all_ranks(case.training.result()),
        hosts=options.hosts,
        rate=options.rate,
        steps=options.steps,
        compute_seconds=options.compute_ms / 1e3,
        size=f"compute emulated by sleeping {options.compute_ms:g} ms, {options.width**2 / 1e6:.2g} M parameters",
        device="cpu",
        torch=torch.__version__,
        commit=revision,
    )


def _report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    table = Table(
        title=f"{rows[0].size}; {rows[0].hosts} hosts at {rows[0].rate}; {options.steps} steps after as many; "
        f"{os.cpu_count()} cores",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    headings = (
        "slow rank",
        "others' steps/s",
        "slow's",
        "x ddp",
        "x healthy",
        "others wait",
        "ahead",
        "at most",
        "same bits",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        others = [rank for rank in range(row.hosts) if rank != _SLOW]
        table.add_row(
            row.case,
            "no" if row.slow_rank is None else f"rank {row.slow_rank}",
            " ".join(f"{row.steps_per_second[rank]:.2f}" for rank in others),
            f"{row.steps_per_second[_SLOW]:.2f}",
            f"{row.ratio:.3f}",
            f"{row.kept:.3f}",
            "-" if row.waited_seconds is None else " ".join(f"{1e3 * row.waited_seconds[rank]:.0f}" for rank in others),
            " ".join(f"{row.steps_ahead[rank]:g}" for rank in others),
            "-" if row.steps_ahead_limit is None else " ".join(f"{row.steps_ahead_limit[rank]}" for rank in others),
            "yes" if row.ranks_identical else "NO",
        )
    console = Console(width=160)
    console.print(table)
    console.print(
        f"others wait: ms a step. ahead: the most steps that each of the others had begun and rank {_SLOW} had not. It "
        "has a limit: to end a mixing, a rank needs those it exchanges with to have begun it, and they had to end the "
        "one before. So in the long run nobody trains faster than the slowest; intervals and overlap let others run "
        "ahead further before they wait, which evens out delays that pass.",
        highlight=False,
    )
    harness.write(rows, options.out)


if __name__ == "__main__":
    parser = harness.arguments("The other ranks' speed beside a slow one; compute is emulated by sleeping.")
    parser.add_argument("--steps", type=int, default=40, help="that count, after as many that do not")
    parser.add_argument("--compute-ms", type=float, default=50.0, help="how long a step's compute takes")
    parser.add_argument("--slowdown", type=float, default=2.0, help=f"of rank {_SLOW}'s compute")
    parser.add_argument("--interval", type=int, default=4, help="also gossip every so many steps")
    parser.add_argument("--width", type=int, default=512, help="of the one linear layer")
    parser.set_defaults(rounds=3, warmup=0)  # each turn of a case begins with steps that do not count
    harness.main(parser, worker)

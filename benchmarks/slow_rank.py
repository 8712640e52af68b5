"""How fast the others train beside one slow rank: DDP, the ring and gossip, with the slow rank and without.

python -m benchmarks slow_rank --hosts 4 --rate none --rounds 3 --out outputs/slow_rank.jsonl

Compute is emulated by sleeping, so that ranks do not compete for this machine's cores; gradients, parameters and what
is sent are real. The slow rank sleeps longer each step. It is not stopped by signals: those would hold up its messages
too, and what others lose here is to be the wait for its results alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.contenders import DDP, Ours, TorchDDP, Training, decentralized, named
from benchmarks.rows import Row
from ringstrategy import Algorithm
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES
from ringstrategy.topologies import Topology

_SLOW = 1
_BATCH = 4
_WIDTH = 512  # of the one linear layer
_RARELY = 4  # gossip also every so many steps


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


class _Case:
    """One way of averaging, with and without the slow rank."""

    def __init__(self, name: str, algorithm: Algorithm | None, options: argparse.Namespace, *, slowed: bool) -> None:
        self.name, self.algorithm, self.slowed = name, algorithm, slowed
        seconds = options.compute_ms / 1e3
        self._sleep = _Sleep(seconds * options.slowdown if slowed and dist.get_rank() == _SLOW else seconds)
        torch.manual_seed(0)
        model = nn.Sequential(self._sleep, nn.Linear(_WIDTH, _WIDTH))
        data = torch.Generator().manual_seed(1000 + dist.get_rank())
        inputs, targets = torch.randn(2, _BATCH, _WIDTH, generator=data)
        steps = math.ceil(options.steps / _RARELY) * _RARELY  # whole intervals in all cases
        batches = [(inputs, targets)] * steps
        self.training: Training = TorchDDP(model, batches) if algorithm is None else Ours(model, batches, algorithm)
        self.turns: list[list[tuple[float, float, int]]] = []  # of each turn, each rank's

    def run(self) -> None:
        """As many steps as it takes to run far ahead of the slow rank, then as many that count, without a break."""
        dist.barrier()
        self.training.run()
        waited = self.training.waited()
        self._sleep.begun.clear()
        self.training.run()
        begun, seconds, now = self._sleep.begun, time.time() - self._sleep.begun[0], self.training.waited()
        waited_a_step = float("nan") if waited is None or now is None else (now - waited) / len(begun)
        mine = torch.tensor([len(begun) / seconds, waited_a_step, *begun], dtype=torch.float64)
        ranks = [theirs.tolist() for theirs in harness.of_all_ranks(mine)]
        slow = ranks[_SLOW][2:]
        self.turns.append([(rate, waits, _most_ahead(times, slow)) for rate, waits, *times in ranks])
        self.training.result()  # a collective: nothing is under way when the next case begins

    def medians(self) -> list[list[float]]:
        """Over the turns, for each rank: steps a second, seconds waited a step (NaN: nobody counts), steps ahead."""
        quantities: list[list[float]] = np.median(self.turns, axis=0).T.tolist()
        return quantities

    def others(self) -> float:
        """Steps a second of the other ranks: their mean."""
        return float(np.mean(np.delete(self.medians()[0], _SLOW)))


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
    period = algorithm.topology.period(size)
    farthest = [
        max(_mixings_from(algorithm.topology, size, slow, rank, last) for last in range(period)) for rank in range(size)
    ]
    return [mixings * algorithm.interval + algorithm.schedule.late if mixings else 0 for mixings in farthest]


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
    algorithms: dict[str, Algorithm | None] = {DDP: None}
    algorithms |= {name: STRATEGIES[name]() for name in ("ring_int8", *decentralized())}
    for name in decentralized():
        algorithms[f"{name} every {_RARELY}"] = named(name, interval=_RARELY)
    return {name: algorithms[name] for name in dict.fromkeys([DDP, *harness.chosen(algorithms, options.cases)])}


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    cases = [
        _Case(name, algorithm, options, slowed=slowed)
        for slowed in (False, True)
        for name, algorithm in _algorithms(options).items()
    ]
    for case, counts in harness.turns(cases, options.rounds, options.warmup):
        case.run()
        if not counts:
            case.turns.clear()
    rows = [_row(case, cases, options) for case in cases]
    for case in cases:
        case.training.close()
    if dist.get_rank() == 0:
        harness.publish(f"{rows[0].size}; {harness.network(options)}", rows, options.out, [_NOTE])


def _row(case: _Case, cases: Sequence[_Case], options: argparse.Namespace) -> Row:
    [baseline] = [other for other in cases if other.name == DDP and other.slowed == case.slowed]
    [healthy] = [other for other in cases if other.name == case.name and not other.slowed]
    rates, waits, ahead = case.medians()
    limit = None
    if isinstance(case.algorithm, Decentralized):
        limit = steps_ahead_limit(case.algorithm, options.hosts, _SLOW)
    return Row(
        benchmark="slow rank",
        case=case.name,
        baseline=baseline.name,
        slow_rank=_SLOW if case.slowed else None,
        slowdown=options.slowdown if case.slowed else None,
        steps_per_second=rates,
        waited_seconds=None if case.training.waited() is None else waits,
        steps_ahead=ahead,
        steps_ahead_limit=limit,
        ratio=case.others() / baseline.others(),
        kept=case.others() / healthy.others(),
        ranks_identical=harness.identical_on_all_ranks(case.training.result()),
        steps=options.steps,
        compute_seconds=options.compute_ms / 1e3,
        size=f"compute emulated by sleeping {options.compute_ms:g} ms, {_WIDTH**2 / 1e6:.2g} M parameters",
        **harness.facts(options),
    )


_NOTE = (
    f"Each entry is a rank's; rank {_SLOW} is the slow one. waited: seconds a step. steps ahead: the most that a rank "
    "had begun and the slow one had not. That has a limit, at most: to end a mixing, a rank needs those it exchanges "
    "with to have begun it, and they had to end the one before. So in the long run nobody trains faster than the "
    "slowest; intervals and overlap let others run ahead further before they wait, which evens out delays that pass."
)


def _check(options: argparse.Namespace) -> None:
    if min(options.hosts) <= _SLOW or options.processes > 1:
        raise ValueError("one rank slows down those on other hosts: --hosts 2 or more, --processes 1")


def main(given: Sequence[str]) -> None:
    """The command."""
    # no warm-up: each turn of a case begins with steps that do not count
    parser = harness.over_hosts("slow_rank", __doc__, rounds=3, warmup=0)
    parser.add_argument("--steps", type=int, default=40, help="that count, after as many that do not")
    parser.add_argument("--compute-ms", type=float, default=50.0, help="how long a step's compute takes")
    parser.add_argument("--slowdown", type=float, default=2.0, help=f"of rank {_SLOW}'s compute")
    harness.run(parser, given, worker, check=_check)

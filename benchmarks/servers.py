"""Rows of `simulation`: parameter servers and learners of a syncer, where a quarter of the ranks has half the speed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.codecs import BlockInt, Cast
from ringstrategy.server.learner import Learner
from ringstrategy.server.merges import Merge
from ringstrategy.server.plan import planned
from ringstrategy.server.rules import Async, Staleness, Sync
from ringstrategy.simulator import AllReduced, Learners, Pace, Problem, Workers

HEADER = ["", "ranks", "loss", "steps", "bytes", "merges", "staleness", "oldest", "late"]
_SLOW = 2  # ticks of a slow rank's step


def rows(problem: Problem, rate: float, ticks: int, merges: Mapping[str, Merge]) -> Iterator[list[str]]:
    """A row for exact all-reduce, for each rule of a server, and for learners with each of these merges."""
    start, size = torch.zeros(problem.dim), str(problem.size)
    periods = [_SLOW if rank % 4 == 3 else 1 for rank in range(problem.size)]
    turns = ticks // _SLOW
    ranks, first = AllReduced(start.expand(problem.size, -1)), problem.loss(start)
    for turn in range(turns):
        ranks.step(problem.gradient(ranks.values, turn).mul_(-rate))
    share = problem.size / _SLOW / sum(1 / period for period in periods)
    sent = ranks.bytes_sent / turns
    loss = problem.loss(ranks.mean()) / first
    yield ["all-reduce", size, f"{loss:.2e}", f"{share:.3f}", f"{sent:.1f}", str(turns), "0", "0", "-"]

    def common(simulated: Workers | Learners) -> list[str]:
        made, possible = float(simulated.pace.steps.sum()), float(simulated.pace.possible.sum())
        loss, sent = problem.loss(simulated.shared()) / first, simulated.bytes_sent * problem.size / made
        return [size, f"{loss:.2e}", f"{made / possible:.3f}", f"{sent:.1f}"]

    for name, rule in {"sync": Sync(problem.size), "async": Async(), "Staleness(4)": Staleness(4)}.items():
        workers = Workers(rule, partial(torch.optim.SGD, lr=rate), start, Pace(periods))
        for tick in range(ticks):
            workers.step(problem.gradient(workers.values, tick))
        ages = workers.staleness
        age = sum(versions * pushes for versions, pushes in ages.items()) / sum(ages.values())
        merged = workers.store.versions[0]
        yield [f"servers, {name}", *common(workers), str(merged), f"{age:.1f}", str(max(ages)), "-"]
    half = problem.size // 2
    for name, merge in merges.items():
        for of, quorum, away in (("all", None, 0.0), ("half", half, 0.0), ("half, away 20 %", half, 0.2)):
            with contextlib.ExitStack() as ends:
                folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
                make = partial(_learner, quorum=quorum, merge=merge)
                learners = Learners(make, start, Pace(periods, away), folder)
                ends.callback(learners.close)
                for tick in range(ticks):
                    learners.step(problem.gradient(learners.values, tick).mul_(-rate))
                report = learners.syncer.report()
                told = report["learners"].values()
                oldest = max(each["staleness"] for each in told)
                age, late, taken = (sum(each[what] for each in told) for what in ("staleness", "late", "taken"))
                ages_and_late = f"{age / problem.size:.1f}", str(oldest), f"{late / max(1, late + taken):.0%}"
                yield [f"learners{name}, {of}", *common(learners), str(max(report["versions"])), *ages_and_late]


def _learner(row: Tensor, name: str, quorum: int | None, merge: Merge) -> Learner:
    """Options are the defaults of `Decoupled`, but for two fragments and an interval of 16 steps."""
    fragments = [{"values": part} for part in row.tensor_split(2)]
    codec, broadcast = BlockInt(8), Cast("bfloat16")
    parts = {"codec": codec, "broadcast": broadcast, "merge": merge, "outer": Nesterov(0.4, 0.8)}
    plan = planned(fragments, **parts, quorum=quorum, grace="auto")
    return Learner(fragments, plan, codec=codec, broadcast=broadcast, interval=16, overlap=2, blend=0.5, name=name)

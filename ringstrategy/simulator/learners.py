"""Workers of a parameter server and learners of Decoupled DiLoCo, thousands in one process and in virtual time.

A tick is the time of a step at full speed. `Store`, `Learner` and `Syncer` are those of training. The parameters of all
ranks are the rows of one tensor.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.codecs.base import derive_seed
from ringstrategy.requests.within import answered
from ringstrategy.server.folder import Folder
from ringstrategy.server.fragment import Fragment
from ringstrategy.server.learner import Learner
from ringstrategy.server.merges import total_
from ringstrategy.server.rules import Rule, Sync
from ringstrategy.server.store import Push, Store, Taken
from ringstrategy.server.syncer import Syncer


class Pace:
    """The ticks in which ranks end their steps.

    Args:
        periods: ticks of a step, by rank.
        away: share of the time that each rank is away, in one spell a cycle. Its step goes on when it is back.
        cycle: ticks. When in it a rank is away is drawn for each rank.
        seed: draws other spells, and other orders within a tick.

    Attributes:
        tick: how many have passed.
        there: (ranks,) bool: which ranks are not away.
        steps: (ranks,) that each rank has made.
        possible: (ranks,) steps that each rank could have made while it was there.
    """

    def __init__(self, periods: Sequence[int], away: float = 0.0, cycle: int = 100, seed: int = 0) -> None:
        self.tick, self._away, self._cycle, self._seed = 0, away, cycle, seed
        self._periods = torch.tensor(periods)
        self._phases = torch.randint(cycle, (len(periods),), generator=self._generator(1))
        self._until_end = self._periods.clone()  # of the step; below 0 while a rank waits
        self.there = torch.ones(len(periods), dtype=torch.bool)
        self.steps, self.possible = torch.zeros_like(self._periods), torch.zeros(len(periods))

    def order(self, tick: int) -> list[int]:
        """All ranks, in the order in which those that end a step in this tick push."""
        drawn: list[int] = torch.randperm(len(self.steps), generator=self._generator(2, tick)).tolist()
        return drawn

    def advance(self) -> list[int]:
        """Let a tick pass. Returns the ranks that end a step in it, which wait until `begin`."""
        self.there = (self._phases + self.tick) % self._cycle >= self._away * self._cycle
        self._until_end -= self.there.long()
        self.possible += self.there / self._periods
        ends = self.there & (self._until_end == 0)
        self.steps += ends
        ended: list[bool] = ends.tolist()
        order = [rank for rank in self.order(self.tick) if ended[rank]]
        self.tick += 1
        return order

    def begin(self, rank: int) -> None:
        """Begin its next step."""
        self._until_end[rank] = self._periods[rank]

    def _generator(self, *indices: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self._seed, *indices))


class Workers:
    """Workers of a parameter server: each pushes its gradient, and pulls the parameters that its server has made of it.

    A worker that is away is paused, and the server does not notice.

    Args:
        rule: of the server: `Async`, `Staleness`, or `Sync` of all workers.
        optimizer: makes the optimizer of the server.
        start: (dim,), the first parameters.
        pace: of the workers; copied.

    Attributes:
        values: (workers, dim), the parameters as each worker pulled them.
        pace: ticks and steps until now.
        store: parameters and versions of the server.
        staleness: the number of merged pushes, by how many versions old they were.
    """

    def __init__(
        self, rule: Rule, optimizer: Callable[[list[Parameter]], Optimizer], start: Tensor, pace: Pace
    ) -> None:
        ranks = range(len(pace.steps))
        self.pace, self.values, self.staleness = copy.deepcopy(pace), start.repeat(len(ranks), 1), Counter[int]()
        self.store = Store([Fragment(start, optimizer)], rule, total_, progress=False, digests=False)
        for rank in ranks:
            self.store.join(_name(rank))
        self._share = 1 / rule.learners if isinstance(rule, Sync) else 1.0  # of a gradient; `total_` adds them up
        self._bases, self._waiting = [0 for _ in ranks], list[int]()

    def step(self, gradients: Tensor) -> None:
        """Let a tick pass.

        Args:
            gradients: (workers, dim), at `values`; used are those of workers that end a step.
        """
        for rank in self.pace.advance():
            known = int(self.pace.steps[rank]), self.store.boot, self._bases[rank]
            push = Push(_name(rank), *known, 1.0, gradients[rank] * self._share)
            taken = self.store.push(0, push, self.pace.tick)
            assert taken is Taken.TAKEN
            for fragment in self.store.due(self.pace.tick):
                event = self.store.merge(fragment, self.pace.tick)
                self.staleness.update(event["version"] - 1 - each["base"] for each in event["pushes"])
            if not self._pull(rank):
                self._waiting.append(rank)
        self._waiting = [rank for rank in self._waiting if not self._pull(rank)]

    def _pull(self, rank: int) -> bool:
        """Begin the next step, if the push is merged and the rule allows it."""
        pulled = self.store.pull(0, self._bases[rank])
        if pulled is None or not self.store.may_go_on(_name(rank)):
            return False
        self._bases[rank], self.values[rank] = pulled
        self.pace.begin(rank)
        return True

    def shared(self) -> Tensor:
        """Shape (dim,): the server's parameters."""
        return self.store.fragments[0].values.clone()

    @property
    def bytes_sent(self) -> float:
        """By a worker so far, on average over the workers."""
        return float(self.pace.steps.double().mean()) * self.values[0].nbytes


class Learners:
    """Learners of Decoupled DiLoCo, and their syncer, which merges at the end of each tick.

    A learner that is away is paused, and gone for the syncer. When it is back, it joins with the parameters it had.

    Args:
        make: makes a learner of a row of `values` and a name. Its grace counts ticks.
        start: (dim,), the first parameters.
        pace: of the learners; copied.
        folder: of the syncer.

    Attributes:
        values: (learners, dim), the parameters of each learner.
        pace: ticks and steps until now.
        learners: by rank.
        syncer: its `report` has versions, late pushes, staleness and bytes.
    """

    def __init__(self, make: Callable[[Tensor, str], Learner], start: Tensor, pace: Pace, folder: Path) -> None:
        self.pace, self.values = copy.deepcopy(pace), start.repeat(len(pace.steps), 1)
        self._folder = Folder(folder)
        self.syncer = Syncer(self._folder, parts={"Nesterov": Nesterov}, clock=lambda: float(self.pace.tick))
        self.learners = [make(row, _name(rank)) for rank, row in enumerate(self.values)]
        for learner in self.learners:
            self._exchange(learner)

    def step(self, changes: Tensor) -> None:
        """Let a tick pass.

        Args:
            changes: (learners, dim), by their optimizers; used are those of learners that end a step.
        """
        were, ended = self.pace.there, self.pace.advance()
        self.values[ended] += changes[ended]
        for rank in (were & ~self.pace.there).nonzero().flatten().tolist():
            self.syncer.gone(self.learners[rank].name)
        for rank in ended:
            self.learners[rank].after_step(1.0)
            self._exchange(self.learners[rank])
            self.pace.begin(rank)
        self.syncer.merge_due()

    def _exchange(self, learner: Learner) -> None:
        learner.exchange(partial(answered, self.syncer.answer, learner.name))
        for fragment, _, _ in learner.due():
            learner.take(fragment)

    def shared(self) -> Tensor:
        """Shape (dim,): the parameters that the syncer has saved."""
        fragments = range(len(self.learners[0].plan["fragments"]))
        return torch.cat([self._folder.state(fragment)["values"] for fragment in fragments])

    @property
    def bytes_sent(self) -> float:
        """In pushes, by a learner so far, on average over the learners."""
        told: dict[str, dict[str, float]] = self.syncer.report()["learners"]
        return sum(each["bytes in"] for each in told.values()) / len(told)

    def close(self) -> None:
        """Let another syncer have the folder."""
        self._folder.close()


def _name(rank: int) -> str:
    return f"{rank:06d}"

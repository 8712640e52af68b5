"""When pushes to a fragment are merged, and which of them still count. Rules see neither sockets nor clocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from typing_extensions import override

AT_ONCE, NEVER = -inf, inf
_SHARE = 8


class Rule(ABC):
    """A frozen dataclass of its options."""

    def counts(self, base: int, version: int) -> bool:
        """Whether a push that was computed from version `base` still counts at this version."""
        return base == version

    @abstractmethod
    def when(self, arrived: Mapping[str, float], living: Collection[str], merged: float) -> float:
        """The time from which on to merge what has arrived. `NEVER`: not unless something changes.

        Args:
            arrived: by learner, when; at least one.
            living: the learners that are there, with or without a push.
            merged: when the fragment was merged last, or else its first push.
        """

    def lets(self, learner: str, steps: Mapping[str, int]) -> bool:
        """Whether a learner may begin another step, given how many each living one has pushed."""
        del learner, steps
        return True

    def rate(self, staleness: int) -> float:
        """By what to multiply the learning rate for a push that is so many versions old."""
        del staleness
        return 1.0


@dataclass(frozen=True)
class Sync(Rule):
    """Every learner pushes to every version, as if one process had all their data.

    Args:
        learners: how many.
    """

    learners: int

    @override
    def when(self, arrived: Mapping[str, float], living: Collection[str], merged: float) -> float:
        return AT_ONCE if len(arrived) == self.learners else NEVER


@dataclass(frozen=True)
class Async(Rule):
    """Every push is a step of its own, and none is refused.

    The learning rate is divided by 1 + staleness (staleness-aware SGD, Zhang et al. 2016): asynchronous momentum
    diverges without. Not the gradient, whose scale means nothing to Adam.
    """

    @override
    def counts(self, base: int, version: int) -> bool:
        return True

    @override
    def when(self, arrived: Mapping[str, float], living: Collection[str], merged: float) -> float:
        return AT_ONCE

    @override
    def rate(self, staleness: int) -> float:
        return 1 / (1 + staleness)


@dataclass(frozen=True)
class Staleness(Async):
    """As `Async`, but nobody is more than so many steps ahead of the slowest (Ho et al. 2013).

    Args:
        most: steps. More: fast learners wait less, and gradients are older. In versions a push may be older than that.
    """

    most: int

    @override
    def lets(self, learner: str, steps: Mapping[str, int]) -> bool:
        return steps[learner] - min(steps.values()) <= self.most


@dataclass(frozen=True)
class Quorum(Rule):
    """Merge as soon as enough learners have pushed, and a while has passed for others. A later push does not count.

    What is late is not lost: its learner keeps its own steps, and its next push has what is left of them. Added to the
    next merge in full it would count twice, and training would diverge.

    Learners push once in so many steps of their own. Without a grace one that is only a little slower than the quorum
    comes shortly after each merge, and none of its pushes counts.

    Args:
        least: how many; of fewer living learners all.
        grace: seconds after that many. "auto": an eighth of the time that the quorum took since the last merge.
        auto_least: seconds that "auto" waits at least.
    """

    least: int
    grace: float | Literal["auto"] = 0.0
    auto_least: float = 0.0

    @override
    def when(self, arrived: Mapping[str, float], living: Collection[str], merged: float) -> float:
        enough = max(1, min(self.least, len(living)))
        if len(arrived) < enough:
            return NEVER
        if arrived.keys() >= set(living):
            return AT_ONCE
        there = sorted(arrived.values())[enough - 1]
        return there + (max(self.auto_least, (there - merged) / _SHARE) if self.grace == "auto" else self.grace)

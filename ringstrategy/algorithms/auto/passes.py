"""Passes with one algorithm, timed, and the profile of the backward that they show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringstrategy.cost.model import Work
from ringstrategy.cost.step import Profile
from ringstrategy.transport.agree import all_gather_floats
from ringstrategy.transport.base import Peers

_WARM_UP = 3  # passes before those that count, and
_TIMED = 5  # passes that do


@dataclass
class Passes:
    """Backward passes since the algorithm was taken.

    Attributes:
        count: how many.
        seconds: of each, while candidates are compared.
        waited: how much of it this rank waited for the exchange.
    """

    count: int = 0
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @property
    def enough(self) -> bool:
        """For a profile?"""
        return self.count >= _WARM_UP + _TIMED

    def profile(self, launches: Sequence[tuple[int, float]], pack: Work, peers: Peers) -> Profile:
        """The slowest rank's backward, and when rank 0's gradients were complete in the last pass; same on all ranks.

        Args:
            launches: of each bucket how many values it has, and when in the last backward it was complete.
            pack: what it takes to copy gradients into buckets, which is no part of the profile.
            peers: all of whom call it.
        """
        timed = list(zip(self.seconds, self.waited, strict=True))[_WARM_UP:]
        mine = [statistics.median(seconds - waited for seconds, waited in timed)]
        mine += [x for numel, seconds in launches for x in (float(numel), seconds)]
        everyone = all_gather_floats(peers, mine)
        # use rank 0's figures, so that all ranks predict the same
        own, numels, times = everyone[0][0], everyone[0][1::2], everyone[0][2::2]
        backward = max(0.0, max(row[0] for row in everyone) - pack.seconds(round(sum(numels))))
        if own <= 0 or sum(numels) == 0:
            return Profile(rest=0.0, backward=backward)
        points, filled = [(0.0, 0.0)], 0.0
        for numel, seconds in zip(numels, times, strict=True):
            filled += numel
            points.append((filled / sum(numels), max(points[-1][1], min(1.0, seconds / own))))
        return Profile(rest=0.0, backward=backward, ready=tuple(points))

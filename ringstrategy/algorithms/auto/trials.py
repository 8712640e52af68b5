"""Trials of candidates in rounds: whose turn is next, who stays in, who wins. Knows no clock and no peers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

_WARM_UP = 1  # passes of a turn before those that count
PASSES = _WARM_UP + 3  # of a turn
ROUNDS = 4  # at most; each candidate has one turn a round, so that disturbances hit all of them
_STILL_IN = 1.1  # times as long as the best so far, and a candidate is in the next round too
_ALIKE = 1.02  # of candidates that come so near the best the most usual is kept


class Trials:
    """Turns until there is a winner: `end_turn` after each, `judge` after the last of a round.

    Ranks stay in step because only counts of passes end a turn, and because `judge` is given the same on all ranks.

    Args:
        tried: places of candidates, in the order of their first turns.

    Attributes:
        rounds: begun so far.
    """

    def __init__(self, tried: Sequence[int]) -> None:
        self.rounds = 1
        self._timed: dict[int, list[float]] = {place: [] for place in tried}
        self._still_in = list(tried)  # in this round
        self._turns = list(tried)  # of this round still to come, the one under way first

    @property
    def turn(self) -> int:
        """The place of the candidate whose turn it is."""
        return self._turns[0]

    @property
    def round_over(self) -> bool:
        """Has everyone still in had a turn? Then `judge`."""
        return not self._turns

    def end_turn(self, seconds: Sequence[float]) -> None:
        """Record the seconds of the `PASSES` passes of this turn."""
        self._timed[self._turns.pop(0)] += seconds[_WARM_UP:]

    def medians(self) -> dict[int, float]:
        """Seconds of a pass on this rank, over all rounds, by place; in the order of `tried`."""
        return {place: statistics.median(timed) for place, timed in self._timed.items()}

    def judge(self, seconds: Mapping[int, float]) -> int | None:
        """The place of the winner. None: the candidates near the best go on to another round.

        Who fell out cannot win: the machine may have been faster then.

        Args:
            seconds: what the slowest rank's medians are, by place.
        """
        least = min(seconds[place] for place in self._still_in)
        near = [place for place in self._still_in if seconds[place] <= _STILL_IN * least]
        if len(near) == 1 or self.rounds == ROUNDS:
            return min(place for place in near if seconds[place] <= _ALIKE * least)
        self.rounds += 1
        self._still_in = near[::-1]  # to and fro
        self._turns = list(self._still_in)
        return None

"""Who is tried when, who stays in and who wins: candidates take turns in rounds. Knows no clock and no peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ringstrategy.codecs.base import Codec

_NEAR = 1.25  # candidates predicted to take up to so many times as long as the best are tried
_MOST_TRIED = 4
_NEAR_OTHER_CODEC = 1.5  # the best of each codec likewise, since codecs differ most in what no model knows
_WARM_UP = 1  # passes of a turn before those that count, and
_TIMED = 3  # passes that do
_ROUNDS = 4  # at most, each candidate once a round, so that what comes and goes hits all alike
_STILL_IN = 1.1  # times as long as the best so far, and a candidate is in the next round too
_ALIKE = 1.02  # of candidates that come so near the best the most usual is kept


def to_try(predictions: Mapping[int, float], codec_of: Mapping[int, object], allow: Iterable[Codec]) -> list[int]:
    """The few best candidates, and the best of each codec if that is near.

    Args:
        predictions: seconds by place; the lower the place, the more usual the candidate.
        codec_of: by place.
        allow: the codecs, in whose order their best are added.
    """
    order = sorted(predictions, key=lambda place: predictions[place])
    best = predictions[order[0]]
    tried = [place for place in order if predictions[place] <= _NEAR * best][:_MOST_TRIED]
    for codec in allow:
        first = next((place for place in order if codec_of[place] == codec), tried[0])
        if first not in tried and predictions[first] <= _NEAR_OTHER_CODEC * best:
            tried.append(first)
    return tried


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
        """Whose it is."""
        return self._turns[0]

    @property
    def round_over(self) -> bool:
        """Has everyone still in had a turn? Then `judge`."""
        return not self._turns

    def turn_over(self, seconds: Sequence[float]) -> bool:
        """Are these passes enough?"""
        return len(seconds) >= _WARM_UP + _TIMED

    def end_turn(self, seconds: Sequence[float]) -> None:
        """Note what the passes of this turn took."""
        self._timed[self._turns.pop(0)] += seconds[_WARM_UP:]

    def medians(self) -> dict[int, float]:
        """Seconds of a pass on this rank, over all rounds, by place; in the order of `tried`."""
        return {place: statistics.median(timed) for place, timed in self._timed.items()}

    def judge(self, seconds: Mapping[int, float]) -> int | None:
        """The winner's place; None: those near the best of this round have another.

        Who fell out cannot win: the machine may have been faster then.

        Args:
            seconds: what the slowest rank's medians are, by place.
        """
        least = min(seconds[place] for place in self._still_in)
        near = [place for place in self._still_in if seconds[place] <= _STILL_IN * least]
        if len(near) == 1 or self.rounds == _ROUNDS:
            return min(place for place in near if seconds[place] <= _ALIKE * least)
        self.rounds += 1
        self._still_in = near[::-1]  # to and fro
        self._turns = list(self._still_in)
        return None

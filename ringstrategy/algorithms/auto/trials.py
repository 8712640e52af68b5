"""Trials of candidates in rounds: which is tried next, which stays in, which wins. Knows no clock and no peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ringstrategy.codecs.base import Codec

_NEAR = 1.25  # candidates predicted to take up to so many times as long as the best are tried
_MOST_TRIED = 4
_NEAR_OTHER_CODEC = 1.5  # also the best of each codec, because codecs differ most in what the model does not know
_WARM_UP = 1  # passes of a turn before those that count, and
_TIMED = 3  # passes that do
_ROUNDS = 4  # at most; each candidate has one turn a round, so that disturbances hit all of them
_STILL_IN = 1.1  # times as long as the best so far, and a candidate is in the next round too
_ALIKE = 1.02  # of candidates that come so near the best the most usual is kept


def to_try(predictions: Mapping[int, float], codec_of: Mapping[int, object], allow: Iterable[Codec]) -> list[int]:
    """Choose the few best candidates, and the best of each codec if it is near the best.

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
        """The place of the candidate whose turn it is."""
        return self._turns[0]

    @property
    def round_over(self) -> bool:
        """Has everyone still in had a turn? Then `judge`."""
        return not self._turns

    def turn_over(self, seconds: Sequence[float]) -> bool:
        """Are these passes enough?"""
        return len(seconds) >= _WARM_UP + _TIMED

    def end_turn(self, seconds: Sequence[float]) -> None:
        """Record the seconds of the passes of this turn."""
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
        if len(near) == 1 or self.rounds == _ROUNDS:
            return min(place for place in near if seconds[place] <= _ALIKE * least)
        self.rounds += 1
        self._still_in = near[::-1]  # to and fro
        self._turns = list(self._still_in)
        return None

"""What `Auto` chooses from: each way of averaging that makes sense here, the usual ones first; and each in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from torch.nn import Parameter

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, sums_dtype
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.hierarchical import Hierarchical

_BUCKETS_MB = (25.0, 5.0)
_WARM_UP = 1  # passes of a turn before those that count
PASSES = _WARM_UP + 3  # of a turn
ROUNDS = 4  # at most; each candidate has one turn a round, so that disturbances hit all of them
_STILL_IN = 1.1  # times as long as the best so far, and a candidate is in the next round too
_ALIKE = 1.02  # of candidates that come so near the best the most usual is kept


def eligible(allow: Iterable[Codec], hosts: Sequence[str], **common: Any) -> list[AllReduce]:
    """Every combination of codec, collective and bucket size that makes sense, the usual ones first.

    `Native` is not among them: nobody could count its bytes.

    Args:
        allow: the codecs.
        hosts: for each rank which host it is on.
        common: further arguments of each `AllReduce`.
    """
    collectives: list[Collective] = [BySize(), Direct()]
    if 1 < len(set(hosts)) < len(hosts):
        collectives.insert(0, Hierarchical())
    made = []
    for codec in allow:
        for collective in collectives:
            try:
                collective.check(codec)
            except ValueError:  # this codec cannot travel this way
                continue
            made += [AllReduce(codec, collective, bucket_mb=bucket_mb, **common) for bucket_mb in _BUCKETS_MB]
    return made


def to_try(candidates: Sequence[AllReduce], parameters: Sequence[Parameter]) -> list[int]:
    """The places of the candidates to try: their codecs carry these parameters, and their buckets divide them.

    TypeError: no codec carries them.

    Args:
        candidates: of `eligible`.
        parameters: whose gradients travel in buckets.
    """
    dtypes = {sums_dtype(parameter.dtype) for parameter in parameters}
    total = sum(parameter.numel() * sums_dtype(parameter.dtype).itemsize for parameter in parameters)
    places, refused = [], {}
    for place, candidate in enumerate(candidates):
        if candidate.bucket_mb != max(_BUCKETS_MB) and total <= candidate.bucket_mb * 2**20:
            continue  # all in one bucket, as with larger ones
        assert isinstance(candidate.codec, Codec)
        try:
            for dtype in dtypes:
                candidate.codec.check(dtype)
        except TypeError as error:
            refused[candidate.codec] = error
        else:
            places.append(place)
    if not places:
        raise next(iter(refused.values()))
    return places


def in_words(algorithm: AllReduce) -> str:
    """In a few words, for a log or a table."""
    assert isinstance(algorithm.codec, Codec)
    fed = " with error feedback" if algorithm.error_feedback and not algorithm.codec.lossless else ""
    return f"{brief(algorithm.codec)}{fed} over {brief(algorithm.collective)}, buckets of {algorithm.bucket_mb:g} MB"


def next_best_in_words(candidates: Sequence[AllReduce], best: int, seconds: Mapping[int, float]) -> str:
    """In words, the fastest candidate that differs from the best in more than sizes; empty if there is none.

    Args:
        candidates: all.
        best: the place of the one that is taken.
        seconds: by place, what those in question take.
    """

    def kind(place: int) -> tuple[object, type]:
        return candidates[place].codec, type(candidates[place].collective)

    others = [place for place in seconds if kind(place) != kind(best)]
    if not others:
        return ""
    other = min(others, key=lambda place: seconds[place])
    rank = "next best" if seconds[other] > seconds[best] else "as good, but less usual:"
    return f"; {rank} {in_words(candidates[other])}, {1000 * seconds[other]:.1f} ms"


def brief(part: object) -> str:
    """The `repr` of a codec or a collective, without arguments that have their defaults."""
    assert is_dataclass(part)
    given = [(field, getattr(part, field.name)) for field in fields(part) if field.init]
    shown = [
        f"{field.name}={brief(value) if is_dataclass(value) else repr(value)}"
        for field, value in given
        if field.default is MISSING or value != field.default
    ]
    return f"{type(part).__name__}({', '.join(shown)})"


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

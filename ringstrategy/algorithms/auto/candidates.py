"""What `Auto` chooses from: each way of averaging that makes sense here, the usual ones first; and each in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from torch.nn import Parameter

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, sums_dtype
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.hierarchical import Hierarchical
from ringstrategy.cost.step import largest_wire

_BUCKETS_MB = (25.0, 5.0, 100.0)


def eligible(allow: Iterable[Codec], hosts: Sequence[str], **common: Any) -> list[AllReduce]:
    """Every combination of codec, collective, segments and bucket size that makes sense, the usual ones first.

    `Native` is not among them: nobody could count its bytes.

    Args:
        allow: the codecs.
        hosts: for each rank which host it is on.
        common: further arguments of each `AllReduce`.
    """
    collectives: list[Collective] = [BySize(), Direct(), BySize(segments=1)]
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


def refused(allow: Sequence[Codec], parameters: Mapping[str, Parameter]) -> Collection[Codec]:
    """The codecs that cannot carry all of these parameters; a TypeError if none can."""
    dtypes = {sums_dtype(parameter.dtype) for parameter in parameters.values()}
    errors = {}
    for codec in allow:
        try:
            for dtype in dtypes:
                codec.check(dtype)
        except TypeError as error:
            errors[codec] = error
    if len(errors) == len(allow):
        raise errors[allow[0]]
    return errors.keys()


def largest_exchange(
    candidates: Iterable[AllReduce], without: Collection[Codec], parameters: Mapping[str, Parameter]
) -> int:
    """Bytes of the largest bucket of any candidate, as it travels.

    Args:
        candidates: as of `eligible`.
        without: codecs whose candidates do not count.
        parameters: whose gradients travel in buckets.
    """
    widest = {made.codec: made for made in candidates if made.bucket_mb == max(_BUCKETS_MB)}
    return max(largest_wire(made, parameters) for codec, made in widest.items() if codec not in without)


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

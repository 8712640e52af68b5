"""Cut a model's parameters into buckets, by a plan that never changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import Parameter

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.sparse import SparseBucket
from ringstrategy.codecs.base import Codec, check_carried
from ringstrategy.codecs.cast import wire_of
from ringstrategy.collectives.base import sums_dtype

FIRST_BUCKET_BYTES = 1 << 20  # once the first bucket has these it is closed: the wire should not idle for long


def capacity_of(bucket_mb: float) -> int:
    """Bytes of a bucket's buffer. ValueError unless it is a number of megabytes > 0."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
        raise ValueError(f"bucket_mb is a number of megabytes > 0, got {bucket_mb!r}")
    return max(1, int(bucket_mb * 2**20))


def small(capacity: int) -> int:
    """Bytes of a bucket that is not worth messages of its own."""
    return min(capacity // 64, 1 << 18)


def plan_buckets(
    parameters: Mapping[str, Parameter],
    sparse: frozenset[str],
    codec_of: Callable[[str, Parameter], Codec],
    feedback_of: Callable[[Codec], bool],
    capacity: int,
    first_index: int,
    residual_dtype: torch.dtype | None = None,
) -> list[Bucket]:
    """Cut the parameters into buckets, in reverse order of registration: about the order in which backward fills them.

    Args:
        parameters: with their names, in order of registration.
        sparse: names of those whose gradients are sparse.
        codec_of: the codec for a parameter; parameters share a bucket only if device, dtype of sums and codec agree.
        feedback_of: whether a bucket of this codec keeps a residual.
        capacity: bytes of a buffer. A larger parameter closes its bucket, which it shares with nothing but parameters
            before it that are `small` together.
        first_index: index of the first bucket, > 0 for those that are appended to a plan.
        residual_dtype: of the residuals; None: the buffers'.
    """
    groups: dict[tuple[torch.device, torch.dtype, Codec], list[tuple[str, Parameter]]] = {}
    closed: list[tuple[int, list[tuple[str, Parameter]], Codec | None]] = []
    place_of = {name: place for place, name in enumerate(reversed(list(parameters)))}

    def close(key: tuple[torch.device, torch.dtype, Codec]) -> None:
        members = groups.pop(key)
        closed.append((place_of[members[-1][0]], members, key[2]))

    for name, parameter in reversed(list(parameters.items())):
        if name in sparse:
            closed.append((place_of[name], [(name, parameter)], None))
            continue
        codec = wire_of(codec_of(name, parameter), parameter.dtype)
        dtype = sums_dtype(parameter.dtype)
        check_carried(codec, name, dtype)
        key = (parameter.device, dtype, codec)
        held = sum(member.numel() for _, member in groups.get(key, [])) * dtype.itemsize
        nbytes = parameter.numel() * dtype.itemsize
        if held > small(capacity) and held + nbytes > capacity:
            close(key)
        groups.setdefault(key, []).append((name, parameter))
        if first_index == 0 and not closed and held + nbytes >= FIRST_BUCKET_BYTES:
            close(key)  # the wire idles until there is a first bucket
    for key in list(groups):
        close(key)

    buckets: list[Bucket] = []
    # by the last to fill: a bucket is launched when it and all before it are full
    for index, (_, members, member_codec) in enumerate(sorted(closed, key=lambda item: item[0]), start=first_index):
        if member_codec is None:
            buckets.append(SparseBucket(index, *members[0]))
        else:
            dtype = sums_dtype(members[0][1].dtype)
            bucket = DenseBucket(index, members, dtype, member_codec, feedback_of(member_codec), residual_dtype)
            bucket.is_small = bucket.buffer.nbytes <= small(capacity)
            buckets.append(bucket)
    return buckets

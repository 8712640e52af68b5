"""The contract of a collective: a schedule by which a flat tensor becomes its sum over all peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.transport.base import Peers

if TYPE_CHECKING:
    from ringstrategy.kernels.operations import Source

# Bytes of values. Two pieces overlap, so a chunk is halved unless they would be tiny; more pieces only shorten the
# ends, and each costs a codec's calls, so they must be larger.
SMALLEST_HALF = 1 << 18
SMALLEST_SEGMENT = 1 << 21
# Edges lie on multiples of so many blocks, in which the scales fill 16 bytes, and 16 bits a value too: so codes and raw
# values begin where a GPU reads most at once, and NCCL does not copy byte by byte.
_TOGETHER = 8
_EVEN = 8  # unless that makes fewer than so many such runs a part: then parts would differ too much
_WIDENED = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Summand:
    """What this rank adds to a sum, and how that travels.

    Args:
        values: flat; replaced by the sum. For a mean, scale by 1/size before.
        codec: how they travel.
        residual: same shape, any float dtype: counts as part of `values`; it is added piece by piece, where the wire is
            busy with others.
        lost: same shape, any float dtype, perhaps the residual itself: receives, at each element that this rank
            encodes, what encoding lost, and 0 elsewhere: the sum of all ranks' `lost` is what the result lacks. In a
            narrower dtype than the values it is rounded to nearest even.
            Elements where an encode met a non-finite block get the residual, or without one keep theirs.
        seed: the same on all ranks, another for each step and bucket.
        source: where the values lie, if `values` only receives the sum; for a codec that has `launches`.
    """

    values: Tensor
    codec: Codec
    residual: Tensor | None = None
    lost: Tensor | None = None
    seed: int = 0
    source: Source | None = None


class Collective(ABC):
    """A frozen dataclass of its options. Each rank encodes each element at most once.

    Attributes:
        tagged: all its messages go through `Peers.post`, so ranks that differ are found without further ones. They also
            hold what else `sum_` is given, unless `carries_extras` says otherwise.
    """

    tagged: ClassVar[bool] = False

    @abstractmethod
    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        """Replace the summand's values by their sum over all peers, with the same bits on all of them.

        Blocks until done. `flags` (flat uint8 on the values' device, as many on all ranks) become the bitwise or of all
        ranks' flags. `riders` are summed as if each had a call of its own with one segment, but in the same messages.
        Flags, riders and a source only with a collective that `carries_extras`.

        Each piece becomes a wire by `Codec.hop` and values again by `Codec.deliver`, or by its `launches`.
        """

    def scatter_(self, summand: Summand, peers: Peers) -> None:
        """Reduce-scatter: this rank's chunk of the values becomes its sum over all peers, in full precision.

        Blocks until done. Of the summand's values, `peers.size` chunks of one length, the others are scratch. Nothing
        of this rank's chunk is encoded on this rank, so it loses nothing there.
        """
        del summand, peers
        self.check_scatters()

    def check_scatters(self) -> None:
        """ValueError if it has no `scatter_`."""
        if type(self).scatter_ is Collective.scatter_:
            raise ValueError(f"{self} has no reduce-scatter; pass collective=Ring(), Direct() or BySize()")

    def carries_extras(self, peers: Peers) -> bool:
        """Whether flags and riders can travel with the values, which may lie where a `Summand.source` says."""
        del peers
        return self.tagged  # in messages of its own

    def check(self, codec: Codec) -> None:
        """Raise a ValueError with the cure if `codec` cannot travel this way."""


def mean_(
    summand: Summand,
    peers: Peers,
    collective: Collective,
    *,
    flags: Tensor | None = None,
    riders: Sequence[Summand] = (),
) -> None:
    """Average over all peers, with error feedback (Seide et al. 2014; Karimireddy et al. 2019) at every encode.

    Args:
        summand: values scaled by 1/size, which become the mean, with the same bits on all ranks. Its residual is what
            earlier rounds lost on this rank, in the scale of the values and in parameter space; without a `lost` of its
            own it is replaced by what this round loses.
        peers: all ranks.
        collective: how the values travel.
        flags: see `Collective.sum_`.
        riders: see `Collective.sum_`; their residuals are treated in the same way.
    """
    # what is lost replaces the residual, if it has no place of its own
    given = [replace(one, lost=one.residual) if one.lost is None else one for one in (summand, *riders)]
    if peers.size == 1:  # nothing is encoded
        for one in given:
            if one.residual is not None and one.lost is not None and one.lost is not one.residual:
                one.lost.copy_(one.residual)
        return
    # a lossless codec loses nothing, and its encodes are not asked
    summed = [replace(one, lost=None) if one.codec.lossless else one for one in given]
    collective.sum_(summed[0], peers, flags=flags, riders=summed[1:])
    for one in given:
        if one.codec.lossless and one.residual is not None and one.lost is not None:
            one.lost.copy_(one.residual.masked_fill(one.values.isfinite(), 0))


def cut(begin: int, end: int, parts: int, block: int) -> list[tuple[int, int]]:
    """Cut [begin, end) into `parts` runs whose inner edges lie whole blocks from `begin`; some may be empty.

    Unless they are short, the edges lie multiples of eight blocks from there.
    """
    together = block * _TOGETHER
    run = together if end - begin >= _EVEN * parts * together else block
    runs = -(-(end - begin) // run)
    edges = [min(begin + runs * part // parts * run, end) for part in range(parts + 1)]
    return list(pairwise(edges))


def cut_chunks(values: Tensor, size: int, segments: int, block: int) -> list[list[tuple[int, int]]]:
    """One chunk a rank, each cut into the same number of segments: at most `segments`, none needlessly small."""
    segments = pieces_of(values, size, segments)
    return [cut(begin, end, segments, block) for begin, end in cut(0, values.numel(), size, block)]


def pieces_of(values: Tensor, size: int, segments: int) -> int:
    """How many pieces a chunk of these values has: at most `segments`, none needlessly small."""
    nbytes = values.numel() * values.element_size() // size
    worthwhile = max(1, min(2, nbytes // SMALLEST_HALF), nbytes // SMALLEST_SEGMENT)
    return min(segments, worthwhile)


def check_segments(segments: int) -> None:
    """Raise unless it is a whole number of at least 1."""
    if type(segments) is not int or segments < 1:
        raise ValueError(f"segments is how many pieces of a chunk are in flight: a whole number >= 1, got {segments!r}")


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are summed: float32 for 16-bit ones, else their own."""
    return torch.float32 if dtype in _WIDENED else dtype

"""Short values by one collective, long ones by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, Summand, check_segments
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.ring import Ring
from ringstrategy.transport.base import FEW, Peers

_LARGEST = 1 << 28  # bytes of queued values that go direct, since all that arrives has memory of its own at once


@dataclass(frozen=True)
class BySize(Collective):
    """`Direct` for what is short, `Ring` for what is long.

    A rank sends the same bytes in as many messages either way. But a ring's messages go one after the other, for
    2 (N-1) latencies in all, and `Direct` waits for two. So it is faster for short buckets, where latency costs more
    than bandwidth; it also rounds twice instead of N times. Its price: N-1 messages reach each rank at once. If several
    of several hosts' ranks share a link, all goes over the `Ring`, which leaves each host once; see `Hierarchical`.

    Where messages are only queued (NCCL), `Direct` takes two calls, a ring 2 (N-1) for each segment. There long values
    go direct too, among at most 16 ranks and up to 256 MB.

    Args:
        segments: of `Ring`.
        below: encoded bytes of all values, riders included; fewer are short. Larger: fewer latencies to wait for, more
            messages at once at each rank. 256 kB take 2 ms at 1 Gbit/s and 80 us at 25 Gbit/s: a few latencies.
    """

    tagged = True
    segments: int = 4
    below: int = 1 << 18

    def __post_init__(self) -> None:
        check_segments(self.segments)
        if type(self.below) is not int or self.below < 0:
            raise ValueError(f"below is a number of encoded bytes >= 0, got {self.below!r}")

    @override
    def check(self, codec: Codec) -> None:
        Ring(self.segments).check(codec)

    @override
    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        nbytes = sum(one.codec.nbytes(one.values.numel(), one.values.dtype) for one in (summand, *riders))
        self.chosen(nbytes, peers).sum_(summand, peers, flags=flags, riders=riders)

    @override
    def scatter_(self, summand: Summand, peers: Peers) -> None:
        nbytes = summand.codec.nbytes(summand.values.numel(), summand.values.dtype)
        self.chosen(nbytes, peers).scatter_(summand, peers)

    def chosen(self, nbytes: int, peers: Peers) -> Collective:
        """How so many encoded bytes travel."""
        shared = 1 < len(set(peers.hosts)) < peers.size
        direct = nbytes < self.below or (peers.queues and peers.size <= FEW and nbytes <= _LARGEST)
        return Direct() if direct and not shared else Ring(self.segments)

"""Short values by one collective, long ones by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, Summand, check_segments
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.ring import Ring
from ringstrategy.transport.base import FEW, Peers


@dataclass(frozen=True)
class BySize(Collective):
    """`Direct` for what is short, `Ring` for what is long.

    Both send the same bytes in as many messages. A ring's go one after the other, 2 (N-1) times a link's latency in
    all; `Direct` waits for two latencies, but opens N-1 connections and lets N-1 messages meet at each receiver. So
    `Direct` is sooner while latency counts for more than the bytes; it also rounds twice instead of N times.

    Where messages are only queued (NCCL), `Direct` takes two calls, a ring 2 (N-1) for each segment. There long values
    go direct too, among at most 16 ranks that all share a host or that share none. Where some do, a ring leaves each
    host once, but `Direct` once for each of its ranks.

    Args:
        segments: of `Ring`.
        below: encoded bytes of all values; fewer are short. At 256 kB no more than that meet at a receiver, and on a
            link of 1 Gbit/s they take 2 ms, on one of 25 Gbit/s 80 us: a few latencies.
    """

    segments: int = 4
    below: int = 1 << 18

    def __post_init__(self) -> None:
        check_segments(self.segments)
        if not isinstance(self.below, int) or isinstance(self.below, bool) or self.below < 0:
            raise ValueError(f"below is a number of encoded bytes >= 0, got {self.below!r}")

    @property
    def tagged(self) -> bool:
        """See `Collective.tagged`."""
        return True

    def carries_more(self, peers: Peers) -> bool:
        """See `Collective.carries_more`."""
        del peers
        return True

    def check(self, codec: Codec) -> None:
        """See `Ring.check`."""
        Ring(self.segments).check(codec)

    def sum_(
        self,
        values: Tensor,
        peers: Peers,
        codec: Codec,
        *,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        seed: int = 0,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        """See `Collective.sum_`."""
        chosen = self.chosen(codec.nbytes(values.numel(), values.dtype), peers)
        chosen.sum_(values, peers, codec, residual=residual, lost=lost, seed=seed, flags=flags, riders=riders)

    def chosen(self, nbytes: int, peers: Peers) -> Collective:
        """How so many encoded bytes travel."""
        in_one_call = peers.queues and peers.size <= FEW and len(set(peers.hosts)) in (1, peers.size)
        return Direct() if nbytes < self.below or in_one_call else Ring(self.segments)

"""Ring all-reduce in two phases, pipelined in segments (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, check_segments
from ringstrategy.collectives.pieces import Pieces, cut_pieces, cut_shards
from ringstrategy.transport.base import Handle, Peers
from ringstrategy.transport.trace import span

_EXPECTED = 1 << 25  # bytes of memory for receives that begin early


@dataclass(frozen=True)
class Ring(Collective):
    """Each rank sends 2 (N-1)/N of the encoded values, to its successor only, whatever N is.

    Values are cut into N chunks. Reduce-scatter, steps s = 0..N-2: rank r encodes its partial sum of chunk r-s and
    sends it on; then it owns the whole sum of chunk r+1. All-gather: the owner encodes it once, reads its own bytes
    back, and the bytes travel round verbatim, so that all ranks decode the same.

    Args:
        segments: most pieces of a chunk in flight at once: while one is on the wire, another is encoded or added.
            More hide more work, in smaller messages; more than two have at least 2 MB of values each.
    """

    tagged = True
    segments: int = 4

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def check(self, codec: Codec) -> None:
        """Partial sums are encoded again at each hop."""
        if not codec.hop_by_hop:
            raise ValueError(f"{codec} cannot be added hop by hop; pass collective=Direct()")

    @override
    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        rank, size = peers.rank, peers.size
        if size == 1 or (summand.values.numel() == 0 and flags is None and not riders):
            return
        pieces = cut_pieces(summand, peers, self.segments, flags=flags, riders=riders)
        each, link = range(pieces.count), _Link(peers, pieces, rank, parts=size - 1, sums=size - 1)

        # Reduce-scatter.
        own = rank - size + 1  # as chunks are counted, rank + 1
        for chunk in range(rank, own, -1):
            for k in each:
                arrived = [] if chunk == rank else [link.arrived(k)]
                with span("encode", chunk % size, rank - chunk):
                    wire = pieces.encode_part(chunk, k, link.leaving[k], arrived)
                link.pass_on(k, wire)

        # The chunk that this rank owns: the whole sum.
        for k in each:
            arrived = [link.arrived(k)]
            with span("encode", own % size, size - 1):
                wire = pieces.encode_sum(own, k, link.leaving[k], arrived)
            link.pass_on(k, wire)
            with span("decode", own % size, size - 1):
                pieces.deliver_(own, k, wire)

        # All-gather.
        last = own - size + 1
        for chunk in range(own - 1, last - 1, -1):
            for k in each:
                wire = link.arrived(k)
                if chunk > last:
                    link.pass_on(k, wire)
                with span("decode", chunk % size, rank - chunk - 1):
                    pieces.deliver_(chunk, k, wire)

    def scatter_(self, summand: Summand, peers: Peers) -> None:
        """See `Collective.scatter_`: the first phase, which each chunk begins one rank later."""
        rank, size = peers.rank, peers.size
        if size == 1 or summand.values.numel() == 0:
            return
        pieces = cut_shards(summand, peers, self.segments)
        each, first = range(pieces.count), rank - 1
        link = _Link(peers, pieces, first, parts=size - 1, sums=0)
        for chunk in range(first, rank - size, -1):
            for k in each:
                arrived = [] if chunk == first else [link.arrived(k)]
                link.pass_on(k, pieces.encode_part(chunk, k, link.leaving[k], arrived))
        for k in each:
            pieces.keep_sum_(rank, k, [link.arrived(k)])

    def gather_(self, values: Tensor, peers: Peers) -> None:
        """Give all ranks every rank's chunk, bit for bit: the second phase.

        Args:
            values: flat, of any dtype; of `peers.size` chunks of one length, of which this rank's is filled.
        """
        rank, size = peers.rank, peers.size
        if size == 1 or values.numel() == 0:
            return
        pieces = cut_shards(Summand(values, Identity()), peers, self.segments)
        each, link = range(pieces.count), _Link(peers, pieces, rank, parts=0, sums=size - 1)
        for k in each:
            link.pass_on(k, pieces.raw(rank, k))
        last = rank - size + 1
        for chunk in range(rank - 1, last - 1, -1):
            for k in each:
                wire = link.arrived(k)
                if chunk > last:
                    link.pass_on(k, wire)


class _Link:
    """To the rank after this one and from the one before: of each segment one piece is on the way, each way.

    Each hop passes a piece of chunk c on and receives one of chunk c - 1, beginning with chunk `first`. The first
    `parts` hops carry parts of sums, and `sums` hops after them whole ones. What
    arrives fills memory of its own until all of it has been passed on: two wires a segment are enough, for one leaves
    while the other fills, but with one for each hop all can be expected from the start. Each send is waited for before
    its memory is written again, because a handle covers the send and the receive that were posted together.
    """

    def __init__(self, peers: Peers, pieces: Pieces, first: int, *, parts: int, sums: int) -> None:
        self._peers, self._pieces, self._first, self._parts = peers, pieces, first, parts
        self._after, self._before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
        hops = parts + sums
        expected = hops * pieces.count * pieces.stride <= _EXPECTED
        slots = hops if expected else 2
        self.leaving = pieces.leaving(peers, "leaving", pieces.count)
        lands = pieces.in_place and parts == 0  # where it belongs, so that no memory is needed
        self._filling = (pieces.leaving if lands else pieces.arriving)(peers, "filling", slots * pieces.count)
        self._hops = [0] * pieces.count  # by segment: made so far
        self._under_way: dict[int, tuple[Handle, Tensor]] = {}  # by segment
        if expected:
            for hop in range(hops):
                for k in range(pieces.count):
                    peers.expect(self._before, self._arriving(hop, k))

    def _arriving(self, hop: int, k: int) -> Tensor:
        memory = self._filling[(hop * self._pieces.count + k) % len(self._filling)]
        chunk = self._first - 1 - hop
        if hop < self._parts:
            return self._pieces.part_of_sum(chunk, k, memory)
        return self._pieces.landing(chunk, k, memory)

    def pass_on(self, k: int, wire: Tensor) -> None:
        """Send `wire` to the next rank, and receive what the one before passes on."""
        hop = self._hops[k]
        self._hops[k] += 1
        with span("send", (self._peers.rank - hop) % self._peers.size, hop):
            arriving = self._arriving(hop, k)
            self._under_way[k] = self._peers.swap(self._after, wire, self._before, arriving), arriving

    def arrived(self, k: int) -> Tensor:
        """The wire from the rank before, once it has arrived and what was sent meanwhile has left."""
        handle, arriving = self._under_way.pop(k)
        hop = self._hops[k] - 1
        with span("wait", (self._peers.rank - 1 - hop) % self._peers.size, hop):
            handle.wait()
        return arriving

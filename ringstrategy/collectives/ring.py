"""Ring all-reduce in two phases, pipelined in segments (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, check_segments, cut_chunks
from ringstrategy.collectives.pieces import Pieces
from ringstrategy.transport.base import Handle, Peers


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

    segments: int = 4

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def check(self, codec: Codec) -> None:
        """Partial sums are encoded again at each hop."""
        if not codec.hop_by_hop:
            raise ValueError(f"{codec} cannot be added hop by hop; pass collective=Direct()")

    def sum_(
        self,
        values: Tensor,
        peers: Peers,
        codec: Codec,
        *,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """See `Collective.sum_`."""
        rank, size = peers.rank, peers.size
        if size == 1 or values.numel() == 0:
            return
        chunks = cut_chunks(values, size, self.segments, codec.block)
        pieces = Pieces(values, chunks, codec, residual=residual, lost=lost, seed=seed, rank=rank)
        each, link = range(pieces.count), _Link(peers, pieces)

        # Reduce-scatter.
        own = rank - size + 1  # as chunks are counted, rank + 1
        for chunk in range(rank, own, -1):
            for k in each:
                arrived = [] if chunk == rank else [link.arrived(k)]
                wire = pieces.encode(chunk, k, link.leaving[k], arrived)
                link.pass_on(k, wire, pieces.wire(chunk - 1, k, link.filling[k]))

        # The chunk that this rank owns: the whole sum.
        for k in each:
            wire = pieces.encode(own, k, link.leaving[k], [link.arrived(k)])
            link.pass_on(k, wire, pieces.landing(own - 1, k, link.filling[k]))
            pieces.deliver_(own, k, wire)

        # All-gather.
        last = own - size + 1
        for chunk in range(own - 1, last - 1, -1):
            for k in each:
                wire = link.arrived(k)
                link.turn(k)
                if chunk > last:
                    link.pass_on(k, wire, pieces.landing(chunk - 1, k, link.filling[k]))
                pieces.deliver_(chunk, k, wire)


class _Link:
    """To the rank after this one and from the one before: in each direction one piece of each segment is on the way.

    Two wires a segment are enough: one leaves while the other fills. Each send is waited for before its memory is
    written again, because a handle covers the send and the receive that were posted together.
    """

    def __init__(self, peers: Peers, pieces: Pieces) -> None:
        self.leaving = pieces.leaving(peers, "ring.leaving", pieces.count)
        self.filling = pieces.arriving(peers, "ring.filling", pieces.count)
        self._peers = peers
        self._after, self._before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
        self._under_way: dict[int, tuple[Handle, Tensor]] = {}  # by segment

    def pass_on(self, k: int, wire: Tensor, arriving: Tensor) -> None:
        """Send `wire` to the next rank, and receive what the one before passes on."""
        self._under_way[k] = self._peers.swap(self._after, wire, self._before, arriving), arriving

    def arrived(self, k: int) -> Tensor:
        """The wire from the rank before, once it has arrived and what was sent meanwhile has left."""
        handle, arriving = self._under_way.pop(k)
        handle.wait()
        return arriving

    def turn(self, k: int) -> None:
        """What filled will leave."""
        self.leaving[k], self.filling[k] = self.filling[k], self.leaving[k]

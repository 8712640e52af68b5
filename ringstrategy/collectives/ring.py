"""Ring all-reduce in two phases, pipelined in segments (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, check_segments
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
        pieces = Pieces(values, size, self.segments, codec, residual=residual, lost=lost, seed=seed, rank=rank)
        each = range(pieces.count)
        # Two wires a segment are enough: one leaves while the other fills. Each send is waited for before its memory
        # is written again, because a handle covers the send and the receive that were posted together.
        leaving = _wires(peers, "ring.leaving", pieces.count, 0 if pieces.in_place else pieces.stride, values)
        filling = _wires(peers, "ring.filling", pieces.count, pieces.stride, values)

        def pass_on(wire: Tensor, arriving: Tensor) -> Handle:
            return peers.swap((rank + 1) % size, wire, (rank - 1) % size, arriving)

        # Reduce-scatter. Preparing and restoring a segment stand where the wire is busy with others.
        handles: list[Handle] = []
        for k in each:
            pieces.prepare_(rank, k)
            wire = pieces.encode(rank, k, leaving[k])
            handles.append(pass_on(wire, pieces.wire(rank - 1, k, filling[k])))
            pieces.restore_lost_(rank, k)
        for chunk in range(rank - 1, rank - size + 1, -1):
            for k in each:
                pieces.prepare_(chunk, k)
                handles[k].wait()
                arrived = pieces.wire(chunk, k, filling[k])
                wire = pieces.add_and_encode(chunk, k, (arrived,), leaving[k])
                handles[k] = pass_on(wire, pieces.wire(chunk - 1, k, filling[k]))
                pieces.restore_lost_(chunk, k)

        # This rank owns the next chunk.
        own = rank + 1
        for k in each:
            pieces.prepare_(own, k)
            handles[k].wait()
            wire = pieces.add_and_encode(own, k, (pieces.wire(own, k, filling[k]),), leaving[k])
            handles[k] = pass_on(wire, pieces.landing(own - 1, k, filling[k]))
            pieces.restore_lost_(own, k)
            pieces.deliver_(own, k, wire)

        # All-gather.
        for chunk in range(own - 1, own - size, -1):
            for k in each:
                handles[k].wait()
                wire = pieces.landing(chunk, k, filling[k])
                filling[k], leaving[k] = leaving[k], filling[k]
                if chunk > own - size + 1:
                    handles[k] = pass_on(wire, pieces.landing(chunk - 1, k, filling[k]))
                pieces.deliver_(chunk, k, wire)


def _wires(peers: Peers, name: str, count: int, stride: int, values: Tensor) -> list[Tensor]:
    whole = peers.scratch(name, count * stride, values.device)
    return [whole[k * stride : (k + 1) * stride] for k in range(count)]

"""Ring all-reduce in two phases, pipelined in segments (Patarasuk and Yuan 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import (
    Collective,
    check_segments,
    cut_chunks,
    prepare_piece_,
    restore_lost_,
    wire_stride,
)
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
        count = len(chunks[0])
        own_seed = codec.own_seed(seed, rank)
        in_place = codec.raw(values) is not None
        after, before = (rank + 1) % size, (rank - 1) % size

        # Two wires a segment are enough: one leaves while the other fills. Each send is waited for before its memory
        # is written again, because a handle covers the send and the receive that were posted together.
        stride = wire_stride(chunks, codec, values)
        leaving = _wires(peers, "ring.leaving", count, 0 if in_place else stride, values)
        filling = _wires(peers, "ring.filling", count, stride, values)

        def piece(chunk: int, k: int) -> tuple[Tensor, int, int]:
            begin, end = chunks[chunk % size][k]
            return values[begin:end], begin, codec.nbytes(end - begin, values.dtype)

        def send(wire: Tensor, arriving: Tensor) -> Handle:
            return peers.swap(after, wire, before, arriving)

        def part_of(whole: Tensor | None, chunk: int, k: int) -> Tensor | None:
            begin, end = chunks[chunk % size][k]
            return None if whole is None else whole[begin:end]

        # Preparing and restoring a segment stand where the wire is busy with others.
        def prepare(chunk: int, k: int) -> None:
            part = piece(chunk, k)[0]
            prepare_piece_(part, part_of(residual, chunk, k), part_of(lost, chunk, k), codec, seed)

        def hop(chunk: int, k: int, *, add: bool) -> Tensor:
            """The wire that leaves: this rank's partial sum of a segment, after adding what arrived."""
            part, begin, nbytes = piece(chunk, k)
            if in_place:
                if add:
                    codec.decode(filling[k][:nbytes], part, add=True)
                return _raw(codec, part)
            wire = leaving[k][:nbytes]
            if add:
                codec.relay(filling[k][:nbytes], part, wire, lost=part_of(lost, chunk, k), seed=own_seed, offset=begin)
            else:
                codec.encode(part, wire, lost=part_of(lost, chunk, k), seed=own_seed, offset=begin)
            return wire

        def landing(chunk: int, k: int) -> Tensor:
            """Where a finished segment arrives."""
            part, _, nbytes = piece(chunk, k)
            return _raw(codec, part) if in_place else filling[k][:nbytes]

        def deliver(wire: Tensor, part: Tensor) -> None:
            codec.decode(wire, part)
            codec.restore_(part, seed)

        handles: list[Handle] = []
        for k in range(count):
            prepare(rank, k)
            handles.append(send(hop(rank, k, add=False), filling[k][: piece(rank - 1, k)[2]]))
            restore_lost_(codec, part_of(lost, rank, k), seed)
        for step in range(1, size - 1):
            for k in range(count):
                prepare(rank - step, k)
                handles[k].wait()
                wire = hop(rank - step, k, add=True)
                handles[k] = send(wire, filling[k][: piece(rank - step - 1, k)[2]])
                restore_lost_(codec, part_of(lost, rank - step, k), seed)
        for k in range(count):
            prepare(rank + 1, k)
            handles[k].wait()
            wire = hop(rank + 1, k, add=True)
            handles[k] = send(wire, landing(rank, k))
            restore_lost_(codec, part_of(lost, rank + 1, k), seed)
            if not in_place:
                deliver(wire, piece(rank + 1, k)[0])
        for step in range(1, size):
            for k in range(count):
                handles[k].wait()
                part = piece(rank + 1 - step, k)[0]
                wire = landing(rank + 1 - step, k)
                filling[k], leaving[k] = leaving[k], filling[k]
                if step < size - 1:
                    handles[k] = send(wire, landing(rank - step, k))
                if not in_place:
                    deliver(wire, part)


def _raw(codec: Codec, part: Tensor) -> Tensor:
    wire = codec.raw(part)
    assert wire is not None
    return wire


def _wires(peers: Peers, name: str, count: int, stride: int, values: Tensor) -> list[Tensor]:
    whole = peers.scratch(name, count * stride, values.device)
    return [whole[k * stride : (k + 1) * stride] for k in range(count)]

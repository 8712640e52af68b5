"""All-reduce in two exchanges of everyone with everyone: two roundings instead of N."""

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
from ringstrategy.collectives.peers import Handle, Peers


@dataclass(frozen=True)
class Direct(Collective):
    """Everyone sends its part of chunk c to rank c, which sums in full precision, encodes once, and sends to all.

    The bytes are the ring's, 2 (N-1)/N of the encoded values, over N-1 connections. Order of addition: the owner's own
    values, then the others' in rank order.

    Args:
        segments: most pieces of a chunk in flight at once; more than two have at least 2 MB of values each.
    """

    segments: int = 4

    def __post_init__(self) -> None:
        check_segments(self.segments)

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
        stride = wire_stride(chunks, codec, values)
        leaving = peers.scratch("direct.leaving", 0 if in_place else size * count * stride, values.device)
        filling = peers.scratch("direct.filling", size * count * stride, values.device)

        def part(chunk: int, k: int) -> Tensor:
            begin, end = chunks[chunk][k]
            return values[begin:end]

        def part_of(whole: Tensor | None, chunk: int, k: int) -> Tensor | None:
            begin, end = chunks[chunk][k]
            return None if whole is None else whole[begin:end]

        def wire(store: Tensor, peer: int, chunk: int, k: int) -> Tensor:
            begin, end = chunks[chunk][k]
            place = (peer * count + k) * stride
            return store[place : place + codec.nbytes(end - begin, values.dtype)]

        def prepare(chunk: int, k: int) -> None:
            prepare_piece_(part(chunk, k), part_of(residual, chunk, k), part_of(lost, chunk, k), codec, seed)

        def deliver(wire: Tensor, part: Tensor) -> None:
            codec.decode(wire, part)
            codec.restore_(part, seed)

        def post(target: int, out: Tensor, source: int, arriving: Tensor) -> Handle:
            return peers.post({target: out} if out.numel() else {}, {source: arriving} if arriving.numel() else {})

        pairs = [((rank + distance) % size, (rank - distance) % size) for distance in range(1, size)]
        scattered: list[list[Handle]] = []
        for k in range(count):
            scattered.append([])
            for target, source in pairs:
                prepare(target, k)
                out = codec.raw(part(target, k))
                if out is None:
                    out, rest = wire(leaving, target, target, k), part_of(lost, target, k)
                    codec.encode(part(target, k), out, lost=rest, seed=own_seed, offset=chunks[target][k][0])
                scattered[k].append(post(target, out, source, wire(filling, source, rank, k)))
                restore_lost_(codec, part_of(lost, target, k), seed)
            prepare(rank, k)

        gathered: list[list[Handle]] = []
        for k in range(count):
            for handle in scattered[k]:
                handle.wait()
            arrived = [wire(filling, peer, rank, k) for peer in range(size) if peer != rank]
            own = part(rank, k)
            out = codec.raw(own)
            if out is not None:
                for summand in arrived:
                    codec.decode(summand, own, add=True)
            else:
                out = wire(leaving, rank, rank, k)
                codec.reduce(arrived, own, out, lost=part_of(lost, rank, k), seed=own_seed, offset=chunks[rank][k][0])
            gathered.append([])
            for target, source in pairs:
                landing = codec.raw(part(source, k))
                gathered[k].append(
                    post(target, out, source, wire(filling, source, source, k) if landing is None else landing)
                )
            restore_lost_(codec, part_of(lost, rank, k), seed)
            if not in_place:
                deliver(out, own)

        for k in range(count):
            for handle, (_, source) in zip(gathered[k], pairs, strict=True):
                handle.wait()
                if not in_place:
                    deliver(wire(filling, source, source, k), part(source, k))

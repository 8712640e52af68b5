"""All-reduce in two exchanges of everyone with everyone: two roundings instead of N."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

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

_LONG = 1 << 17  # bytes of a message that keeps a link busy for longer than it takes to start the next
_WINDOW = 2  # of those are on the way at once: one is on the wire while the other starts or is encoded


@dataclass(frozen=True)
class Direct(Collective):
    """Everyone sends its part of chunk c to rank c, which sums in full precision, encodes once, and sends to all.

    The bytes are the ring's, 2 (N-1)/N of the encoded values, over N-1 connections. Short messages leave for all at
    once. Long ones, of chunks in several segments, go to one rank after the other, each rank beginning with the next,
    so that a link carries one stream at a time: several share it unevenly, and those that end early leave other links
    idle. Order of addition: the owner's own values, then the others' in rank order.

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
            if not in_place:
                codec.decode(wire, part)
                codec.restore_(part, seed)

        pairs = peers.pairs()
        in_turn = count > 1 and stride >= _LONG
        batches = [[pair] for pair in pairs] if in_turn else [pairs]
        under_way: deque[tuple[int, Handle]] = deque()  # and of which segment

        def post(k: int, target: int, out: Tensor, source: int, arriving: Tensor) -> None:
            if in_turn and len(under_way) == _WINDOW:
                under_way.popleft()[1].wait()
            under_way.append((k, peers.swap(target, out, source, arriving)))

        def wait(k: int) -> None:
            while any(segment == k for segment, _ in under_way):
                under_way.popleft()[1].wait()

        for batch in batches:
            for k in range(count):
                for target, source in batch:
                    prepare(target, k)
                    out = codec.raw(part(target, k))
                    if out is None:
                        out, rest = wire(leaving, target, target, k), part_of(lost, target, k)
                        codec.encode(part(target, k), out, lost=rest, seed=own_seed, offset=chunks[target][k][0])
                    post(k, target, out, source, wire(filling, source, rank, k))
                    restore_lost_(codec, part_of(lost, target, k), seed)

        def add_up(k: int) -> Tensor:
            """The wire of this rank's chunk, all ranks' sum."""
            arrived = [wire(filling, peer, rank, k) for peer in range(size) if peer != rank]
            own = part(rank, k)
            out = codec.raw(own)
            if out is None:
                out = wire(leaving, rank, rank, k)
                codec.reduce(arrived, own, out, lost=part_of(lost, rank, k), seed=own_seed, offset=chunks[rank][k][0])
                return out
            for summand in arrived:
                codec.decode(summand, own, add=True)
            return out

        def share(k: int, batch: list[tuple[int, int]]) -> None:
            for target, source in batch:
                landing = codec.raw(part(source, k))
                arriving = wire(filling, source, source, k) if landing is None else landing
                post(k, target, sums[k], source, arriving)

        def take(k: int, batch: list[tuple[int, int]]) -> None:
            for _, source in batch:
                deliver(wire(filling, source, source, k), part(source, k))

        sums: list[Tensor] = []
        for k in range(count):
            prepare(rank, k)
            wait(k)
            sums.append(add_up(k))
            share(k, batches[0])
            restore_lost_(codec, part_of(lost, rank, k), seed)
            deliver(sums[k], part(rank, k))
        for before, batch in pairwise(batches):
            for k in range(count):
                wait(k)
                share(k, batch)
                take(k, before)
        for k in range(count):
            wait(k)
            take(k, batches[-1])

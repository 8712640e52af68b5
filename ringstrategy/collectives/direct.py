"""All-reduce in two exchanges of everyone with everyone: two roundings instead of N."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, check_segments
from ringstrategy.collectives.pieces import Pieces
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
        pieces = Pieces(values, size, self.segments, codec, residual=residual, lost=lost, seed=seed, rank=rank)
        count, stride = pieces.count, pieces.stride
        leaving = peers.scratch("direct.leaving", 0 if pieces.in_place else size * count * stride, values.device)
        filling = peers.scratch("direct.filling", size * count * stride, values.device)

        def memory(store: Tensor, peer: int, k: int) -> Tensor:
            """For a piece that goes to `peer`, or comes from there."""
            return store[(peer * count + k) * stride :]

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

        # Everyone's parts to their owners.
        for batch in batches:
            for k in range(count):
                for target, source in batch:
                    pieces.prepare_(target, k)
                    out = pieces.encode(target, k, memory(leaving, target, k))
                    post(k, target, out, source, pieces.wire(rank, k, memory(filling, source, k)))
                    pieces.restore_lost_(target, k)

        def share(k: int, batch: list[tuple[int, int]]) -> None:
            for target, source in batch:
                post(k, target, sums[k], source, pieces.landing(source, k, memory(filling, source, k)))

        def take(k: int, batch: list[tuple[int, int]]) -> None:
            for _, source in batch:
                pieces.deliver_(source, k, pieces.wire(source, k, memory(filling, source, k)))

        # This rank's chunk: all ranks' sum, which goes to everyone.
        sums: list[Tensor] = []
        for k in range(count):
            pieces.prepare_(rank, k)
            wait(k)
            arrived = [pieces.wire(rank, k, memory(filling, peer, k)) for peer in range(size) if peer != rank]
            sums.append(pieces.add_and_encode(rank, k, arrived, memory(leaving, rank, k)))
            share(k, batches[0])
            pieces.restore_lost_(rank, k)
            pieces.deliver_(rank, k, sums[k])
        for before, batch in pairwise(batches):
            for k in range(count):
                wait(k)
                share(k, batch)
                take(k, before)
        for k in range(count):
            wait(k)
            take(k, batches[-1])

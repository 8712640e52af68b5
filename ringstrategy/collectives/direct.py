"""All-reduce in two exchanges of everyone with everyone: two roundings instead of N."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor
from typing_extensions import override

from ringstrategy.collectives.base import Collective, Summand, check_segments
from ringstrategy.collectives.pieces import Pieces, cut_pieces, cut_shards
from ringstrategy.transport.base import Handle, Peers
from ringstrategy.transport.trace import span

_LONG = 1 << 17  # bytes of a message that keeps a link busy for longer than it takes to start the next
_WINDOW = 2  # of those are on the way at once: one is on the wire while the other starts or is encoded


@dataclass(frozen=True)
class Direct(Collective):
    """Everyone sends its part of chunk c to rank c, which sums in full precision, encodes once, and sends to all.

    The bytes are the ring's, 2 (N-1)/N of the encoded values, over N-1 connections. Short messages leave for all at
    once. Long ones, of chunks in several segments, go to one rank after the other, each rank beginning with the next,
    so that a link carries one stream at a time: several share it unevenly, and those that end early leave other links
    idle. Order of addition: the owner's own values, then the others' in rank order.

    Where messages are only queued (NCCL), it is two calls to all at once, one of parts and one of sums.

    Args:
        segments: most pieces of a chunk in flight at once; more than two have at least 2 MB of values each.
    """

    tagged = True
    segments: int = 4

    def __post_init__(self) -> None:
        check_segments(self.segments)

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
        if peers.queues:
            _sum_in_two_calls(cut_pieces(summand, peers, 1, flags=flags, riders=riders), peers)
            return
        pieces = cut_pieces(summand, peers, self.segments, flags=flags, riders=riders)
        each = range(pieces.count)
        places = list(product(range(size), each))  # (whom a wire goes to, k)
        from_others = [(source, k) for source, k in places if source != rank]
        leaving = dict(zip(places, pieces.leaving(peers, "leaving", len(places)), strict=True))
        filling = dict(zip(from_others, pieces.arriving(peers, "filling", len(from_others)), strict=True))
        in_turn = pieces.count > 1 and pieces.stride >= _LONG
        spread = filling  # where sums arrive: if those are expected, not where parts do
        if not in_turn and not pieces.in_place:
            spread = dict(zip(from_others, pieces.arriving(peers, "spread", len(from_others)), strict=True))
        pairs = peers.pairs()
        batches = [[pair] for pair in pairs] if in_turn else [pairs]
        mail = _Mail(peers, _WINDOW if in_turn else None)

        def part(k: int, source: int) -> Tensor:
            return pieces.part_of_sum(rank, k, filling[source, k])

        def landing(k: int, source: int) -> Tensor:
            return pieces.landing(source, k, spread[source, k])

        if not in_turn:  # short messages: let all land at once
            for arriving in (part, landing):
                for k in each:
                    for _, source in pairs:
                        peers.expect(source, arriving(k, source))

        # Everyone's parts to their owners.
        for batch in batches:
            for k in each:
                for target, source in batch:
                    with span("encode", target, 0):
                        wire = pieces.encode_part(target, k, leaving[target, k])
                    with span("send", target, 0):
                        mail.swap(k, target, wire, source, part(k, source))

        # The chunk that this rank owns: the whole sum, which begins to leave.
        sums = []
        for k in each:
            with span("wait", rank, 0):
                parts = mail.arrived(k)
            with span("encode", rank, 1):
                sums.append(pieces.encode_sum(rank, k, leaving[rank, k], [parts[peer] for peer in sorted(parts)]))
            with span("send", rank, 1):
                for target, source in batches[0]:
                    mail.swap(k, target, sums[k], source, landing(k, source))
            with span("decode", rank, 1):
                pieces.deliver_(rank, k, sums[k])

        # The owners' sums to everyone: those of a batch are delivered while those of the following are on the way.
        for following in [*batches[1:], []]:
            for k in each:
                with span("wait", hop=1):
                    arrived = mail.arrived(k)
                for target, source in following:
                    with span("send", rank, 1):
                        mail.swap(k, target, sums[k], source, landing(k, source))
                for source, wire in arrived.items():
                    with span("decode", source, 1):
                        pieces.deliver_(source, k, wire)

    def scatter_(self, summand: Summand, peers: Peers) -> None:
        """See `Collective.scatter_`: everyone's parts to their owners."""
        rank, size = peers.rank, peers.size
        if size == 1 or summand.values.numel() == 0:
            return
        pieces = cut_shards(summand, peers, 1 if peers.queues else self.segments)
        pairs, each = peers.pairs(), range(pieces.count)
        places = [(peer, k) for peer, _ in pairs for k in each]
        leaving = dict(zip(places, pieces.leaving(peers, "leaving", len(places)), strict=True))
        filling = dict(zip(places, pieces.arriving(peers, "filling", len(places)), strict=True))
        mail = _Mail(peers, None if peers.queues or pieces.stride < _LONG else _WINDOW)
        for target, source in pairs:
            for k in each:
                wire = pieces.encode_part(target, k, leaving[target, k])
                mail.swap(k, target, wire, source, pieces.part_of_sum(rank, k, filling[source, k]))
        for k in each:
            parts = mail.arrived(k)
            pieces.keep_sum_(rank, k, [parts[peer] for peer in sorted(parts)])


def _sum_in_two_calls(pieces: Pieces, peers: Peers) -> None:
    """Chunks of one piece each; what is added to what, and what is encoded, is as in messages."""
    rank, size = peers.rank, peers.size
    others = [source for source in range(size) if source != rank]
    leaving = pieces.leaving(peers, "leaving", size)
    arriving = pieces.arriving(peers, "filling", size)
    nothing = arriving[rank][:0]

    with span("encode", hop=0):
        encoded = iter(pieces.encode_parts(others, [leaving[to] for to in others]))
    parts = [nothing if to == rank else next(encoded) for to in range(size)]
    landing = [nothing if source == rank else pieces.part_of_sum(rank, 0, arriving[source]) for source in range(size)]
    with span("send", hop=0):
        peers.all_to_all(parts, landing).wait()
    with span("encode", rank, 1):
        total = pieces.encode_sum(rank, 0, leaving[rank], [landing[source] for source in others])

    sums = [total if source == rank else pieces.landing(source, 0, arriving[source]) for source in range(size)]
    spreading = [nothing if source == rank else wire for source, wire in enumerate(sums)]
    with span("send", rank, 1):
        peers.all_to_all([nothing if to == rank else total for to in range(size)], spreading).wait()
    with span("decode", hop=1):
        pieces.deliver_all_(range(size), sums)


class _Mail:
    """Messages under way, each of one segment.

    Args:
        peers: to and from whom.
        most: messages under way at once, each way; None: any number.
    """

    def __init__(self, peers: Peers, most: int | None) -> None:
        self._peers, self._most = peers, most
        self._under_way: deque[tuple[int, int, Tensor, Handle]] = deque()
        self._here: dict[int, dict[int, Tensor]] = {}  # by segment, then by source

    def swap(self, k: int, target: int, leaving: Tensor, source: int, arriving: Tensor) -> None:
        """Send to one and receive from another, when there are few enough under way."""
        if len(self._under_way) == self._most:
            self._wait_for_first()
        self._under_way.append((k, source, arriving, self._peers.swap(target, leaving, source, arriving)))

    def arrived(self, k: int) -> dict[int, Tensor]:
        """By source what has arrived of a segment since the last call, once none of its messages is under way."""
        while any(segment == k for segment, *_ in self._under_way):
            self._wait_for_first()
        return self._here.pop(k)

    def _wait_for_first(self) -> None:
        k, source, arriving, handle = self._under_way.popleft()
        handle.wait()
        self._here.setdefault(k, {})[source] = arriving

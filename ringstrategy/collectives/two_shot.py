"""All-reduce within one host by address: each rank reads the others' memory instead of receiving messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from ringstrategy.collectives.base import Collective, Summand
from ringstrategy.collectives.direct import Direct
from ringstrategy.collectives.pieces import Pieces, cut_pieces
from ringstrategy.transport.base import Peers, Windows
from ringstrategy.transport.trace import span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TwoShot(Collective):
    """`Direct` without messages: the kernels read and write memory that the GPUs of one host share.

    Each rank encodes its part of chunk c into its own window. After a barrier, the owner of chunk c reads that part in
    everyone's window, adds, and encodes the sum into its own window. After another barrier, all read the sums of all
    owners there. The bits, the order of additions and the counted bytes are those of `Direct`.

    It needs GPUs of one host that reach each other's memory, and NCCL. Elsewhere it is `Direct`, and rank 0 logs that
    once.
    """

    @property
    def tagged(self) -> bool:
        """See `Collective.tagged`; with transports that have tags it is `Direct`."""
        return True

    def carries_extras(self, peers: Peers) -> bool:
        """See `Collective.carries_extras`."""
        del peers
        return True

    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        """See `Collective.sum_`."""
        if peers.size == 1 or (summand.values.numel() == 0 and flags is None and not riders):
            return
        hosts = len(set(peers.hosts))
        pieces = cut_pieces(summand, peers, 1, flags=flags, riders=riders, copied=True)
        windows = peers.windows(peers.size * pieces.stride) if hosts == 1 else None
        if windows is not None:
            _sum_by_address(pieces, windows, peers.rank, peers.size)
            return
        if peers.rank == 0:
            _say("they cannot read each other's memory" if hosts == 1 else f"they are on {hosts} hosts")
        Direct().sum_(summand, peers, flags=flags, riders=riders)


@cache
def _say(why: str) -> None:
    """Once a process."""
    _log.warning("collective=TwoShot() sends messages, as Direct() does: it is for ranks of one host, and %s", why)


def _sum_by_address(pieces: Pieces, windows: Windows, rank: int, size: int) -> None:
    """A window has one slot for each rank's part, and that of the rank itself, which no other reads, for its sum."""
    others = [source for source in range(size) if source != rank]

    def slot(of: int, place: int) -> Tensor:
        return windows.memory[of][place * pieces.stride : (place + 1) * pieces.stride]

    with span("encode", hop=0):
        parts = pieces.encode_parts(others, [slot(rank, to) for to in others])
    landed = [pieces.part_of_sum(rank, 0, slot(source, rank)) for source in others]
    with span("barrier", hop=0):
        windows.barrier(parts, landed)
    with span("encode", rank, 1):
        total = pieces.encode_sum(rank, 0, slot(rank, rank), landed)

    sums = [pieces.wire(source, 0, slot(source, source)) for source in others]
    with span("barrier", hop=1):
        windows.barrier([total] * len(others), sums)
    with span("decode", hop=1):
        pieces.deliver_all_([rank, *others], [total, *sums])

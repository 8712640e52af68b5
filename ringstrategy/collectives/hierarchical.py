"""All-reduce over hosts with several ranks each: exact within a host, through the codec only between hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, check_segments, cut, cut_chunks
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.native import Native
from ringstrategy.collectives.pieces import Pieces
from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.trace import span
from ringstrategy.transport.worker import Task


@dataclass(frozen=True)
class Hierarchical(Collective):
    """Each host sends 2 (H-1)/H of the encoded values over its link, however many ranks it has (H hosts).

    Values are cut into as many columns as the smallest host has ranks, and on each host the first rank owns the first
    column, and so on; further ranks own none. The ranks of a host send each column's owner their part of it, who adds
    them: its own values, then the others' in rank order. Then the owners of a column, one a host, sum it with
    `between`, and each sends the outcome verbatim to the other ranks of its host.

    Only owners encode, so a residual is what `between` lost in a rank's own column, and 0 elsewhere. On one host
    nothing is encoded; with one rank a host this is `between`. It needs a copy of the column for each further rank of
    the host. Columns are cut into pieces, which draw noise and rotations of their own: another number of them gives
    other bits.

    Args:
        between: how a column travels between hosts: `BySize`, `Ring` or `Direct`.
        segments: most pieces of a column: while one travels between hosts, others travel within them (over NCCL they
            take turns). More hide more of that, in smaller messages; more than two have at least 2 MB of values for
            each host.
    """

    between: Collective = field(default_factory=BySize)
    segments: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.between, Collective):
            raise TypeError(f"between is a Collective such as ringstrategy.Ring(), got {self.between!r}")
        if isinstance(self.between, Native):
            raise ValueError(
                "a backend's all-reduce takes all ranks, not one a host: pass between=Ring() or Direct(), or "
                "collective=Native() alone"
            )
        check_segments(self.segments)

    def carries_extras(self, peers: Peers) -> bool:
        """See `Collective.carries_extras`: not through hosts."""
        return len(ranks_of_hosts(peers.hosts)) == peers.size and self.between.carries_extras(peers)

    @property
    def tagged(self) -> bool:  # type: ignore[override]
        """As between hosts."""
        return self.between.tagged

    def check(self, codec: Codec) -> None:
        """Whatever `between` can carry."""
        try:
            self.between.check(codec)
        except ValueError as error:
            raise ValueError(f"{error} (here the argument `between` of Hierarchical)") from None

    @override
    def sum_(
        self,
        summand: Summand,
        peers: Peers,
        *,
        flags: Tensor | None = None,
        riders: Sequence[Summand] = (),
    ) -> None:
        rank, hosts = peers.rank, ranks_of_hosts(peers.hosts)
        if len(hosts) == peers.size:
            self.between.sum_(summand, peers, flags=flags, riders=riders)
            return
        assert flags is None
        assert not riders
        values, codec, lost = summand.values, summand.codec, summand.lost
        if values.numel() == 0:
            return
        if lost is not None and summand.residual is not None and lost is not summand.residual:
            lost.copy_(summand.residual)  # `between` does not see it
        width = min(len(host) for host in hosts)
        [host] = [ranks for ranks in hosts if rank in ranks]
        own = host.index(rank)  # this rank's column, if there are so many
        columns = self._columns(values, width, len(hosts), codec.block)
        pieces = Pieces(replace(summand, codec=Identity(), lost=None), columns, rank)
        like = Subset(peers, [ranks[own] for ranks in hosts]) if own < width else None  # who owns it on other hosts

        def finish(k: int, parts: Sequence[Tensor]) -> None:
            """A piece of this rank's column becomes the sum: within this host, then over all of them."""
            with span("add within the host", own):
                pieces.add_(own, k, parts)
            assert like is not None
            rest = None if lost is None else pieces.part(lost, own, k)
            # offsets begin at 0 in each piece, so each needs noise of its own
            part = Summand(pieces[own, k], codec, lost=rest, seed=derive_seed(summand.seed, own, k))
            self.between.sum_(part, like)

        _sum_within_hosts(pieces, peers, host, width, finish)
        if lost is not None:
            for column, k in product(range(width), range(pieces.count)):
                if column != own or len(hosts) == 1:  # this rank encoded none of it
                    pieces.part(lost, column, k).masked_fill_(pieces[column, k].isfinite(), 0)

    def _columns(self, values: Tensor, width: int, hosts: int, block: int) -> list[list[tuple[int, int]]]:
        """Each cut into the same number of pieces."""
        count = len(cut_chunks(values, width * hosts, self.segments, block)[0])  # `between` will cut each by the hosts
        return [cut(begin, end, count, block) for begin, end in cut(0, values.numel(), width, block)]


def ranks_of_hosts(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host in order; hosts in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def _sum_within_hosts(
    pieces: Pieces, peers: Peers, host: Sequence[int], width: int, finish: Callable[[int, Sequence[Tensor]], None]
) -> None:
    rank, own, each = peers.rank, host.index(peers.rank), range(pieces.count)
    owners = {column: host[column] for column in range(width) if column != own}
    others = [other for other in host if other != rank] if own < width else []  # they send this rank their parts
    places = list(product(each, others))
    filling = dict(zip(places, pieces.arriving(peers, "hierarchical.filling", len(places)), strict=True))

    # Within each host: everyone's parts to the columns' owners.
    gathering, arriving = [], []
    for k in each:
        for column in range(width):
            pieces.add_residual_(column, k)
        leaving = {owner: pieces.raw(column, k) for column, owner in owners.items()}
        arriving.append({other: pieces.wire(own, k, filling[k, other]) for other in others})
        gathering.append(peers.post(_not_empty(leaving), _not_empty(arriving[k])))

    # Between hosts: the owners of each column sum it. Within each host: they send the sum to everyone.
    spreading = []
    for k in each:
        with span("wait within the host"):
            gathering[k].wait()  # only now may the sum arrive where this rank's parts were
        sums = {}
        if own < width:
            finish(k, list(arriving[k].values()))
            sums = dict.fromkeys(others, pieces.raw(own, k))
        finished = {owner: pieces.raw(column, k) for column, owner in owners.items()}
        spreading.append(peers.post(_not_empty(sums), _not_empty(finished)))
    with span("wait within the host"):
        for handle in spreading:
            handle.wait()


def _not_empty(wires: Mapping[int, Tensor]) -> dict[int, Tensor]:
    # all ranks cut in the same way, so the other end leaves out the same empty messages
    return {peer: wire for peer, wire in wires.items() if wire.numel()}


class Subset(Peers):
    """Some of the ranks, numbered from 0, over the connections and with the scratch of all of them."""

    def __init__(self, everyone: Peers, members: Sequence[int]) -> None:
        hosts = tuple(everyone.hosts[member] for member in members)
        super().__init__(members.index(everyone.rank), len(members), everyone.stats, hosts)
        self._everyone, self._members, self.queues = everyone, members, everyone.queues

    @property
    def control(self) -> Peers:
        """The same ranks."""
        return Subset(self._everyone.control, self._members)

    @override
    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        return self._everyone.post(
            {self._members[peer]: tensor for peer, tensor in sends.items()},
            {self._members[peer]: tensor for peer, tensor in recvs.items()},
        )

    @override
    def expect(self, source: int, arriving: Tensor) -> None:
        self._everyone.expect(self._members[source], arriving)

    def all_reduce_(self, values: Tensor) -> None:
        """Not without a process group of their own."""
        raise NotImplementedError("some ranks cannot use the backend's all-reduce: pass between=Ring() or Direct()")

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """See `Peers.scratch`; all ranks and some never exchange at the same time."""
        return self._everyone.scratch(name, nbytes, device)

    @override
    def submit(self, task: Task, where: str) -> Waitable:
        return self._everyone.submit(task, where)

    def close(self) -> None:
        """The connections are not its own."""

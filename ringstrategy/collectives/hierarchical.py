"""All-reduce over hosts with several ranks each: exact within a host, through the codec only between hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, check_segments, cut, cut_chunks, wire_stride
from ringstrategy.collectives.native import Native
from ringstrategy.collectives.ring import Ring
from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.worker import Work


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
        between: how a column travels between hosts: `Ring` or `Direct`.
        segments: most pieces of a column: while one travels between hosts, others travel within them (over NCCL they
            take turns). More hide more of that, in smaller messages; more than two have at least 2 MB of values for
            each host.
    """

    between: Collective = field(default_factory=Ring)
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

    def check(self, codec: Codec) -> None:
        """Whatever `between` can carry."""
        try:
            self.between.check(codec)
        except ValueError as error:
            raise ValueError(f"{error} (here the argument `between` of Hierarchical)") from None

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
        rank, hosts = peers.rank, ranks_of_hosts(peers.hosts)
        if values.numel() == 0:
            return
        if len(hosts) == peers.size:
            self.between.sum_(values, peers, codec, residual=residual, lost=lost, seed=seed)
            return
        width = min(len(host) for host in hosts)
        [host] = [ranks for ranks in hosts if rank in ranks]
        others = [other for other in host if other != rank]
        own = host.index(rank) if rank in host[:width] else None  # this rank's column
        columns = self._cut(values, width, len(hosts), codec.block)
        count = len(columns[0])
        stride = wire_stride(columns, Identity(), values)
        room = 0 if own is None else count * len(others) * stride
        filling = peers.scratch("hierarchical.filling", room, values.device)

        def part(column: int, k: int, of: Tensor = values) -> Tensor:
            begin, end = columns[column][k]
            return of[begin:end]

        def by_owner(k: int) -> dict[int, Tensor]:
            return {host[column]: part(column, k) for column in range(width) if column != own}

        def by_other(k: int) -> dict[int, Tensor]:
            """Where their parts of this rank's column arrive."""
            if own is None:
                return {}
            nbytes = part(own, k).nbytes
            begins = {other: (k * len(others) + i) * stride for i, other in enumerate(others)}
            return {other: filling[begin : begin + nbytes].view(values.dtype) for other, begin in begins.items()}

        gathering = []
        for k in range(count):
            if residual is not None:
                for column in range(width):
                    part(column, k).add_(part(column, k, residual))
            gathering.append(peers.post(_wires(by_owner(k)), _wires(by_other(k))))
        spreading: list[Handle] = []
        for k in range(count):
            gathering[k].wait()  # only now may the sum arrive where this rank's parts were
            finished: dict[int, Tensor] = {}
            if own is not None:
                piece = part(own, k)
                for summand in by_other(k).values():
                    peers.add_(piece, summand)
                owners = _Subset(peers, [ranks[own] for ranks in hosts])
                rest = None if lost is None else part(own, k, lost)
                # offsets begin at 0 in each piece, so each needs noise of its own
                self.between.sum_(piece, owners, codec, lost=rest, seed=derive_seed(seed, own, k))
                finished = dict.fromkeys(others, piece)
            spreading.append(peers.post(_wires(finished), _wires(by_owner(k))))
        for handle in spreading:
            handle.wait()
        if lost is None:
            return
        for column, pieces in enumerate(columns):
            if column != own or len(hosts) == 1:
                begin, end = pieces[0][0], pieces[-1][1]
                lost[begin:end].masked_fill_(values[begin:end].isfinite(), 0)

    def _cut(self, values: Tensor, width: int, hosts: int, block: int) -> list[list[tuple[int, int]]]:
        """Columns, each cut into the same number of pieces."""
        count = len(cut_chunks(values, width * hosts, self.segments, block)[0])  # `between` will cut each by the hosts
        return [cut(begin, end, count, block) for begin, end in cut(0, values.numel(), width, block)]


def ranks_of_hosts(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host in order; hosts in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def _wires(parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    # all ranks cut alike, so the other end leaves out the same empty messages
    return {peer: part.view(torch.uint8) for peer, part in parts.items() if part.numel()}


class _Subset(Peers):
    """Some of the ranks, numbered from 0, over the connections and with the scratch of all of them."""

    def __init__(self, everyone: Peers, members: Sequence[int]) -> None:
        hosts = tuple(everyone.hosts[member] for member in members)
        super().__init__(members.index(everyone.rank), len(members), everyone.stats, hosts)
        self._everyone, self._members = everyone, members

    @property
    def control(self) -> Peers:
        """The same ranks."""
        return _Subset(self._everyone.control, self._members)

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """See `Peers.post`."""
        return self._everyone.post(
            {self._members[peer]: tensor for peer, tensor in sends.items()},
            {self._members[peer]: tensor for peer, tensor in recvs.items()},
        )

    def all_reduce_(self, values: Tensor) -> None:
        """Not without a process group of their own."""
        raise NotImplementedError("some ranks cannot use the backend's all-reduce: pass between=Ring() or Direct()")

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """See `Peers.scratch`; all ranks and some never exchange at the same time."""
        return self._everyone.scratch(name, nbytes, device)

    def submit(self, work: Work, where: str) -> Waitable:
        """See `Peers.submit`."""
        return self._everyone.submit(work, where)

    def close(self) -> None:
        """The connections are not its own."""

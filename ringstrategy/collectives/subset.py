"""Some of the ranks as peers of their own, for a sum among them while all are in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.worker import Task


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

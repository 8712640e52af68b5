"""The ranks of this host, where gradients are averaged within hosts and parameters between them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.collectives.hierarchical import ranks_of_hosts
from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.stats import Stats


class Host:
    """The other ranks of this host, over connections and a thread of their own.

    So the exchanges of each step do not wait for those that go on between hosts.

    Attributes:
        algorithm: averages their gradients; to be set up with `peers`.
        group: these ranks.
        peers: likewise; its bytes are not counted, because they never leave the host.
    """

    def __init__(self, algorithm: Algorithm, ranks: list[int], device: torch.device, timeout: timedelta) -> None:
        self.algorithm = algorithm
        self.group = dist.new_group(ranks, timeout, use_local_synchronization=True)
        self.peers = connect(device, timeout, Stats(), group=self.group)

    @classmethod
    def around(
        cls,
        everyone: Peers,
        algorithm: Algorithm,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta,
    ) -> Host | None:
        """This rank's host; None if the rank is alone there. All ranks of the host call it."""
        [members] = [ranks for ranks in ranks_of_hosts(everyone.hosts) if everyone.rank in ranks]
        if len(members) == 1:
            return None
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return cls(algorithm, [ranks[member] for member in members], device, timeout)

    def close(self) -> None:
        """Disconnect. No collective."""
        self.algorithm.close()
        self.peers.close()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

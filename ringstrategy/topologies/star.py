"""Everyone with rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, metropolis


@dataclass(frozen=True)
class Star(Topology):
    """Rank 0 averages all; each other keeps all but 1 / size of its own. For hubs: size - 1 messages at rank 0."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        if rank == 0:
            return metropolis(0, dict.fromkeys(range(1, size), 1), size - 1)
        return metropolis(rank, {0: size - 1}, 1)

"""Everyone with everyone."""

from __future__ import annotations

from dataclasses import dataclass

from ringstrategy.topologies.base import Topology, uniform


@dataclass(frozen=True)
class Complete(Topology):
    """The exact mean at every step, by size - 1 messages of each rank: what the others are compared with."""

    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        """See `Topology.weights`."""
        return uniform(rank, range(size))

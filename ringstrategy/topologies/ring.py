"""A ring: everyone with the two beside it."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, uniform


@dataclass(frozen=True)
class RingGraph(Topology):
    """Rank r averages with r - 1 and r + 1, a third each. Two messages a step; the gap shrinks as 1 / size**2."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, [(rank - 1) % size, (rank + 1) % size])

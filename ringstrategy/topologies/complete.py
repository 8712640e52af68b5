"""The complete graph: each rank averages with all others."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, uniform


@dataclass(frozen=True)
class Complete(Topology):
    """The exact mean at every step. Each rank sends size - 1 messages. The yardstick for other topologies."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, range(size))

"""Hypercube: each rank averages with the ranks whose number differs from its own in one bit."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, metropolis


@dataclass(frozen=True)
class Hypercube(Topology):
    """log2(size) messages a step. A size that is no power of two gives an incomplete cube (Katseff 1988)."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        neighbours = _neighbours(rank, size)
        return metropolis(rank, {peer: len(_neighbours(peer, size)) for peer in neighbours}, len(neighbours))


def _neighbours(rank: int, size: int) -> list[int]:
    return [rank ^ (1 << bit) for bit in range((size - 1).bit_length()) if rank ^ (1 << bit) < size]

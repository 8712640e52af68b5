"""Graphs with the same edges at every step: a ring, a torus, a hypercube, a star, and all with all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, metropolis, uniform


@dataclass(frozen=True)
class RingGraph(Topology):
    """Rank r averages with r - 1 and r + 1, a third each. Two messages a step; the gap shrinks as 1 / size**2."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, [(rank - 1) % size, (rank + 1) % size])


@dataclass(frozen=True)
class Torus(Topology):
    """Ranks in rows and columns, each with those above, below, left and right of it; four messages a step at most.

    Args:
        rows: how many; must divide the number of ranks. None: as square as it can be (a prime size gives a ring).
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and (type(self.rows) is not int or self.rows < 1):
            raise ValueError(f"rows is a whole number of at least 1, or None, got {self.rows!r}")

    @override
    def check(self, size: int) -> None:
        if self.rows is not None and size % self.rows:
            raise ValueError(f"{size} ranks do not make {self.rows} equal rows: leave out Torus(rows=)")

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        rows = _squarest(size) if self.rows is None else self.rows
        columns = size // rows
        row, column = divmod(rank, columns)
        vertical = [(row + by) % rows * columns + column for by in (-1, 1)]
        horizontal = [row * columns + (column + by) % columns for by in (-1, 1)]
        return uniform(rank, [*vertical, *horizontal])


def _squarest(size: int) -> int:
    """The largest divisor that is not above the root."""
    return next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)


@dataclass(frozen=True)
class Hypercube(Topology):
    """Each rank averages with those whose numbers differ from its own in one bit: log2(size) messages a step.

    A size that is no power of two gives an incomplete cube (Katseff 1988).
    """

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        neighbours = _cube_neighbours(rank, size)
        return metropolis(rank, {peer: len(_cube_neighbours(peer, size)) for peer in neighbours}, len(neighbours))


def _cube_neighbours(rank: int, size: int) -> list[int]:
    return [rank ^ (1 << bit) for bit in range((size - 1).bit_length()) if rank ^ (1 << bit) < size]


@dataclass(frozen=True)
class Star(Topology):
    """Rank 0 averages all; each other keeps all but 1 / size of its own. For hubs: size - 1 messages at rank 0."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        if rank == 0:
            return metropolis(0, dict.fromkeys(range(1, size), 1), size - 1)
        return metropolis(rank, {0: size - 1}, 1)


@dataclass(frozen=True)
class Complete(Topology):
    """The exact mean at every step. Each rank sends size - 1 messages. The yardstick for other topologies."""

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, range(size))

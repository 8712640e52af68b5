"""Torus: a grid whose opposite edges are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, uniform


@dataclass(frozen=True)
class Torus(Topology):
    """Ranks in rows and columns, each with those above, below, left and right of it; four messages a step at most.

    Args:
        rows: how many; must divide the number of ranks. None: as square as it can be (a prime size gives a ring).
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and (not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1):
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

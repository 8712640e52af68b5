"""A user's own matrix, or own graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ringstrategy.topologies.base import Topology, metropolis

_ROUNDING = 1e-6  # by which a sum of weights may miss 1
_Row = tuple[tuple[int, float], ...]


class _Given(Topology):
    """A topology that is fixed for one world size."""

    _rows: tuple[_Row, ...]

    @override
    def check(self, size: int) -> None:
        if size not in (1, len(self._rows)):
            raise ValueError(
                f"{type(self).__name__} describes {len(self._rows)} ranks, but there are {size}: "
                "give one for that many, or choose a topology for any size, such as Exponential()"
            )

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return {0: 1.0} if size == 1 else dict(self._rows[rank])


@dataclass(frozen=True, init=False)
class FromMatrix(_Given):
    """W as given. Its columns must sum to 1; unless its rows do too, it is for push-sum alone.

    Args:
        matrix: square, `W[i][j]` is what rank i takes of rank j: nested sequences, an array or a tensor, no weight
            below 0; from every rank a way must lead to every other.
    """

    _rows: tuple[_Row, ...]

    def __init__(self, matrix: Sequence[Sequence[float]]) -> None:
        dense = [[float(weight) for weight in row] for row in matrix]
        size = len(dense)
        if not size or any(len(row) != size for row in dense):
            raise ValueError(f"matrix is square, one row a rank, got rows of {[len(row) for row in dense]} weights")
        if not all(math.isfinite(weight) and weight >= 0 for row in dense for weight in row):
            raise ValueError("matrix has a weight below 0, or one that is no number: weights are shares")
        for column in range(size):
            total = sum(row[column] for row in dense)
            if abs(total - 1) > _ROUNDING:
                raise ValueError(
                    f"column {column} of matrix sums to {total:.6g}: what rank {column} gives away, itself included, "
                    "must sum to 1, or the mean over ranks would drift; FromGraph(edges) finds weights that do"
                )
        rows = tuple(tuple((peer, weight) for peer, weight in enumerate(row) if weight) for row in dense)
        _check_connected([[peer for peer, _ in row] for row in rows])
        object.__setattr__(self, "_rows", rows)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Of the matrix."""
        at = [dict(row) for row in self._rows]
        return all(at[peer].get(rank) == weight for rank, row in enumerate(self._rows) for peer, weight in row)

    @property
    def doubly_stochastic(self) -> bool:  # type: ignore[override]
        """Of the matrix."""
        return all(abs(sum(weight for _, weight in row) - 1) <= _ROUNDING for row in self._rows)


@dataclass(frozen=True, init=False)
class FromGraph(_Given):
    """Metropolis-Hastings weights on an undirected graph.

    Args:
        graph: edges as pairs of ranks, 0 to the greatest that occurs; or a networkx Graph whose nodes are such numbers.
    """

    _rows: tuple[_Row, ...]

    def __init__(self, graph: Any) -> None:
        if getattr(graph, "is_directed", bool)():
            raise ValueError(
                "the graph is directed, so no weights give every rank the same say: use graph.to_undirected()"
            )
        edges: Iterable[Any] = graph.edges if hasattr(graph, "edges") else graph
        pairs = [tuple(edge)[:2] for edge in edges]
        named = {rank for pair in pairs for rank in pair} | set(getattr(graph, "nodes", ()))
        if not all(type(rank) is int and rank >= 0 for rank in named):
            raise ValueError(
                "the nodes of the graph are ranks, whole numbers from 0: networkx.convert_node_labels_to_integers"
            )
        neighbours: list[set[int]] = [set() for _ in range(max(named, default=0) + 1)]
        for one, other in pairs:
            if one != other:
                neighbours[one].add(other)
                neighbours[other].add(one)
        _check_connected(neighbours)
        rows = [
            metropolis(rank, {peer: len(neighbours[peer]) for peer in sorted(those)}, len(those))
            for rank, those in enumerate(neighbours)
        ]
        object.__setattr__(self, "_rows", tuple(tuple(row.items()) for row in rows))


def _check_connected(sources: Sequence[Iterable[int]]) -> None:
    """Raise unless what any rank knows reaches every other. `sources`: of each rank."""
    targets: list[list[int]] = [[] for _ in sources]
    for rank, those in enumerate(sources):
        for peer in those:
            targets[peer].append(rank)
    for way, ways in (("reaches", targets), ("hears from", sources)):
        seen, stack = {0}, [0]
        while stack:
            new = set(ways[stack.pop()]) - seen
            seen |= new
            stack += new
        missing = sorted(set(range(len(sources))) - seen)
        if missing:
            raise ValueError(
                f"rank 0 never {way} ranks {missing[:5]}{'...' if missing[5:] else ''}, so they would never agree: "
                "add edges until the graph is connected"
            )

"""Choose few cases in which all pairs of values meet, where a product of parameters would have too many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def all_pairs(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each list, such that each two values of different lists stand in some row together.

    Greedy, and the same on each run: a row takes the pair that is still missing, and then of each other list the value
    that makes most missing pairs.
    """
    assert len(lists) > 1
    values = [list(each) for each in lists]
    columns = range(len(values))
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(columns, 2)
        for a, b in itertools.product(range(len(values[i])), range(len(values[j])))
    }
    rows = []
    while missing:
        i, a, j, b = min(missing)
        row = {i: a, j: b}
        for column in columns:
            if column not in row:
                row[column] = max(
                    range(len(values[column])), key=lambda v: sum(p in missing for p in _of(row | {column: v}, column))
                )
        missing -= {pair for column in columns for pair in _of(row, column)}
        rows.append(tuple(values[column][row[column]] for column in columns))
    return rows


def _of(row: dict[int, int], column: int) -> Iterator[tuple[int, int, int, int]]:
    """The pairs of a row that have this column."""
    for other in row:
        if other != column:
            first, second = sorted((other, column))
            yield first, row[first], second, row[second]


def pairs(**lists: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by `all_pairs`: `@pairs(size=[1, 2, 3], codec=CODECS, numel=[0, 1, 63])`."""
    return pytest.mark.parametrize(",".join(lists), all_pairs(*lists.values()))

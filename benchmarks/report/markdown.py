"""Cells, tables and where figures are from, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from benchmarks.cells import Cell, told
from benchmarks.lab import bits_per_second

Line: TypeAlias = Any  # of a table: a row with its columns as attributes


def table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Without a line, nothing."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *body)]
    return "\n".join(lines) if len(lines) > 2 else ""


def of_lines(found: pd.DataFrame, columns: Mapping[str, Cell]) -> str:
    """A row a line; a column that says nothing of any line is left out."""
    return table(*told((line for _, line in found.iterrows()), columns))


def matrix(found: pd.DataFrame, cases: Iterable[str], heading: str, cell: Callable[[Line], str]) -> str:
    """A row a case that was measured, a column a value of the column `heading`."""
    columns = list(dict.fromkeys(found[heading]))
    cells = {(line.case, line[heading]): cell(line) for _, line in found.iterrows()}
    measured = [case for case in cases if any((case, column) in cells for column in columns)]
    body = [[f"`{case}`", *(cells.get((case, column), "-") for column in columns)] for case in measured]
    return table(["case", *columns], body)


def origin(found: pd.DataFrame) -> str:
    """Machine, versions, days and commits, as a sentence."""
    facts = [[f"{cores:g} cores" for cores in found.cores.dropna()], [f"torch {version}" for version in found.torch]]
    facts = [list(found.processor), *facts, list(found.date), [f"commit {commit[:10]}" for commit in found.commit]]
    return f"Measured on {', '.join(fact for each in facts for fact in dict.fromkeys(each))}."


def sources(found: pd.DataFrame) -> str:
    """Command, date, machine, versions and throttle of each run, a line each."""
    lines = [_source(line) for _, line in found.drop_duplicates("run", keep="first").iterrows()]
    return "\n".join(f"- {line}" for line in dict.fromkeys(lines))


def _source(line: Line) -> str:
    head, dash, dirty = line.commit.partition("-")
    said = [f"`{line.command}`", line.date, f"commit {head[:10]}{dash}{dirty}", f"torch {line.torch}", line.processor]
    if line.cores == line.cores:
        said.append(f"{line.cores:g} cores, {line.threads:g} thread(s) a rank")
    if line.throughput == line.throughput and (bits := bits_per_second(line.rate)):
        said.append(f"a raw TCP stream carried {800 * line.throughput / bits:.1f} % of the rate")
    return ", ".join(said + ([line.cpu] if isinstance(line.cpu, str) else [])) + "."

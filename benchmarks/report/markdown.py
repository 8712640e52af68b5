"""Cells, tables and where figures are from, in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from benchmarks.lab import bits_per_second

Line = pd.Series


def table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Without a line, nothing."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *body)]
    return "\n".join(lines) if len(lines) > 2 else ""


def of_lines(found: pd.DataFrame, columns: dict[str, Callable[[Line], str]]) -> str:
    """A row a line; a column that says nothing of any line is left out."""
    cells = {heading: [cell(line) for _, line in found.iterrows()] for heading, cell in columns.items()}
    told = {heading: column for heading, column in cells.items() if set(column) - {"-"}}
    return table(list(told), zip(*told.values(), strict=True))


def matrix(found: pd.DataFrame, cases: Iterable[str], heading: str, cell: Callable[[Line], str]) -> str:
    """A row a case that was measured, a column a value of the column `heading`."""
    columns = list(dict.fromkeys(found[heading]))
    cells = {(line.case, line[heading]): cell(line) for _, line in found.iterrows()}
    measured = [case for case in cases if any((case, column) in cells for column in columns)]
    body = [[f"`{case}`", *(cells.get((case, column), "-") for column in columns)] for case in measured]
    return table(["case", *columns], body)


def seconds(value: float | None) -> str:
    """With three digits or so."""
    if value is None or not math.isfinite(value):
        return "-" if value is None or math.isnan(value) else "missed"
    if value >= 0.1:
        return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"
    return f"{1e3 * value:.1f} ms" if value >= 0.01 else f"{1e3 * value:.2f} ms"


def times(ratio: float) -> str:
    """How many times as fast; near 1 with a digit more."""
    if ratio in (0, math.inf) or math.isnan(ratio):
        return {0.0: "missed", math.inf: "they miss it"}.get(ratio, "-")
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x" if ratio >= 1.05 or ratio < 0.95 else f"{ratio:.3f}x"


def shown(value: Any, form: str, scale: float = 1.0) -> str:
    """Formatted, or - for what was not measured."""
    return "-" if value is None or value != value else re.sub(r"(?<=\d)%", " %", form.format(value * scale))


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

"""docs/benchmarks.md, rendered from page.md.jinja."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import pandas as pd

from benchmarks.cells import seconds, shown, times
from benchmarks.report.frame import SETTING, losses, races

Line: TypeAlias = Any  # of a table: a row with its columns as attributes
_RARE = "stochastic|e5m2|bits=3"  # codecs that no registered name uses
_OPERATIONS = ["encode", "decode", "decode, add"]


def text(rows: pd.DataFrame, figures: str) -> str:
    """The whole page; `figures` is the folder of the pictures as seen from it."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"matrix": _matrix, "origin": _origin}
    known: dict[str, Any] = {
        "of": lambda query: rows.query(query, engine="python"),
        "having": _having,
        "losses": _losses(rows),
        "races": partial(_races, races(rows)),
        "codecs": _codecs(rows),
    }
    template = environment.from_string(Path(__file__).with_name("page.md.jinja").read_text())
    return re.sub(r"\n{3,}", "\n\n", template.render(figures=figures, **known)).rstrip() + "\n"


def _having(found: pd.DataFrame, case: str) -> pd.DataFrame:
    """The settings in which this case was measured."""
    return found.groupby(SETTING).filter(lambda setting: case in set(setting.case)) if len(found) else found


def _table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """In Markdown; without a line, nothing."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *body)]
    return "\n".join(lines) if len(lines) > 2 else ""


def _by_case(found: pd.DataFrame, cases: Iterable[str], heading: str, cell: Callable[[Line], str]) -> str:
    """A row a case that was measured, a column a value of the column `heading`."""
    columns = list(dict.fromkeys(found[heading]))
    cells = {(line.case, line[heading]): cell(line) for _, line in found.iterrows()}
    measured = [case for case in cases if any((case, column) in cells for column in columns)]
    body = [[f"`{case}`", *(cells.get((case, column), "-") for column in columns)] for case in measured]
    return _table(["case", *columns], body)


def _matrix(
    found: pd.DataFrame,
    cases: list[str] | None,
    heading: str,
    first: int = 0,
    of: str = "ratio",
    of_limit: bool = False,
) -> str:
    """Of the first cases the seconds, of the others how many times as fast as the baseline (of the limit).

    `heading`: the columns of the frame that name a column of the table. `of`: "seconds_median" or "deviation" instead.
    """
    named = found.assign(heading=[", ".join(map(str, names)) for names in found[heading.split()].to_numpy()])
    cases = list(dict.fromkeys(found.case)) if cases is None else cases

    def cell(line: Line) -> str:
        if of == "deviation":
            return shown(line.deviation, "{:+.0f}", scale=100)
        if of == "seconds_median" or line.case in cases[:first]:
            return seconds(line.seconds_median)
        return times(line.ratio) + (shown(line.of_limit, " ({:.0%})").replace("-", "") if of_limit else "")

    return _by_case(named, cases, "heading", cell)


def _origin(found: pd.DataFrame) -> str:
    """Machine, versions and days, as a sentence."""
    facts = [[f"{cores:g} cores" for cores in found.cores.dropna()], [f"torch {version}" for version in found.torch]]
    facts = [list(found.processor), *facts, sorted(found.date)]
    return f"Measured on {', '.join(fact for each in facts for fact in dict.fromkeys(each))}."


def _losses(rows: pd.DataFrame) -> str:
    body = []
    for kind, each in losses(rows).groupby("kind", sort=False):
        beaten = each[each.beaten]
        which = [f"{line.setting} ({line.strongest}; {line.best})" for _, line in beaten.iterrows()]
        slower, settings = f"{each.lost.sum()} of {each.ours.sum()}", f"{len(beaten)} of {len(each)}"
        body.append([str(kind), slower, settings, "; ".join(which) or "-"])
    return _table(["where", "our cases slower than fp32", "settings where another beats all of ours", "which"], body)


def _races(found: pd.DataFrame, cases: list[str]) -> str:
    """Seconds, and how many times as fast as the better of the dense peers."""

    def cell(line: Line) -> str:
        reached = line.seconds_median < float("inf")
        return f"{seconds(line.seconds_median)}, {times(line.ratio)}" if reached else "missed"

    if not len(found):
        return ""
    heading = [f"loss {line.target:g}, {line.network}, {line.seeds} seed(s)" for _, line in found.iterrows()]
    return _by_case(found.assign(heading=heading), cases, "heading", cell)


def _short(codec: str) -> str:
    """Without the arguments that all codecs of the table share."""
    return re.sub(r"(, )?(block=256|rounding='nearest')", "", codec)


def _codecs(rows: pd.DataFrame) -> str:
    found = rows[(rows.benchmark == "codecs") & ~rows.codec.str.contains(_RARE, na=False)]
    if not len(found):
        return ""
    speed = found.pivot(index="codec", columns="operation", values="gigabytes_per_second").reindex(found.codec.unique())
    compression = found.groupby("codec").compression.max()
    body = [
        [f"`{_short(codec)}`", f"{compression[codec]:.2f}x", *(f"{line[name]:.1f}" for name in _OPERATIONS)]
        for codec, line in speed.dropna(subset=[name for name in _OPERATIONS if name in speed]).iterrows()
    ]
    rest = found[~found.operation.isin([*_OPERATIONS, "encode, lost"])]
    said = ", ".join(
        f"{name} {speed:.1f}" for name, speed in zip(rest.operation, rest.gigabytes_per_second, strict=True)
    )
    said = f"GB/s of {found['values'].iloc[0]:.0f} float32 values in blocks of 256, by CPU time; {said}."
    return f"{said}\n\n{_table(['codec', 'compression', *_OPERATIONS], body)}"

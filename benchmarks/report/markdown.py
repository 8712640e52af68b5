"""Cells, tables and where figures are from, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.report.runs import Made, Panel, Run, bits_per_second
from benchmarks.rows import Row


def table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *body)]


def listed(lines: Iterable[str]) -> list[str]:
    """Each once; as a list if they are several."""
    once = list(dict.fromkeys(lines))
    return once if len(once) == 1 else [f"- {line}" for line in once]


def seconds(value: float) -> str:
    """With three digits or so."""
    if value >= 0.1:
        return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"
    return f"{1e3 * value:.1f} ms" if value >= 0.01 else f"{1e3 * value:.2f} ms"


def times(ratio: float | None) -> str:
    """How many times as fast; near 1 with a digit more."""
    if ratio is None:
        return "-"
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x" if ratio >= 1.05 or ratio < 0.95 else f"{ratio:.3f}x"


def median_times(found: Sequence[float] | None) -> str:
    """Over the seeds."""
    return "-" if found is None else times(statistics.median(found))


def megabytes(nbytes: float | None) -> str:
    """Millions of bytes."""
    return "-" if nbytes is None else f"{nbytes / 1e6:.3g}"


def of_limit(row: Row) -> str:
    """How much of what the wire allows was reached."""
    return f"{100 * row.limit_seconds / row.seconds_median:.0f} %" if row.limit_seconds else "-"


def provenance(row: Row, made: Made, *more: str) -> str:
    """Command, date, machine, versions and throttle of the run that a row is of, as one line."""
    head, dash, dirty = row.commit.partition("-")
    said = [f"`{made['command']}`", made["date"], *more, f"commit {head[:10]}{dash}{dirty}", f"torch {row.torch}"]
    said.append(made["processor"])
    if row.threads is not None:
        said.append(f"{row.cores} cores, {row.threads} thread(s) a rank")
    if row.throughput is not None and row.rate != "none":
        share = 8 * row.throughput / bits_per_second(row.rate)
        said.append(f"a raw TCP stream carried {100 * share:.1f} % of the rate")
    if row.cpu is not None:
        said.append(row.cpu)
    return ", ".join(said) + "."


def sources(panels: Iterable[Panel]) -> list[str]:
    """Where the figures of panels are from."""
    runs: list[Run] = [run for panel in panels for run in panel.sources()]
    firsts = [(run, next(iter(run.rows.values()))) for run in runs]
    return listed(provenance(row, run.made, f"{len(row.seconds)} rounds") for run, row in firsts)


def origin(panels: Iterable[Panel]) -> str:
    """The same in short: machine, versions, days and commits."""
    runs = [run for panel in panels for run in panel.sources()]
    firsts = [(run.made, next(iter(run.rows.values()))) for run in runs]
    facts = [
        [made["processor"] for made, _ in firsts],
        [f"{row.cores} cores" for _, row in firsts],
        [f"torch {row.torch}" for _, row in firsts],
        [made["date"] for made, _ in firsts],
        [f"commit {row.commit[:10]}" for _, row in firsts],
    ]
    return f"Measured on {', '.join(fact for each in facts for fact in dict.fromkeys(each))}."

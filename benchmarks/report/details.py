"""Full tables of all that was measured, a file a family: every case, its spread, its limit, its bytes and its run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.report.markdown import listed, megabytes, of_limit, provenance, seconds, sources, table, times
from benchmarks.report.runs import Panel, Rows, is_alone, of, panels, races
from benchmarks.report.targets import HEADINGS, losses, verdicts
from benchmarks.rows import Row

_TARGETS = ("target", "setting", "needed", "measured", "verdict")
FAMILIES = {  # of cases that take turns: the file, its title, the benchmark
    "all-reduce": ("All-reduces", "collectives"),
    "training": ("Training steps", "training"),
    "mixing": ("One mixing of parameters, nothing computed", "exchange"),
    "hosts": ("All-reduces of fixed bytes over a growing number of hosts", "scaling"),
    "predictions": ("What `ringstrategy-plan` says, beside what was measured", "prediction"),
    "one-rank": ("One rank alone", "overhead"),
}


def texts(made: Rows) -> dict[str, str]:
    """By the name of the file, without its ending."""
    found = {name: (title, _panels(panels(made, family))) for name, (title, family) in FAMILIES.items()}
    found["targets"] = ("Targets", ["", *table(_TARGETS, (verdict.cells() for verdict in verdicts(made)))])
    found["losses"] = ("Where we lose", ["", *table(HEADINGS, (loss.cells() for loss in losses(made)))])
    found["races"] = ("Seconds to a loss, each seed", _races(made))
    return {
        name: "\n".join([f"# {title}", "", "Made by `python -m benchmarks report`.", *lines]) + "\n"
        for name, (title, lines) in found.items()
        if lines
    }


def _panels(found: Iterable[Panel]) -> list[str]:
    lines: list[str] = []
    for panel in found:
        rows = list(panel.rows())
        waits = any(row.waited_seconds is not None for row in rows)
        predicts = any(row.predicted_seconds is not None for row in rows)
        headings = ["case", "seconds", "fastest - slowest", f"x {rows[0].baseline}", "limit", "of the limit"]
        headings += [*(["waited"] if waits else []), *(["predicted", "deviation"] if predicts else [])]
        headings += ["MB sent", "MB on the link", "error"]
        body = [list(_cells(row, waits, predicts)) for row in rows]
        lines += ["", f"## {panel.setting}", "", *table(headings, body)]
        apart = [f"`{row.case}`" for row in rows if row.ranks_identical is False and not is_alone(row.case)]
        where = sources([panel])
        if len(where) > 1:
            lines += ["", "A case is of the first of these runs that has it, and so is the baseline of its x:"]
        lines += ["", *where]
        lines += ["", f"Ranks ended with different bits: {', '.join(apart)}."] if apart else []
    return lines


def _cells(row: Row, waits: bool, predicts: bool) -> Iterator[str]:
    yield f"`{row.case}`"
    yield seconds(row.seconds_median)
    yield f"{seconds(min(row.seconds))} - {seconds(max(row.seconds))}"
    yield times(row.ratio)
    yield seconds(row.limit_seconds) if row.limit_seconds else "-"
    yield of_limit(row)
    if waits:
        yield seconds(row.waited_seconds) if isinstance(row.waited_seconds, float) else "-"
    if predicts:
        yield "-" if row.predicted_seconds is None else seconds(row.predicted_seconds)
        yield "-" if row.deviation is None else f"{100 * row.deviation:+.0f} %"
    yield megabytes(row.bytes_sent)
    yield megabytes(row.bytes_at_interface)
    yield "-" if row.error is None else f"{row.error:.1e}"


def _races(made: Rows) -> list[str]:
    lines: list[str] = []
    headings = ["seed", "case", "seconds", "steps", "best loss", "MB sent", "MB on the link"]
    for race in races(made):
        body = [[str(seed), *_run(row)] for seed, contenders in race.seeds.items() for row in contenders.values()]
        lines += ["", f"## Loss {race.target:g}: {race.setting}", "", *table(headings, body), ""]
        firsts = [(next(iter(race.seeds[seed].values())), known, seed) for seed, known in race.made.items()]
        lines += listed(provenance(row, known, f"seed {seed}") for row, known, seed in firsts)
    return lines


def _run(row: Row) -> list[str]:
    there = row.seconds_to_target is not None and row.steps_to_target is not None
    return [
        f"`{row.case}`",
        seconds(row.seconds_to_target or 0.0) if there else "missed",
        f"{row.steps_to_target:.0f}" if there else "-",
        "-" if row.best_loss is None else f"{row.best_loss:.3f}",
        megabytes(row.bytes_sent),
        megabytes(row.bytes_at_interface),
    ]


def last(made: Rows, benchmark: str) -> Rows:
    """Rows of the last step that ran this benchmark."""
    found = of(made, benchmark)
    return [(known, row) for known, row in found if known is found[-1][0]]

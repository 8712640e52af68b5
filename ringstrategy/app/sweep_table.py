"""The jobs below a folder as tables: found by their summaries, put into words; one row a job, one a group of seeds."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ringstrategy.app.report import Summary, byte_count, number, read_summary
from ringstrategy.app.sweep_compare import Spread, groups, times_ddp

COLUMNS = (
    "job",
    "status",
    "strategy",
    "overrides",
    "processes",
    "metric",
    "final_metric",
    "steps",
    "seconds_per_step",
    "bytes_sent_per_step",
    "seconds",
    "exposed_ms_per_step",
    "hidden_ms_per_step",
)
CAPTION = (
    "Time and bytes are those of rank 0. Times a step are means without the first tenth of the steps, which warm up; "
    "loading data and validation are not in them. x ddp: such a time of the ddp job with the same seed and other "
    "settings, divided by this job's; it says nothing about the loss. Exposed: communication that a step waited for; "
    "hidden: what went on while it computed."
)
MEANS_CAPTION = (
    "Finished jobs that differ in nothing but the seed: mean ± sample standard deviation. x ddp: mean time a step of "
    "ddp with the same other settings, over its seeds, divided by this one."
)


class Column(NamedTuple):
    """Of a table."""

    heading: str  # may have several lines
    is_number: bool = True  # aligned to the right
    spare: int = 0  # where there is no room, columns with more are left out first; 0: never


class Cell(NamedTuple):
    """The text to show, and the value to sort by; None sorts last."""

    text: str
    value: float | str | None


class Grid(NamedTuple):
    """A table of cells, whoever shows it."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    failed: list[bool]  # by row
    caption: str


def job_folders(folder: Path, since: float = 0.0) -> list[Path]:
    """`folder` and those below it that have a `summary.json` written at `since` or later; job 2 comes before job 10."""
    folders = [path.parent for path in folder.rglob("summary.json") if path.stat().st_mtime >= since]
    return sorted(folders, key=_numbers_by_value)


def _numbers_by_value(job: Path) -> list[str | int]:
    # text and digits take turns, so that like is compared with like
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(job)))]


def read_row(job: Path, folder: Path) -> Summary:
    """The job's summary, by COLUMNS; None for missing values. ValueError if the file is not ours."""
    summary = read_summary(job)
    if not isinstance(summary, dict) or not {"status", "strategy", "overrides"} <= summary.keys():
        raise ValueError(f"{job / 'summary.json'} was not written by ringstrategy-train: move it out of {folder}")
    name = str(job.relative_to(folder)) if job != folder else job.resolve().name
    return {column: summary.get(column) for column in COLUMNS} | {"job": name}


def shared_folder(rows: Sequence[Summary]) -> str:
    """Where all jobs lie, below the folder that was asked for; "" if nowhere deeper."""
    return os.path.commonpath([os.path.dirname(row["job"]) for row in rows]) if rows else ""


def job_name(row: Summary, rows: Sequence[Summary]) -> str:
    """The job's folder below the shared one."""
    return str(row["job"]).removeprefix(f"{shared_folder(rows)}/")


def common_overrides(rows: Sequence[Summary]) -> list[str]:
    """The overrides that all jobs have."""
    return [text for text in rows[0]["overrides"] if all(text in row["overrides"] for row in rows)]


def own_overrides(row: Summary, rows: Sequence[Summary]) -> list[str]:
    """The overrides that distinguish the job from the others. Its strategy has its own column."""
    return _own(row["overrides"], rows)


def _own(overrides: Sequence[str], rows: Sequence[Summary]) -> list[str]:
    common = common_overrides(rows)
    return [text for text in overrides if text not in common and not text.startswith("strategy=")]


def grids(rows: Sequence[Summary]) -> list[Grid]:
    """The table of all jobs; and if some differ in nothing but the seed, that of the means over seeds."""
    tables = [_jobs(rows)]
    if any(group.runs > 1 for group in groups(rows)):
        tables.append(_means(rows))
    return tables


def _jobs(rows: Sequence[Summary]) -> Grid:
    metric = _shared_metric(rows)
    columns = [
        Column("job", is_number=False),
        Column("strategy", is_number=False),
        Column("overrides", is_number=False),
        Column(_final(metric)),
        Column("x ddp\na step"),
        Column("ms\na step"),
        Column("bytes\na step"),
        Column("steps", spare=3),
        Column("total\ns", spare=4),
        Column("exposed\nms\na step", spare=1),
        Column("hidden\nms\na step", spare=2),
    ]
    failed = [row["status"] == "failed" for row in rows]
    return Grid("jobs", columns, [_job_cells(row, rows, metric) for row in rows], failed, CAPTION)


def _job_cells(row: Summary, rows: Sequence[Summary], metric: str | None) -> list[Cell]:
    failed = row["status"] == "failed"
    seconds, total, steps = row["seconds_per_step"], row["seconds"], row["steps"]
    milliseconds = None if seconds is None else 1000 * seconds
    final = number(row["final_metric"]) if metric else f"{row['metric']} {number(row['final_metric'])}"
    return [
        Cell(job_name(row, rows), row["job"]),
        Cell(row["strategy"], row["strategy"]),
        _words(own_overrides(row, rows)),
        Cell("FAILED" if failed else final, row["final_metric"]),
        _speed(times_ddp(row, rows)),
        Cell(number(milliseconds), milliseconds),
        Cell(byte_count(row["bytes_sent_per_step"]), row["bytes_sent_per_step"]),
        Cell("-" if steps is None else str(steps), steps),
        Cell("-" if total is None else f"{total:.1f}", total),
        Cell(number(row["exposed_ms_per_step"]), row["exposed_ms_per_step"]),
        Cell(number(row["hidden_ms_per_step"]), row["hidden_ms_per_step"]),
    ]


def _means(rows: Sequence[Summary]) -> Grid:
    metric = _shared_metric(rows)
    columns = [
        Column("strategy", is_number=False),
        Column("overrides", is_number=False),
        Column("runs"),
        Column(_final(metric)),
        Column("x ddp\na step"),
        Column("ms\na step"),
        Column("bytes\na step", spare=1),
    ]
    cells = [
        [
            Cell(group.strategy, group.strategy),
            _words(_own(group.overrides, rows)),
            Cell(str(group.runs), group.runs),
            _mean(group.final_metric, prefix="" if metric else f"{group.metric} "),
            _speed(group.times_ddp),
            _mean(group.seconds_per_step, scale=1000),
            Cell(byte_count(sent := group.bytes_sent_per_step and group.bytes_sent_per_step.mean), sent),
        ]
        for group in groups(rows)
    ]
    return Grid("means over seeds", columns, cells, [False] * len(cells), MEANS_CAPTION)


def _shared_metric(rows: Sequence[Summary]) -> str | None:
    metrics = {row["metric"] for row in rows if row["status"] != "failed"}
    return metrics.pop() if len(metrics) == 1 else None


def _final(metric: str | None) -> str:
    return f"final\n{metric or 'metric'}".replace("_", "_\n", 1)  # two short lines, for val_accuracy


def _words(overrides: Sequence[str]) -> Cell:
    return Cell(" ".join(overrides), " ".join(overrides))


def _speed(times: float | None) -> Cell:
    return Cell("" if times is None else f"{times:.3g}", times)


def _mean(spread: Spread | None, prefix: str = "", scale: float = 1) -> Cell:
    if spread is None:
        return Cell("-", None)
    deviation = scale * (spread.deviation or 0)
    around = "" if spread.deviation is None else f" ± {deviation:.0f}" if deviation >= 10 else f" ± {deviation:.2g}"
    return Cell(f"{prefix}{number(scale * spread.mean)}{around}", scale * spread.mean)

"""The jobs below a folder as rows of one table: found by their summaries, put into words, printed."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from ringstrategy.report import Summary, byte_count, number, read_summary

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
HEADINGS = (
    "job",
    "strategy",
    "overrides",
    "final metric",
    "steps",
    "ms\na step",
    "bytes\na step",
    "total\ns",
    "exposed\nms\na step",
    "hidden\nms\na step",
)
WORDS, NUMBERS = HEADINGS[1:4], HEADINGS[4:]  # on a narrow screen words are folded, numbers stay in one piece
CAPTION = (
    "Time and bytes are those of rank 0. Exposed: communication that a step waited for; hidden: what went on while it "
    "computed. Times a step are means without the first tenth of the steps, which warm up."
)


class Cell(NamedTuple):
    """What is shown, and what to sort by; None sorts last."""

    text: str
    value: float | str | None


def job_folders(folder: Path, since: float = 0.0) -> list[Path]:
    """`folder` and those below it that have a `summary.json` written at `since` or later; job 2 comes before job 10."""
    folders = [path.parent for path in folder.rglob("summary.json") if path.stat().st_mtime >= since]
    return sorted(folders, key=_numbers_by_value)


def _numbers_by_value(job: Path) -> list[str | int]:
    # text and digits take turns, so that like is compared with like
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(job)))]


def read_row(job: Path, folder: Path) -> Summary:
    """The job's summary, by COLUMNS; None for what it lacks. ValueError: somebody else's file."""
    summary = read_summary(job)
    if not isinstance(summary, dict) or not {"status", "strategy", "overrides"} <= summary.keys():
        raise ValueError(f"{job / 'summary.json'} was not written by ringstrategy-train: move it out of {folder}")
    name = str(job.relative_to(folder)) if job != folder else job.resolve().name
    return {column: summary.get(column) for column in COLUMNS} | {"job": name}


def common_overrides(rows: Sequence[Summary]) -> list[str]:
    """Those that all jobs have."""
    return [text for text in rows[0]["overrides"] if all(text in row["overrides"] for row in rows)]


def own_overrides(row: Summary, rows: Sequence[Summary]) -> list[str]:
    """Those that tell the job from the others; its strategy is a column of its own."""
    common = common_overrides(rows)
    return [text for text in row["overrides"] if text not in common and not text.startswith("strategy=")]


def cells(row: Summary, rows: Sequence[Summary]) -> list[Cell]:
    """One a heading."""
    failed = row["status"] == "failed"
    seconds, total, steps = row["seconds_per_step"], row["seconds"], row["steps"]
    milliseconds = None if seconds is None else 1000 * seconds
    overrides = " ".join(own_overrides(row, rows))
    return [
        Cell(row["job"], row["job"]),
        Cell(row["strategy"], row["strategy"]),
        Cell(overrides, overrides),
        Cell("FAILED" if failed else f"{row['metric']} {number(row['final_metric'])}", row["final_metric"]),
        Cell("-" if steps is None else str(steps), steps),
        Cell(number(milliseconds), milliseconds),
        Cell(byte_count(row["bytes_sent_per_step"]), row["bytes_sent_per_step"]),
        Cell("-" if total is None else f"{total:.1f}", total),
        Cell(number(row["exposed_ms_per_step"]), row["exposed_ms_per_step"]),
        Cell(number(row["hidden_ms_per_step"]), row["hidden_ms_per_step"]),
    ]


def print_table(rows: Sequence[Summary], folder: Path) -> None:
    """On the screen, failed jobs in red."""
    # Text, since in a string the brackets of an override would be taken for markup
    table = Table(title=Text(f"jobs in {folder}"), caption=CAPTION, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        justify: JustifyMethod = "right" if heading in NUMBERS else "left"
        table.add_column(heading, no_wrap=heading not in WORDS, overflow="fold", justify=justify)
    for row in rows:
        style = "red" if row["status"] == "failed" else None
        table.add_row(*(Text(cell.text) for cell in cells(row, rows)), style=style)
    Console().print(table)

"""End a sweep (`ringstrategy-train -m`) with one table of all its runs, on the screen and as JSON and CSV."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from ringstrategy.report import Summary, byte_count, number, read_summary

COLUMNS = (
    "job",
    "status",
    "strategy",
    "overrides",
    "metric",
    "final_metric",
    "seconds_per_step",
    "bytes_sent_per_step",
    "exposed_ms_per_step",
)


class SweepTable(Callback):
    """Prints the table when the last job has ended and saves it in the sweep's folder.

    It reads what the jobs left on disk, so it does not mind where a launcher ran them. A failed job is a row too; the
    sweep then ends with exit code 1.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the time: what is older in the folder was left by another sweep."""
        self._began = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print, save, and exit with 1 if a job failed."""
        folder = Path(config.hydra.sweep.dir)
        rows = _rows(folder, self._began)
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
        with open(folder / "sweep.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({**row, "overrides": " ".join(row["overrides"])} for row in rows)
        _print(rows, folder)
        if any(row["status"] == "failed" for row in rows):
            sys.exit(1)


def _rows(folder: Path, began: float) -> list[Summary]:
    """One row a job that ended after `began`, in the order in which they ended."""
    paths = [path for path in folder.rglob("summary.json") if path.stat().st_mtime >= began]
    rows = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        summary = {"job": str(path.parent.relative_to(folder)), **read_summary(path.parent)}
        rows.append({column: summary.get(column) for column in COLUMNS})
    return rows


def _print(rows: list[Summary], folder: Path) -> None:
    table = Table(
        title=f"sweep in {folder}",
        caption="time, bytes and waiting are those of rank 0",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in (
        "job",
        "strategy",
        "overrides",
        "final metric",
        "ms\na step",
        "bytes\na step",
        "exposed ms\na step",
    ):
        table.add_column(heading, no_wrap=heading != "overrides", overflow="fold")
    for row in rows:
        failed, seconds = row["status"] == "failed", row["seconds_per_step"]
        overrides = [text for text in row["overrides"] if not text.startswith("strategy=") and not _in_all(text, rows)]
        table.add_row(
            row["job"],
            row["strategy"],
            " ".join(overrides),
            "FAILED" if failed else f"{row['metric']} {number(row['final_metric'])}",
            number(seconds and 1000 * seconds),
            byte_count(row["bytes_sent_per_step"]),
            number(row["exposed_ms_per_step"]),
            style="red" if failed else None,
        )
    Console().print(table)


def _in_all(override: str, rows: list[Summary]) -> bool:
    return all(override in row["overrides"] for row in rows)

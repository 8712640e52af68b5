"""End a sweep (`ringstrategy-train -m`) with one table of all its runs, on the screen and as JSON and CSV."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ringstrategy.app.sweep_print import print_tables
from ringstrategy.app.sweep_table import COLUMNS, job_folders, read_row


class SweepTable(Callback):
    """Prints the table when the last job has ended and saves it in the sweep's folder.

    It reads what the jobs left on disk, so it does not mind where a launcher ran them. A failed job is a row too; the
    sweep then ends with exit code 1.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the time. Older files in the folder belong to another sweep."""
        self._began = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print, save, and exit with 1 if a job failed."""
        folder = Path(config.hydra.sweep.dir)
        rows = [read_row(job, folder) for job in job_folders(folder, since=self._began)]
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
        with open(folder / "sweep.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({**row, "overrides": " ".join(row["overrides"])} for row in rows)
        print_tables(rows, folder)
        print(f"to see the curves of all jobs: ringstrategy-report {folder}")
        if any(row["status"] == "failed" for row in rows):
            sys.exit(1)

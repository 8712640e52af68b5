"""End a sweep (`ringstrategy-train -m`) with one table of all its runs, on the screen and as JSON and CSV."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ringstrategy.app.jobs import COLUMNS, read_jobs
from ringstrategy.app.overrides import planned
from ringstrategy.app.sweep_report import print_tables


class SweepTable(Callback):
    """Prints the table when the last job has ended and saves it in the sweep's folder.

    It reads what the jobs left on disk, so it does not mind where a launcher ran them. A job that did not finish is a
    row too; the sweep then ends with exit code 1.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the time. Older files in the folder belong to another sweep."""
        self._began = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print, save, and exit with 1 if a job did not finish."""
        folder = Path(config.hydra.sweep.dir)
        jobs = read_jobs(folder, since=self._began)
        table = jobs[list(COLUMNS)]
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2))
        table.assign(overrides=table["overrides"].map(" ".join)).to_csv(folder / "sweep.csv", index=False)
        print_tables(jobs)
        print(f"to see all columns and the curves of all jobs: ringstrategy-report {folder}")
        if (jobs["status"] != "finished").any():
            sys.exit(1)


def progress(folder: Path, number: int) -> str:
    """ "job 3 of 6, about 4 minutes left", for job `number` (from 0) of the sweep in `folder`.

    The rest takes as long a job as those that have ended, which the launcher may have run side by side.
    """
    jobs = len(planned(folder))
    if not jobs:
        return f"job {number + 1}"
    began = (folder / "multirun.yaml").stat().st_mtime
    ended = sum(path.stat().st_mtime >= began for path in folder.rglob("summary.json"))
    place = f"job {number + 1} of {jobs}"
    if not ended:
        return place
    left = (time.time() - began) / ended * (jobs - ended)
    return f"{place}, about {left:.0f} s left" if left < 100 else f"{place}, about {left / 60:.0f} minutes left"

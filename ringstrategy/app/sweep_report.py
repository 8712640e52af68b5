"""`ringstrategy-report FOLDER`: every job below a folder as a table on the screen and as one page with plots."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ringstrategy.extras import require


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    parser = argparse.ArgumentParser(
        prog="ringstrategy-report",
        description="Compare the jobs of ringstrategy-train: a table, and a page with plots that needs no network.",
    )
    parser.add_argument("folder", type=Path, help="of a sweep (multirun/DATE/TIME), of one run, or above several")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the page; default: FOLDER/report.html")
    options = parser.parse_args(arguments)
    require("ringstrategy-report", "matplotlib", "plotly", "rich")  # so what needs them is imported late
    try:
        written = report(options.folder, options.out or options.folder / "report.html")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"page: {written}")


def report(folder: Path, out: Path) -> Path:
    """Print the table, write the page to `out` and return it.

    FileNotFoundError: there is no job in `folder` or below. ValueError: a file there is not what a job writes.
    """
    from ringstrategy.app.curves import STEPS_FILE, read_curves
    from ringstrategy.app.sweep_page import page
    from ringstrategy.app.sweep_plots import jobs_of
    from ringstrategy.app.sweep_print import print_tables
    from ringstrategy.app.sweep_table import job_folders, read_row, shared_folder

    folders = job_folders(folder)
    if not folders:
        raise FileNotFoundError(
            f"no job to report: there is no summary.json in {folder} or in a folder below it; ringstrategy-train "
            "writes one into a job's folder when the job ends"
        )
    rows = [read_row(job, folder) for job in folders]
    # a failed job may stand where an earlier one left its steps
    has_steps = [
        row["status"] != "failed" and (job / STEPS_FILE).exists() for job, row in zip(folders, rows, strict=True)
    ]
    curves = [read_curves(job) if steps else None for job, steps in zip(folders, has_steps, strict=True)]
    title = f"jobs in {folder.resolve() / shared_folder(rows)}"
    out.write_text(page(title, jobs_of(rows, curves)), encoding="utf-8")
    print_tables(rows, folder)
    return out

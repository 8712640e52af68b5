"""`ringstrategy-report FOLDER`: every job below a folder as a table on the screen and as one page with plots."""

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ringstrategy.extras import require

if TYPE_CHECKING:
    import pandas as pd

ON_SCREEN = 7  # columns
CAPTION = (
    "Time and bytes are those of rank 0. Times a step are means without the first tenth of the steps, which warm up; "
    "loading data and validation are not in them. x ddp: such a time of the ddp job with the same seed and other "
    "settings, divided by this job's; it says nothing about the loss. Exposed: communication that a step waited for; "
    "hidden: what went on while it computed. After ±: the sample standard deviation over seeds."
)
PLOTS_CAPTION = (
    "Click a legend to hide a job in all plots of the loss, double-click to see it alone. Runs longer than 500 steps "
    "are averaged down to 500 points. A job whose bytes are not counted, such as ddp, is not drawn against them, and "
    "its communication is not told apart from its computation."
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 1.5rem 2rem; font: 15px/1.45 system-ui, sans-serif; color: #222; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .28rem .8rem; text-align: left; border-bottom: 1px solid #dde; }}
th {{ white-space: nowrap; }}
td {{ max-width: 30rem; overflow-wrap: break-word; }}
h1, code {{ overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; margin-bottom: 1rem; }}
.plot > div {{ min-width: 60rem; }}
@media (max-width: 40rem) {{ body {{ margin: 1rem; }} h1 {{ font-size: 1.3rem; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
{body}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    parser = argparse.ArgumentParser(
        prog="ringstrategy-report",
        description="Compare the jobs of ringstrategy-train: a table, and a page with plots that needs no network.",
    )
    parser.add_argument("folder", type=Path, help="of a sweep (multirun/DATE/TIME), of one run, or above several")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the page; default: FOLDER/report.html")
    options = parser.parse_args(arguments)
    require("ringstrategy-report", "matplotlib", "pandas", "plotly", "rich")  # so what needs them is imported late
    try:
        written = report(options.folder, options.out or options.folder / "report.html")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"page: {written}")


def report(folder: Path, out: Path) -> Path:
    """Print the table, write the page to `out` and return it.

    FileNotFoundError: there is no job in `folder` or below. ValueError: a file there is not what a job writes.
    """
    from ringstrategy.app.job_plots import loss_curves, step_times
    from ringstrategy.app.jobs import common_overrides, read_jobs, shared_folder

    jobs = read_jobs(folder)
    if jobs.empty:
        raise FileNotFoundError(
            f"no job to report: there is no summary.json in {folder} or in a folder below it; ringstrategy-train "
            "writes one into a job's folder when the job ends"
        )
    figures = [loss_curves(jobs), step_times(jobs)]
    ended = ", ".join(f"{count} {status}" for status, count in jobs["status"].value_counts(sort=False).items())
    page = _PAGE.format(
        title=escape(f"jobs in {folder.resolve() / shared_folder(jobs)}"),
        about=f"{len(jobs)} jobs: {ended}. In all of them: <code>"
        + escape(" ".join(common_overrides(jobs)) or "-")
        + "</code>",
        body="\n".join(
            [
                *(
                    f'<h2>{title}</h2><div class="wide">{table.to_html(index=False, border=0)}</div>'
                    for title, table in tables(jobs)
                ),
                f"<p>{CAPTION}</p>",
                *(
                    '<div class="wide plot">'
                    + figure.to_html(full_html=False, include_plotlyjs=place == 0, config={"displaylogo": False})
                    + "</div>"
                    for place, figure in enumerate(figures)
                ),
                f"<p>{PLOTS_CAPTION}</p>",
            ]
        ),
    )
    out.write_text(page, encoding="utf-8")
    print_tables(jobs)
    return out


def tables(jobs: "pd.DataFrame") -> "list[tuple[str, pd.DataFrame]]":
    """The table of all jobs; and if some differ in nothing but the seed, that of the means over seeds."""
    from ringstrategy.app.jobs import table_of_jobs, table_of_means

    means = table_of_means(jobs)
    return [("jobs", table_of_jobs(jobs))] + ([] if means is None else [("means over seeds", means)])


def print_tables(jobs: "pd.DataFrame") -> None:
    """Print the first columns; the page and the CSV of a sweep have all."""
    for title, table in tables(jobs):
        print(f"\n{title}\n{table.iloc[:, :ON_SCREEN].to_string(index=False)}")

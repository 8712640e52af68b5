"""Make docs/benchmarks.md and its pictures from the measured rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ringstrategy.extras import require

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m benchmarks report", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the rows")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="pictures go beside it")
    options = parser.parse_args(arguments)
    require("python -m benchmarks report", "jinja2", "matplotlib", "pandas", extra="bench")
    from benchmarks.report import frame, page, plots

    rows, figures = frame.load(options.results), options.page.with_suffix("")
    plots.draw(rows, figures)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page.text(rows, figures.name))
    print(f"{options.page}, pictures in {figures}")

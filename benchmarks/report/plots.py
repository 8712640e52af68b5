"""Pictures of rows: time against size, loss against seconds, time against hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report.frame import who

SIZES = (
    *("gloo fp32", "gloo fp16 tensor", "ring identity", "ring int8", "ring int4", "direct rotated int2"),
    "ring sign",
)
RACERS = (
    *("ddp", "ddp fp16 hook", "ddp powersgd rank 4", "post-local sgd every 16"),
    *("ring_int8", "ring_int4", "gossip_exponential every 16", "gossip_int8 every 4 (1 late)"),
)
_Points = Callable[[pd.DataFrame], tuple[Any, Any]]


def draw(rows: pd.DataFrame, folder: Path) -> None:
    """Those that the page shows. What was not measured is not drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = rows[(rows.benchmark == "collectives") & (rows.processes == 1) & rows.case.isin(SIZES)]
    sums = sums.groupby("network", sort=False).filter(lambda some: some.megabytes.nunique() > 1)
    racers = rows[(rows.benchmark == "time to accuracy") & rows.case.isin(RACERS)]
    hosts = rows[rows.benchmark == "scaling"].sort_values("hosts")
    against_size: _Points = lambda line: (line.megabytes, line.seconds_median)  # noqa: E731
    against_hosts: _Points = lambda line: (line.hosts, line.seconds_median)  # noqa: E731
    _lines(sums, ["network"], ["case"], against_size, ("MB of fp32", "seconds"), folder / "sizes.png")
    labels = ("seconds of training", "held-out loss, nats a byte")
    _lines(racers, ["network", "target"], ["case", "seed"], _losses, labels, folder / "time_to_accuracy.png")
    _lines(hosts, ["size", "rate"], ["case"], against_hosts, ("hosts", "seconds"), folder / "scaling.png")


def _losses(run: pd.DataFrame) -> tuple[Any, Any]:
    curve = run.curve.iloc[0]
    return curve["seconds"][1:], np.array(curve["losses"][1:], dtype=float)  # where it diverged, None: a gap


def _lines(
    found: pd.DataFrame, panel: list[str], line: list[str], points: _Points, labels: tuple[str, str], path: Path
) -> None:
    """Axes for each panel, two beside each other, and one legend; others' lines are dashed."""
    panels = list(found.groupby(panel, sort=False))
    if not panels:
        return
    columns = min(2, len(panels))
    # Figure without pyplot: no display is looked for and no global state is touched
    figure = Figure(figsize=(6.2 * columns, 4.2 * -(-len(panels) // columns)), layout="constrained")
    all_axes = list(figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat)
    colors = {case: f"C{place}" for place, case in enumerate(found.case.unique())}
    known = {}
    for axes, (name, each) in zip(all_axes, panels, strict=False):
        for _, some in each.groupby(line, sort=False):
            case = some.case.iloc[0]
            style = {"color": colors[case], "linestyle": "--" if who(case) == "peer" else "-"}
            [known[case]] = axes.plot(*points(some), linewidth=1, marker=".", markersize=3, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, label in ((axes.xaxis, labels[0]), (axes.yaxis, labels[1])):  # plain numbers at 1, 2 and 5
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
            axis.set_label_text(label, size=8)
        axes.set_title(", ".join(map(str, name)), size=9)
        axes.grid(alpha=0.25, which="both")
        axes.tick_params(labelsize=7, which="both")
    for spare in all_axes[len(panels) :]:
        spare.set_axis_off()
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)

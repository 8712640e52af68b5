"""Pictures of rows, with at most eight lines or bars: time against size, loss against seconds, time against hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report.frame import growth, rounds, share, who

SIZES = (
    *("gloo fp32", "gloo fp16 tensor", "ring identity", "ring int8", "ring int4", "direct rotated int2"),
    "ring sign",
)
STEPS = (
    *("ddp", "ddp fp16 hook", "ddp powersgd rank 1", "ring", "ring_int8", "ring_int4", "ring_powersgd"),
    "gossip_int8 every 4 (1 late)",
)
RACERS = (
    *("ddp", "ddp fp16 hook", "ddp powersgd rank 4", "post-local sgd every 16"),
    *("ring_int8", "ring_int4", "gossip_exponential every 16", "gossip_int8 every 4 (1 late)"),
)


def draw(rows: pd.DataFrame, folder: Path, cases: Sequence[str] = ()) -> None:
    """Those that the page shows; of other cases, if some are given."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = rows[(rows.benchmark == "collectives") & (rows.processes == 1) & rows.case.isin(cases or SIZES)]
    _sizes(sums.groupby("network", sort=False).filter(lambda some: some.megabytes.nunique() > 1), folder / "sizes.png")
    steps = rows[rows.benchmark == "training"].groupby("size").filter(lambda some: "ring_int8" in set(some.case))
    _steps(steps[steps.parameters == steps.parameters.max()], cases or STEPS, folder / "training.png")
    racers = rows[(rows.benchmark == "time to accuracy") & rows.case.isin(cases or RACERS)]
    _races(racers, cases or RACERS, folder / "time_to_accuracy.png")
    hosts = growth(rows)
    _growth(hosts[hosts.case.isin(cases or hosts.case)], folder / "scaling.png")


def _sizes(found: pd.DataFrame, path: Path) -> None:
    figure, panels = grid([panel for _, panel in found.groupby("network", sort=False)], 4.0)
    for panel, axes in panels:
        for case, line in panel.groupby("case", sort=False):
            style = ".--" if who(case) == "peer" else ".-"
            axes.plot(line.megabytes, line.seconds_median, style, label=case, linewidth=1)
        _logarithmic(axes.xaxis)
        _logarithmic(axes.yaxis)
        _label(axes, panel.network.iloc[0], "MB of fp32", "seconds")
    save(figure, path)


def _steps(found: pd.DataFrame, cases: Sequence[str], path: Path) -> None:
    figure, panels = grid(
        [panel for _, panel in found.groupby(["network", "size"], sort=False)], 1.2 + 0.25 * len(cases)
    )
    for panel, axes in panels:
        bars = panel.set_index("case").reindex([case for case in reversed(cases) if case in set(panel.case)])
        colors = ["0.75" if who(case) == "peer" else "#8fb8de" for case in bars.index]
        axes.barh(range(len(bars)), bars.seconds_median, color=colors, height=0.7)
        for height, (_, bar) in enumerate(bars.iterrows()):
            axes.annotate(f" {bar.ratio:.2f}x", (bar.seconds_median, height), va="center", size=7)
            if bar.limit_seconds == bar.limit_seconds:
                axes.plot([bar.limit_seconds] * 2, [height - 0.42, height + 0.42], color="black", linewidth=1.6)
        axes.set_yticks(range(len(bars)), bars.index, fontsize=7)
        axes.margins(x=0.15)
        title = f"{panel['size'].iloc[0]}, {panel.network.iloc[0]}"
        _label(axes, title, "seconds; grey: others'; black: the limit", "")
    save(figure, path)


def _races(found: pd.DataFrame, cases: Sequence[str], path: Path) -> None:
    figure, panels = grid([panel for _, panel in found.groupby(["network", "target"], sort=False)], 4.4)
    for panel, axes in panels:
        for _, run in panel.iterrows():
            losses = np.array(run.curve["losses"][1:], dtype=float)  # where it diverged, None: a gap
            how: dict[str, Any] = {
                "color": f"C{cases.index(run.case)}",
                "linestyle": "--" if who(run.case) == "peer" else "-",
            }
            axes.plot(run.curve["seconds"][1:], losses, label=run.case, linewidth=1, alpha=0.8, **how)
        axes.axhline(panel.target.iloc[0], color="crimson", linewidth=0.8)
        _logarithmic(axes.xaxis)
        _label(axes, panel.network.iloc[0], "seconds of training", "held-out loss, nats a byte")
    save(figure, path)


def _growth(found: pd.DataFrame, path: Path) -> None:
    figure, panels = grid([panel for _, panel in found.groupby(["size", "network"], sort=False)], 4.2)
    for panel, axes in panels:
        for place, (_, line) in enumerate(panel.iterrows()):
            hosts = np.arange(min(line.by_hosts), max(line.by_hosts) + 1)
            model = [line.alpha * rounds(line.case, n) + line.beta * share(line.case, n) * line.nbytes for n in hosts]
            axes.plot(list(line.by_hosts), list(line.by_hosts.values()), "o", color=f"C{place}", label=line.case)
            axes.plot(hosts, model, color=f"C{place}", linewidth=1)
        axes.set_ylim(bottom=0)
        title = f"{panel['size'].iloc[0]}, {panel.network.iloc[0]}"
        _label(axes, title, "hosts", "seconds; lines: the model")
    save(figure, path)


def grid(panels: list[pd.DataFrame], height: float) -> tuple[Figure, list[tuple[pd.DataFrame, Axes]]]:
    """A figure with axes for each panel, two beside each other."""
    columns = max(1, min(2, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    # Figure without pyplot: no display is looked for and no global state is touched
    figure = Figure(figsize=(6.2 * columns, height * lines), layout="constrained")
    all_axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in all_axes[len(panels) :]:
        spare.set_axis_off()
    return figure, list(zip(panels, all_axes, strict=False))


def save(figure: Figure, path: Path) -> None:
    """With one legend for all axes, if lines have labels; nothing is written where nothing was drawn."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    if pairs:
        known = {label: handle for handle, label in reversed(pairs)}
        labels = list(dict.fromkeys(label for _, label in pairs))
        handles = [known[label] for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    if any(axes.has_data() for axes in figure.axes):
        figure.savefig(path, dpi=110)


def _logarithmic(axis: Axis) -> None:
    """With plain numbers at 1, 2 and 5."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _label(axes: Axes, title: str, below: str, beside: str) -> None:
    axes.set_title(title, size=9)
    axes.set_xlabel(below, size=8)
    axes.set_ylabel(beside, size=8)
    axes.grid(alpha=0.25, which="both")
    axes.tick_params(labelsize=7, which="both")

"""Pictures of rows, with at most eight lines or bars: time against size, loss against seconds, time against hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report import growth
from benchmarks.report.runs import Panel, Race, Rows, is_peer, panels, pick, races, rate_in_words

SIZES = (
    "gloo fp32",
    "gloo fp16 tensor",
    "ring identity",
    "ring int8",
    "ring int4",
    "direct rotated int2",
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


def draw(made: Rows, folder: Path, cases: Sequence[str] = ()) -> None:
    """Those that the page shows; of other cases, if some are given."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [panel for panel in panels(made, "collectives") if panel.setting.processes == 1]
    sizes = [pick(sums, network=network) for network in dict.fromkeys(panel.setting.network for panel in sums)]
    several = [group for group in sizes if len(group) > 1]
    if several:
        _sizes(several, cases or SIZES, folder / "sizes.png")
    steps = [panel for panel in panels(made, "training") if "ring_int8" in panel.runs]
    if steps:
        most = max(panel.setting.parameters for panel in steps)
        _steps([p for p in steps if p.setting.parameters == most], cases or STEPS, folder / "training.png")
    if races(made):
        _races(races(made), cases or RACERS, folder / "time_to_accuracy.png")
    hosts = panels(made, "scaling")
    if hosts:
        _growth(hosts, cases, folder / "scaling.png")


def _sizes(groups: Sequence[Sequence[Panel]], cases: Sequence[str], path: Path) -> None:
    figure, all_axes = grid(len(groups), 4.0)
    for group, axes in zip(groups, all_axes, strict=False):
        for case in cases:
            points = [(panel.setting.megabytes, row.seconds_median) for panel in group if (row := panel.row(case))]
            if points:
                axes.plot(*zip(*points, strict=True), ".--" if is_peer(case) else ".-", label=case, linewidth=1)
        _logarithmic(axes.xaxis)
        _logarithmic(axes.yaxis)
        _label(axes, group[0].setting.network, "MB of fp32", "seconds")
    _save(figure, all_axes, path)


def _steps(found: Sequence[Panel], cases: Sequence[str], path: Path) -> None:
    figure, all_axes = grid(len(found), 1.2 + 0.25 * len(cases))
    for panel, axes in zip(found, all_axes, strict=False):
        rows = [row for case in reversed(cases) if (row := panel.row(case)) is not None]
        for height, row in enumerate(rows):
            axes.barh(height, row.seconds_median, color="0.75" if is_peer(row.case) else "#8fb8de", height=0.7)
            axes.annotate(f" {row.ratio or 0:.2f}x", (row.seconds_median, height), va="center", size=7)
            if row.limit_seconds:
                axes.plot([row.limit_seconds] * 2, [height - 0.42, height + 0.42], color="black", linewidth=1.6)
        axes.set_yticks(range(len(rows)), [row.case for row in rows], fontsize=7)
        axes.margins(x=0.15)
        _label(axes, str(panel.setting), "seconds; grey: others'; black: the limit", "")
    figure.savefig(path, dpi=110)


def _races(found: Sequence[Race], cases: Sequence[str], path: Path) -> None:
    figure, all_axes = grid(len(found), 4.4)
    for race, axes in zip(found, all_axes, strict=False):
        for place, case in enumerate(cases):
            for number, contenders in enumerate(race.seeds.values()):
                curve = contenders[case].curve if case in contenders else {"seconds": [], "losses": []}
                points = [pair for pair in zip(curve["seconds"], curve["losses"], strict=True) if pair[1] is not None]
                seconds, values = ([pair[part] for pair in points[1:]] for part in (0, 1))
                label = case if number == 0 and points else None
                style = "--" if is_peer(case) else "-"
                axes.plot(seconds, values, style, label=label, linewidth=1, alpha=0.8, color=f"C{place}")
        axes.axhline(race.target, color="crimson", linewidth=0.8)
        _logarithmic(axes.xaxis)
        _label(axes, race.setting.network, "seconds of training", "held-out loss, nats a byte")
    _save(figure, all_axes, path)


def _growth(found: Sequence[Panel], cases: Sequence[str], path: Path) -> None:
    groups = list(dict.fromkeys((panel.setting.size, panel.setting.rate) for panel in found))
    figure, all_axes = grid(len(groups), 4.2)
    for (size, rate), axes in zip(groups, all_axes, strict=False):
        group = pick(found, size=size, rate=rate)
        for place, (case, rows) in enumerate(growth.by_case(row for panel in group for row in panel.rows()).items()):
            if cases and case not in cases:
                continue
            hosts = [row.hosts for row in rows]
            axes.plot(hosts, [row.seconds_median for row in rows], "o", color=f"C{place}", label=case)
            if len(hosts) > 2:
                model = growth.fit(case, rows)
                between = range(min(hosts), max(hosts) + 1)
                axes.plot(between, [model.seconds(case, count) for count in between], color=f"C{place}", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xticks([panel.setting.hosts for panel in group])
        _label(axes, f"{size}, {rate_in_words(rate)}", "hosts", "seconds; lines: the model")
    _save(figure, all_axes, path)


def grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """So many axes, two beside each other."""
    columns = min(2, count)
    lines = -(-count // columns)
    # Figure without pyplot: no display is looked for and no global state is touched
    figure = Figure(figsize=(6.2 * columns, height * lines), layout="constrained")
    all_axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in all_axes[count:]:
        spare.set_axis_off()
    return figure, all_axes


def _logarithmic(axis: Axis) -> None:
    """With plain numbers at 1, 2 and 5."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, all_axes: Sequence[Axes], path: Path) -> None:
    pairs = [pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    known = {label: handle for handle, label in pairs}
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def _label(axes: Axes, title: str, below: str, beside: str) -> None:
    axes.set_title(title, size=9)
    axes.set_xlabel(below, size=8)
    axes.set_ylabel(beside, size=8)
    axes.grid(alpha=0.25, which="both")
    axes.tick_params(labelsize=7, which="both")

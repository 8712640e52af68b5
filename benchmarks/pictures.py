"""Draw result rows: ratios as bars with their limits, time against size, loss against seconds, time against hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import scaling
from benchmarks.races import Race
from benchmarks.runs import Panel, Row, is_alone, is_peer, rate_in_words

_ACROSS = (
    "gloo fp32",
    "gloo fp16 tensor",
    "ring identity",
    "ring int8",
    "ring int4",
    "direct rotated int2",
    "ring sign",
)


def bars(panels: Sequence[Panel], title: str, path: Path) -> None:
    """How many times as fast as the baseline, a panel each; a black stroke is where the limit is."""
    figure, all_axes = _grid(len(panels), 1.4 + 0.24 * max(len(panel.runs) for panel in panels))
    for panel, axes in zip(panels, all_axes, strict=False):
        rows = [row for row in panel.rows() if not is_alone(row["case"])][::-1]
        for height, row in enumerate(rows):
            color = "0.75" if is_peer(row["case"]) else "#8fb8de"
            axes.barh(height, row["ratio"], color=color, height=0.7)
            axes.annotate(f" {row['ratio']:.2f}", (0, height), xycoords=("axes fraction", "data"), va="center", size=7)
            limit = _limit_ratio(panel, row)
            if limit is not None:
                axes.plot([limit, limit], [height - 0.42, height + 0.42], color="black", linewidth=1.6)
        axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
        axes.axvline(1, color="crimson", linewidth=0.8)
        _logarithmic(axes.xaxis)
        axes.margins(x=0.08)
        _label(axes, str(panel.setting), "times as fast as the baseline", None)
    figure.suptitle(f"{title}; grey: others'; black: the limit", size=10)
    figure.savefig(path, dpi=110)


def _limit_ratio(panel: Panel, row: Row) -> float | None:
    run = panel.runs[row["case"]]
    baseline = next(iter(run.rows.values()))
    return None if not row["limit_seconds"] else baseline["seconds_median"] / row["limit_seconds"]


def sizes(groups: Sequence[Sequence[Panel]], path: Path) -> None:
    """Seconds of an all-reduce against its size; a group of panels, of one network, each."""
    figure, all_axes = _grid(len(groups), 4.0)
    for group, axes in zip(groups, all_axes, strict=False):
        for case in _ACROSS:
            points = [(panel.setting.megabytes, row["seconds_median"]) for panel in group if (row := panel.row(case))]
            if points:
                axes.plot(*zip(*points, strict=True), ".--" if is_peer(case) else ".-", label=case, linewidth=1)
        _logarithmic(axes.xaxis)
        _logarithmic(axes.yaxis)
        _label(axes, group[0].setting.network, "MB of fp32", "seconds")
    _legend(figure, all_axes)
    figure.savefig(path, dpi=110)


def losses(races: Sequence[Race], path: Path) -> None:
    """Held-out loss against seconds of training; a line a seed."""
    figure, all_axes = _grid(len(races), 4.4)
    cases = list(dict.fromkeys(case for race in races for case in race.cases()))
    for race, axes in zip(races, all_axes, strict=False):
        for place, case in enumerate(cases):
            style = {"color": f"C{place % 10}", "linestyle": "--" if is_peer(case) else ("-", ":")[place // 10 % 2]}
            for number, contenders in enumerate(race.seeds.values()):
                if case in contenders:
                    curve = contenders[case]["curve"]
                    points = [
                        pair for pair in zip(curve["seconds"], curve["losses"], strict=True) if pair[1] is not None
                    ]
                    seconds, values = ([pair[part] for pair in points[1:]] for part in (0, 1))
                    axes.plot(seconds, values, label=case if number == 0 else None, linewidth=1, alpha=0.8, **style)
        axes.axhline(race.target, color="crimson", linewidth=0.8)
        _logarithmic(axes.xaxis)
        _label(axes, race.setting.network, "seconds of training", "held-out loss, nats a byte")
    _legend(figure, all_axes)
    figure.savefig(path, dpi=110)


def growth(groups: Sequence[Sequence[Panel]], path: Path) -> None:
    """Seconds against the number of hosts, and the fitted model; a group of panels, of one size and rate, each."""
    figure, all_axes = _grid(len(groups), 4.2)
    for group, axes in zip(groups, all_axes, strict=False):
        for place, (case, rows) in enumerate(scaling.by_case(row for panel in group for row in panel.rows()).items()):
            sizes = [row["hosts"] for row in rows]
            axes.plot(sizes, [row["seconds_median"] for row in rows], "o", color=f"C{place}", label=case)
            if len(sizes) > 2:
                model = scaling.fit(case, rows)
                between = range(min(sizes), max(sizes) + 1)
                axes.plot(between, [model.seconds(case, size) for size in between], color=f"C{place}", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xticks([panel.setting.hosts for panel in group])
        setting = group[0].setting
        _label(axes, f"{setting.size}, {rate_in_words(setting.rate)}", "hosts", "seconds; lines: the model")
    _legend(figure, all_axes)
    figure.savefig(path, dpi=110)


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
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
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    known = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)


def _label(axes: Axes, title: str, below: str, beside: str | None) -> None:
    axes.set_title(title, size=9)
    axes.set_xlabel(below, size=8)
    axes.set_ylabel(beside or "", size=8)
    axes.grid(alpha=0.25, which="both")
    axes.tick_params(labelsize=7, which="both")

"""The plots of a sweep's page: plotly's traces and layouts as plain JSON, and a caption for each plot."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ringstrategy.app.curves import MOST_POINTS, STEPS_FILE, Curves, thin
from ringstrategy.app.report import Summary
from ringstrategy.app.sweep_table import job_name, own_overrides

COLORS = (  # of strategies; the second ten are paler
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
    "#aec7e8",
    "#ffbb78",
    "#98df8a",
    "#ff9896",
    "#c5b0d5",
    "#c49c94",
    "#f7b6d2",
    "#c7c7c7",
    "#dbdb8d",
    "#9edae5",
)
DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")  # of the jobs of one strategy
LABEL_LENGTH = 24  # characters of overrides where room is short
HEIGHT, LINE_HEIGHT, AROUND_BARS = 420, 17, 90  # pixels
PARTS = {  # of a step: words, color
    "alone": ("computing", "#8d99ae"),
    "hidden": ("computing and communicating (hidden)", "#2a9d8f"),
    "exposed": ("waiting (exposed)", "#e76f51"),
    "undivided": ("not told apart", "#c2a878"),
}

Trace = dict[str, Any]


@dataclass
class Job:
    """A row of the table, and its steps."""

    words: list[str]  # its strategy, what else tells it from the others (seed first, cut), and its folder if it must
    label: str  # the same in full, on one line; as no other job in the report is called
    color: str
    dash: str
    row: Summary
    curves: Curves | None  # None: it failed, or has no steps.csv


@dataclass
class Plot:
    """One figure. A trace's `meta` is its job's place in the table, or one place for each of its bars."""

    title: str
    note: str  # how to read it, and which jobs are not in it
    data: list[Trace]
    layout: dict[str, Any]
    height: int = HEIGHT
    key: Sequence[tuple[str, str]] = ()  # (words, color), for what the jobs' own lines do not tell


def plots(jobs: Sequence[Job]) -> list[Plot]:
    """Loss against steps, seconds and bytes; then the parts of a step's time."""
    return [
        _loss_plot("Loss against steps", "step", jobs, lambda curves: curves.steps, _no_steps),
        _loss_plot(
            "Loss against time",
            "seconds of training steps, rank 0",
            jobs,
            lambda curves: curves.total_seconds,
            _no_steps,
            {"rangemode": "tozero"},
        ),
        _loss_plot(
            "Loss against traffic",
            "bytes sent by rank 0",
            jobs,
            lambda curves: curves.total_bytes_sent or [],
            _no_bytes,
            {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "B"},
        ),
        _time_plot(jobs),
    ]


def jobs_of(rows: Sequence[Summary], curves: Sequence[Curves | None]) -> list[Job]:
    """Jobs with distinct labels. Jobs of one strategy have one color."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    settings = [
        " ".join(sorted(own_overrides(row, rows), key=lambda text: not text.startswith("seed="))) for row in rows
    ]
    cut = [text if len(text) <= LABEL_LENGTH else text[:LABEL_LENGTH] + "…" for text in settings]
    names = list(zip((row["strategy"] for row in rows), cut, strict=True))
    jobs = []
    for place, row in enumerate(rows):
        strategy = row["strategy"]
        folder = f"(job {job_name(row, rows)})" if names.count(names[place]) > 1 else ""
        words, label = ([strategy, *filter(None, [text, folder])] for text in (cut[place], settings[place]))
        color = COLORS[strategies.index(strategy) % len(COLORS)]
        dash = DASHES[[row["strategy"] for row in rows[:place]].count(strategy) % len(DASHES)]
        jobs.append(Job(words, " ".join(label), color, dash, row, curves[place]))
    return jobs


def _loss_plot(
    title: str,
    quantity: str,
    jobs: Sequence[Job],
    total: Callable[[Curves], Sequence[float]],
    why_not: Callable[[Job], str | None],
    axis: dict[str, Any] | None = None,
) -> Plot:
    left_out = {place: reason for place, job in enumerate(jobs) if (reason := why_not(job))}
    data: list[Trace] = []
    thinned = False
    for place, job in enumerate(jobs):
        if job.curves is None or place in left_out:
            continue
        so_far = total(job.curves)
        thinned |= len(so_far) > MOST_POINTS
        trace = {"type": "scatter", "name": escape(job.label, quote=False), "meta": place}
        hover = f"<b>%{{fullData.name}}</b><br>{quantity} %{{x}}<br>%{{y:.4g}}"
        data.append(
            trace
            | {"mode": "lines", "x": _numbers(thin(so_far)), "y": _numbers(thin(job.curves.losses))}
            | {
                "line": {"color": job.color, "dash": job.dash, "width": 1.6},
                "hovertemplate": hover + " training<extra></extra>",
            }
        )
        if job.curves.validation_losses:
            steps, losses = zip(*job.curves.validation_losses, strict=True)
            marker = {"symbol": "diamond", "size": 8, "color": job.color, "line": {"width": 1, "color": "white"}}
            data.append(
                trace
                | {"mode": "markers", "x": _numbers(_at(steps, job.curves.steps, so_far)), "y": _numbers(losses)}
                | {"marker": marker, "hovertemplate": hover + " validation<extra></extra>"}
            )
    note = "Lines: training loss of rank 0. Diamonds: validation loss of all ranks."
    if thinned:
        note += f" Longer runs are averaged down to {MOST_POINTS} points."
    layout = {"xaxis": {"title": {"text": quantity}} | (axis or {}), "yaxis": {"title": {"text": "loss"}}}
    return Plot(title, note + _in_words(left_out, jobs), data, layout)


def _time_plot(jobs: Sequence[Job]) -> Plot:
    left_out = {place: reason for place, job in enumerate(jobs) if (reason := _no_time(job))}
    shown = [(place, job) for place, job in enumerate(jobs) if place not in left_out]
    names = {place: "<br>".join(escape(text, quote=False) for text in job.words) for place, job in shown}
    bar_height = LINE_HEIGHT * max((len(job.words) for _, job in shown), default=1)
    milliseconds: dict[str, dict[int, float]] = {part: {} for part in PARTS}
    for place, job in shown:
        step = 1000 * job.row["seconds_per_step"]
        exposed, hidden = job.row["exposed_ms_per_step"], job.row["hidden_ms_per_step"]
        if exposed is None or hidden is None:
            milliseconds["undivided"][place] = step
        else:
            milliseconds["exposed"][place] = exposed
            milliseconds["hidden"][place] = hidden
            milliseconds["alone"][place] = max(0.0, step - exposed - hidden)
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PARTS[part][0],
            "meta": list(values),
            "x": _numbers(list(values.values())),
            "y": [names[place] for place in values],
            "width": min(0.7, 1.2 * bar_height * len(shown) / (HEIGHT - AROUND_BARS)),  # a few bars are not a wall
            "marker": {"color": PARTS[part][1]},
            "hovertemplate": "<b>%{y}</b><br>%{x:.4g} ms a step<br>%{fullData.name}<extra></extra>",
        }
        for part, values in milliseconds.items()
        if values
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "ms a step, rank 0"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "categoryarray": list(names.values())[::-1], "ticksuffix": " "},
    }
    note = "Means, without the first tenth of the steps, which warm up. A bar is as long as a step takes."
    if milliseconds["undivided"]:
        note += f" Not told apart, as nobody counts their communication: {_names(milliseconds['undivided'], jobs)}."
    height = max(HEIGHT, AROUND_BARS + bar_height * len(shown))
    key = [PARTS[part] for part, values in milliseconds.items() if values]
    return Plot("Where a step's time goes", note + _in_words(left_out, jobs), data, layout, height, key)


def _no_steps(job: Job) -> str | None:
    if job.row["status"] == "failed":
        return "failed"
    if job.curves is None:
        return f"has no {STEPS_FILE}"
    if not job.curves.steps:
        return "no steps"
    if all(loss is None for loss in job.curves.losses):
        return "its training_step returns no loss"
    return None


def _no_bytes(job: Job) -> str | None:
    if (reason := _no_steps(job)) is not None:
        return reason
    assert job.curves is not None
    totals = job.curves.total_bytes_sent
    if totals is None:
        return "its bytes are not counted"
    return None if totals[-1] else "sent nothing"


def _no_time(job: Job) -> str | None:
    if job.row["status"] == "failed":
        return "failed"
    return "no steps" if job.row["seconds_per_step"] is None else None


def _in_words(left_out: dict[int, str], jobs: Sequence[Job]) -> str:
    reasons: dict[str, list[int]] = {}
    for place, reason in left_out.items():
        reasons.setdefault(reason, []).append(place)
    found = [f"{_names(places, jobs)} ({reason})" for reason, places in reasons.items()]
    return f" Left out: {'; '.join(found)}." if found else ""


def _names(places: Iterable[int], jobs: Sequence[Job]) -> str:
    return ", ".join(" ".join(jobs[place].words) for place in places)


def _at(validated: Sequence[int], steps: Sequence[int], so_far: Sequence[float]) -> list[float]:
    """Seconds and bytes spent when each validation began; zero for one before the first step."""
    ended = [bisect_right(steps, step) for step in validated]
    return [so_far[count - 1] if count else 0 for count in ended]


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Six digits; None, a gap, for NaN and infinity, which JSON has not."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]

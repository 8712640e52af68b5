"""Plots of a sweep's jobs: losses against steps, time and bytes; and what a step spends its time on."""

import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pandas as pd
import plotly.express as px  # type: ignore[import-untyped]
from plotly.graph_objects import Figure  # type: ignore[import-untyped]

from ringstrategy.app.curves import STEPS_FILE, read_steps, read_validation, thin
from ringstrategy.app.jobs import own_overrides

AGAINST = {"step": "step", "total_seconds": "seconds of training steps, rank 0", "total_bytes": "bytes sent by rank 0"}
TRAINING, VALIDATION = "training, rank 0", "validation, all ranks"
PARTS = {  # of a step: color
    "computing": "#8d99ae",
    "computing and communicating (hidden)": "#2a9d8f",
    "waiting (exposed)": "#e76f51",
    "not told apart": "#c2a878",
}


def loss_curves(jobs: pd.DataFrame) -> Figure:
    """A row of plots for the training loss, one for the validation loss; one color a strategy, one dash a setting.

    Jobs that did not finish or left no steps are not in it. ValueError: a file of steps has other columns than a job
    writes.
    """
    points = [pd.DataFrame(columns=["against", "value", "loss", "loss of", "job", "strategy", "settings"])]
    for row in jobs.assign(settings=own_overrides(jobs)).to_dict("records"):
        # another job may stand where an earlier one left its steps
        if row["status"] == "finished" and (Path(row["folder"]) / STEPS_FILE).exists():
            labels = {name: _label(row[name]) for name in ("job", "strategy", "settings")}
            points += [each.assign(**labels) for each in _points(Path(row["folder"]))]
    figure = px.line(
        pd.concat(points),
        x="value",
        y="loss",
        color="strategy",
        line_dash="settings",
        line_group="job",
        hover_name="job",
        facet_col="against",
        facet_row="loss of",
        category_orders={"against": list(AGAINST.values()), "loss of": [TRAINING, VALIDATION]},
        height=800,
    )
    figure.update_xaxes(matches=None, title=None)
    figure.for_each_annotation(lambda note: note.update(text=note.text.partition("=")[2]))
    return figure


def _points(folder: Path) -> Iterator[pd.DataFrame]:
    steps, validation = read_steps(folder), read_validation(folder)
    steps["total_bytes"] = steps["bytes_sent"].cumsum(skipna=False)
    # a validation is drawn at the seconds and bytes that were spent when it began
    validation = pd.merge_asof(validation, steps[list(AGAINST)], on="step").fillna(0)
    for name, words in AGAINST.items():
        if steps["loss"].notna().any() and steps[name].iloc[-1] > 0:
            thinned = pd.DataFrame({"value": thin(steps[name].tolist()), "loss": thin(steps["loss"].tolist())})
            yield thinned.assign(against=words, **{"loss of": TRAINING})
            validated = validation[[name, "loss"]].rename(columns={name: "value"})
            yield validated.assign(against=words, **{"loss of": VALIDATION})


def step_times(jobs: pd.DataFrame) -> Figure:
    """A bar for each job that made steps, as long as its mean step, in milliseconds, divided into `PARTS`."""
    measured = jobs[jobs["seconds_per_step"].notna() & (jobs["status"] == "finished")]
    step, exposed, hidden = (
        1000 * measured["seconds_per_step"],
        measured["exposed_ms_per_step"],
        measured["hidden_ms_per_step"],
    )
    names = measured["job"] + " " + measured["strategy"] + " " + own_overrides(jobs)
    parts = [(step - exposed - hidden).clip(lower=0), hidden, exposed, step.where(exposed.isna())]
    bars = pd.DataFrame(dict(zip(PARTS, parts, strict=True))).assign(job=names[measured.index].map(_label))
    figure = px.bar(
        bars.melt("job", var_name="part", value_name="ms a step, rank 0").dropna(),
        x="ms a step, rank 0",
        y="job",
        color="part",
        color_discrete_map=PARTS,
        orientation="h",
        title="Where a step's time goes",
        height=200 + 40 * len(bars),
    )
    figure.update_yaxes(type="category", autorange="reversed", title=None)
    return figure


def _label(text: str) -> str:
    """Text of the user's in short lines, so that plotly takes none of it for markup."""
    return "<br>".join(escape(line, quote=False) for line in textwrap.wrap(text, 40))

"""Draw a run's loss, and what each of its steps spent its time on, into one PNG."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

MOST_POINTS = 500  # a longer run is averaged down to this many


@dataclass
class Curves:
    """One entry a step, seconds as the training thread of rank 0 saw them; the validation apart, as (step, loss)."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)  # the training thread waited for the wire
    communication_seconds: list[float] = field(default_factory=list)  # the wire was busy, waited for or not
    validation_losses: list[tuple[int, float]] = field(default_factory=list)


def draw(curves: Curves, path: Path) -> None:
    """Write the PNG: losses on the left, milliseconds a step on the right."""
    # Figure without pyplot: no display is looked for and no global state is touched
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)

    steps, losses = _thin(curves.losses)
    loss_axes.plot(steps, losses, label="training, rank 0", linewidth=1)
    if curves.validation_losses:
        loss_axes.plot(*zip(*curves.validation_losses, strict=True), "o-", markersize=4, label="validation, all ranks")
    loss_axes.set(xlabel="step", ylabel="loss", title="Loss")
    loss_axes.legend()

    steps, step_ms = _thin(curves.step_seconds, 1000)
    if curves.communication_seconds:
        _, exposed_ms = _thin(curves.exposed_seconds, 1000)
        _, communication_ms = _thin(curves.communication_seconds, 1000)
        computation_ms = step_ms - exposed_ms
        time_axes.stackplot(
            steps, computation_ms, exposed_ms, labels=["computation", "exposed communication"], colors=["C0", "C3"]
        )
        hidden_ms = np.maximum(communication_ms - exposed_ms, 0)
        time_axes.plot(steps, hidden_ms, color="C2", linewidth=1, label="hidden communication (during computation)")
    else:
        time_axes.plot(steps, step_ms, label="computation and communication", linewidth=1)
    # the first steps warm up and would flatten all others
    time_axes.set(xlabel="step", ylabel="ms a step", title="Time, rank 0", ylim=(0, 1.5 * np.percentile(step_ms, 95)))
    time_axes.legend()
    figure.savefig(path, dpi=120)


def _thin(values: Sequence[float], scale: float = 1) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS means of neighbouring values, times `scale`, and the steps they stand for."""
    size = -(-len(values) // MOST_POINTS)
    starts = np.arange(0, len(values), size)
    means = np.add.reduceat(np.asarray(values), starts) / np.diff([*starts, len(values)])
    return starts + 1, scale * means

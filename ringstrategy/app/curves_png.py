"""Draw a run's loss, and what each of its steps spent its time on, into one PNG."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ringstrategy.app.curves import Curves, thin


def draw(curves: Curves, path: Path) -> None:
    """Write the PNG: losses on the left, milliseconds a step on the right."""
    # Figure without pyplot: no display is looked for and no global state is touched
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)

    steps = thin(curves.steps)
    loss_axes.plot(steps, thin(curves.losses), label="training, rank 0", linewidth=1)
    if curves.validation_losses:
        loss_axes.plot(*zip(*curves.validation_losses, strict=True), "o-", markersize=4, label="validation, all ranks")
    loss_axes.set(xlabel="step", ylabel="loss", title="Loss")
    loss_axes.legend()

    step_ms = 1000 * np.asarray(thin(curves.step_seconds))
    if None not in curves.communication_seconds:
        exposed_ms = 1000 * np.asarray(thin(curves.exposed_seconds))
        communication_ms = 1000 * np.asarray(thin(curves.communication_seconds))
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

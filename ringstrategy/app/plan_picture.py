"""`ringstrategy-plan --picture`: how long a step takes with each strategy, on slower and faster links too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ringstrategy.app.advice import Row, apart, recommended

DECADES, POINTS = 2, 41  # of the rate to both sides of the one asked for, and how many in all


def curves(predicted: Callable[[float], list[Row]], rate: float) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Rates in bits a second; and at each of them a step's seconds, by strategy.

    They are the first of the rows, ddp, and all that are recommended at one of the rates.
    """
    rates = rate * np.logspace(-DECADES, DECADES, POINTS)
    rows = [predicted(each) for each in rates]
    shown = {rows[0][0].strategy: None}
    for each in rows:
        best = recommended(each)
        shown |= {row.strategy: None for row in (best, apart(each, best)) if row}
    found = [{row.strategy: row.seconds for row in each} for each in rows]
    return rates, {name: [each[name] for each in found] for name in shown}


def draw(predicted: Callable[[float], list[Row]], rate: float, alone: float, path: Path) -> None:
    """Write the picture, in the format of the path's suffix.

    Args:
        predicted: the rows at a rate in bits a second.
        rate: the one asked for.
        alone: seconds of a step without any exchange.
        path: of the picture. ValueError: no such format.
    """
    rates, seconds = curves(predicted, rate)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, each in seconds.items():
        axes.plot(rates / 1e9, each, label=name)
    axes.axhline(alone, color="grey", linestyle=":", label="computing alone")
    axes.axvline(rate / 1e9, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s of each host's link", ylabel="seconds a step, predicted")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)

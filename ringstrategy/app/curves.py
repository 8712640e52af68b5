"""A run step by step: columns in memory while it trains, then `steps.csv` and `validation.csv` beside its summary."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import pandas as pd

MOST_POINTS = 500  # a longer run is averaged down to this many before it is drawn
STEPS_FILE = "steps.csv"
VALIDATION_FILE = "validation.csv"
STEP_COLUMNS = (
    "step",
    "loss",
    "seconds",
    "total_seconds",
    "bytes_sent",
    "exposed_seconds",
    "communication_seconds",
)
VALIDATION_COLUMNS = ("step", "loss")


@dataclass
class Curves:
    """Lists with one entry a step, from rank 0; None if not measured. Validations are separate.

    Bytes and seconds of communication are those since the step before ended.
    """

    steps: list[int] = field(default_factory=list)  # the trainer's count: a resumed run goes on where it was
    losses: list[float | None] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int | None] = field(default_factory=list)
    exposed_seconds: list[float | None] = field(default_factory=list)  # the training thread waited for the wire
    communication_seconds: list[float | None] = field(default_factory=list)  # the wire was busy, waited for or not
    validation_losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)

    @property
    def total_seconds(self) -> list[float]:
        """Seconds of all steps up to each one's end; loading data and validation are not in it."""
        return list(accumulate(self.step_seconds))

    @property
    def total_bytes_sent(self) -> int | None:
        """Bytes sent in all steps, or None if there were none, or bytes were not counted."""
        counted = [count for count in self.bytes_sent if count is not None]
        return sum(counted) if counted and len(counted) == len(self.bytes_sent) else None


def write_curves(folder: Path, curves: Curves) -> None:
    """Write `steps.csv` and `validation.csv`. Values that were not measured are empty cells."""
    rows = zip(
        curves.steps,
        curves.losses,
        curves.step_seconds,
        curves.total_seconds,
        curves.bytes_sent,
        curves.exposed_seconds,
        curves.communication_seconds,
        strict=True,
    )
    _write(folder / STEPS_FILE, STEP_COLUMNS, rows)
    _write(folder / VALIDATION_FILE, VALIDATION_COLUMNS, curves.validation_losses)


def read_steps(folder: Path) -> pd.DataFrame:
    """Read `steps.csv`; NaN if not measured. ValueError: it is not what `write_curves` writes."""
    return _read(folder / STEPS_FILE, STEP_COLUMNS)


def read_validation(folder: Path) -> pd.DataFrame:
    """Read `validation.csv`. ValueError: it is not what `write_curves` writes."""
    return _read(folder / VALIDATION_FILE, VALIDATION_COLUMNS)


def thin(values: Sequence[float | None]) -> list[float]:
    """At most MOST_POINTS means of neighbouring values; NaN if one of them is None."""
    if not values:
        return []
    starts = np.arange(0, len(values), -(-len(values) // MOST_POINTS))
    sums = np.add.reduceat(np.asarray(values, dtype=float), starts)
    means: list[float] = (sums / np.diff([*starts, len(values)])).tolist()
    return means


def warm_mean(values: Sequence[float | None]) -> float | None:
    """The mean of all but the first tenth, at least the first one: these steps warm up. None: not measured."""
    measured = [value for value in values if value is not None]
    if not measured or len(measured) < len(values):
        return None
    return statistics.fmean(measured[max(1, len(measured) // 10) :] or measured)


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _read(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    table = pd.read_csv(path)
    if list(table.columns) != list(columns):
        raise ValueError(
            f"{path} should have the columns {', '.join(columns)}, has {', '.join(table.columns)}: run it again"
        )
    return table.astype({"step": "int64"} | dict.fromkeys(columns[1:], "float64"))

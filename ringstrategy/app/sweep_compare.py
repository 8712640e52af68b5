"""Which jobs may be compared: with torch's ddp under the same settings, and with their repetitions by other seeds."""

import math
import re
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from ringstrategy.app.overrides import PARTS
from ringstrategy.app.report import Summary

BASELINE = "ddp"
_OF_STRATEGY = re.compile(rf"[+~]*(strategy|{'|'.join(PARTS)})\b")


class Spread(NamedTuple):
    """Mean and sample standard deviation of a quantity over several jobs; no deviation for one job."""

    mean: float
    deviation: float | None


class Group(NamedTuple):
    """Finished jobs that differ only in the seed; None for quantities that one of them did not measure."""

    strategy: str
    overrides: list[str]  # all but the seed
    runs: int
    metric: str
    final_metric: Spread | None
    seconds_per_step: Spread | None
    bytes_sent_per_step: Spread | None
    times_ddp: float | None


def times_ddp(row: Summary, rows: Sequence[Summary]) -> float | None:
    """Seconds a step of the ddp job with the same settings and seed, divided by those of this job.

    The mean counts if there are several such ddp jobs; None if there is none, or if times were not measured.
    """
    return _times_ddp([row], [other for other in rows if _settings(other) == _settings(row)])


def groups(rows: Sequence[Summary]) -> list[Group]:
    """Every finished job is in one group; groups are in the order of their first jobs.

    A group's `times_ddp` is the mean of seconds a step over ddp's group with the same settings, divided by its own.
    """
    members: dict[tuple[object, ...], list[Summary]] = {}
    for row in rows:
        if row["status"] != "failed":
            key = (row["strategy"], row["metric"], row["processes"], frozenset(_without_seed(row["overrides"])))
            members.setdefault(key, []).append(row)
    return [
        Group(
            strategy=jobs[0]["strategy"],
            overrides=_without_seed(jobs[0]["overrides"]),
            runs=len(jobs),
            metric=jobs[0]["metric"],
            final_metric=_spread(jobs, "final_metric"),
            seconds_per_step=_spread(jobs, "seconds_per_step"),
            bytes_sent_per_step=_spread(jobs, "bytes_sent_per_step"),
            times_ddp=_times_ddp(
                jobs, [row for row in rows if _settings(row, seed=False) == _settings(jobs[0], seed=False)]
            ),
        )
        for jobs in members.values()
    ]


def _times_ddp(jobs: Sequence[Summary], comparable: Sequence[Summary]) -> float | None:
    own = _spread(jobs, "seconds_per_step")
    baseline = _spread(
        [row for row in comparable if row["strategy"] == BASELINE and row["status"] != "failed"], "seconds_per_step"
    )
    return baseline.mean / own.mean if own and baseline and own.mean else None


def _settings(row: Summary, seed: bool = True) -> tuple[object, frozenset[str]]:
    """Everything but the strategy and its parts."""
    overrides = row["overrides"] if seed else _without_seed(row["overrides"])
    return row["processes"], frozenset(text for text in overrides if not _OF_STRATEGY.match(text))


def _without_seed(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.startswith("seed=")]


def _spread(jobs: Sequence[Summary], quantity: str) -> Spread | None:
    values = [job[quantity] for job in jobs]
    if not values or None in values:
        return None
    if len(values) == 1:
        return Spread(values[0], None)
    return Spread(mean(values), stdev(values) if all(map(math.isfinite, values)) else math.nan)

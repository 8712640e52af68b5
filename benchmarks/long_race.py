"""Minutes to a loss on slow links, from two measurements: the loss after each step, and the seconds that a step takes.

python -m benchmarks time_to_accuracy --hosts 4 --rate loopback --no-target --out outputs/curves.jsonl
python -m benchmarks training --hosts 4 --rate 10mbit --model gpt --width 192 --layers 2 --optimizer adamw \\
    --out outputs/steps.jsonl
python -m benchmarks long_race --curves outputs/curves.jsonl --steps outputs/steps.jsonl --after 512

Whole runs over 10 Mbit/s would take days. But a contender's loss after so many steps does not depend on the network: it
sends the same bits on each. So its time is the number of steps that it needs, from the curves, times the seconds that
one of them takes on the network in question. That is not so for `ring_auto`, which chooses by the network, and for an
exact start ("after 128"), whose first steps take longer: both are left out. The target is DDP's own loss after
`--after` steps, for each seed its own; steps are the mean over the seeds with which the contender trained. One that
missed it may still be faster than others: "> 5" are the minutes that it trained. Of several curves with one seed, the
longest counts, and of several timings on a network, that of most rounds. The last line is the limit of a network that
costs nothing: ranks that only compute, and need as many steps as DDP.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.cells import shown
from benchmarks.contenders import DDP
from benchmarks.lab import bits_per_second
from benchmarks.report.frame import millions, rate_in_words, who
from benchmarks.rows import ALONE, Row, read
from benchmarks.time_to_accuracy import CURVES, Curve

_EXACT_START = " after "


@dataclass(frozen=True)
class Racer:
    """One contender."""

    case: str
    excess: Sequence[float | None]  # relative, over DDP's loss after as many steps; an entry a seed, None: unknown
    steps: Sequence[float | None]  # to DDP's loss; None: missed
    trained: Sequence[int]  # steps of its curves
    seconds: Mapping[str, float]  # a step, by rate
    megabytes: float | None  # a step on a host's link

    def minutes(self, rate: str) -> float | None:
        """To DDP's loss, the mean over seeds; None if a seed missed it, or nobody measured its steps."""
        return None if None in self.steps else self.least_minutes(rate)

    def least_minutes(self, rate: str) -> float | None:
        """As `minutes`, but where a seed missed it, of the steps that it made; None if nobody measured them."""
        if rate not in self.seconds:
            return None
        least = [made if count is None else count for count, made in zip(self.steps, self.trained, strict=True)]
        return statistics.mean(least) * self.seconds[rate] / 60


def racers(curves: Sequence[Row], steps: Sequence[Row], after: int) -> list[Racer]:
    """All that have a curve for a seed of DDP's, in their order. ValueError if the two do not fit together."""
    if not curves or any(row.benchmark != CURVES for row in curves):
        raise ValueError("--curves: rows of `time_to_accuracy --no-target`")
    if not steps or any(row.benchmark != "training" for row in steps):
        raise ValueError("--steps: rows of `training`")
    if any(not row.size.endswith("AdamW") for row in steps):
        raise ValueError("--steps: rows of `training --optimizer adamw`, as the curves are")
    if len({(row.learning_rate, row.python) for row in curves}) > 1:
        raise ValueError("--curves: all of one learning rate, and of one Python, whose text they learn")
    sizes = {(round(millions(row.size), 1), row.hosts * row.processes) for row in (*curves, *steps)}
    if len(sizes) > 1:
        told = " and ".join(f"{size:g} M parameters on {ranks} ranks" for size, ranks in sorted(sizes))
        raise ValueError(f"curves and steps are of one model and world size, got {told}")
    by_seed: dict[tuple[str, int], Curve] = {}
    for row in sorted(curves, key=lambda row: row.curve["steps"][-1]):
        by_seed[row.case, row.seed] = Curve(**row.curve)
    seeds = sorted({seed for case, seed in by_seed if case == DDP})
    if not seeds:
        raise ValueError(f"--curves: {DDP} is not there, whose loss is the target")
    targets: dict[int, float] = {}
    for seed in seeds:
        loss = _at(by_seed[DDP, seed], after)
        if loss is None:
            raise ValueError(f"--after {after}: {DDP} has no loss then, with seed {seed}")
        targets[seed] = loss
    seconds: dict[str, dict[str, float]] = {}
    megabytes: dict[str, float] = {}
    for row in sorted(steps, key=lambda row: len(row.seconds)):
        seconds.setdefault(row.case, {})[row.rate] = row.seconds_median
        if row.bytes_at_interface is not None:
            megabytes[row.case] = row.bytes_at_interface / 1e6
    found = []
    for case in dict.fromkeys(row.case for row in curves):
        if case == "ring_auto" or _EXACT_START in case:
            continue
        excess: list[float | None] = []
        needed: list[float | None] = []
        trained: list[int] = []
        for seed, target in targets.items():
            curve = by_seed.get((case, seed))
            if curve is None:
                continue
            loss, reached = _at(curve, after), curve.reached(target)
            excess.append(None if loss is None else loss / target - 1)
            needed.append(None if reached is None else reached[0])
            trained.append(curve.steps[-1])
        if trained:
            found.append(Racer(case, excess, needed, trained, seconds.get(case, {}), megabytes.get(case)))
    return [*found, *_limit(found, steps)]


def _limit(found: Sequence[Racer], steps: Sequence[Row]) -> list[Racer]:
    """Ranks that only compute, as fast as they did in any of the runs on a network; none if nobody measured them."""
    seconds: dict[str, float] = {}
    for row in steps:
        if who(row.case) == "alone":
            seconds[row.rate] = min(row.seconds_median, seconds.get(row.rate, math.inf))
    ddp = next(racer for racer in found if racer.case == DDP)
    return [Racer(ALONE, ddp.excess, ddp.steps, ddp.trained, seconds, 0.0)] if seconds else []


def _at(curve: Curve, step: int) -> float | None:
    """The loss after so many steps; None if it was not evaluated, or not finite."""
    return dict(zip(curve.steps, curve.losses, strict=True)).get(step)


def lines(found: Sequence[Racer], after: int) -> Iterator[str]:
    """The table, as Markdown. Ratios are to the fastest on this network that is not ours."""
    rates = sorted(
        {rate for racer in found for rate in racer.seconds}, key=lambda rate: bits_per_second(rate) or math.inf
    )
    fastest = {rate: _fastest(found, rate) for rate in rates}
    yield (
        f"| | seeds | loss after {after:,} steps | steps to that of `{DDP}` | MB a step | "
        + " | ".join(f"s a step, {rate_in_words(rate)} | minutes" for rate in rates)
        + " |"
    )
    yield "|---" * (5 + 2 * len(rates)) + "|"
    for racer in found:
        cells = [
            f"`{racer.case}`",
            f"{len(racer.trained)}",
            _of_seeds(racer.excess, "{:+.1%}", "-"),
            _of_seeds(racer.steps, "{:,.0f}", "missed"),
        ]
        cells.append(shown(racer.megabytes, "{:.2f}"))
        for rate in rates:
            minutes = racer.minutes(rate)
            cells.append(shown(racer.seconds.get(rate), "{:.3f}"))
            best = fastest[rate]
            ratio = "" if minutes is None or best is None else f" ({best / minutes:.2f}x)"
            cells.append(shown(racer.least_minutes(rate), "> {:.1f}" if minutes is None else "{:.1f}") + ratio)
        yield f"| {' | '.join(cells)} |"


def _fastest(found: Sequence[Racer], rate: str) -> float | None:
    """Minutes of the fastest that is not ours; None if nobody was measured, or all missed the target."""
    minutes = [racer.minutes(rate) for racer in found if who(racer.case) == "peer"]
    return min((each for each in minutes if each is not None), default=None)


def _of_seeds(values: Sequence[float | None], form: str, otherwise: str) -> str:
    """The mean, with the lowest and the highest."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return otherwise
    mean = shown(statistics.mean(there), form)
    return mean if len(there) == 1 else f"{mean} ({shown(min(there), form)} to {shown(max(there), form)})"


def main(given: Sequence[str]) -> None:
    """Print the table, or write it."""
    parser = harness.arguments("long_race", __doc__, rounds=None, cases=False)
    parser.add_argument("--curves", type=Path, nargs="+", required=True, help="files of rows of `time_to_accuracy`")
    parser.add_argument("--steps", type=Path, nargs="+", required=True, help="files of rows of `training`")
    parser.add_argument("--after", type=int, default=1024, help="steps, after which DDP's loss is the target")
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    options = parser.parse_args(given)
    with harness.refusing(parser):
        curves = [row for file in options.curves for row in read(file)]
        steps = [row for file in options.steps for row in read(file)]
        table = "".join(f"{line}\n" for line in lines(racers(curves, steps, options.after), options.after))
        harness.show_or_write(table, "long_race", options.write)

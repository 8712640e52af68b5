"""Minutes to a loss on slow links, from two measurements: the loss after each step, and the seconds that a step takes.

python -m benchmarks time_to_accuracy --hosts 4 --rate loopback --no-target --out outputs/curves.jsonl
python -m benchmarks training --hosts 4 --rate 10mbit --model gpt --width 192 --layers 2 --optimizer adamw \\
    --out outputs/steps.jsonl
python -m benchmarks long_race --curves outputs/curves.jsonl --steps outputs/steps.jsonl --after 512

Whole runs over 10 Mbit/s would take days. But a contender's loss after so many steps does not depend on the network: it
sends the same bits on each. So its time is the number of steps that it needs, from the curves, times the seconds that
one of them takes on the network in question. That is not so for `ring_auto`, which chooses by the network, and for an
exact start ("after 128"), whose first steps take longer: both are left out. The target is DDP's own loss after
`--after` steps, for each seed its own; steps are the mean over the seeds with which the contender trained, and ratios
are over the seeds that both have. One that missed the target may still be faster than others: "> 5" are the minutes
that it trained. Of several curves with one seed, the
longest counts, and of several timings on a network, that of most rounds. The last line is the limit of a network that
costs nothing: ranks that only compute, and need as many steps as DDP.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
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
class Run:
    """What a contender did with one seed."""

    excess: float | None  # relative, over DDP's loss after as many steps; None: not evaluated then
    needed: float | None  # steps to DDP's loss; None: missed
    trained: float  # steps

    @property
    def steps(self) -> float:
        """To DDP's loss, or all, if it missed that."""
        return self.trained if self.needed is None else self.needed


@dataclass(frozen=True)
class Racer:
    """One contender."""

    case: str
    runs: Mapping[int, Run]  # by seed
    seconds: Mapping[str, float]  # a step, by rate
    megabytes: float | None  # a step on a host's link

    @property
    def missed(self) -> bool:
        """Whether it missed DDP's loss with some seed."""
        return any(run.needed is None for run in self.runs.values())

    def minutes(self, rate: str, seeds: Container[int] | None = None) -> float | None:
        """To DDP's loss, the mean over these seeds, or all; where it was missed, of all its steps. None: not timed."""
        if rate not in self.seconds:
            return None
        steps = [run.steps for seed, run in self.runs.items() if seeds is None or seed in seeds]
        return statistics.mean(steps) * self.seconds[rate] / 60


def racers(curves: Sequence[Row], steps: Sequence[Row], after: int) -> list[Racer]:
    """All that have a curve for a seed of DDP's, in their order. ValueError if the two do not fit together."""
    _check(curves, steps)
    by_case: dict[str, dict[int, Curve]] = {row.case: {} for row in curves}
    for row in sorted(curves, key=lambda row: row.curve["steps"][-1]):
        by_case[row.case][row.seed] = Curve(**row.curve)
    if DDP not in by_case:
        raise ValueError(f"--curves: {DDP} is not there, whose loss is the target")
    targets: dict[int, float] = {}
    for seed, curve in sorted(by_case[DDP].items()):
        loss = _at(curve, after)
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
    for case, by_seed in by_case.items():
        runs = {seed: _run(by_seed[seed], target, after) for seed, target in targets.items() if seed in by_seed}
        if runs and case != "ring_auto" and _EXACT_START not in case:
            found.append(Racer(case, runs, seconds.get(case, {}), megabytes.get(case)))
    return [*found, *_limit(found, steps)]


def _check(curves: Sequence[Row], steps: Sequence[Row]) -> None:
    """ValueError if they are not of one model, data, world size and learning rate."""
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


def _run(curve: Curve, target: float, after: int) -> Run:
    loss, reached = _at(curve, after), curve.reached(target)
    excess = None if loss is None else loss / target - 1
    return Run(excess, None if reached is None else reached[0], curve.steps[-1])


def _limit(found: Sequence[Racer], steps: Sequence[Row]) -> list[Racer]:
    """Ranks that only compute, as fast as they did in any of the runs on a network; none if nobody measured them."""
    seconds: dict[str, float] = {}
    for row in steps:
        if who(row.case) == "alone":
            seconds[row.rate] = min(row.seconds_median, seconds.get(row.rate, math.inf))
    ddp = next(racer for racer in found if racer.case == DDP)
    return [Racer(ALONE, ddp.runs, seconds, 0.0)] if seconds else []


def _at(curve: Curve, step: int) -> float | None:
    """The loss after so many steps; None if it was not evaluated, or not finite."""
    return dict(zip(curve.steps, curve.losses, strict=True)).get(step)


def lines(found: Sequence[Racer], after: int) -> Iterator[str]:
    """The table, as Markdown. Ratios are to the fastest on this network that is not ours, with the seeds of both."""
    rates = sorted(
        {rate for racer in found for rate in racer.seconds}, key=lambda rate: bits_per_second(rate) or math.inf
    )
    fastest = {rate: _fastest(found, rate) for rate in rates}
    yield (
        f"| | seeds | steps trained | loss after {after:,} steps | steps to that of `{DDP}` | MB a step | "
        + " | ".join(f"s a step, {rate_in_words(rate)} | minutes" for rate in rates)
        + " |"
    )
    yield "|---" * (6 + 2 * len(rates)) + "|"
    for racer in found:
        runs = racer.runs.values()
        cells = [
            f"`{racer.case}`",
            f"{len(runs)}",
            f"{min(run.trained for run in runs):,}",
            _of_seeds([run.excess for run in runs], "{:+.1%}", "-"),
            _of_seeds([run.needed for run in runs], "{:,.0f}", "missed"),
            shown(racer.megabytes, "{:.2f}"),
        ]
        for rate in rates:
            cells.append(shown(racer.seconds.get(rate), "{:.3f}"))
            form = "> {:.1f}" if racer.missed else "{:.1f}"
            cells.append(shown(racer.minutes(rate), form) + _ratio(racer, fastest[rate], rate))
        yield f"| {' | '.join(cells)} |"


def _fastest(found: Sequence[Racer], rate: str) -> Racer | None:
    """Of those that are not ours; None if nobody was measured, or all missed the target."""
    reached = [racer for racer in found if who(racer.case) == "peer" and rate in racer.seconds and not racer.missed]
    return min(reached, key=lambda racer: racer.minutes(rate) or math.inf, default=None)


def _ratio(racer: Racer, fastest: Racer | None, rate: str) -> str:
    """How many times as fast as the fastest; nothing where one of them was not timed, or missed the target."""
    if fastest is None or racer.missed:
        return ""
    seeds = racer.runs.keys() & fastest.runs.keys()
    theirs, minutes = (each.minutes(rate, seeds) if seeds else None for each in (fastest, racer))
    return "" if theirs is None or minutes is None else f" ({theirs / minutes:.2f}x)"


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

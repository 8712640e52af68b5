"""Rows as runs, whose cases took turns and can be compared, as panels of one setting, and as races to one loss."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rows import ALONE, Row

Made = dict[str, Any]  # what is known of a step of the campaign: command, commit, date, processor
Rows = Sequence[tuple[Made, Row]]  # all that were measured, each behind what is known of its step

RARE = "post-local"  # how the case begins that averages only now and then
DENSE = ("ddp", "ddp fp16 hook")
POWERSGD = ("ddp powersgd rank 1", "ddp powersgd rank 4")
RARE_CASES = ("post-local sgd every 4", "post-local sgd every 16")
FED = "ring_int8 with feedback"
_RATE = re.compile(r"([\d.]+)([kmg])bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, order=True)
class Setting:
    """What was measured, on which network; ratios of two settings mean nothing."""

    benchmark: str
    size: str
    hosts: int
    processes: int
    rate: str

    @property
    def network(self) -> str:
        """In words."""
        if self.hosts * self.processes == 1:
            return "one rank"
        ranks = f"{self.hosts} hosts" + (f" x {self.processes} ranks" if self.processes > 1 else "")
        return f"{ranks}, {rate_in_words(self.rate)}"

    @property
    def megabytes(self) -> float:
        """Of a collective's tensor."""
        return float(self.size.split()[0])

    @property
    def parameters(self) -> float:
        """Millions, of the model that is trained."""
        found = re.search(r"([\d.]+) M parameters", self.size)
        return float("nan") if found is None else float(found[1])

    @property
    def model(self) -> str:
        """In short."""
        return self.size.partition(" of ")[0] + f" {self.parameters:g} M"

    def __str__(self) -> str:
        return f"{self.size}, {self.network}"


@dataclass
class Run:
    """Cases that took turns in one process group, by name, the baseline first."""

    setting: Setting
    made: Made
    rows: dict[str, Row] = field(default_factory=dict)

    def faster(self, case: str, than: str) -> float:
        """How many times as fast as another: the median over the rounds."""
        pairs = zip(self.rows[than].seconds, self.rows[case].seconds, strict=True)
        return statistics.median(other / own for other, own in pairs)

    def strongest_peer(self) -> str | None:
        """The fastest of the cases that are not ours and average at each step."""
        peers = [case for case in self.rows if is_peer(case) and not case.startswith(RARE)]
        return min(peers, key=lambda case: self.rows[case].seconds_median, default=None)


@dataclass
class Panel:
    """All cases of one setting, each of the last run that has it; runs are in the order of their steps' keys."""

    setting: Setting
    runs: dict[str, Run] = field(default_factory=dict)  # by case
    measured: list[Run] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """In the order of the cases."""
        return (run.rows[case] for case, run in self.runs.items())

    def row(self, case: str) -> Row | None:
        """If it was measured."""
        return self.runs[case].rows[case] if case in self.runs else None

    def sources(self) -> list[Run]:
        """The runs that these cases are of, the last first."""
        return [run for run in reversed(self.measured) if any(run is each for each in self.runs.values())]


@dataclass
class Race:
    """To one loss, by seed and case: the contenders of a seed took turns, the seeds did not."""

    setting: Setting
    target: float
    seeds: dict[int, dict[str, Row]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)

    def cases(self) -> list[str]:
        """That all seeds have."""
        first, *others = self.seeds.values()
        return [case for case in first if all(case in other for other in others)]

    def lacking(self) -> dict[int, list[str]]:
        """The cases that a seed was not run with, but another was."""
        known = dict.fromkeys(case for contenders in self.seeds.values() for case in contenders)
        return {seed: [c for c in known if c not in contenders] for seed, contenders in self.seeds.items()}

    def seconds(self, case: str) -> list[float | None]:
        """To the target, one a seed; None: missed."""
        return [contenders[case].seconds_to_target for contenders in self.seeds.values()]

    def faster(self, case: str, than: Iterable[str]) -> list[float] | None:
        """How many times as fast as the best of the others, one a seed; None if it or all of them missed once."""
        others, found = list(than), []
        for contenders in self.seeds.values():
            own = contenders[case].seconds_to_target
            reached = [contenders[other].seconds_to_target for other in others if other in contenders]
            best = min((seconds for seconds in reached if seconds is not None), default=None)
            if own is None or best is None:
                return None
            found.append(best / own)
        return found

    def strongest_peer(self) -> str | None:
        """The one of others that is at the target first, by the median over the seeds."""
        medians = {
            case: statistics.median(reached)
            for case in self.cases()
            if is_peer(case)
            and len(reached := [each for each in self.seconds(case) if each is not None]) == len(self.seeds)
        }
        return min(medians, key=lambda case: medians[case], default=None)

    def best_of_ours(self, than: Iterable[str]) -> tuple[str, float] | None:
        """Our case with the highest median ratio to the best of the others, if all its seeds reached the target."""
        others = list(than)
        ratios = {case: self.faster(case, others) for case in self.cases() if not is_peer(case)}
        medians = {case: statistics.median(found) for case, found in ratios.items() if found}
        return max(medians.items(), key=lambda pair: pair[1], default=None)


def is_peer(case: str) -> bool:
    """Whether it is somebody else's way of averaging."""
    return case.startswith(("gloo", "ddp", RARE))


def is_alone(case: str) -> bool:
    """Whether its ranks only compute."""
    return case.startswith(ALONE)


def is_ours(case: str) -> bool:
    """Whether it is one of our ways of averaging."""
    return not is_peer(case) and not is_alone(case)


def rate_in_words(rate: str) -> str:
    """`100mbit` -> 100 Mbit/s."""
    found = _RATE.fullmatch(rate)
    if found is None:
        return {"none": "links without a throttle"}.get(rate, rate)
    return f"{found[1]} {found[2].upper().replace('K', 'k')}bit/s"


def bits_per_second(rate: str) -> float:
    """Infinite where nothing throttles."""
    found = _RATE.fullmatch(rate)
    return float("inf") if found is None else float(found[1]) * _UNITS[found[2]]


def setting_of(row: Row) -> Setting:
    """Of one row."""
    return Setting(row.benchmark, row.size, row.hosts, row.processes, row.rate)


def of(made: Rows, benchmark: str) -> Rows:
    """The rows of one benchmark."""
    return [(each, row) for each, row in made if row.benchmark == benchmark]


def panels(made: Rows, benchmark: str) -> list[Panel]:
    """Of one benchmark whose cases take turns; by ranks a host, hosts, rate and size."""
    runs: dict[tuple[str, Setting], Run] = {}
    for known, row in of(made, benchmark):
        setting = setting_of(row)
        runs.setdefault((known["command"], setting), Run(setting, known)).rows[row.case] = row
    found: dict[Setting, Panel] = {}
    for run in runs.values():
        panel = found.setdefault(run.setting, Panel(run.setting))
        panel.measured.append(run)
        panel.runs.update(dict.fromkeys(run.rows, run))
    return sorted(found.values(), key=_order)


def _order(panel: Panel) -> tuple[Any, ...]:
    setting = panel.setting
    weight = setting.megabytes if setting.benchmark == "collectives" else -setting.parameters
    return setting.processes, setting.hosts, bits_per_second(setting.rate), weight, setting.size


def pick(found: Sequence[Panel], **wanted: Any) -> list[Panel]:
    """Panels whose settings have these values."""
    return [panel for panel in found if all(getattr(panel.setting, name) == value for name, value in wanted.items())]


def races(made: Rows) -> list[Race]:
    """Slow links first. Where a seed was run twice, the last counts."""
    found: dict[tuple[Setting, float], Race] = {}
    for known, row in of(made, "time to accuracy"):
        setting = setting_of(row)
        race = found.setdefault((setting, row.target), Race(setting, row.target))
        if race.made.get(row.seed) is not known:
            race.made[row.seed], race.seeds[row.seed] = known, {}
        race.seeds[row.seed][row.case] = row
    return sorted(
        found.values(), key=lambda r: (r.setting.size, r.setting.hosts, bits_per_second(r.setting.rate), -r.target)
    )

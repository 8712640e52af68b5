"""Read the rows of time_to_accuracy.py back: contenders on their way to one loss, with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders import DDP, FP16_HOOK, POST_LOCAL, POWERSGD_HOOKS
from benchmarks.runs import Row, Setting, by_rate, is_peer, provenance, rows

BENCHMARK = "time to accuracy"
DENSE = (DDP, FP16_HOOK)  # of others, those that send every gradient
POWERSGD = tuple(POWERSGD_HOOKS.values())
OTHERS = (*DENSE, *POWERSGD, *POST_LOCAL.values())


@dataclass
class Race:
    """By seed, then by case: the contenders of one run took turns, the seeds did not."""

    setting: Setting
    target: float
    seeds: dict[int, dict[str, Row]] = field(default_factory=dict)
    made: dict[int, Row] = field(default_factory=dict)  # the campaign's record of each

    def provenance(self) -> list[str]:
        """Of each seed, see `runs.provenance`."""
        firsts = {seed: next(iter(contenders.values())) for seed, contenders in self.seeds.items()}
        return [provenance(firsts[seed], made, f"seed {seed}") for seed, made in self.made.items()]

    def known(self) -> list[str]:
        """That some seed has."""
        return list(dict.fromkeys(case for contenders in self.seeds.values() for case in contenders))

    def cases(self) -> list[str]:
        """That all seeds have."""
        first, *others = self.seeds.values()
        return [case for case in first if all(case in other for other in others)]

    def seconds(self, case: str) -> list[float | None]:
        """To the target, one a seed; None: missed."""
        return [contenders[case]["seconds_to_target"] for contenders in self.seeds.values()]

    def faster(self, case: str, than: Iterable[str]) -> list[float] | None:
        """How many times as fast as the best of the others, one a seed; None if it or all of them missed once."""
        found = []
        for contenders in self.seeds.values():
            own = contenders[case]["seconds_to_target"]
            best = min(
                (reached for other in than if (reached := _seconds(contenders, other)) is not None), default=None
            )
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


def _seconds(contenders: dict[str, Row], case: str) -> float | None:
    return contenders[case]["seconds_to_target"] if case in contenders else None


def races(folder: Path) -> list[Race]:
    """Slow links first. Where a seed was run twice, the last counts."""
    found: dict[tuple[Setting, float], Race] = {}
    for made, row in rows(folder):
        if row["benchmark"] != BENCHMARK:
            continue
        setting = Setting(BENCHMARK, row["size"], row["hosts"], row["processes"], row["rate"])
        race = found.setdefault((setting, row["target"]), Race(setting, row["target"]))
        if race.made.get(row["seed"]) is not made:
            race.made[row["seed"]] = made
            race.seeds[row["seed"]] = {}
        race.seeds[row["seed"]][row["case"]] = row
    return sorted(found.values(), key=_order)


def _order(race: Race) -> tuple[str, int, float, float]:
    return race.setting.size, race.setting.hosts, by_rate(race.setting.rate), -race.target

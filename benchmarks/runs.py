"""Read result rows back: as runs, whose cases took turns and can be compared, and as panels, all that is known of one
setting.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import share_of_rate
from benchmarks.lab import bits_per_second

Row = dict[str, Any]
CAMPAIGN = "campaign.json"  # what is known of each step of suite.py: its command, commit, date and seconds
_UNTHROTTLED = {"none": "links without a throttle", "loopback": "loopback"}
_RARE = "post-local"  # how the case begins that averages only now and then
_PEERS = ("gloo", "ddp", _RARE)  # how others' cases begin
ALONE = "compute alone"


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

    def __str__(self) -> str:
        return f"{self.size}, {self.network}"


@dataclass
class Run:
    """Cases that took turns in one process group, by name, the baseline first."""

    setting: Setting
    rows: dict[str, Row]
    made: Row  # the campaign's record of its step

    def faster(self, case: str, than: str) -> float:
        """How many times as fast as another: the median over the rounds."""
        pairs = zip(self.rows[than]["seconds"], self.rows[case]["seconds"], strict=True)
        return statistics.median(other / own for other, own in pairs)

    def strongest_peer(self) -> str | None:
        """The fastest of the cases that are not ours and average at each step."""
        peers = [case for case in self.rows if is_peer(case) and not case.startswith(_RARE)]
        return min(peers, key=lambda case: self.rows[case]["seconds_median"], default=None)

    def rare_peers(self) -> list[str]:
        """The cases that are not ours and average only now and then."""
        return [case for case in self.rows if case.startswith(_RARE)]

    def provenance(self) -> str:
        """See `provenance`."""
        first = next(iter(self.rows.values()))
        return provenance(first, self.made, f"{len(first['seconds'])} rounds")


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


def is_peer(case: str) -> bool:
    """Whether it is somebody else's way of averaging."""
    return case.startswith(_PEERS)


def is_alone(case: str) -> bool:
    """Whether its ranks only compute."""
    return case.startswith(ALONE)


def is_name(case: str) -> bool:
    """Whether it is a registered name, which people write in `Trainer(strategy=...)`."""
    return " " not in case and not is_peer(case)


def rate_in_words(rate: str) -> str:
    """`100mbit` -> 100 Mbit/s."""
    found = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    return _UNTHROTTLED[rate] if found is None else f"{found[1]} {found[2].upper().replace('K', 'k')}bit/s"


def by_rate(rate: str) -> float:
    """To sort by, slow links first."""
    bits = bits_per_second(rate)
    return float("inf") if bits is None else bits


def provenance(row: Row, made: Row, *more: str) -> str:
    """Command, date, machine, versions and throttle of the run that a row is of, as one line of Markdown."""
    share = share_of_rate(row["throughput"], row["rate"]) if "throughput" in row else None
    said = [
        f"`{made['command']}`",
        made["date"],
        *more,
        f"commit {short(row['commit'])}",
        f"torch {row['torch']}",
        made["processor"],
        *([f"{row['cores']} cores, {row['threads']} thread(s) a rank"] if "threads" in row else []),
        *([f"a raw TCP stream carried {100 * share:.1f} % of the rate"] if share is not None else []),
    ]
    return ", ".join(said) + "."


def short(commit: str) -> str:
    """As git shows it, and whether files had been changed."""
    head, dash, dirty = commit.partition("-")
    return head[:10] + dash + dirty


def rows(folder: Path) -> list[tuple[Row, Row]]:
    """Every row of the campaign, behind the record of its step; steps by key."""
    known = sorted(records(folder).items())
    files = [(made, folder / f"{key}.jsonl") for key, made in known]
    return [(made, json.loads(line)) for made, file in files if file.exists() for line in file.read_text().splitlines()]


def records(folder: Path) -> dict[str, Row]:
    """What is known of the campaign's steps, by key."""
    file = folder / CAMPAIGN
    return json.loads(file.read_text()) if file.exists() else {}


def runs(folder: Path) -> list[Run]:
    """Of all benchmarks whose cases take turns."""
    found: dict[tuple[str, Setting], Run] = {}
    for made, row in rows(folder):
        if not {"case", "seconds", "ratio", "rate"} <= row.keys():
            continue
        setting = Setting(row["benchmark"], row["size"], row["hosts"], row["processes"], row["rate"])
        run = found.setdefault((made["command"], setting), Run(setting, {}, made))
        run.rows[row["case"]] = row
    return list(found.values())


def panels(found: Iterable[Run], benchmark: str) -> list[Panel]:
    """Of one benchmark; by hosts, rate and size."""
    by_setting: dict[Setting, Panel] = {}
    for run in found:
        if run.setting.benchmark == benchmark:
            panel = by_setting.setdefault(run.setting, Panel(run.setting))
            panel.measured.append(run)
            for case in run.rows:
                panel.runs[case] = run
    return sorted(by_setting.values(), key=_order)


def _order(panel: Panel) -> tuple[Any, ...]:
    setting = panel.setting
    weight = setting.megabytes if setting.benchmark == "collectives" else -setting.parameters
    return setting.processes, setting.hosts, by_rate(setting.rate), weight, setting.size


def pick(found: Sequence[Panel], **wanted: Any) -> list[Panel]:
    """Panels whose settings have these values."""
    return [panel for panel in found if all(getattr(panel.setting, name) == value for name, value in wanted.items())]

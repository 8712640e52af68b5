"""What rows say of the project: which of its targets are met, and where it loses to others in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.report import growth
from benchmarks.report.markdown import median_times, times
from benchmarks.report.runs import (
    DENSE,
    FED,
    POWERSGD,
    RARE_CASES,
    Panel,
    Race,
    Rows,
    Run,
    is_alone,
    is_ours,
    is_peer,
    panels,
    pick,
    races,
    rate_in_words,
)
from ringstrategy.names import STRATEGIES

_RATES = ("100mbit", "1gbit")
_FEWER_BITS = {  # at 100 Mbit/s, beside gloo in fp32
    "int8": (3.95, ("ring int8", "direct int8")),
    "int4 absmax": (7.6, ("ring int4", "ring int4 blocks of 1024", "direct int4")),
    "2 bits, rotated": (13.0, ("ring rotated int2", "direct rotated int2")),
    "sign": (24.0, ("ring sign", "direct sign", "direct rotated sign")),
}
_LARGE_MLP = "MLP of 24.1 M parameters"
_BEYOND = 0.10
_HIDDEN = 1.05
_AUTO = 0.97
_TO_ACCURACY = {"100mbit": 3.0, "1gbit": 1.5}
_CONTESTS = {
    "the better of DDP and its fp16 hook": DENSE,
    "PowerSGD as a DDP hook, the better of ranks 1 and 4": POWERSGD,
    "all others, post-local SGD too": (*DENSE, *POWERSGD, *RARE_CASES),
}


@dataclass(frozen=True)
class Verdict:
    """One target in one setting."""

    target: str
    where: str
    needed: str
    measured: str = "not measured yet"
    met: bool | None = None  # None: not measured

    def cells(self) -> list[str]:
        """Of a table."""
        verdict = {True: "met", False: "**MISSED**", None: "-"}[self.met]
        return [self.target, self.where, self.needed, self.measured, verdict]


def verdicts(made: Rows) -> list[Verdict]:
    """All targets, whether measured or not."""
    sums, trainings = panels(made, "collectives"), panels(made, "training")
    return [
        *_sums(sums),
        *_beyond_the_limit(trainings),
        _two_hosts(trainings),
        *_hidden(trainings),
        *_races(races(made)),
        *_auto(trainings),
        *_growth(panels(made, "scaling")),
    ]


def grouped(found: Iterable[Verdict]) -> list[list[str]]:
    """A row a target: in how many settings it is met, and those in which it is not."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in found:
        groups.setdefault((verdict.target, verdict.needed), []).append(verdict)
    return [
        [
            *named,
            f"{sum(each.met is True for each in each_where)} of {len(each_where)}",
            "; ".join(f"{each.where}: {each.measured}" for each in each_where if not each.met) or "-",
        ]
        for named, each_where in groups.items()
    ]


def _at_least(target: str, where: str, needed: float, found: tuple[str, float] | None) -> Verdict:
    """A ratio that must reach `needed`, and the case that it is of."""
    bound = f"at least {needed:g}x"
    if found is None:
        return Verdict(target, where, bound)
    return Verdict(target, where, bound, f"{found[1]:.4g}x (`{found[0]}`)", found[1] >= needed)


def _best(found: Sequence[Panel], cases: Sequence[str]) -> tuple[str, float] | None:
    """Of those whose ranks agree, the case with the highest ratio to the baseline of its run."""
    rows = [row for panel in found[:1] for case in cases if (row := panel.row(case)) is not None]
    known = [(row.case, row.ratio) for row in rows if row.ranks_identical and row.ratio is not None]
    return max(known, key=lambda pair: pair[1], default=None)


def _sums(found: Sequence[Panel]) -> Iterator[Verdict]:
    four = pick(found, size="96 MB of fp32", hosts=4, processes=1)
    for rate in _RATES:
        best = _best(pick(four, rate=rate), ["ring identity"])
        yield _at_least("fp32 ring beside gloo", f"96 MB, 4 hosts, {rate_in_words(rate)}", 1.0, best)
    for name, (needed, cases) in _FEWER_BITS.items():
        best = _best(pick(four, rate="100mbit"), cases)
        yield _at_least(f"{name} beside gloo in fp32", "96 MB, 4 hosts, 100 Mbit/s", needed, best)


def _large(found: Sequence[Panel]) -> list[Panel]:
    return [panel for panel in found if panel.setting.size.startswith(_LARGE_MLP) and panel.setting.processes == 1]


def _beyond_the_limit(found: Sequence[Panel]) -> Iterator[Verdict]:
    target, needed = "time beyond the limit of a step", f"at most {100 * _BEYOND:.0f} % of the step"
    for rate in _RATES:
        where = f"24 M MLP, 4 hosts, {rate_in_words(rate)}"
        shares = {
            row.case: 1 - row.limit_seconds / row.seconds_median
            for panel in pick(_large(found), hosts=4, rate=rate)
            for row in panel.rows()
            if " " not in row.case and is_ours(row.case) and row.limit_seconds is not None
        }
        if not shares:
            yield Verdict(target, where, needed)
            continue
        kept = sum(share <= _BEYOND for share in shares.values())
        worst = max(shares, key=lambda case: shares[case])
        lacking = sorted(STRATEGIES.keys() - shares.keys())
        said = f"{kept} of {len(shares)} names; the worst, `{worst}`, {100 * shares[worst]:.0f} %"
        said += f"; not measured: {', '.join(lacking)}" if lacking else ""
        yield Verdict(target, where, needed, said, False if kept < len(shares) else None if lacking else True)


def _two_hosts(found: Sequence[Panel]) -> Verdict:
    best = _best(pick(_large(found), hosts=2, rate="1gbit"), ["ring_int8"])
    return _at_least("`ring_int8` beside DDP", "24 M MLP, 2 hosts, 1 Gbit/s", 3.1, best)


def _hidden(found: Sequence[Panel]) -> Iterator[Verdict]:
    target = "gossip at an interval that covers the exchange, beside compute alone"
    needed = f"at most {_HIDDEN:g}x the time"
    for rate in _RATES:
        hiding = [
            (case, run)
            for panel in pick(found, rate=rate)
            for case, run in panel.runs.items()
            if f"{case}, no overlap" in run.rows  # at the interval that was to hide it; others have one that is given
        ]
        for case, run in hiding:
            time = 1 / run.faster(case, _only_computing(run, case))
            yield Verdict(target, f"`{case}`, {rate_in_words(rate)}", needed, f"{time:.3g}x", time <= _HIDDEN)
        if not hiding:
            yield Verdict(target, rate_in_words(rate), needed)


def _only_computing(run: Run, case: str) -> str:
    """The case of as many steps in a row that sends nothing: longer turns take less time a step."""
    return next(name for name, row in run.rows.items() if is_alone(name) and row.steps == run.rows[case].steps)


def _races(found: Sequence[Race]) -> Iterator[Verdict]:
    four: list[Race] = [race for race in found if (race.setting.hosts, race.setting.processes) == (4, 1)]
    measured = {race.setting.rate for race in four}
    asked = [(race.setting.rate, race) for race in four]
    for rate, race in [*asked, *((rate, None) for rate in _TO_ACCURACY if rate not in measured)]:
        loss = "its target loss" if race is None else f"loss {race.target:g}, {len(race.seeds)} seed(s)"
        where = f"byte GPT to {loss}, 4 hosts, {rate_in_words(rate)}"
        for whom, others in _CONTESTS.items():
            needed = _TO_ACCURACY.get(rate, 1.0) if others is DENSE else 1.0
            target = f"the best of ours beside {whom}"
            if race is None:
                yield Verdict(target, where, f"at least {needed:g}x")
            else:
                yield _contest(target, where, needed, race, others)


def _contest(target: str, where: str, needed: float, race: Race, others: Sequence[str]) -> Verdict:
    bound = f"at least {needed:g}x"
    lacking = [f"`{case}`" for case in others if case not in race.cases()]
    if lacking:
        return Verdict(target, where, bound, f"not measured with {', '.join(lacking)}")
    if (best := race.best_of_ours(others)) is not None:
        return _at_least(target, where, needed, best)
    if any(None not in race.seconds(case) for case in race.cases() if not is_peer(case)):
        return Verdict(target, where, bound, "ours reached it, with a seed none of these did")
    return Verdict(target, where, bound, "none of ours reached it with every seed", False)


def _auto(found: Sequence[Panel]) -> Iterator[Verdict]:
    allowed = ("ring", FED)
    target = f"`ring_auto` beside the better of what it was allowed, `ring` and `{FED}`"
    known = [(panel, panel.runs["ring_auto"]) for panel in found if "ring_auto" in panel.runs]
    comparable = [(panel, run) for panel, run in known if all(case in run.rows for case in allowed)]
    for panel, run in comparable:
        best = min(allowed, key=lambda case: run.rows[case].seconds_median)
        where = f"{panel.setting.model}, {panel.setting.network}"
        yield _at_least(target, where, _AUTO, (best, run.faster("ring_auto", best)))
    if not comparable:
        yield _at_least(target, "any", _AUTO, None)


def _growth(found: Sequence[Panel]) -> Iterator[Verdict]:
    needed = f"as 2 (N-1)/N, within {100 * growth.BOUND:.0f} %"
    target, where = "seconds per all-reduce from 2 to 8 hosts", "100 Mbit/s"
    slow = pick(found, rate="100mbit")
    grown = [
        (size, case, off - 1)
        for size in dict.fromkeys(panel.setting.size for panel in slow)
        for case, rows in growth.by_case(row for panel in pick(slow, size=size) for row in panel.rows()).items()
        if case.startswith(("ring", "direct")) and (off := growth.growth(case, rows)) is not None
    ]
    for size, case, off in grown:
        yield Verdict(target, f"{size}, `{case}`, {where}", needed, f"{100 * off:+.1f} %", abs(off) <= growth.BOUND)
    if not grown:
        yield Verdict(target, where, needed)


_KINDS: dict[str, Callable[[Panel], bool]] = {  # where to expect losses; the first that fits
    "fast links": lambda panel: panel.setting.rate == "none",
    "small tensors": lambda panel: panel.setting.benchmark == "collectives" and panel.setting.megabytes <= 1.0,
    "small models": lambda panel: panel.setting.parameters < 5.0,
    "large tensors and models": lambda panel: True,
}


HEADINGS = ("kind", "setting", "slower than fp32", "the slowest", "strongest other", "the best of ours")


@dataclass(frozen=True)
class Loss:
    """One setting: how many of our cases are slower than the baseline, and who is the strongest of the others."""

    kind: str
    where: str
    slower: int
    ours: int
    slowest: str
    strongest: str
    best: str
    beaten: bool  # the best of ours is slower than the strongest

    def cells(self) -> list[str]:
        """Below `HEADINGS`."""
        return [self.kind, self.where, f"{self.slower} of {self.ours}", self.slowest, self.strongest, self.best]


def losses(made: Rows) -> list[Loss]:
    """Of every setting that has others too: those that average at each step, each within its own run."""
    found = []
    measured = [
        panel
        for panel in [*panels(made, "collectives"), *panels(made, "training")]
        if panel.setting.rate != "loopback" and any(map(is_peer, panel.runs)) and any(map(is_ours, panel.runs))
    ]
    for kind, fits in _KINDS.items():
        mine = [panel for panel in measured if fits(panel) and panel.setting.rate != "loopback"]
        measured = [panel for panel in measured if not fits(panel)]
        found += [
            _lost(kind, panel) for panel in mine if any(map(is_peer, panel.runs)) and any(map(is_ours, panel.runs))
        ]
    return found + [_lost_race(race) for race in races(made)]


def by_kind(found: Sequence[Loss]) -> list[list[str]]:
    """A row a kind."""
    body = []
    for kind in dict.fromkeys(loss.kind for loss in found):
        mine = [loss for loss in found if loss.kind == kind]
        beaten = [f"{loss.where} ({loss.strongest}; {loss.best})" for loss in mine if loss.beaten]
        slower, ours = sum(loss.slower for loss in mine), sum(loss.ours for loss in mine)
        body.append([kind, f"{slower} of {ours}", f"{len(beaten)} of {len(mine)}", "; ".join(beaten) or "-"])
    return body


def _lost(kind: str, panel: Panel) -> Loss:
    ours = {case: run.rows[case].ratio or 0.0 for case, run in panel.runs.items() if is_ours(case)}
    baseline = next(panel.rows()).baseline
    worst = min(ours, key=lambda case: ours[case])
    others = [(run, peer) for run in panel.sources() if (peer := run.strongest_peer()) is not None]
    run, peer = max(others, key=lambda pair: pair[0].rows[pair[1]].ratio or 0.0)
    beside = {
        case: mine.faster(case, strongest)
        for case, mine in panel.runs.items()
        if is_ours(case) and (strongest := mine.strongest_peer()) is not None
    }
    best = max(beside, key=lambda case: beside[case])
    name = panel.setting.size if panel.setting.benchmark == "collectives" else panel.setting.model
    return Loss(
        kind,
        f"{name}, {panel.setting.network}",
        sum(ratio < 1 for ratio in ours.values()),
        len(ours),
        f"`{worst}` {times(ours[worst])} {baseline}",
        f"`{peer}` {times(run.rows[peer].ratio)} {baseline}",
        f"`{best}` {times(beside[best])} the strongest",
        beside[best] < 1,
    )


def _lost_race(race: Race) -> Loss:
    ours = [case for case in race.cases() if not is_peer(case)]
    dense = {case: found for case in ours if (found := race.faster(case, DENSE)) is not None}
    worst = min(dense, key=lambda case: statistics.median(dense[case]), default="")
    strongest = race.strongest_peer() or ""
    best = race.best_of_ours([strongest])
    slower = sum(statistics.median(found) < 1 for found in dense.values()) + len(ours) - len(dense)
    return Loss(
        "time to a loss",
        f"loss {race.target:g}, {race.setting.model}, {race.setting.network}",
        slower,
        len(ours),
        f"`{worst}` {median_times(dense.get(worst))} DDP or fp16",
        f"`{strongest}` {median_times(race.faster(strongest, DENSE)) if strongest else '-'} DDP or fp16",
        "none there with every seed" if best is None else f"`{best[0]}` {times(best[1])} the strongest",
        best is None or best[1] < 1,
    )

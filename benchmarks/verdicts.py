"""What rows say of the project: which of its targets are met, and where it loses to others in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import scaling
from benchmarks.contenders import FED
from benchmarks.races import DENSE, OTHERS, POWERSGD, Race, races
from benchmarks.runs import Panel, Row, Run, is_alone, is_name, is_peer, panels, pick, rate_in_words, runs
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
_SMALL_TENSOR = 1.0  # MB
_SMALL_MODEL = 5.0  # M parameters


@dataclass(frozen=True)
class Verdict:
    """One target on one network."""

    target: str
    needed: str
    measured: str
    met: bool | None  # None: not measured


def verdicts(folder: Path) -> list[Verdict]:
    """All targets, whether measured or not."""
    known = runs(folder)
    sums, trainings = panels(known, "collectives"), panels(known, "training")
    return [
        *_sums(sums),
        *_beyond_the_limit(trainings),
        _two_hosts(trainings),
        *_hidden(trainings),
        *_races(races(folder)),
        *_auto(trainings),
        *_growth(panels(known, scaling.BENCHMARK)),
    ]


def _times(target: str, needed: float, found: tuple[str, float] | None) -> Verdict:
    """A ratio that must reach `needed`, and the case that it is of."""
    bound = f"at least {needed:g}x"
    if found is None:
        return _unknown(target, bound)
    return Verdict(target, bound, f"{found[1]:.4g}x (`{found[0]}`)", found[1] >= needed)


def _unknown(target: str, needed: str) -> Verdict:
    return Verdict(target, needed, "not measured yet", None)


def _best(panel: Panel, cases: Sequence[str]) -> tuple[str, float] | None:
    """Of those whose ranks agree, the case with the highest ratio to the baseline of its run."""
    known = [row for case in cases if (row := panel.row(case)) is not None and row["ranks_identical"]]
    return max(((row["case"], row["ratio"]) for row in known), key=lambda pair: pair[1], default=None)


def _sums(found: Sequence[Panel]) -> Iterable[Verdict]:
    def best(rate: str, cases: Sequence[str]) -> tuple[str, float] | None:
        chosen = pick(found, size="96 MB of fp32", hosts=4, processes=1, rate=rate)
        return _best(chosen[0], cases) if chosen else None

    for rate in _RATES:
        yield _times(
            f"96 MB, 4 hosts, {rate_in_words(rate)}: fp32 ring beside gloo", 1.0, best(rate, ["ring identity"])
        )
    for name, (needed, cases) in _FEWER_BITS.items():
        yield _times(f"96 MB, 4 hosts, 100 Mbit/s: {name} beside gloo in fp32", needed, best("100mbit", cases))


def _beyond_the_limit(found: Sequence[Panel]) -> Iterable[Verdict]:
    needed = f"at most {100 * _BEYOND:.0f} % of the step"
    for rate in _RATES:
        target = f"24 M MLP, 4 hosts, {rate_in_words(rate)}: time beyond forward + max(backward, wire) + optimizer"
        shares = {
            row["case"]: 1 - row["limit_seconds"] / row["seconds_median"]
            for panel in pick(found, hosts=4, processes=1, rate=rate)
            if panel.setting.size.startswith(_LARGE_MLP)
            for row in panel.rows()
            if is_name(row["case"]) and row["limit_seconds"] is not None
        }
        if not shares:
            yield _unknown(target, needed)
            continue
        kept = sum(share <= _BEYOND for share in shares.values())
        worst = max(shares, key=lambda case: shares[case])
        said = f"{kept} of {len(shares)} names; the worst, `{worst}`, {100 * shares[worst]:.0f} %"
        lacking = STRATEGIES.keys() - shares.keys()
        if kept < len(shares):
            yield Verdict(target, needed, said, False)
        else:
            said += f"; not measured: {', '.join(sorted(lacking))}" if lacking else ""
            yield Verdict(target, needed, said, None if lacking else True)


def _two_hosts(found: Sequence[Panel]) -> Verdict:
    chosen = [
        panel for panel in pick(found, hosts=2, processes=1, rate="1gbit") if panel.setting.size.startswith(_LARGE_MLP)
    ]
    best = _best(chosen[0], ["ring_int8"]) if chosen else None
    return _times("24 M MLP, 2 hosts, 1 Gbit/s: `ring_int8` beside DDP", 3.1, best)


def _hidden(found: Sequence[Panel]) -> Iterable[Verdict]:
    needed = f"at most {_HIDDEN:g}x the time"
    for rate in _RATES:
        target = f"{rate_in_words(rate)}: gossip at an interval of compute that covers the exchange, beside none at all"
        times = [
            (1 / run.faster(case, _only_computing(run, case)), case)
            for panel in pick(found, rate=rate)
            for case, run in panel.runs.items()
            if f"{case}, no overlap" in run.rows  # at the interval that was to hide it; others have one that is given
        ]
        if not times:
            yield _unknown(target, needed)
            continue
        for time, case in times:
            yield Verdict(f"{target}: `{case}`", needed, f"{time:.3g}x", time <= _HIDDEN)


def _only_computing(run: Run, case: str) -> str:
    """The case of as many steps in a row that sends nothing: longer turns take less time a step."""
    steps = run.rows[case]["steps"]
    return next(other for other, row in run.rows.items() if is_alone(other) and row["steps"] == steps)


def _races(found: Sequence[Race]) -> Iterable[Verdict]:
    four = [race for race in found if race.setting.hosts == 4 and race.setting.processes == 1]
    measured: list[tuple[str, Race | None]] = [(race.setting.rate, race) for race in four]
    known = dict(measured)
    for rate, race in [*measured, *((rate, None) for rate in _TO_ACCURACY if rate not in known)]:
        loss = "its target loss" if race is None else f"loss {race.target:g}, {len(race.seeds)} seed(s)"
        contests = [
            ("PowerSGD as a DDP hook, the better of ranks 1 and 4", 1.0, POWERSGD),
            ("all others, post-local SGD too", 1.0, OTHERS),
        ]
        if rate in _TO_ACCURACY:
            contests.insert(0, ("the better of DDP and its fp16 hook", _TO_ACCURACY[rate], DENSE))
        for whom, needed, others in contests:
            target = f"byte GPT to {loss}, 4 hosts, {rate_in_words(rate)}: the best of ours beside {whom}"
            yield _contest(target, needed, race, others)


def _contest(target: str, needed: float, race: Race | None, others: Sequence[str]) -> Verdict:
    if race is None:
        return _times(target, needed, None)
    bound = f"at least {needed:g}x"
    lacking = [f"`{case}`" for case in others if case not in race.cases()]
    if lacking:
        return Verdict(target, bound, f"not measured with {', '.join(lacking)}", None)
    if (best := race.best_of_ours(others)) is not None:
        return _times(target, needed, best)
    if any(None not in race.seconds(case) for case in race.cases() if not is_peer(case)):
        return Verdict(target, bound, "ours reached it, with a seed none of these did", None)
    return Verdict(target, bound, "none of ours reached it with every seed", False)


def _auto(found: Sequence[Panel]) -> Iterable[Verdict]:
    allowed = ("ring", FED)
    target = f"`ring_auto` beside the better of what it was allowed, `ring` and `{FED}`"
    known = [(panel, panel.runs["ring_auto"]) for panel in found if "ring_auto" in panel.runs]
    comparable = [(panel, run) for panel, run in known if all(case in run.rows for case in allowed)]
    if not comparable:
        yield _times(target, _AUTO, None)
    for panel, run in comparable:
        best = min(allowed, key=lambda case: run.rows[case]["seconds_median"])
        yield _times(f"{panel.setting}: {target}", _AUTO, (best, run.faster("ring_auto", best)))


def _growth(found: Sequence[Panel]) -> Iterable[Verdict]:
    needed = f"as 2 (N-1)/N, within {100 * scaling.GROWTH_BOUND:.0f} %"
    target = "seconds per all-reduce of fixed bytes, 2 to 8 hosts, 100 Mbit/s"
    by_size: dict[str, list[Row]] = {}
    for panel in pick(found, rate="100mbit"):
        by_size.setdefault(panel.setting.size, []).extend(panel.rows())
    grown = [
        (size, case, growth)
        for size, measured in by_size.items()
        for case, rows in scaling.by_case(measured).items()
        if case.startswith(("ring", "direct")) and (growth := scaling.growth(case, rows)) is not None
    ]
    if not grown:
        yield _unknown(target, needed)
    for size, case, growth in grown:
        off = growth - 1
        yield Verdict(f"{target}: {size}, `{case}`", needed, f"{100 * off:+.1f} %", abs(off) <= scaling.GROWTH_BOUND)


@dataclass(frozen=True)
class _Kind:
    """Where to expect it."""

    title: str
    has: Callable[[Panel], bool]


_KINDS = (
    _Kind("Fast links", lambda panel: panel.setting.rate == "none"),
    _Kind("Small tensors", lambda panel: _sums_of(panel) and panel.setting.megabytes <= _SMALL_TENSOR),
    _Kind("Small models", lambda panel: not _sums_of(panel) and panel.setting.parameters < _SMALL_MODEL),
    _Kind("Large tensors and models, throttled links", lambda panel: True),
)


def losses(folder: Path) -> list[str]:
    """Every case of ours that is slower than the baseline or than the strongest of others in its run, in sentences.

    Of others that average at each step: how fast post-local SGD is, which does not, stands behind it.
    """
    known = runs(folder)
    left = [
        panel
        for panel in [*panels(known, "collectives"), *panels(known, "training")]
        if panel.setting.rate != "loopback" and any(map(is_peer, panel.runs))
    ]
    lines: list[str] = []
    for kind in _KINDS:
        mine, left = [panel for panel in left if kind.has(panel)], [panel for panel in left if not kind.has(panel)]
        if not mine:
            lines += [f"**{kind.title}**: not measured yet.", ""]
            continue
        slower = sum(_slower(panel) for panel in mine)
        measured = sum(sum(map(_is_ours, panel.runs)) for panel in mine)
        lines += [f"**{kind.title}**: {slower} of {measured} cases are slower than gloo or DDP in fp32.", ""]
        lines += [f"- {panel.setting}: {'; '.join(said)}." for panel in mine if (said := _said(panel))]
        lines.append("")
    found = races(folder)
    if not found:
        return [*lines, "**Time to accuracy**: not measured yet."]
    behind = [(race, _behind(race)) for race in found]
    return [
        *lines,
        "**Time to accuracy**, medians over the seeds:",
        "",
        *(f"- {race.setting}: {said}." for race, said in behind if said),
    ]


def _behind(race: Race) -> str:
    ours = [case for case in race.cases() if not is_peer(case)]
    strongest = race.strongest_peer()
    parts = []
    if strongest is not None:
        ratios = {case: found for case in ours if (found := race.faster(case, [strongest])) is not None}
        slower = [_with_ratio(case, ratio) for case, each in ratios.items() if (ratio := statistics.median(each)) < 1]
        if slower:
            parts.append(f"slower than the strongest, {strongest}: {', '.join(slower)}")
    missed = [f"`{case}`" for case in ours if None in race.seconds(case)]
    if missed:
        parts.append(f"not at the target with every seed: {', '.join(missed)}")
    return "; ".join(parts)


def _with_ratio(case: str, ratio: float) -> str:
    return f"`{case}` {ratio:.2f}x" if ratio < 0.95 else f"`{case}` {ratio:.3f}x"


def _sums_of(panel: Panel) -> bool:
    return panel.setting.benchmark == "collectives"


def _is_ours(case: str) -> bool:
    return not is_peer(case) and not is_alone(case)


def _slower(panel: Panel) -> int:
    return sum(_is_ours(case) and run.rows[case]["ratio"] < 1 for case, run in panel.runs.items())


def _said(panel: Panel) -> list[str]:
    """Beside whom some cases are slower, and by how much. The runs of a panel may differ in who is strongest."""
    leads: dict[tuple[str, str], list[float]] = {}
    slower: dict[tuple[str, str], list[str]] = {}
    rare: list[str] = []
    for run in panel.sources():
        baseline = next(iter(run.rows))
        for other in dict.fromkeys((baseline, run.strongest_peer() or baseline)):
            leads.setdefault((other, baseline), []).append(run.faster(other, baseline))
            for case in run.rows:
                if _is_ours(case) and panel.runs[case] is run and (ratio := run.faster(case, other)) < 1:
                    slower.setdefault((other, baseline), []).append(_with_ratio(case, ratio))
        rare += [f"{case} {run.faster(case, baseline):.2f}x {baseline}" for case in run.rare_peers()]
    said = [f"slower than {_named(*pair, leads[pair])}: {', '.join(cases)}" for pair, cases in slower.items()]
    return said + ([f"averaging only at intervals: {', '.join(rare)}"] if said and rare else [])


def _named(other: str, baseline: str, leads: Sequence[float]) -> str:
    if other == baseline:
        return baseline
    least, most = f"{min(leads):.2f}", f"{max(leads):.2f}"
    ahead = least if least == most else f"{least} to {most}"
    return f"the strongest, {other} ({ahead}x {baseline})"

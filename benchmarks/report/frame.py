"""Measured rows as one table, a line a case of a setting, and what is derived from runs, races and rows of hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.lab import bits_per_second
from benchmarks.rows import ALONE, Row, campaign

SETTING = ["benchmark", "size", "hosts", "processes", "rate"]  # ratios of two settings mean nothing
MADE = ["command", "date", "processor"]
TURNS = ["collectives", "training", "exchange", "scaling", "prediction", "overhead"]  # their cases can be shared out
FED = "ring_int8 with feedback"
RARE = ("post-local", "torchft")  # how the cases begin that average only now and then
OTHERS = {  # whom a race is run against, by the column of the ratio
    "dense": ["ddp", "ddp fp16 hook"],
    "powersgd": ["ddp powersgd rank 1", "ddp powersgd rank 4"],
}
OTHERS["everybody"] = [*OTHERS["dense"], *OTHERS["powersgd"], "post-local sgd every 4", "post-local sgd every 16"]

GROWTH_BOUND = (2, 8)  # hosts, between which growth is judged


def load(folder: Path) -> pd.DataFrame:
    """All rows of the campaign, of each case those of the last run that has it, beside what is derived of them.

    Columns: the fields of `Row`, those of `SETTING` in words, `who` measured it ("ours", "peer" or "alone"), and how
    many times as fast a case is as others of its own run (median over the rounds): `beside_peer`, the strongest that
    averages at each step; `beside_alone`, computing as many steps in a row; `beside_allowed`, what `ring_auto` may do.
    """
    made = [{**asdict(row), **{name: known[name] for name in MADE}} for known, row in campaign(folder)]
    rows = pd.DataFrame(made, columns=[*(field.name for field in fields(Row)), *MADE])
    rows["run"] = rows.groupby(["command", *SETTING]).ngroup()
    rows["who"] = [who(case) for case in rows.case]
    rows["of_limit"] = rows.limit_seconds.where(rows.limit_seconds > 0).astype(float) / rows.seconds_median
    rows["beyond"] = 1 - rows.of_limit
    for name in ("beside_peer", "beside_alone", "beside_allowed"):
        rows[name] = np.nan
    # without the other columns: each access copies all that there are
    for _, run in rows[["run", "case", "who", "steps", "seconds", "seconds_median"]].groupby("run"):
        for place, row in run.iterrows():
            for name, other in _references(run, row).items():
                rows.loc[place, name] = np.median(np.divide(other.seconds, row.seconds))
    rows["bits"] = [bits_per_second(rate) or np.inf for rate in rows.rate]
    rows["megabytes"] = [_number(size, r"([\d.]+) MB") for size in rows["size"]]
    rows["parameters"] = [millions(size) for size in rows["size"]]
    rows["model"] = [
        f"{size.partition(' of ')[0]} {parameters:g} M{', AdamW' * size.endswith(', AdamW')}"
        for size, parameters in zip(rows["size"], rows.parameters, strict=True)
    ]
    rows["network"] = [
        network(*where) for where in rows[["hosts", "processes", "rate"]].itertuples(index=False, name=None)
    ]
    return _last(rows)


def _last(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each case those of the last run, in the order of the cases' first; settings by ranks, hosts, rate and size."""
    last_run = rows.groupby([*SETTING, "target", "seed"], dropna=False).run.transform("last")
    rows = rows[rows.benchmark.isin(TURNS) | (rows.run == last_run)]
    one = [*SETTING, "case", "target", "seed", "slow_rank", "codec", "operation"]
    rows = rows.assign(first=rows.groupby(one, sort=False, dropna=False).ngroup())
    order = ["processes", "parameters", "hosts", "bits", "target", "megabytes", "size", "first"]
    rising = [column not in ("parameters", "target") for column in order]
    return rows.drop_duplicates(one, keep="last").sort_values(order, ascending=rising).reset_index(drop=True)


def who(case: str) -> str:
    """Whose way of averaging it is: ours or a peer's; or whether its ranks only compute."""
    return "alone" if case.startswith(ALONE) else "peer" if case.startswith(("gloo", "ddp", *RARE)) else "ours"


def _references(run: pd.DataFrame, row: pd.Series) -> dict[str, pd.Series]:
    """By column, the row of the same run that this one is held against."""
    allowed = run[run.case.isin(["ring", FED])]
    candidates = {
        "beside_peer": run[(run.who == "peer") & ~run.case.str.startswith(RARE)],
        "beside_alone": run[(run.who == "alone") & (run.steps == row.steps)],
        "beside_allowed": allowed if row.case == "ring_auto" and len(allowed) == 2 else run[:0],
    }
    return {
        name: found.loc[found.seconds_median.idxmin()]
        for name, found in candidates.items()
        if len(found) and len(row.seconds)
    }


def network(hosts: int, processes: int, rate: str) -> str:
    """In words: 4 hosts x 2 ranks, 100 Mbit/s."""
    if hosts * processes == 1:
        return "one rank"
    return f"{hosts} hosts{f' x {processes} ranks' if processes > 1 else ''}, {rate_in_words(rate)}"


def rate_in_words(rate: str) -> str:
    """`100mbit` -> 100 Mbit/s."""
    said = re.sub(r"([kmg])bit$", lambda found: f" {found[1].upper().replace('K', 'k')}bit/s", rate)
    return "links without a throttle" if said == "none" else said


def millions(size: str) -> float:
    """Of parameters, as a row's size says."""
    return _number(size, r"([\d.]+) M parameters")


def _number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    return float("nan") if found is None else float(found[1])


def races(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a case that all seeds of a race were run with, missed targets at infinity.

    Columns: `seconds_median` over the `seeds`; how many times as fast as the best of each of `OTHERS`, seed by seed
    and then the median, 0 if a seed missed the target, NaN without all of them; as those of `dense` that there are,
    `ratio`, and as the strongest peer, `beside_peer`; `lacking`, in words, what only some seeds were run with.
    """
    found = []
    for _, race in rows[rows.benchmark == "time to accuracy"].groupby([*SETTING, "target"], sort=False):
        race = race.sort_values("first")
        table = race.pivot(index="case", columns="seed", values="seconds_to_target").reindex(race.case.unique())
        ran = race.pivot(index="case", columns="seed", values="run").reindex(table.index).notna()
        seconds = table.astype(float).fillna(np.inf)[ran.all(axis=1)]
        medians = seconds.median(axis=1).mask(np.isinf(seconds).any(axis=1), np.inf)
        peers = medians[[who(case) == "peer" for case in medians.index]]
        dense = [case for case in OTHERS["dense"] if case in seconds.index]
        against = {**OTHERS, "ratio": dense, "beside_peer": [peers.idxmin()] if len(peers) else []}
        made = (
            race.drop_duplicates("case").set_index("case").loc[seconds.index, [*SETTING, "target", "model", "network"]]
        )
        made = made.assign(benchmark="race", who=[who(case) for case in seconds.index], seconds_median=medians)
        for name, others in against.items():
            known = bool(others) and set(others) <= set(seconds.index)
            best = seconds.loc[others].min() if known else np.nan
            ratios = seconds.rdiv(best, axis=1).median(axis=1, skipna=False)  # no ratio where neither is there
            made[name] = ratios.mask(np.isinf(seconds).any(axis=1) & ratios.notna(), 0.0)
        lacking = [
            f"Seed {seed} was not run with {', '.join(f'`{case}`' for case in ran.index[~ran[seed]])}."
            for seed in ran
            if not ran[seed].all()
        ]
        made = made.assign(seeds=len(table.columns), lacking=" ".join(lacking), ranks_identical=True)
        found.append(made.reset_index())
    columns = [*SETTING, "case", "target", "who", "seconds_median", "ratio", "beside_peer", *OTHERS]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)


# The number of hosts: alpha a round, beta a byte


def rounds(case: str, hosts: int) -> int:
    """Messages that must follow each other: one in a mixing on a ring graph, else those of a ring all-reduce."""
    return 1 if case.startswith("gossip") else 2 * (hosts - 1)


def share(case: str, hosts: int) -> float:
    """How often a rank sends the values."""
    return min(2, hosts - 1) if case.startswith("gossip") else 2 * (hosts - 1) / hosts


def fit(case: str, hosts: Sequence[int], seconds: Sequence[float], nbytes: float) -> tuple[float, float, float]:
    """Of at least three numbers of hosts, by least squares: alpha, seconds a round; beta, seconds a byte; and the
    largest |measured / model - 1|. `nbytes`: of the encoded values.
    """
    terms = np.array([[rounds(case, count), share(case, count) * nbytes] for count in hosts])
    scale = terms.max(axis=0)  # a handful of rounds beside millions of bytes
    both = np.linalg.lstsq(terms / scale, np.array(seconds), rcond=None)[0] / scale
    return float(both[0]), float(both[1]), float(np.abs(np.array(seconds) / (terms @ both) - 1).max())


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a case, size and rate that was measured on several numbers of hosts: `by_hosts`, the seconds; `alpha`,
    `beta` and `worst` of the fit; `growth`, seconds beside what the bytes grow by from 2 to 8 hosts, less 1, at the
    number farthest off. NaN where too little was measured.
    """
    found, least = [], GROWTH_BOUND[0]
    for key, line in rows[rows.benchmark == "scaling"].groupby(["size", "rate", "case"], sort=False):
        (size, rate, case), line = key, line.sort_values("hosts")
        by_hosts = dict(zip(line.hosts, line.seconds_median, strict=True))
        shares = np.array([share(case, count) for count in line.hosts])
        sent = (line.bytes_sent.astype(float) / shares).fillna(line.megabytes * 2**20)  # gloo: the values themselves
        nbytes = float(sent.median())
        alpha = beta = worst = grown = float("nan")
        if len(by_hosts) > 2:
            alpha, beta, worst = fit(case, list(by_hosts), list(by_hosts.values()), nbytes)
        if by_hosts.keys() >= set(GROWTH_BOUND):
            beside = [
                seconds / by_hosts[least] * share(case, least) / share(case, count) - 1
                for count, seconds in by_hosts.items()
                if least < count <= GROWTH_BOUND[1]
            ]
            grown = max(beside, key=abs)
        made = {"benchmark": "growth", "size": size, "rate": rate, "case": case, "by_hosts": by_hosts, "nbytes": nbytes}
        made |= {"alpha": alpha, "beta": beta, "worst": worst, "growth": grown, "who": who(case)}
        found.append(made | {"network": rate_in_words(rate), "ranks_identical": True})
    columns = ["benchmark", "size", "rate", "case", "network", "by_hosts", "growth"]
    return pd.DataFrame(found, columns=None if found else columns)

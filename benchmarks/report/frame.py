"""Measured rows as one table, a line a case of a setting, and what is derived from runs and races."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.cells import times
from benchmarks.lab import bits_per_second
from benchmarks.rows import ALONE, Row, campaign

SETTING = ["benchmark", "size", "hosts", "processes", "rate"]  # ratios of two settings mean nothing
MADE = ["command", "date", "processor"]
TURNS = ["collectives", "training", "scaling", "prediction", "overhead"]  # their cases can be shared out
RARE = ("post-local", "torchft")  # how the cases begin that average only now and then
DENSE = ["ddp", "ddp fp16 hook"]  # whom a race is run against


def load(folder: Path) -> pd.DataFrame:
    """All rows of the campaign, of each case those of the last run that has it, beside what is derived of them.

    Columns: the fields of `Row`, those of `SETTING` in words, `who` measured it ("ours", "peer" or "alone"), and
    `beside_peer`, how many times as fast it is as the strongest peer of its run that averages at each step.
    """
    made = [{**asdict(row), **{name: known[name] for name in MADE}} for known, row in campaign(folder)]
    rows = pd.DataFrame(made, columns=[*(field.name for field in fields(Row)), *MADE])
    rows["run"] = rows.groupby(["command", *SETTING]).ngroup()
    rows["who"] = [who(case) for case in rows.case]
    rows["of_limit"] = rows.limit_seconds.where(rows.limit_seconds > 0).astype(float) / rows.seconds_median
    rows["beside_peer"] = np.nan
    for _, run in rows[["run", "case", "who", "seconds", "seconds_median"]].groupby("run"):
        peers = run[(run.who == "peer") & ~run.case.str.startswith(RARE) & run.seconds.map(bool)]
        if len(peers):
            strongest = peers.seconds[peers.seconds_median.idxmin()]
            rows.loc[run.index, "beside_peer"] = [np.median(np.divide(strongest, own)) for own in run.seconds]
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
    one = [*SETTING, "case", "target", "seed", "codec", "operation"]
    rows = rows.assign(first=rows.groupby(one, sort=False, dropna=False).ngroup())
    order = ["processes", "parameters", "hosts", "bits", "target", "megabytes", "size", "first"]
    rising = [column not in ("parameters", "target") for column in order]
    return rows.drop_duplicates(one, keep="last").sort_values(order, ascending=rising).reset_index(drop=True)


def who(case: str) -> str:
    """Whose way of averaging it is: ours or a peer's; or whether its ranks only compute."""
    return "alone" if case.startswith(ALONE) else "peer" if case.startswith(("gloo", "ddp", *RARE)) else "ours"


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

    Columns: `seconds_median` over the `seeds`; how many times as fast as the better of `DENSE`, `ratio`, and as the
    strongest peer, `beside_peer`: seed by seed and then the median, 0 if a seed missed the target, NaN without any.
    """
    found = []
    for _, race in rows[rows.benchmark == "time to accuracy"].groupby([*SETTING, "target"], sort=False):
        race = race.sort_values("first")
        table = race.pivot(index="case", columns="seed", values="seconds_to_target").reindex(race.case.unique())
        ran = race.pivot(index="case", columns="seed", values="run").reindex(table.index).notna()
        seconds = table.astype(float).fillna(np.inf)[ran.all(axis=1)]
        medians = seconds.median(axis=1).mask(np.isinf(seconds).any(axis=1), np.inf)
        peers = medians[[who(case) == "peer" for case in medians.index]]
        dense = [case for case in DENSE if case in seconds.index]
        against = {"ratio": dense, "beside_peer": [peers.idxmin()] if len(peers) else []}
        made = (
            race.drop_duplicates("case").set_index("case").loc[seconds.index, [*SETTING, "target", "model", "network"]]
        )
        made = made.assign(benchmark="race", who=[who(case) for case in seconds.index], seconds_median=medians)
        for name, others in against.items():
            best = seconds.loc[others].min() if others else np.nan
            ratios = seconds.rdiv(best, axis=1).median(axis=1, skipna=False)  # no ratio where neither is there
            made[name] = ratios.mask(np.isinf(seconds).any(axis=1) & ratios.notna(), 0.0)
        found.append(made.assign(seeds=len(table.columns)).reset_index())
    columns = [*SETTING, "case", "target", "who", "seconds_median", "ratio", "beside_peer"]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)


def losses(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a setting that was measured with others too: its `kind`, the `setting`, and in words the `strongest` other
    that averages at each step and the `best` of ours; how many of `ours` are slower than fp32, `lost`; and whether the
    strongest other is faster than all of ours, `beaten`.
    """
    steps = rows[rows.benchmark.isin(["collectives", "training"]) & (rows.rate != "loopback")]
    found = []
    for _, setting in pd.concat([steps, races(rows)]).groupby([*SETTING, "target"], sort=False, dropna=False):
        ours, peers = (setting[setting.who == who].set_index("case") for who in ("ours", "peer"))
        if not len(ours) or not len(peers) or ours.beside_peer.isna().all():
            continue
        first, race = setting.iloc[0], setting.benchmark.iloc[0] == "race"
        kinds = {  # where to expect losses; the first that fits
            "time to a loss": race,
            "fast links": first.rate == "none",
            "small tensors": first.megabytes <= 1,
            "small models": first.parameters < 5,
            "large tensors and models": True,
        }
        beside = peers[peers.index.str.startswith(("gloo", "ddp")) | race].ratio.astype(float)
        strongest = beside.fillna(0.0).idxmax()  # of a race that all of them missed, there is no ratio
        best, base = ours.beside_peer.astype(float).idxmax(), "DDP or fp16" if race else first.baseline
        found.append(
            {
                "kind": next(kind for kind, fits in kinds.items() if fits),
                "setting": _place(first),
                "strongest": f"`{strongest}` {times(peers.ratio[strongest])} {base}",
                "best": f"`{best}` {times(ours.beside_peer[best])} the strongest",
                "lost": int((ours.ratio < 1).sum()),
                "ours": len(ours),
                "beaten": bool(ours.beside_peer[best] < 1),
            }
        )
    return pd.DataFrame(found, columns=["kind", "setting", "strongest", "best", "lost", "ours", "beaten"])


def _place(row: pd.Series) -> str:
    """The setting of a row, in words."""
    if row.benchmark == "race":
        return f"{row.model} to loss {row.target:g}, {row.seeds:g} seed(s), {row.network}"
    return f"{row.model if row.benchmark == 'training' else row['size']}, {row.network}"

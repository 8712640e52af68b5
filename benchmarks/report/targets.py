"""What rows say of the project: which of targets.yaml are met, and where it loses to others in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from benchmarks.cells import shown, times
from benchmarks.report.frame import SETTING, growth, races, rate_in_words

VERDICT = ["target", "needed", "where", "measured", "met"]
LOSS = ["kind", "setting", "slower than fp32", "the slowest", "strongest other", "the best of ours"]


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a target and setting, of the columns `VERDICT`; `met` is None where nothing was measured."""
    wanted = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("targets.yaml")))
    assert isinstance(wanted, list)
    beside = [f"{case}, no overlap" in set(rows.case) for case in rows.case]  # at the interval that was to hide it
    everything = pd.concat([rows.assign(hidden=beside), races(rows), growth(rows)], ignore_index=True)
    everything = everything[everything.ranks_identical.isin([True])]
    return pd.DataFrame([line for each in wanted for line in _judged(everything, each)], columns=VERDICT)


def _judged(everything: pd.DataFrame, wanted: dict[str, Any]) -> Iterator[list[Any]]:
    fewest, most = wanted.get("at_least", -np.inf), wanted.get("at_most", np.inf)
    needed = f"at least {fewest:g}x" if most == np.inf else f"at most {100 * most:g} %"
    found = everything[everything.rate.isin(wanted["rates"])].query(wanted["rows"], engine="python")
    found = found[found.case.isin(wanted.get("cases", found.case)) & found[wanted["of"]].notna()]
    for rate in wanted["rates"]:
        settings = [setting for _, setting in found[found.rate == rate].groupby([*SETTING, "target"], dropna=False)]
        if not settings:
            yield [wanted["target"], needed, rate_in_words(rate), "not measured yet", None]
        for setting in settings:
            values = setting.set_index("case")[wanted["of"]].astype(float)
            good = values.between(fewest, most)
            form = times if most == np.inf else lambda value: shown(value, "{:+.1%}")
            place = _place(setting.iloc[0])
            if wanted.get("take") == "each":
                for case, value in values.items():
                    yield [wanted["target"], needed, f"`{case}`, {place}", form(value), bool(good[case])]
                continue
            case = values.idxmax()  # the best of ratios, the worst of what is to be small
            said = f"{form(values[case])} (`{case}`)"
            if wanted.get("take") == "all":
                said = f"{good.sum()} of {len(good)} names; the worst, {said}"
            yield [wanted["target"], needed, place, said, bool(good[case])]


def _place(row: pd.Series) -> str:
    """The setting of a row, in words."""
    if row.benchmark == "race":
        return f"{row.model} to loss {row.target:g}, {row.seeds:g} seed(s), {row.network}"
    return f"{row.model if row.benchmark == 'training' else row['size']}, {row.network}"


def losses(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a setting that was measured with others too: the columns `LOSS`; `lost`, how many of `ours` are slower
    than fp32, and `beaten`, whether the best of ours is slower than the strongest other that averages at each step.
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
        worst, best = ours.ratio.astype(float).idxmin(), ours.beside_peer.astype(float).idxmax()
        lost, beaten = int((ours.ratio < 1).sum()), bool(ours.beside_peer[best] < 1)
        base = "DDP or fp16" if race else first.baseline
        found.append(
            {
                "kind": next(kind for kind, fits in kinds.items() if fits),
                "setting": _place(first),
                "slower than fp32": f"{lost} of {len(ours)}",
                "the slowest": f"`{worst}` {times(ours.ratio[worst])} {base}",
                "strongest other": f"`{strongest}` {times(peers.ratio[strongest])} {base}",
                "the best of ours": f"`{best}` {times(ours.beside_peer[best])} the strongest",
                "lost": lost,
                "ours": len(ours),
                "beaten": beaten,
            }
        )
    return pd.DataFrame(found, columns=[*LOSS, "lost", "ours", "beaten"])

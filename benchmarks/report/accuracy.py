"""Turn the rows of accuracy.py into accuracy.md, a page for each stage of means, and PNGs; with what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.cells import shown
from benchmarks.report.markdown import Line, of_lines, table
from benchmarks.report.plots import grid, save

NOISE = 0.003  # of the loss: a smaller difference is none
PROMISED = {"ring_int8": NOISE, "ring_int4": NOISE, "ring_int2": 0.02}  # of the loss: the most by which it may be worse
CONTROL = "control"  # how the names begin of what must come out worse
BASELINE = {"factorial": "fp32, ring", "paired": "ring", "gossip": "ddp", "seldom": "ddp"}
WAYS = ["ring", "ring, feedback", "direct", "direct, feedback"]
TITLES = {"text": "text (byte GPT)", "digits": "digits (CNN)", "adamw": "AdamW", "sgd": "SGD with momentum"}

_HEAD = (
    "Made by `python -m benchmarks report` from `accuracy.jsonl`. Real Lightning trainers on {} processes over gloo, "
    "different data on each, equal steps, warm-up and cosine for all; the learning rate was chosen on fp32."
)
_PAIRED = (
    "`same`: the mean loss differs from fp32's by no more than the standard deviation of fp32 over the seeds, or by at "
    "most 0.3 % of it. Promised: the same for `ring_int8` and `ring_int4`; within 2 % (or the spread) for `ring_int2`. "
    "Differences are between runs with the same seed; ± is a standard deviation over seeds."
)
_FACTORIAL = (
    "Final validation loss beside that of fp32 over the ring with the same seed, in per cent; one run each. fp32 "
    "itself, added in another order (direct), shows how much of a difference is chance."
)
_RATES = (
    "Bold is what the other stages use: the lowest loss among the rates at which ring and direct, which for fp32 "
    "differ only in the order of addition, end within 0.1 % of each other. Above that one run tells nothing."
)
OF_MEANS = {  # stages whose ranks have parameters of their own: what they are about, and what validation sees
    "gossip": ("gossip does", "the mean of all ranks at each validation"),
    "seldom": ("few meetings do", "what validation sees, at last the mean of all ranks"),
}
_OF_MEANS = (
    "Loss and accuracy are of the mean of all ranks' parameters, which all ranks hold at the end. To ddp: the "
    "difference to Lightning's own `ddp` with the same ranks, data and seed; ± is a standard deviation over seeds. "
    "Equal data: every rank draws from all images. Skew 1: each rank has images of a few neighbouring labels only. "
    "kB a step: what rank 0 handed to the transport in training, without the means for validation; ddp's are not "
    "counted."
)


def publish(folder: Path) -> None:
    """Of the rows in `folder`/accuracy.jsonl, if there are some: accuracy.md, a page for each of `OF_MEANS`, PNGs."""
    file = folder / "accuracy.jsonl"
    if not file.exists():
        return
    rows = _read(file)
    rest = rows[~rows.stage.isin(OF_MEANS)]
    if len(rest):
        paired, factorial = _stage(rows, "paired"), _stage(rows, "factorial")
        parts = ["# What each wire does to training", _setup(rest)]
        if len(paired):
            parts += ["## Registered names, paired seeds", _PAIRED, *_tables(paired, "###")]
            _draw_paired(paired, folder / "accuracy.png")
            parts += ["![Loss beside fp32's, and bytes](accuracy.png)"]
        if len(factorial):
            parts += ["## Every wire and knob, one seed, short runs", _FACTORIAL, *_factorial(factorial)]
        parts += [*_rates(rows), _failures(rest)]
        (folder / "accuracy.md").write_text("\n\n".join(parts) + "\n")
    for stage, (what, seen) in OF_MEANS.items():
        of_means, name = _stage(rows, stage), f"accuracy_{stage}"
        if len(of_means):
            _draw_curves(of_means, folder / f"{name}.png")
            parts = [f"# What {what} to training", _setup(of_means), _OF_MEANS, *_tables(of_means, "##")]
            parts += [f"![Loss of {seen}]({name}.png)", _failures(of_means)]
            (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def _read(file: Path) -> pd.DataFrame:
    """A line a run; `panel`: what may be compared, `finished`: with a loss and one state on all ranks."""
    rows = pd.DataFrame([json.loads(line) for line in file.read_text().splitlines()])
    for column in ("error", "replicas_identical", "bytes_sent_per_step", "val_loss", "val_accuracy", "curve"):
        rows[column] = rows.get(column)
    rows["panel"] = [_panel(row) for _, row in rows.iterrows()]
    rows["finished"] = (rows.status == "finished") & rows.replicas_identical.isin([True])
    return rows.sort_values(["task", "panel"], ascending=[False, True], kind="stable")


def _panel(row: Line) -> str:
    parts = [TITLES.get(row.task, row.task), TITLES.get(row.optimizer, row.optimizer)]
    if row.stage in OF_MEANS:
        skew = row.settings["data"].get("skew")
        parts += [f"{row.ranks} ranks", f"skew {skew:g}" if skew else "equal data"]
    return ", ".join(parts)


def _stage(rows: pd.DataFrame, stage: str) -> pd.DataFrame:
    """Its rows; where a case was trained with several settings or lengths, the panel's last ones. Beside them, `base`:
    the loss of the stage's baseline with the same seed.
    """
    found = rows[rows.stage == stage].copy()
    how = pd.Series([repr((r.rate, r.steps, r.ranks, r.settings)) for _, r in found.iterrows()], found.index, dtype=str)
    found = found[how == how.groupby(found.panel).transform("last")]
    base = found[(found.name == BASELINE.get(stage)) & found.finished].drop_duplicates(["panel", "seed"], keep="last")
    return found.merge(base[["panel", "seed", "val_loss"]].rename(columns={"val_loss": "base"}), how="left")


def summaries(panel: pd.DataFrame) -> pd.DataFrame:
    """A line a name and algorithm of one panel: its last row, beside the lists `losses`, `accuracies` and `percents`
    (to the baseline on the same seeds, of its mean loss), how many `failed`, and the `verdict`.
    """
    base = panel[panel.name == BASELINE[panel.stage.iloc[0]]].base.dropna()
    spread = base.std() if len(base) > 1 else 0.0
    found = []
    for _, some in panel.groupby(["name", "algorithm"], sort=False):
        good = some[some.finished & some.base.notna()]
        percents = 100 * (good.val_loss - good.base) / good.base.mean()
        made = {"losses": list(good.val_loss), "percents": list(percents), "failed": len(some) - len(good)}
        made |= {"accuracies": list(good.val_accuracy.dropna()), "kilobytes": some.bytes_sent_per_step.min() / 1e3}
        share = spread / good.base.mean() if len(good) else np.nan
        made |= {
            "verdict": _verdict(some.name.iloc[0], made, share),
            "band": 100 * max(share, NOISE),
            "seeds": len(some),
        }
        found.append({**some.iloc[-1].to_dict(), **made})
    return pd.DataFrame(found)


def _verdict(name: str, made: dict[str, Any], spread: float) -> str:
    """In words, and whether what was promised of this name holds."""
    if made["failed"] or not made["percents"]:
        return "**failed**" if name in PROMISED else "failed"
    difference = float(np.mean(made["percents"])) / 100
    same = abs(difference) <= max(spread, NOISE)
    if name.startswith(CONTROL):
        return "worse, as it must be" if not same and difference > 0 else "**not told from fp32**"
    found = "same as fp32" if same else "worse" if difference > 0 else "better"
    if name not in PROMISED:
        return found
    kept = abs(difference) <= spread or difference <= PROMISED[name]
    return found + (": promise kept" if kept else ": **promise broken**")


def _setup(rows: pd.DataFrame) -> str:
    lines = [_HEAD.format("/".join(sorted({str(ranks) for ranks in rows.ranks}))), ""]
    for task, some in rows.dropna(subset="parameters").groupby("task", sort=False):
        last = some.iloc[-1]
        known = shown(last.bigram_loss, "; guessing from bigrams gives {:.3f}").replace("-", "")
        lines.append(f"- {task}: {last.parameters:,.0f} parameters, {last.settings['classes']} classes{known}")
    same = rows.replicas_identical.dropna()
    lines.append(f"- replicas bit-identical at the end: {same.sum()} of {len(same)} runs")
    spent = rows.cpu_seconds.sum() if "cpu_seconds" in rows else 0.0
    lines.append(f"- cost of all {len(rows)} runs: {spent / 3600:.2f} core hours")
    return "\n".join(lines)


def _spread(values: list[float], form: str, unit: str = "") -> str:
    """Mean and standard deviation; - of nothing."""
    if not values:
        return "-"
    spread = f" ± {form.format(np.std(values, ddof=1)).lstrip('+')}" if len(values) > 1 else ""
    return form.format(np.mean(values)) + spread + unit


def _tables(rows: pd.DataFrame, level: str) -> list[str]:
    """A title and a table for each panel."""
    apart = rows.stage.iloc[0] in OF_MEANS
    columns = {
        "name": lambda line: f"`{line['name']}`",
        **({"algorithm": lambda line: f"`{line.algorithm}`"} if apart else {"codec": lambda line: f"`{line.codec}`"}),
        "collective": lambda line: "-" if apart else line.collective.split("(")[0],
        "feedback": lambda line: "-" if apart else "yes" if line.feedback else "no",
        "kB a step": lambda line: shown(line.kilobytes, "{:.3g}" if line.kilobytes < 10 else "{:.0f}"),
        "loss": lambda line: _spread(line.losses, "{:.4f}") + (f" ({line.failed} failed)" if line.failed else ""),
        "accuracy": lambda line: _spread([100 * each for each in line.accuracies], "{:.2f}", " %"),
        f"to {'ddp' if apart else 'fp32'}": lambda line: _spread(line.percents, "{:+.2f}", " %"),
        "seeds": lambda line: str(line.seeds) if apart else "-",
        "verdict": lambda line: "-" if apart else line.verdict,
    }
    parts = []
    for title, panel in rows.groupby("panel", sort=False):
        first = panel.iloc[0]
        parts.append(f"{level} {title}: {first.steps} steps, learning rate {first.rate:g}")
        parts.append(of_lines(summaries(panel), columns))
    return parts


def _factorial(rows: pd.DataFrame) -> list[str]:
    parts = []
    for title, panel in rows.groupby("panel", sort=False):
        first, cells = panel.iloc[0], {}
        kilobytes: dict[str, float] = {}
        for _, line in summaries(panel).iterrows():
            wire, _, way = line["name"].partition(", ")
            said = f"{line.percents[0]:+.2f}" if line.percents else "replicas differ"
            cells[wire, way] = said if line.percents or line.status == "finished" else line.status
            kilobytes[wire] = min(line.kilobytes, kilobytes.get(wire, np.inf))
        body = [
            [wire, shown(size, "{:.0f}"), *(cells.get((wire, way), "") for way in WAYS)]
            for wire, size in kilobytes.items()
        ]
        said = f"{first.steps} steps, learning rate {first.rate:g}, fp32 ends at {panel.base.mean():.4f}"
        parts += [f"### {title}: {said}", table(["wire", "kB a step", *WAYS], body)]
    return parts


def _rates(rows: pd.DataFrame) -> list[str]:
    used = {(row.panel, row.rate) for stage in ("factorial", "paired") for _, row in _stage(rows, stage).iterrows()}
    body = []
    for title, panel in rows[rows.stage == "rates"].groupby("panel", sort=False):
        tried = [
            f"{row.rate:g}: {f'{row.val_loss:.4f}' if row.status == 'finished' else row.status}"
            for _, row in panel.sort_values("rate").iterrows()
        ]
        bold = [(title, rate) in used for rate in sorted(panel.rate)]
        body.append([title, ", ".join(f"**{text}**" if each else text for text, each in zip(tried, bold, strict=True))])
    head = ["## Learning rates, fp32, a seed of their own", _RATES]
    return [*head, table(["task", "loss at each rate"], body)] if body else []


def _failures(rows: pd.DataFrame) -> str:
    lines = []
    for _, row in rows[~rows.finished].iterrows():
        why = row.error.strip().splitlines()[-1] if isinstance(row.error, str) else f"loss {row.val_loss}"
        why += ", replicas differ" if row.replicas_identical is False else ""
        where = f"{row.stage}, {row.panel}, rate {row.rate:g}, seed {row.seed}, {row['name']} (`{row.codec}`)"
        lines.append(f"- {row.status}: {where}: {why}")
    return "\n".join(["## Failures", "", *lines]) if lines else "No run failed or diverged."


def _draw_paired(rows: pd.DataFrame, path: Path) -> None:
    figure, panels = grid([panel for _, panel in rows.groupby("panel", sort=False)], 4.2)
    for panel, axes in panels:
        for place, (_, line) in enumerate(summaries(panel).iterrows()):
            percents, color = line.percents, f"C{place % 10}" if line.percents else "crimson"
            middle, failed = np.mean(percents or [0.0]), f" ({line.failed} failed)" if line.failed else ""
            axes.plot([line.kilobytes] * len(percents), percents, ".", color=color, alpha=0.4, markersize=4)
            error, mark = np.std(percents, ddof=1) if len(percents) > 1 else 0.0, "o" if percents else "x"
            axes.errorbar(line.kilobytes, middle, error, fmt=mark, color=color, capsize=3, markersize=5)
            how: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": color}
            axes.annotate(line["name"] + failed, (line.kilobytes, middle), (6, 5 if place % 2 else -10), **how)
            if line["name"] == BASELINE["paired"]:
                axes.axhspan(-line.band, line.band, color="0.92", zorder=0)
        axes.set(
            xscale="log", title=panel.panel.iloc[0], xlabel="kB sent by a rank in a step", ylabel="loss - fp32's, %"
        )
        axes.margins(x=0.15)
        axes.set_yscale("symlog", linthresh=1.0)  # tenths of a per cent beside tens
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.grid(alpha=0.25)
    figure.suptitle(
        "Final validation loss beside fp32's on the same seeds; grey: the spread of fp32 over seeds", size=10
    )
    save(figure, path)


def _draw_curves(rows: pd.DataFrame, path: Path) -> None:
    colors = {name: f"C{place % 10}" for place, name in enumerate(dict.fromkeys(rows.name))}
    figure, panels = grid([panel for _, panel in rows.groupby("panel", sort=False)], 3.6)
    for panel, axes in panels:
        for _, row in panel[panel.curve.notna()].iterrows():  # those that diverged too, as far as they came
            axes.plot(*np.array(row.curve, dtype=float).T, color=colors[row["name"]], alpha=0.2, linewidth=0.7)
        for name, some in panel[panel.finished].groupby("name", sort=False):
            mean = np.mean(np.array(list(some.curve), dtype=float), axis=0).T
            axes.plot(*mean, color=colors[name], marker=".", label=name)
        axes.set(yscale="log", title=panel.panel.iloc[0], xlabel="step", ylabel="validation loss")
        axes.grid(alpha=0.25, which="both")
    figure.suptitle("Validation loss; thin: each seed, bold: their mean", size=10)
    save(figure, path)

"""Turn the rows of accuracy.py into accuracy.md, accuracy_gossip.md and PNGs; what failed is in all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.report.plots import grid

Row = dict[str, Any]
Panel = tuple[str, ...]  # task, optimizer; of gossip also ranks and data

NOISE = 0.003  # of the loss: a smaller difference is none
PROMISED = {"ring_int8": NOISE, "ring_int4": NOISE, "ring_int2": 0.02}  # of the loss: the most by which it may be worse
CONTROL = "control"  # how the names begin of what must come out worse
BASELINE = {"factorial": "fp32, ring", "paired": "ring", "gossip": "ddp"}
WAYS = ("ring", "ring, feedback", "direct", "direct, feedback")
TITLES = {"text": "text (byte GPT)", "digits": "digits (CNN)", "adamw": "AdamW", "sgd": "SGD with momentum"}


@dataclass
class Summary:
    """One wire under one task and optimizer, over its seeds, beside fp32 on the same seeds."""

    name: str
    rows: list[Row]  # all of them
    losses: list[float]  # of those that finished
    differences: list[float]  # to fp32 with the same seed
    base: float  # mean loss of fp32 on those seeds
    spread: float  # standard deviation over the seeds of fp32

    @property
    def failures(self) -> int:
        """How many seeds did not finish."""
        return len(self.rows) - len(self.losses)

    @property
    def difference(self) -> float:
        """Mean difference to fp32, as a share of its loss."""
        return statistics.fmean(self.differences) / self.base

    @property
    def verdict(self) -> str:
        """In words, and whether what was promised of this name holds."""
        promised = self.name in PROMISED
        if self.failures or not self.differences:
            return "**failed**" if promised else "failed"
        within_spread = abs(self.difference) * self.base <= self.spread
        same = within_spread or abs(self.difference) <= NOISE
        if self.name.startswith(CONTROL):
            return "worse, as it must be" if not same and self.difference > 0 else "**not told from fp32**"
        found = "same as fp32" if same else "worse" if self.difference > 0 else "better"
        if promised:
            kept = within_spread or self.difference <= PROMISED[self.name]
            found += ": promise kept" if kept else ": **promise broken**"
        return found


def publish(rows: Sequence[Row], folder: Path) -> None:
    """Write accuracy.md and accuracy_gossip.md, and a PNG a stage that has rows."""
    synchronous = [row for row in rows if row["stage"] != "gossip"]
    if synchronous:
        _publish_synchronous(synchronous, folder)
    gossip = _stage(rows, "gossip")
    if gossip:
        pieces = ["# What gossip does to training", "", *_setup(gossip), "", *_gossip_text(gossip)]
        _draw_curves(gossip, folder / "accuracy_gossip.png")
        pieces += ["", "![Loss of the mean of all ranks at each validation](accuracy_gossip.png)"]
        pieces += ["", *_failures_text(gossip)]
        (folder / "accuracy_gossip.md").write_text("\n".join(pieces).rstrip() + "\n")


def _publish_synchronous(rows: Sequence[Row], folder: Path) -> None:
    pieces = ["# What each wire does to training", "", *_setup(rows)]
    paired, factorial = (_stage(rows, stage) for stage in ("paired", "factorial"))
    if paired:
        pieces += ["", "## Registered names, paired seeds", "", *_paired_text(paired)]
        _draw_paired(paired, folder / "accuracy.png")
        pieces += ["", "![Loss beside fp32's, and bytes](accuracy.png)"]
    if factorial:
        pieces += ["", "## Every wire and knob, one seed, short runs", "", *_factorial_text(factorial)]
    pieces += ["", *_rates_text(rows), "", *_failures_text(rows)]
    (folder / "accuracy.md").write_text("\n".join(pieces).rstrip() + "\n")


def _stage(rows: Iterable[Row], stage: str) -> list[Row]:
    """Its rows; where a case was trained with several settings or lengths, the panel's last ones."""
    chosen = [row for row in rows if row["stage"] == stage]
    last = {_panel(row): _conditions(row) for row in chosen}
    return [row for row in chosen if _conditions(row) == last[_panel(row)]]


def _panel(row: Row) -> Panel:
    if row["stage"] != "gossip":
        return row["task"], row["optimizer"]
    skew = row["settings"]["data"].get("skew")
    return row["task"], row["optimizer"], f"{row['ranks']} ranks", f"skew {skew:g}" if skew else "equal data"


def _conditions(row: Row) -> tuple[Any, ...]:
    return row["rate"], row["steps"], row["ranks"], repr(row["settings"])


def _panels(rows: Iterable[Row]) -> list[Panel]:
    return sorted({_panel(row) for row in rows}, key=lambda panel: (panel[0] != "text", *panel[1:]))


def _title(panel: Panel) -> str:
    return ", ".join(TITLES.get(part, part) for part in panel)


def _finished(row: Row) -> bool:
    return row["status"] == "finished" and row["replicas_identical"] is True


def _summaries(rows: Iterable[Row], panel: Panel) -> list[Summary]:
    """One a name and algorithm, in the order of the file; empty while fp32 is missing."""
    mine = [row for row in rows if _panel(row) == panel]
    base = {row["seed"]: row["val_loss"] for row in mine if row["name"] == BASELINE[row["stage"]] and _finished(row)}
    spread = statistics.stdev(base.values()) if len(base) > 1 else 0.0
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in mine:
        grouped.setdefault((row["name"], row["algorithm"]), []).append(row)
    summaries = []
    for (name, _), group in grouped.items():
        good = [row for row in group if _finished(row) and row["seed"] in base]
        losses = [row["val_loss"] for row in good]
        differences = [row["val_loss"] - base[row["seed"]] for row in good]
        common = [base[row["seed"]] for row in good]
        summaries.append(
            Summary(name, group, losses, differences, statistics.fmean(common) if common else float("nan"), spread)
        )
    return summaries


# Text


def _setup(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Made by `python -m benchmarks report` from `accuracy.jsonl`. Real Lightning trainers on "
        f"{'/'.join(sorted({str(row['ranks']) for row in rows}))} processes over gloo, different data on each, equal "
        "steps, warm-up and cosine for all; the learning rate was chosen on fp32.",
        "",
    ]
    for task in sorted({row["task"] for row in rows}, reverse=True):
        some = [row for row in rows if row["task"] == task and "parameters" in row]
        if some:
            last = some[-1]
            bigram = last["bigram_loss"]
            known = "" if bigram is None else f"; guessing from bigrams gives {bigram:.3f}"
            guess = last["settings"]["classes"]
            lines.append(f"- {task}: {last['parameters']:,} parameters, {guess} classes{known}")
    count = len([row for row in rows if "replicas_identical" in row])
    same = sum(row.get("replicas_identical") is True for row in rows)
    lines.append(f"- replicas bit-identical at the end: {same} of {count} runs")
    spent = sum(row.get("cpu_seconds", 0) for row in rows)
    lines.append(f"- cost of all {len(rows)} runs: {spent / 3600:.2f} core hours")
    return lines


def _paired_text(rows: list[Row]) -> list[str]:
    lines = [
        f"`same`: the mean loss differs from fp32's by no more than the standard deviation of fp32 over the seeds, or "
        f"by at most {100 * NOISE:g} % of it. Promised: the same for `ring_int8` and `ring_int4`; within 2 % (or the "
        "spread) for `ring_int2`. Differences are between runs with the same seed; ± is a standard deviation over "
        "seeds."
    ]
    for panel in _panels(rows):
        first = next(row for row in rows if _panel(row) == panel)
        classes = panel[0] == "digits"
        lines += [
            "",
            f"### {_title(panel)}: {first['steps']} steps, learning rate {first['rate']:g}",
            "",
            "| name | codec | collective | feedback | kB a step | loss |"
            f"{' accuracy |' if classes else ''} to fp32 | |",
            f"|---|---|---|---|---|---|{'---|' if classes else ''}---|---|",
        ]
        for summary in _summaries(rows, panel):
            row = summary.rows[-1]
            accuracies = [100 * row["val_accuracy"] for row in summary.rows if _finished(row) and classes]
            cells = [
                f"`{summary.name}`",
                f"`{row['codec']}`",
                row["collective"].split("(")[0],
                "yes" if row["feedback"] else "no",
                _kilobytes(summary.rows),
                _mean_and_spread(summary.losses, "{:.4f}") + _failed(summary),
                *([_mean_and_spread(accuracies, "{:.2f}") + " %"] if classes else []),
                _mean_and_spread([100 * each / summary.base for each in summary.differences], "{:+.2f}") + " %",
                summary.verdict,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _factorial_text(rows: list[Row]) -> list[str]:
    lines = [
        "Final validation loss beside that of fp32 over the ring with the same seed, in per cent; one run each. "
        "fp32 itself, added in another order (direct), shows how much of a difference is chance."
    ]
    for panel in _panels(rows):
        mine = [row for row in rows if _panel(row) == panel]
        summaries = _summaries(mine, panel)
        base = next((each.base for each in summaries if each.name == BASELINE["factorial"]), float("nan"))
        lines += [
            "",
            f"### {_title(panel)}: {mine[0]['steps']} steps, learning rate {mine[0]['rate']:g}, "
            f"fp32 ends at {base:.4f}",
            "",
            f"| wire | kB a step | {' | '.join(WAYS)} |",
            "|---|---|---|---|---|---|",
        ]
        table = _by_way(summaries)
        for wire, ways in table.items():
            cells = [_cell(ways.get(way)) for way in WAYS]
            some = [row for each in ways.values() for row in each.rows]
            lines.append(f"| {wire} | {_kilobytes(some)} | {' | '.join(cells)} |")
    return lines


def _gossip_text(rows: list[Row]) -> list[str]:
    lines = [
        "Loss and accuracy are of the mean of all ranks' parameters, which all ranks hold at the end. To ddp: the "
        "difference to Lightning's own `ddp` with the same ranks, data and seed; ± is a standard deviation over seeds. "
        "Equal data: every rank draws from all images. Skew 1: each rank has images of a few neighbouring labels only. "
        "kB a step: what rank 0 handed to the transport in training, without the means for validation; ddp's are not "
        "counted."
    ]
    for panel in _panels(rows):
        first = next(row for row in rows if _panel(row) == panel)
        lines += [
            "",
            f"## {_title(panel)}: {first['steps']} steps, learning rate {first['rate']:g}",
            "",
            "| name | algorithm | kB a step | loss | accuracy | to ddp | seeds |",
            "|---|---|---|---|---|---|---|",
        ]
        for summary in _summaries(rows, panel):
            good = [row for row in summary.rows if _finished(row)]
            accuracies = [100 * row["val_accuracy"] for row in good if row["val_accuracy"] is not None]
            cells = [
                f"`{summary.name}`",
                f"`{summary.rows[-1]['algorithm']}`",
                _kilobytes(summary.rows),
                _mean_and_spread([row["val_loss"] for row in good], "{:.4f}") + _failed(summary),
                _mean_and_spread(accuracies, "{:.2f}") + (" %" if accuracies else ""),
                _mean_and_spread([100 * each / summary.base for each in summary.differences], "{:+.2f}") + " %",
                str(len(summary.rows)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _by_way(summaries: Iterable[Summary]) -> dict[str, dict[str, Summary]]:
    table: dict[str, dict[str, Summary]] = {}
    for summary in summaries:
        wire, _, way = summary.name.partition(", ")
        table.setdefault(wire, {})[way] = summary
    return table


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return ""
    if not summary.differences:
        return summary.rows[-1]["status"] if summary.rows[-1]["status"] != "finished" else "replicas differ"
    return f"{100 * summary.difference:+.2f}"


def _rates_text(rows: Iterable[Row]) -> list[str]:
    found = [row for row in rows if row["stage"] == "rates"]
    if not found:
        return []
    used = {(*_panel(row), row["rate"]) for stage in BASELINE for row in _stage(rows, stage)}
    lines = [
        "## Learning rates, fp32, a seed of their own",
        "",
        "Bold is what the other stages use: the lowest loss among the rates at which ring and direct, which for fp32 "
        "differ only in the order of addition, end within 0.1 % of each other. Above that one run tells nothing.",
        "",
        "| task | optimizer | loss at each rate |",
        "|---|---|---|",
    ]
    for panel in _panels(found):
        tried = [
            (f"**{row['rate']:g}: " if (*panel, row["rate"]) in used else f"{row['rate']:g}: ")
            + (f"{row['val_loss']:.4f}" if row["status"] == "finished" else row["status"])
            + ("**" if (*panel, row["rate"]) in used else "")
            for row in sorted(found, key=lambda row: row["rate"])
            if _panel(row) == panel
        ]
        lines.append(f"| {panel[0]} | {TITLES.get(panel[1], panel[1])} | {', '.join(tried)} |")
    return lines


def _failures_text(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        if not _finished(row):
            why = row["error"].strip().splitlines()[-1] if "error" in row else f"loss {row['val_loss']}"
            if row.get("replicas_identical") is False:
                why += ", replicas differ"
            lines.append(
                f"- {row['status']}: {row['stage']}, {_title(_panel(row))}, rate {row['rate']:g}, seed {row['seed']}, "
                f"{row['name']} (`{row['codec']}`): {why}"
            )
    return ["## Failures", "", *lines] if lines else ["No run failed or diverged."]


def _kilobytes(rows: Iterable[Row]) -> str:
    counts = [row["bytes_sent_per_step"] for row in rows if row.get("bytes_sent_per_step") is not None]
    return f"{min(counts) / 1000:.0f}" if counts else "-"


def _failed(summary: Summary) -> str:
    return f" ({summary.failures} failed)" if summary.failures else ""


def _mean_and_spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    mean = form.format(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ± {form.format(statistics.stdev(values)).lstrip('+')}"


# Pictures


def _draw_paired(rows: list[Row], path: Path) -> None:
    panels = _panels(rows)
    figure, all_axes = grid(len(panels), 4.2)
    for panel, axes in zip(panels, all_axes, strict=False):
        for place, summary in enumerate(_summaries(rows, panel)):
            counts = [row["bytes_sent_per_step"] for row in summary.rows if row.get("bytes_sent_per_step")]
            if not counts:
                continue
            kilobytes, color = counts[-1] / 1000, f"C{place % 10}"
            if not summary.differences:
                axes.plot(kilobytes, 0, "x", color="crimson")
                axes.annotate(f"{summary.name} failed", (kilobytes, 0), (4, 8), textcoords="offset points", fontsize=7)
                continue
            percents = [100 * each / summary.base for each in summary.differences]
            axes.plot([kilobytes] * len(percents), percents, ".", color=color, alpha=0.4, markersize=4)
            error = statistics.stdev(percents) if len(percents) > 1 else 0.0
            axes.errorbar(kilobytes, statistics.fmean(percents), error, fmt="o", color=color, capsize=3, markersize=5)
            axes.annotate(
                summary.name + _failed(summary),
                (kilobytes, statistics.fmean(percents)),
                (6, 5 if place % 2 else -10),
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
            if summary.name == BASELINE["paired"]:
                band = 100 * max(summary.spread / summary.base, NOISE)
                axes.axhspan(-band, band, color="0.92", zorder=0)
        axes.set_xscale("log")
        axes.margins(x=0.15)
        _label(axes, panel)
        axes.set_xlabel("kB sent by a rank in a step")
    figure.suptitle(
        "Final validation loss beside fp32's on the same seeds; grey: the spread of fp32 over seeds", size=10
    )
    figure.savefig(path, dpi=130)


def _draw_curves(rows: list[Row], path: Path) -> None:
    panels = _panels(rows)
    colors = {name: f"C{place % 10}" for place, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    figure, all_axes = grid(len(panels), 3.6)
    for panel, axes in zip(panels, all_axes, strict=False):
        mine = [row for row in rows if _panel(row) == panel]
        for row in mine:  # those that diverged too, as far as they came
            axes.plot(*zip(*row.get("curve", ()), strict=True), color=colors[row["name"]], alpha=0.2, linewidth=0.7)
        for name, color in colors.items():
            curves = [row["curve"] for row in mine if row["name"] == name and _finished(row)]
            if curves:
                means = [(seen[0][0], statistics.fmean(loss for _, loss in seen)) for seen in zip(*curves, strict=True)]
                axes.plot(*zip(*means, strict=True), color=color, marker=".")
        axes.set_yscale("log")
        axes.set_title(_title(panel), size=10)
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss")
        axes.grid(alpha=0.25, which="both")
        axes.tick_params(labelsize=8, which="both")
    for name, color in colors.items():
        all_axes[0].plot([], [], color=color, marker=".", label=name)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle("Validation loss of the mean of all ranks; thin: each seed, bold: their mean", size=10)
    figure.savefig(path, dpi=130)


def _label(axes: Axes, panel: Panel) -> None:
    """Symmetric logarithm: tenths of a per cent beside tens."""
    axes.set_title(_title(panel), size=10)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylabel("loss - fp32's, %")
    axes.axhline(0, color="0.5", linewidth=0.8)
    low, high = axes.get_ylim()
    shown = [tick for tick in (-30, -10, -3, -1, 0, 1, 3, 10, 30, 100) if min(low, -1) <= tick <= max(high, 1)]
    axes.set_yticks(shown, [f"{tick:+d}" if tick else "0" for tick in shown])
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def publish_folder(folder: Path) -> None:
    """Of the rows that lie in it, if there are some."""
    file = folder / "accuracy.jsonl"
    if file.exists():
        publish([json.loads(line) for line in file.read_text().splitlines()], folder)

"""Make the page of all measured rows, docs/benchmarks.md, and its pictures. Figures from elsewhere stand at its end.

python benchmarks/document.py
python benchmarks/document.py --results outputs/bench --page outputs/bench/benchmarks.md  # of suite.py --short
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import pictures, scaling
from benchmarks.races import DENSE, POWERSGD, Race, races
from benchmarks.runs import Panel, Row, is_alone, panels, provenance, rate_in_words, rows, runs
from benchmarks.verdicts import losses, verdicts

_ROOT = Path(__file__).resolve().parents[1]
_MAIN_MB = 96.0

_INTRODUCTION = """# Benchmarks

Made by `python benchmarks/document.py` from the rows in `benchmarks/results/`: change those, not this page. What the
commands do is said in [benchmarks/README.md](../benchmarks/README.md); what each wire does to training, with equal
steps, in [results/accuracy.md](../benchmarks/results/accuracy.md).

Hosts are network namespaces on one machine, each with its own link, throttled up and down; before each run a raw TCP
stream from the first host to the second must carry 90 to 100 % of the rate. The cases of a run take turns in the same
processes. A time is the slowest rank's, the median over the rounds, and beside it the fastest and the slowest round; x
is how many times as fast as the first case, the median over the rounds. The limit is the encoded bytes that must leave
a host (of an all-reduce 2 (N-1)/N of the values) over what the raw stream carries, of a training step forward +
max(backward, wire) + optimizer, of gossip compute + what the wire takes beyond the compute of the steps that overlap it
("1 late": of one step, else of the whole interval), with what the slowest rank took that only computed in that round,
as many steps in a row where such a case is shown: so a case can be a little beyond it, more where a throttle's first
0.1 to 0.3 MB after a pause are much of a message. A tensor of 96 MB has 96 x 2^20 bytes; 1 MB sent is a million. MB
sent are counted at the transport, of the rank that sent most; MB on the link by the kernel, headers included, of the
host that sent most. The error is relative: of a sum to the fp64 sum, of training to where DDP's weights went. Hosts
share the machine's cores: at fast rates they are the limit, and not the wire. Where others are named the strongest, it
is of those that average at each step."""

# Written down in the project's notes when they were run, 2026-11; their rows were not kept.
_ELSEWHERE = """| peer | all-reduce of 96 MB beside gloo's fp32 | training step of the 24 M MLP beside torch DDP |
|---|---|---|
| Horovod 0.28.1 | 1.0x | 0.96x, 1.00x |
| Horovod 0.28.1, fp16 | | 0.60x, 1.97x |
| hivemind, uint8 | 0.66x, 2.98x | |"""


def page(results: Path, figures: str) -> str:
    """The whole text; `figures` is the folder of the pictures as seen from the page."""
    known = runs(results)
    pieces = [_INTRODUCTION, "", "## Targets", "", *_targets(results), "", "## Where we lose", "", *losses(results)]
    for title, missing, text in (
        ("All-reduce", "collectives.py", _sums([p for p in panels(known, "collectives") if _flat(p)], figures)),
        ("Several ranks a host", "collectives.py --processes 2", _layouts(panels(known, "collectives"))),
        ("Training steps", "training.py", _trainings(panels(known, "training"), figures)),
        ("One mixing of parameters alone", "training.py --exchanges", _tables(panels(known, "exchange"))),
        ("Time to accuracy", "time_to_accuracy.py", _races(races(results), figures)),
        ("Number of hosts", "scaling.py", _scaling(panels(known, scaling.BENCHMARK), figures)),
        ("A slow rank", "slow_rank.py", _slow_rank(results)),
        ("Predictions", "prediction.py", _predictions(panels(known, "prediction"))),
        ("Codecs on one core", "codecs.py", _codecs(results)),
        ("One rank alone", "overhead.py", _tables(panels(known, "overhead"))),
    ):
        pieces += ["", f"## {title}", "", *(text or [f"Not measured yet: `python benchmarks/{missing}`."])]
    pieces += [
        "",
        "## Measured elsewhere",
        "",
        "On this kind of machine (2 cores, 4 hosts as namespaces, torch 2.13 on CPU), 2026-11: cited, not run here. "
        "Where there are two figures, the first is at 1 Gbit/s and the second at 100 Mbit/s.",
        "",
        _ELSEWHERE,
    ]
    return "\n".join(pieces).rstrip() + "\n"


def draw(results: Path, folder: Path) -> None:
    """The pictures that the page shows."""
    folder.mkdir(parents=True, exist_ok=True)
    known = runs(results)
    sums = [panel for panel in panels(known, "collectives") if _flat(panel)]
    if sums:
        pictures.bars(_mains(sums), "All-reduce", folder / "collectives.png")
    if _of_several_sizes(sums):
        pictures.sizes(_of_several_sizes(sums), folder / "sizes.png")
    for model in _models(panels(known, "training")):
        pictures.bars(model, "Training step", folder / f"{_slug(model)}.png")
    found = races(results)
    if found:
        pictures.losses(found, folder / "time_to_accuracy.png")
    hosts = panels(known, scaling.BENCHMARK)
    if hosts:
        pictures.growth(_lines(hosts), folder / "scaling.png")


def _targets(results: Path) -> list[str]:
    words = {True: "met", False: "**MISSED**", None: "-"}
    body = [[each.target, each.needed, each.measured, words[each.met]] for each in verdicts(results)]
    return _table(["target", "needed", "measured", "verdict"], body)


# All-reduces


def _flat(panel: Panel) -> bool:
    return panel.setting.processes == 1


def _mains(found: Sequence[Panel]) -> list[Panel]:
    """Of each network one size: 96 MB, or the nearest."""
    return [
        min(group, key=lambda panel: abs(panel.setting.megabytes - _MAIN_MB))
        for group in _groups(found, lambda panel: panel.setting.network)
    ]


def _of_several_sizes(found: Sequence[Panel]) -> list[list[Panel]]:
    """Each network of which more than one was measured."""
    return [group for group in _groups(found, lambda panel: panel.setting.network) if len(group) > 1]


def _sums(found: Sequence[Panel], figures: str) -> list[str]:
    if not found:
        return []
    lines = [f"![How many times as fast as gloo's fp32]({figures}/collectives.png)", "", *_tables(_mains(found))]
    if _of_several_sizes(found):
        lines += ["", f"![Seconds against MB]({figures}/sizes.png)"]
    for group in _of_several_sizes(found):
        lines += ["", f"### Sizes: {group[0].setting.network}", ""]
        lines += _matrix(group, [f"{panel.setting.megabytes:g} MB" for panel in group])
        lines += ["", *_listed(run.provenance() for panel in group for run in panel.sources())]
    for group in _groups(_mains(found), lambda panel: (panel.setting.size, panel.setting.rate)):
        if len(group) > 1:
            setting = group[0].setting
            lines += ["", f"### Hosts: {setting.size}, {rate_in_words(setting.rate)}", ""]
            lines += _matrix(group, [f"{panel.setting.hosts} hosts" for panel in group])
    return lines


def _layouts(found: Sequence[Panel]) -> list[str]:
    chosen = [panel for panel in found if not _flat(panel)]
    if not chosen:
        return []
    return [
        "Within a host nothing is throttled. gloo, `ring` and `direct` know nothing of hosts; `hierarchical` sums "
        "within each first. The limit is what a schedule must send over a host's link: with P ranks on each of H hosts "
        "and N = P H, 2 (N-1)/N of the values on a flat ring, 2 P (H-1)/H where all talk to all, 2 (H-1)/H with one "
        "sum a host, which is the least there is, and what gloo is held against. MB sent count what stays within the "
        "host, too.",
        "",
        *_tables(chosen),
    ]


# Training


def _models(found: Sequence[Panel]) -> list[list[Panel]]:
    return _groups(found, lambda panel: panel.setting.size)


def _slug(model: Sequence[Panel]) -> str:
    return "training-" + re.sub(r"[^a-z0-9]+", "-", model[0].setting.size.partition(" parameters")[0].lower())


def _trainings(found: Sequence[Panel], figures: str) -> list[str]:
    lines: list[str] = []
    for model in _models(found):
        lines += ["", f"![How many times as fast as DDP]({figures}/{_slug(model)}.png)", "", *_tables(model)]
    return lines[1:]


def _races(found: Sequence[Race], figures: str) -> list[str]:
    if not found:
        return []
    lines = [
        "Seconds of training until the loss on held-out text crosses the target, of contenders that start from the "
        "same weights and see the same data: the median over the seeds, and all of them. x: how many times as fast as "
        "the better of DDP and its fp16 hook, and as the better of PowerSGD hooks of rank 1 and 4 (our code, after "
        "torch's, which deadlocks on gloo), the median over the seeds. Loss 2.5 comes early: a table of bigrams has "
        "2.24. Of gossip and post-local SGD the loss is the exact mean's; gossip's last averaging is outside the "
        "clock.",
        "",
        f"![Held-out loss against seconds of training]({figures}/time_to_accuracy.png)",
    ]
    headings = ["case", "seconds to the target", "each seed", "steps", "x DDP or fp16", "x PowerSGD", "MB sent a step"]
    for race in found:
        lines += ["", f"### Loss {race.target:g}: {race.setting}", ""]
        lines += _table(headings, [_contender(race, case) for case in race.cases()])
        lines += ["", *_listed(race.provenance())]
        for seed, contenders in race.seeds.items():
            lacking = [f"`{case}`" for case in race.known() if case not in contenders]
            lines += ["", f"Seed {seed} was not run with {', '.join(lacking)}."] if lacking else []
    return lines


def _contender(race: Race, case: str) -> list[str]:
    seconds = race.seconds(case)
    reached = [value for value in seconds if value is not None]
    rows_ = [contenders[case] for contenders in race.seeds.values()]
    steps = [row["steps_to_target"] for row in rows_ if row["steps_to_target"] is not None]
    sent = [row["bytes_sent"] / row["curve"]["steps"][-1] for row in rows_ if row["bytes_sent"] is not None]
    return [
        f"`{case}`",
        _seconds(statistics.median(reached)) if len(reached) == len(seconds) else "missed",
        ", ".join("missed" if value is None else _seconds(value) for value in seconds),
        f"{statistics.median(steps):.0f}" if len(steps) == len(rows_) else "-",
        _median_ratio(race.faster(case, DENSE)),
        _median_ratio(race.faster(case, POWERSGD)),
        _megabytes(statistics.median(sent)) if sent else "-",
    ]


def _median_ratio(found: list[float] | None) -> str:
    return "-" if found is None else _times(statistics.median(found))


# Hosts, and the rest


def _lines(found: Sequence[Panel]) -> list[list[Panel]]:
    return _groups(found, lambda panel: (panel.setting.size, panel.setting.rate))


def _scaling(found: Sequence[Panel], figures: str) -> list[str]:
    if not found:
        return []
    lines = [f"{scaling.MODEL} {scaling.GROWTH}", "", f"![Seconds against hosts]({figures}/scaling.png)"]
    for group in _lines(found):
        setting = group[0].setting
        hosts = sorted(panel.setting.hosts for panel in group)
        lines += ["", f"### {setting.size}, {rate_in_words(setting.rate)}", ""]
        body = []
        for case, rows_ in scaling.by_case(row for panel in group for row in panel.rows()).items():
            by_hosts = {row["hosts"]: _seconds(row["seconds_median"]) for row in rows_}
            fitted = scaling.cells(case, rows_) if len(rows_) > 2 else ["-"] * len(scaling.HEADINGS)
            body.append([f"`{case}`", *(by_hosts.get(size, "-") for size in hosts), *fitted])
        lines += _table(["case", *(f"{size} hosts" for size in hosts), *scaling.HEADINGS], body)
        lines += ["", *_listed(run.provenance() for panel in group for run in panel.sources())]
    return lines


def _slow_rank(results: Path) -> list[str]:
    found = _last(results, "slow rank")
    if not found:
        return []
    body = []
    for _, row in found:
        others = [rate for rank, rate in enumerate(row["steps_per_second"]) if rank != 1]
        body.append(
            [
                f"`{row['case']}`",
                "no" if row["slow_rank"] is None else f"rank {row['slow_rank']}, {row['slowdown']:g}x",
                f"{statistics.mean(others):.2f}",
                f"{row['steps_per_second'][1]:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['kept']:.2f}",
                f"{max(row['steps_ahead']):g}" + (f" of {max(limit)}" if (limit := row["steps_ahead_limit"]) else ""),
            ]
        )
    headings = ["case", "slow rank", "others' steps/s", "rank 1's", "x DDP", "x without the slow rank", "steps ahead"]
    first = found[0][1]
    where = f"{first['size']}; {first['hosts']} hosts, {rate_in_words(first['rate'])}, {first['steps']} steps."
    return [where, "", *_table(headings, body), "", *_made(found)]


def _predictions(found: Sequence[Panel]) -> list[str]:
    """What `ringstrategy-plan` says, beside what was measured."""
    lines: list[str] = []
    for panel in found:
        body = [
            [
                f"`{row['case']}`",
                _seconds(row["seconds_median"]),
                f"{_seconds(min(row['seconds']))} - {_seconds(max(row['seconds']))}",
                _seconds(row["predicted_seconds"]),
                f"{100 * row['deviation']:+.0f} %",
            ]
            for row in panel.rows()
        ]
        headings = ["case", "seconds", "fastest - slowest", "predicted", "deviation"]
        lines += ["", f"### {panel.setting}", "", *_table(headings, body)]
        lines += ["", *_listed(run.provenance() for run in panel.sources())]
    return lines[1:]


def _codecs(results: Path) -> list[str]:
    found = _last(results, "codecs")
    if not found:
        return []
    by_codec: dict[str, dict[str, Row]] = {}
    for _, row in found:
        by_codec.setdefault(row["codec"], {})[row["operation"]] = row
    [copy] = by_codec.pop("copy").values()
    operations = ["encode", "encode, lost", "decode", "decode, add"]
    body = []
    for codec, done in by_codec.items():
        if operations[0] in done:
            cells = [f"{done[name]['gigabytes_per_second']:.1f}" for name in operations]
            body.append([f"`{codec}`", f"{done[operations[0]]['compression']:.2f}x", *cells])
    turned = ", ".join(f"{name} {row['gigabytes_per_second']:.1f}" for name, row in by_codec.get("Rotated", {}).items())
    return [
        f"GB/s of {copy['values']} float32 values, by CPU time; a copy: {copy['gigabytes_per_second']:.1f}"
        + (f"; Rotated: {turned}." if turned else "."),
        "",
        *_table(["codec", "compression", *operations], body),
        "",
        *_made(found),
    ]


def _last(results: Path, benchmark: str) -> list[tuple[Row, Row]]:
    """Rows of the last step that ran this benchmark, behind its record."""
    found = [(made, row) for made, row in rows(results) if row["benchmark"] == benchmark]
    return [(made, row) for made, row in found if made is found[-1][0]]


def _made(found: Sequence[tuple[Row, Row]]) -> list[str]:
    made, row = found[0]
    return [provenance(row, made, *([row["cpu"]] if "cpu" in row else []))]


# Tables


def _groups(found: Iterable[Panel], key: Callable[[Panel], object]) -> list[list[Panel]]:
    """In the order in which the keys come first."""
    grouped: dict[object, list[Panel]] = {}
    for panel in found:
        grouped.setdefault(key(panel), []).append(panel)
    return list(grouped.values())


def _tables(found: Sequence[Panel]) -> list[str]:
    """One a panel, with where it is from."""
    lines: list[str] = []
    for panel in found:
        shown = list(panel.rows())
        waits = any(row.get("waited_seconds") is not None for row in shown)
        headings = ["case", "seconds", "fastest - slowest", f"x {shown[0]['baseline']}", "limit", "of the limit"]
        headings += [*(["waited"] if waits else []), "MB sent", "MB on the link", "error"]
        lines += ["", f"### {panel.setting}", "", *_table(headings, [_cells(row, waits) for row in shown])]
        apart = [f"`{row['case']}`" for row in shown if not row["ranks_identical"] and not is_alone(row["case"])]
        sources = _listed(run.provenance() for run in panel.sources())
        if len(sources) > 1:
            lines += [
                "",
                "A case is of the first of these runs that has it, and its x beside the first case of the same run:",
            ]
        lines += ["", *sources]
        lines += ["", f"Ranks ended with different bits: {', '.join(apart)}."] if apart else []
    return lines[1:]


def _cells(row: Row, waits: bool) -> list[str]:
    limit, waited = row["limit_seconds"], row.get("waited_seconds")
    return [
        f"`{row['case']}`",
        _seconds(row["seconds_median"]),
        f"{_seconds(min(row['seconds']))} - {_seconds(max(row['seconds']))}",
        _times(row["ratio"]),
        _seconds(limit) if limit else "-",
        f"{100 * limit / row['seconds_median']:.0f} %" if limit else "-",
        *([] if not waits else ["-" if waited is None else _seconds(waited)]),
        "-" if row["bytes_sent"] is None else _megabytes(row["bytes_sent"]),
        "-" if row["bytes_at_interface"] is None else _megabytes(row["bytes_at_interface"]),
        "-" if row["error"] is None else f"{row['error']:.1e}",
    ]


def _matrix(group: Sequence[Panel], columns: Sequence[str]) -> list[str]:
    cases = dict.fromkeys(case for panel in group for case in panel.runs)
    body = []
    for case in cases:
        found = [panel.row(case) for panel in group]
        cells = [
            "-" if row is None else f"{_seconds(row['seconds_median'])} ({_times(row['ratio'])}x)" for row in found
        ]
        body.append([f"`{case}`", *cells])
    return _table(["case", *columns], body)


def _table(headings: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *body)]


def _listed(lines: Iterable[str]) -> list[str]:
    """Each once; as a list if they are several."""
    once = list(dict.fromkeys(lines))
    return once if len(once) == 1 else [f"- {line}" for line in once]


def _seconds(value: float) -> str:
    if value >= 0.1:
        return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"
    return f"{1e3 * value:.1f} ms" if value >= 0.01 else f"{1e3 * value:.2f} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 1.05 else f"{ratio:.3f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g}"


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description="The page of all measured rows.")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of the rows")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "benchmarks.md", help="pictures go beside it")
    options = parser.parse_args()
    figures = options.page.with_suffix("")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(options.results, figures.name))
    draw(options.results, figures)
    print(f"{options.page}, pictures in {figures}")


if __name__ == "__main__":
    main()

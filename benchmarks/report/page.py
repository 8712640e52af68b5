"""The text of docs/benchmarks.md: what to read first of each family, beside the strongest others and the limit."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.report import growth
from benchmarks.report.details import last
from benchmarks.report.markdown import median_times, of_limit, origin, provenance, seconds, table, times
from benchmarks.report.runs import (
    DENSE,
    POWERSGD,
    Panel,
    Race,
    Rows,
    bits_per_second,
    is_alone,
    panels,
    pick,
    races,
    rate_in_words,
)
from benchmarks.report.targets import by_kind, grouped, losses, verdicts
from benchmarks.rows import Row

_MAIN_MB = 96.0
_SUMS = (
    *("gloo fp32", "gloo fp16 tensor", "ring identity", "ring fp16", "ring int8", "direct int8", "ring int4"),
    *("direct rotated int2", "ring sign"),
)
_LAYOUTS = (
    *("gloo fp32", "gloo fp16 tensor", "ring identity", "ring int8", "direct int8"),
    *("hierarchical identity", "hierarchical int8", "hierarchical int4"),
)
_STEPS = (
    *("ddp", "compute alone", "ddp fp16 hook", "ddp powersgd rank 1", "post-local sgd every 4"),
    *("ring", "ring_int8", "ring_int4", "ring_int2", "ring_sign", "ring_topk", "ring_powersgd", "ring_auto"),
    *("direct of BlockInt(4)", "gossip", "gossip_exponential", "gossip_int8", "gossip_int8 every 4 (1 late)"),
)
_CONTENDERS = (
    *("ddp", "ddp fp16 hook", "ddp powersgd rank 1", "ddp powersgd rank 4", "post-local sgd every 16"),
    *("ring", "ring_int8", "ring_int4", "ring_sign", "ring_auto", "ring_powersgd rank 4"),
    *("gossip_exponential", "gossip_exponential every 16", "gossip_int8 every 4", "gossip_int8 every 4 (1 late)"),
)
_OPERATIONS = ("encode", "encode, lost", "decode", "decode, add")

_HOW = """Every figure comes from a row in `benchmarks/results/`, and `python -m benchmarks report` makes this page from
them. The rows are of the commits that stand below each table: a row stays valid as a record when the code goes on.

- **Hosts** are network namespaces on one machine, each with its own link, throttled up and down. Before each run a raw
  TCP stream must carry 90 to 100 % of the rate. All hosts share the cores of the machine, so at fast rates the cores
  are the limit, and not the wire.
- **Seconds** are the slowest rank's, the median over the rounds. The cases of a run take turns in the same processes.
- **x** is how many times as fast as the first case of the same run, the median over the rounds.
- **The limit** is the time that no run can beat. For an all-reduce: the encoded bytes that must leave a host, over what
  the raw stream carries. For a training step: forward + max(backward, wire) + optimizer. For gossip: compute, and what
  the wire takes beyond the compute that it overlaps. The percentage behind an x says how much of the limit was reached.
- A tensor of 96 MB has 96 x 2^20 bytes. 1 MB sent is a million bytes, counted at the transport.

[benchmarks/README.md](../benchmarks/README.md) says how to run a benchmark. [Accuracy](accuracy.md) says what each
codec does to training with equal steps."""

# Written down in the project's notes when they were run, 2026-11; their rows were not kept.
_ELSEWHERE = """On this kind of machine (2 cores, 4 hosts as namespaces, torch 2.13 on CPU), 2026-11. These figures are
cited; no command here runs them. Where there are two, the first is at 1 Gbit/s and the second at 100 Mbit/s.

| peer | all-reduce of 96 MB beside gloo's fp32 | training step of the 24 M MLP beside torch DDP |
| --- | --- | --- |
| Horovod 0.28.1 | 1.0x | 0.96x, 1.00x |
| Horovod 0.28.1, fp16 | | 0.60x, 1.97x |
| hivemind, uint8 | 0.66x, 2.98x | |"""


def text(made: Rows, figures: str) -> str:
    """The whole page; `figures` is the folder of the pictures as seen from it."""
    sums, trainings = panels(made, "collectives"), panels(made, "training")
    flat = [panel for panel in sums if panel.setting.processes == 1]
    parts: list[tuple[str, str, list[str]]] = [
        ("Targets", "", _targets(made)),
        ("Where we lose", "", _losses(made)),
        ("All-reduce", "collectives", _sums(flat, figures)),
        ("Several ranks a host", "collectives --processes 2", _layouts([p for p in sums if p not in flat])),
        ("Training steps", "training", _trainings(trainings, figures)),
        ("One mixing of parameters alone", "training --exchanges", _whole(panels(made, "exchange"), "mixing")),
        ("Time to accuracy", "time_to_accuracy", _races(races(made), figures)),
        ("Number of hosts", "scaling", _scaling(panels(made, "scaling"), figures)),
        ("A slow rank", "slow_rank", _slow_rank(last(made, "slow rank"))),
        ("Predictions", "prediction", _predictions(panels(made, "prediction"))),
        ("Codecs on one core", "codecs", _codecs(last(made, "codecs"))),
        ("One rank alone", "overhead", _whole(panels(made, "overhead"), "one-rank")),
        ("Measured elsewhere", "", [_ELSEWHERE]),
    ]
    titles = ["How to read the figures", *(title for title, _, _ in parts)]
    lines = ["# Benchmarks", "", *(f"- [{title}](#{_anchor(title)})" for title in titles)]
    lines += ["", f"## {titles[0]}", "", _HOW]
    for title, command, body in parts:
        lines += ["", f"## {title}", "", *(body or [f"Not measured yet: `python -m benchmarks {command}`."])]
    return "\n".join(lines).rstrip() + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _full(name: str) -> str:
    return f"All cases, with spread, bytes and error: [tables/{name}.md](../benchmarks/results/tables/{name}.md)."


def _targets(made: Rows) -> list[str]:
    found = verdicts(made)
    met = [verdict.met for verdict in found]
    return [
        f"{met.count(True)} of {len(found)} are met, {met.count(False)} missed and {met.count(None)} not measured.",
        "",
        *table(["target", "needed", "met in", "not met in"], grouped(found)),
        "",
        _full("targets"),
    ]


def _losses(made: Rows) -> list[str]:
    found = losses(made)
    if not found:
        return []
    headings = ["where", "our cases slower than fp32", "settings where another beats all of ours", "which"]
    return [
        "Ours beside gloo or DDP in fp32 (in a race beside the better of DDP and its fp16 hook), and beside the "
        "strongest of the others. Few bits lose where the wire is fast or the tensor small.",
        "",
        *table(headings, by_kind(found)),
        "",
        _full("losses"),
    ]


def _matrix(
    cases: Iterable[str], columns: Mapping[str, Panel], cell: Callable[[Row], str], first: Sequence[str] = ()
) -> list[str]:
    """A row a case that was measured, a column a setting; of the cases in `first` the seconds."""
    body = []
    for case in cases:
        rows = [panel.row(case) for panel in columns.values()]
        if any(rows):
            show = (lambda row: seconds(row.seconds_median)) if case in first else cell
            body.append([f"`{case}`", *("-" if row is None else show(row) for row in rows)])
    return table(["case", *columns], body)


def _ratio(row: Row) -> str:
    return times(row.ratio) + (f" ({of_limit(row)})" if row.limit_seconds else "")


def _nearest(found: Sequence[Panel], megabytes: float) -> list[Panel]:
    """Of each network one size."""
    networks = dict.fromkeys(panel.setting.network for panel in found)
    return [
        min(pick(found, network=network), key=lambda panel: abs(panel.setting.megabytes - megabytes))
        for network in networks
    ]


def _sums(found: Sequence[Panel], figures: str) -> list[str]:
    if not found:
        return []
    mains = _nearest(found, _MAIN_MB)
    return [
        f"{mains[0].setting.size}. Of the first case the seconds, of the others x beside it (of the limit).",
        "",
        *_matrix(_SUMS, {panel.setting.network: panel for panel in mains}, _ratio, _SUMS[:1]),
        "",
        f"![Seconds of an all-reduce against its size]({figures}/sizes.png)",
        "",
        origin(mains),
        "",
        _full("all-reduce"),
    ]


def _layouts(found: Sequence[Panel]) -> list[str]:
    if not found:
        return []
    columns = {f"{panel.setting.megabytes:g} MB, {panel.setting.network}": panel for panel in found}
    return [
        "Within a host nothing is throttled. gloo, `ring` and `direct` do not know which ranks share a host; "
        "`hierarchical` sums within each host first. With P ranks on each of H hosts and N = P H, a host's link must "
        "carry 2 (N-1)/N of the values on a flat ring, 2 P (H-1)/H where all talk to all, and 2 (H-1)/H with one sum a "
        "host, which is the least possible. gloo is held against the least.",
        "",
        *_matrix(_LAYOUTS, columns, _ratio, _LAYOUTS[:1]),
        "",
        origin(found),
    ]


def _trainings(found: Sequence[Panel], figures: str) -> list[str]:
    shown = [panel for panel in found if "ring_int8" in panel.runs]
    if not shown:
        return []
    shown.sort(key=lambda panel: (-panel.setting.parameters, panel.setting.hosts, bits_per_second(panel.setting.rate)))
    columns = {f"{panel.setting.model}, {panel.setting.network}": panel for panel in shown}
    return [
        "A step of an MLP, a byte GPT and a CNN. Of `ddp` and of compute alone the seconds, of the others x DDP (of "
        "the limit). Gossip with `every 4` mixes every 4 steps; `1 late` applies a correction one step later.",
        "",
        *_matrix(_STEPS, columns, _ratio, _STEPS[:2]),
        "",
        f"![Seconds of a step of the largest model, beside the limit]({figures}/training.png)",
        "",
        origin(shown),
        "",
        _full("training"),
    ]


def _whole(found: Sequence[Panel], name: str) -> list[str]:
    """All cases, seconds and x: a family of few."""
    if not found:
        return []
    columns = {f"{panel.setting.size}, {panel.setting.network}": panel for panel in found}
    cases = dict.fromkeys(case for panel in found for case in panel.runs)
    body = _matrix(cases, columns, lambda row: f"{seconds(row.seconds_median)}, {_ratio(row)}")
    return [*body, "", origin(found), "", _full(name)]


def _races(found: Sequence[Race], figures: str) -> list[str]:
    if not found:
        return []
    headings = [f"loss {race.target:g}, {race.setting.network}, {len(race.seeds)} seed(s)" for race in found]
    body = [
        [f"`{case}`", *(_contender(race, case) for race in found)]
        for case in _CONTENDERS
        if any(case in race.cases() for race in found)
    ]
    absent = [
        f"Seed {seed} of {heading} was not run with {', '.join(f'`{case}`' for case in cases)}."
        for race, heading in zip(found, headings, strict=True)
        for seed, cases in race.lacking().items()
        if cases
    ]
    return [
        f"Seconds of training until the held-out loss of a {found[0].setting.size} crosses the target. All contenders "
        "start from the same weights and see the same data; the median over the seeds. First x: beside the better of "
        "DDP and its fp16 hook; second x: beside the better of PowerSGD hooks of rank 1 and 4 (our code, because "
        "torch's deadlocks on gloo). A table of bigrams has loss 2.24, so 2.5 comes early. Of gossip and post-local "
        "SGD the loss is the exact mean's; gossip's last averaging is outside the clock.",
        "",
        *table(["case", *headings], body),
        "",
        f"![Held-out loss against seconds of training]({figures}/time_to_accuracy.png)",
        "",
        *absent,
        "",
        _full("races"),
    ]


def _contender(race: Race, case: str) -> str:
    if case not in race.cases():
        return "-"
    reached = [value for value in race.seconds(case) if value is not None]
    if len(reached) < len(race.seeds):
        return "missed"
    ratios = (median_times(race.faster(case, others)) for others in (DENSE, POWERSGD))
    return f"{seconds(statistics.median(reached))}, {', '.join(ratios)}"


def _scaling(found: Sequence[Panel], figures: str) -> list[str]:
    if not found:
        return []
    lines = [growth.MODEL]
    for setting in dict.fromkeys((panel.setting.size, panel.setting.rate) for panel in found):
        group = pick(found, size=setting[0], rate=setting[1])
        hosts = sorted(panel.setting.hosts for panel in group)
        body = []
        for case, rows in growth.by_case(row for panel in group for row in panel.rows()).items():
            by_hosts = {row.hosts: seconds(row.seconds_median) for row in rows}
            body.append([f"`{case}`", *(by_hosts.get(count, "-") for count in hosts), *growth.cells(case, rows)])
        headings = [f"{setting[0]}, {rate_in_words(setting[1])}", *(f"{count} hosts" for count in hosts)]
        lines += ["", *table([*headings, *growth.HEADINGS], body)]
    return [*lines, "", f"![Seconds against hosts]({figures}/scaling.png)", "", _full("hosts")]


def _slow_rank(found: Rows) -> list[str]:
    if not found:
        return []
    body = []
    for _, row in found:
        if row.slow_rank is None:
            continue
        others = [rate for rank, rate in enumerate(row.steps_per_second) if rank != 1]
        most = "" if row.steps_ahead_limit is None else f" of {max(row.steps_ahead_limit)}"
        body.append(
            [
                f"`{row.case}`",
                f"{statistics.mean(others):.2f}",
                f"{row.steps_per_second[1]:.2f}",
                times(row.ratio),
                times(row.kept),
                f"{max(row.steps_ahead):g}{most}",
            ]
        )
    headings = ["case", "others' steps/s", "rank 1's", "x DDP", "x without the slow rank", "steps ahead"]
    made, first = found[0]
    where = f"Rank 1 computes {found[-1][1].slowdown:g} times as long. {first.size}; {first.hosts} hosts, "
    where += f"{rate_in_words(first.rate)}, {first.steps} steps."
    return [where, "", *table(headings, body), "", provenance(first, made)]


def _predictions(found: Sequence[Panel]) -> list[str]:
    if not found:
        return []
    cases = [case for case in dict.fromkeys(case for panel in found for case in panel.runs) if not is_alone(case)]
    columns = {f"{panel.setting.model}, {panel.setting.network}": panel for panel in found}
    return [
        "How far `ringstrategy-plan` is from the measured step: +10 % is a prediction that is too slow.",
        "",
        *_matrix(cases, columns, lambda row: f"{100 * (row.deviation or 0.0):+.0f} %"),
        "",
        _full("predictions"),
    ]


def _codecs(found: Rows) -> list[str]:
    if not found:
        return []
    by_codec: dict[str, dict[str, Row]] = {}
    for _, row in found:
        by_codec.setdefault(row.codec, {})[row.operation] = row
    [copy] = by_codec.pop("copy").values()
    body = [
        [f"`{codec}`", f"{done['encode'].compression:.2f}x", *(_rate(done[name]) for name in _OPERATIONS)]
        for codec, done in by_codec.items()
        if "encode" in done
    ]
    turned = ", ".join(f"{name} {_rate(row)}" for name, row in by_codec.get("Rotated", {}).items())
    copied = f"GB/s of {copy.values} float32 values, by CPU time. A copy: {_rate(copy)}."
    made, first = found[0]
    return [
        copied + (f" Rotated: {turned}." if turned else ""),
        "",
        *table(["codec", "compression", *_OPERATIONS], body),
        "",
        provenance(first, made),
    ]


def _rate(row: Row) -> str:
    return f"{row.gigabytes_per_second:.1f}"

"""docs/benchmarks.md, rendered from page.md.jinja, and the full tables of each family."""

from __future__ import annotations

import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from benchmarks.cells import CELLS, Cell, seconds, shown, times
from benchmarks.cpu import PARTS
from benchmarks.report.frame import SETTING, growth, races
from benchmarks.report.markdown import Line, matrix, of_lines, origin, sources, table
from benchmarks.report.targets import LOSS, VERDICT, losses, verdicts

FAMILIES = {  # of full tables: the file, its title, the benchmark
    "all-reduce": ("All-reduces", "collectives"),
    "training": ("Training steps", "training"),
    "mixing": ("One mixing of parameters, nothing computed", "exchange"),
    "hosts": ("All-reduces of fixed bytes over a growing number of hosts", "scaling"),
    "predictions": ("What `ringstrategy-plan` says, beside what was measured", "prediction"),
    "one-rank": ("One rank alone", "overhead"),
    "slow-rank": ("Steps a second beside a slow rank", "slow rank"),
    "codecs": ("Codecs on one core, GB/s of float32 values", "codecs"),
}
_RARE = "stochastic|e5m2|bits=3"  # codecs that no registered name uses: in the full table
_OPERATIONS = ["encode", "encode, lost", "decode", "decode, add"]


def text(rows: pd.DataFrame, figures: str) -> str:
    """The whole page; `figures` is the folder of the pictures as seen from it."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"matrix": _matrix, "racers": _racers, "origin": origin}
    known: dict[str, Any] = {
        "of": lambda query: rows.query(query, engine="python"),
        "having": having,
        "full": lambda name: f"[All cases, with spread, bytes and error](../benchmarks/results/tables/{name}.md)",
        **{
            made.__name__.strip("_"): made(rows)
            for made in (_targets, _losses, _race, _hosts, _slow_rank, _cpu, _codecs)
        },
    }
    template = environment.from_string(Path(__file__).with_name("page.md.jinja").read_text())
    page = re.sub(r"\n{3,}", "\n\n", template.render(figures=figures, **known)).rstrip() + "\n"
    contents = " ·\n".join(f"[{title}](#{_anchor(title)})" for title in re.findall(r"^## (.*)$", page, re.M))
    return page.replace("CONTENTS", contents, 1)


def having(found: pd.DataFrame, case: str) -> pd.DataFrame:
    """The settings in which this case was measured."""
    return found.groupby(SETTING).filter(lambda setting: case in set(setting.case)) if len(found) else found


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _matrix(found: pd.DataFrame, cases: list[str] | None, heading: str, first: int = 0, of: str = "ratio") -> str:
    """Of the first cases the seconds, of the others how many times as fast as the baseline (of the limit).

    `heading`: the columns of the frame that name a column of the table. `of`: another column, as a percentage.
    """
    named = found.assign(heading=[", ".join(map(str, names)) for names in found[heading.split()].to_numpy()])
    cases = list(dict.fromkeys(found.case)) if cases is None else cases

    def cell(line: Line) -> str:
        if of != "ratio":
            return shown(line[of], "{:+.0%}")
        if line.case in cases[:first]:
            return seconds(line.seconds_median)
        return times(line.ratio) + shown(line.of_limit, " ({:.0%})").replace("-", "")

    return matrix(named, cases, "heading", cell)


def _targets(rows: pd.DataFrame) -> str:
    found = verdicts(rows)
    body = []
    for (target, needed), each in found.groupby(["target", "needed"], sort=False):
        good = each.met.isin([True])
        missed = [f"{line['where']}: {line.measured}" for _, line in each[~good].iterrows()]
        body.append([target, needed, f"{good.sum()} of {len(each)}", "; ".join(missed) or "-"])
    counts = [found.met.isin([True]).sum(), found.met.isin([False]).sum(), found.met.isna().sum()]
    said = f"{{}} of {len(found)} are met, {{}} missed and {{}} not measured.".format(*counts)
    return f"{said}\n\n{table(['target', 'needed', 'met in', 'not met in'], body)}"


def _losses(rows: pd.DataFrame) -> str:
    body = []
    for kind, each in losses(rows).groupby("kind", sort=False):
        beaten = each[each.beaten]
        which = [
            f"{line.setting} ({line['strongest other']}; {line['the best of ours']})" for _, line in beaten.iterrows()
        ]
        slower, settings = f"{each.lost.sum()} of {each.ours.sum()}", f"{len(beaten)} of {len(each)}"
        body.append([str(kind), slower, settings, "; ".join(which) or "-"])
    return table(["where", "our cases slower than fp32", "settings where another beats all of ours", "which"], body)


def _race(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """A line a contender of a race, with its cell and the heading of its race; the sentences on what was not run."""
    found = races(rows)
    if not len(found):
        return found, ""
    found["heading"] = [f"loss {line.target:g}, {line.network}, {line.seeds} seed(s)" for _, line in found.iterrows()]
    return found, "\n".join(dict.fromkeys(f"{h}: {t}" for h, t in zip(found.heading, found.lacking, strict=True) if t))


def _racers(found: pd.DataFrame, cases: list[str]) -> str:
    """Seconds, and how many times as fast as the better of the dense peers and of PowerSGD."""

    def cell(line: Line) -> str:
        reached = line.seconds_median < float("inf")
        return f"{seconds(line.seconds_median)}, {times(line.dense)}, {times(line.powersgd)}" if reached else "missed"

    return matrix(found, cases, "heading", cell) if len(found) else ""


def _after(hosts: int, line: Line) -> str:
    return seconds(line.by_hosts.get(hosts))


def _hosts(rows: pd.DataFrame) -> str:
    tables = []
    for (size, rate), found in growth(rows).groupby(["size", "network"], sort=False):
        hosts = sorted({count for line in found.by_hosts for count in line})
        columns: dict[str, Cell] = {f"{size}, {rate}": lambda line: f"`{line.case}`"}
        columns |= {f"{count} hosts": partial(_after, count) for count in hosts}
        columns |= {
            "alpha us": lambda line: shown(line.alpha, "{:.0f}", 1e6),
            "beta as Gbit/s": lambda line: shown(8e-9 / line.beta, "{:.4f}"),
            "worst residual": lambda line: shown(line.worst, "{:.1%}"),
            "growth": lambda line: shown(line.growth, "{:+.1%}"),
        }
        tables.append(of_lines(found, columns))
    return "\n\n".join(tables)


def _slow_rank(rows: pd.DataFrame) -> str:
    found = rows[(rows.benchmark == "slow rank") & rows.slow_rank.notna()]
    if not len(found):
        return ""

    def others(line: Line) -> list[float]:
        return [rate for rank, rate in enumerate(line.steps_per_second) if rank != line.slow_rank]

    def ahead(line: Line) -> str:
        limit = line.steps_ahead_limit
        return f"{max(line.steps_ahead):g}{f' of {max(limit)}' if isinstance(limit, list) else ''}"

    columns = {
        "case": lambda line: f"`{line.case}`",
        "others' steps/s": lambda line: f"{statistics.mean(others(line)):.2f}",
        "the slow rank's": lambda line: f"{line.steps_per_second[int(line.slow_rank)]:.2f}",
        "x DDP": lambda line: times(line.ratio),
        "x without the slow rank": lambda line: times(line.kept),
        "steps ahead": ahead,
    }
    first = found.iloc[0]
    where = (
        f"One rank computes {first.slowdown:g} times as long. {first['size']}, {first.network}, {first.steps} steps."
    )
    return f"{where}\n\n{of_lines(found, columns)}\n\n{sources(found)}"


def _cpu(rows: pd.DataFrame) -> str:
    """Milliseconds of CPU of a step, by what they were for, where several ranks share the cores."""
    if "cpu_seconds" not in rows:
        return ""
    found = rows[(rows.benchmark == "training") & rows.cpu_seconds.map(bool)].drop_duplicates([*SETTING, "case"])
    found = having(found, "ring_int8").query("rate == '1gbit'")

    def part(name: str, line: Line) -> str:
        return shown(line.cpu_seconds[name], "{:.0f}", 1e3)

    tables = []
    for (size, network), each in found.groupby(["size", "network"], sort=False):
        columns: dict[str, Cell] = {f"{size}, {network}": lambda line: f"`{line.case}`"}
        columns |= {name: partial(part, name) for name in PARTS}
        columns["all"] = lambda line: shown(sum(line.cpu_seconds.values()), "{:.0f}", 1e3)
        tables.append(of_lines(each, columns))
    return "\n\n".join([*tables, sources(found)]) if tables else ""


def _codecs(rows: pd.DataFrame) -> str:
    found = rows[(rows.benchmark == "codecs") & ~rows.codec.str.contains(_RARE, na=False)]
    if not len(found):
        return ""
    speed = found.pivot(index="codec", columns="operation", values="gigabytes_per_second").reindex(found.codec.unique())
    compression = found.groupby("codec").compression.max()
    body = [
        [f"`{codec}`", f"{compression[codec]:.2f}x", *(f"{line[name]:.1f}" for name in _OPERATIONS)]
        for codec, line in speed.dropna(subset=[name for name in _OPERATIONS if name in speed]).iterrows()
    ]
    rest = found[~found.operation.isin(_OPERATIONS)]
    said = ", ".join(
        f"{name} {speed:.1f}" for name, speed in zip(rest.operation, rest.gigabytes_per_second, strict=True)
    )
    said = f"GB/s of {found['values'].iloc[0]:.0f} float32 values, by CPU time; {said}."
    return f"{said}\n\n{table(['codec', 'compression', *_OPERATIONS], body)}\n\n{sources(found)}"


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """The full tables, by the name of their file: every case, its spread, its limit, its bytes and its run."""
    found: dict[str, tuple[str, list[str]]] = {}
    for name, (title, benchmark) in FAMILIES.items():
        parts: list[str] = []
        for _, setting in rows[rows.benchmark == benchmark].groupby(SETTING, sort=False):
            parts += [
                f"## {setting['size'].iloc[0]}, {setting.network.iloc[0]}",
                of_lines(setting, CELLS),
                sources(setting),
            ]
        found[name] = title, parts
    raced: list[str] = []
    for (size, where, loss), race in rows[rows.benchmark == "time to accuracy"].groupby(["size", "network", "target"]):
        raced += [
            f"## Loss {loss:g}: {size}, {where}",
            of_lines(race.sort_values(["seed", "first"]), {"seed": lambda line: str(line.seed), **CELLS}),
            sources(race),
        ]
    found["races"] = "Seconds to a loss, each seed", raced
    said = verdicts(rows).assign(
        met=lambda all_: [{True: "met", False: "**MISSED**"}.get(met, "-") for met in all_.met]
    )
    found["targets"] = "Targets", [table(VERDICT, said.to_numpy())]
    found["losses"] = "Where we lose", [table(LOSS, losses(rows)[LOSS].to_numpy())]
    head = "Made by `python -m benchmarks report`."
    return {
        name: "\n\n".join([f"# {title}", head, *parts]) + "\n" for name, (title, parts) in found.items() if any(parts)
    }

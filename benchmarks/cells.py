"""What tables say of a measured row, in a terminal as on a page: the same headings, digits and units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

Cell = Callable[[Any], str]  # of a `Row`, or of a line of a table with its fields; - where it says nothing


def shown(value: Any, form: str, scale: float = 1.0) -> str:
    """Formatted, a list with spaces between; - for what was not measured."""
    if isinstance(value, list):
        return " ".join(shown(each, form, scale) for each in value) or "-"
    return "-" if value is None or value != value else re.sub(r"(?<=\d)%", " %", form.format(value * scale))


def seconds(value: float | None) -> str:
    """With three digits or so."""
    if value is None or not math.isfinite(value):
        return "-" if value is None or math.isnan(value) else "missed"
    if value >= 0.1:
        return f"{value:.2f} s" if value >= 10 else f"{value:.3f} s"
    if value >= 0.001:
        return f"{1e3 * value:.1f} ms" if value >= 0.01 else f"{1e3 * value:.2f} ms"
    return f"{1e6 * value:.1f} us"


def times(ratio: float | None) -> str:
    """How many times as fast; near 1 with a digit more."""
    if ratio is None or math.isnan(ratio):
        return "-"
    if ratio in (0, math.inf):
        return "missed" if ratio == 0 else "they miss it"
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x" if ratio >= 1.05 or ratio < 0.95 else f"{ratio:.3f}x"


def _reached(value: float | None, target: float) -> str:
    """When the target was; missed, if there was one."""
    return seconds(target * math.inf if value is None or value != value else value)


_COUNTS = (
    *("faults", "hung", "wrong", "torn", "orphans", "unnamed", "configurations", "comparisons", "payloads", "refused"),
    *("threads_grown", "descriptors_grown"),
)


def _count(name: str, row: Any) -> str:
    return shown(getattr(row, name), "{:.0f}")


CELLS: dict[str, Cell] = {
    "case": lambda row: row.case or f"{row.codec}, {row.operation}",
    "seconds": lambda row: seconds(row.seconds_median),
    "fastest - slowest": lambda row: (
        f"{seconds(min(row.seconds))} - {seconds(max(row.seconds))}" if row.seconds else "-"
    ),
    "to the target": lambda row: _reached(row.seconds_to_target, row.target),
    "steps there": lambda row: shown(row.steps_to_target, "{:.0f}"),
    "best loss": lambda row: shown(row.best_loss, "{:.4f}"),
    "x": lambda row: "-" if times(row.ratio) == "-" else f"{times(row.ratio)} {row.baseline}",
    "x others": lambda row: ", ".join(f"{times(ratio)} {case}" for case, ratio in row.ratios.items() if ratio) or "-",
    "limit": lambda row: seconds(row.limit_seconds or None),
    "of the limit": lambda row: shown(row.limit_seconds or None, "{:.0%}", 1 / (row.seconds_median or 1)),
    "waited": lambda row: seconds(row.waited_seconds),
    "predicted": lambda row: seconds(row.predicted_seconds),
    "deviation": lambda row: shown(row.deviation, "{:+.0%}"),
    "GB/s": lambda row: shown(row.gigabytes_per_second, "{:.1f}"),
    "of a copy": lambda row: shown(
        row.share_of_copy if row.fraction_of_copy is None else row.fraction_of_copy, "{:.0%}"
    ),
    "host": lambda row: seconds(row.host_seconds),
    "on the device": lambda row: seconds(row.device_seconds),
    "as a graph": lambda row: seconds(row.graph_seconds),
    "launches": lambda row: shown(row.launches, "{:.0f}"),
    "waits": lambda row: "-" if row.waits is None else ", ".join(row.waits) or "none",
    "compression": lambda row: shown(row.compression, "{:.2f}x"),
    "MB sent": lambda row: shown(row.bytes_sent, "{:.4g}", 1e-6),
    "MB on the link": lambda row: shown(row.bytes_at_interface, "{:.4g}", 1e-6),
    **{name.replace("_", " "): partial(_count, name) for name in _COUNTS},
    "bytes grown a step": lambda row: shown(row.bytes_grown, "{:.1f}"),
    "error": lambda row: shown(row.error, "{:.1e}"),
    "same bits": lambda row: {True: "yes", False: "NO"}.get(row.ranks_identical, "-"),
}


def told(lines: Iterable[Any], cells: Mapping[str, Cell]) -> tuple[list[str], list[list[str]]]:
    """The headings under which some line says something, and the lines' cells below them."""
    body = [[cell(line) for cell in cells.values()] for line in lines]
    kept = [place for place in range(len(cells)) if any(line[place] != "-" for line in body)]
    return [list(cells)[place] for place in kept], [[line[place] for place in kept] for line in body]

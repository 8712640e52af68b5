"""How fast one core encodes and decodes: GB/s of the values, beside a copy of them in the same run.

python benchmarks/codecs.py --out outputs/codecs.jsonl
python benchmarks/codecs.py --values 2048  # what a call costs beside its values
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ringstrategy import BlockFloat8, BlockInt, Cast, Codec, Gaussian, RandomK, Rotated, Sign, TopK

CODECS: list[Codec] = [
    Cast("float16"),
    BlockFloat8(),
    BlockFloat8("e5m2"),
    BlockInt(8),
    BlockInt(8, scale="minmax"),
    BlockInt(8, rounding="stochastic"),
    BlockInt(4),
    BlockInt(4, rounding="stochastic"),
    BlockInt(3),
    BlockInt(2),
    Sign(),
    Gaussian(4),
    Gaussian(2),
    Gaussian(1),
    TopK(),
    RandomK(),
]
_COPY = "copy"


@dataclass
class Row:
    """One line of the results file."""

    benchmark: str
    codec: str
    operation: str
    gigabytes_per_second: float  # of the float32 values, median over the rounds, by the CPU time of the one thread
    best: float
    share_of_copy: float  # of the copy's median in this run
    compression: float | None
    values: int
    device: str
    torch: str
    cpu: str
    commit: str


def _operations(codec: Codec, values: Tensor) -> dict[str, Callable[[], None]]:
    wire = torch.empty(codec.nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    lost, out = torch.zeros_like(values), torch.zeros_like(values)
    codec.encode(values, wire)
    return {
        "encode": lambda: codec.encode(values, wire),
        "encode, lost": lambda: codec.encode(values, wire, lost=lost),
        "decode": lambda: codec.decode(wire, out),
        "decode, add": lambda: codec.decode(wire, out, add=True),
    }


def _rates(operation: Callable[[], object], nbytes: int, rounds: int) -> list[float]:
    operation()
    rates = []
    for _ in range(rounds):
        begin = time.thread_time()  # not the clock: others may use this core
        operation()
        rates.append(nbytes / (time.thread_time() - begin) / 1e9)
    return rates


def main() -> None:
    """Measure all codecs, then the rotation."""
    parser = argparse.ArgumentParser(description="Speed of the codecs on one CPU core.")
    parser.add_argument("--values", type=int, default=1_572_864, help="a segment of a 96 MB bucket over 4 ranks")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--cases", help="only codecs whose name contains one of these, comma-separated")
    parser.add_argument("--out", type=Path, help="append one JSON row an operation to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(options.values, generator=generator) * torch.rand(options.values, generator=generator)
    target, rotated, rotation = torch.empty_like(values), values.clone(), Rotated()
    copy = _rates(lambda: target.copy_(values), values.nbytes, options.rounds)
    base = statistics.median(copy)

    def row(codec: str, operation: str, rates: list[float], compression: float | None) -> Row:
        middle = statistics.median(rates)
        return Row(
            benchmark="codecs",
            codec=codec,
            operation=operation,
            gigabytes_per_second=middle,
            best=max(rates),
            share_of_copy=middle / base,
            compression=compression,
            values=options.values,
            device="cpu",
            torch=torch.__version__,
            cpu=f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
            commit=harness.commit(),
        )

    rows = [row(_COPY, _COPY, copy, None)]
    known = {str(codec): codec for codec in CODECS}
    for title in harness.chosen(known, options):
        codec = known[title]
        compression = values.nbytes / codec.nbytes(values.numel(), values.dtype)
        for name, operation in _operations(codec, values).items():
            rows.append(row(title, name, _rates(operation, values.nbytes, options.rounds), compression))
    for name, turn in {"rotate": rotation.prepare_, "rotate back": rotation.restore_}.items():
        rates = _rates(lambda turn=turn: turn(rotated, 1), values.nbytes, options.rounds)  # type: ignore[misc]
        rows.append(row("Rotated", name, rates, None))
    _print(rows, options.values)
    harness.write(rows, options.out)


def _print(rows: list[Row], values: int) -> None:
    table = Table(title=f"{values} float32 values on one core, GB/s of them, median (best)", title_justify="left")
    table.add_column("codec", no_wrap=True)
    for heading in ("operation", "us", "GB/s", "best", "of a copy", "compression"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.codec,
            row.operation,
            f"{values * 4e-3 / row.gigabytes_per_second:.0f}",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.best:.1f}",
            f"{row.share_of_copy:.0%}",
            "" if row.compression is None else f"{row.compression:.2f}x",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

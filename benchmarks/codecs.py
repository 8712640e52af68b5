"""How fast one core encodes and decodes: GB/s of the values, beside a copy of them in the same run.

python -m benchmarks codecs --out outputs/codecs.jsonl
python -m benchmarks codecs --values 2048  # what a call costs beside its values
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import harness
from benchmarks.rows import Row
from ringstrategy import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, Sign, TopK

CODECS: list[Codec] = [
    Cast("float16"),
    BlockFloat8(),
    BlockFloat8("e5m2"),
    BlockInt(8),
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
]


def _rates(operation: Callable[[], object], nbytes: int, options: argparse.Namespace) -> list[float]:
    rates = []
    for _ in range(options.warmup + options.rounds):
        begin = time.thread_time()  # not the clock: others may use this core
        operation()
        rates.append(nbytes / (time.thread_time() - begin) / 1e9)
    return rates[options.warmup :]


def main(given: Sequence[str]) -> None:
    """Measure all codecs, then the rotation."""
    parser = harness.arguments("codecs", __doc__, rounds=31)
    parser.add_argument("--values", type=int, default=1_572_864, help="a segment of a 96 MB bucket over 4 ranks")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(options.values, generator=generator) * torch.rand(options.values, generator=generator)
    lost, out, rotated, rotation = torch.zeros_like(values), torch.zeros_like(values), values.clone(), Rotated()
    known = {str(codec): codec for codec in CODECS}
    operations: dict[tuple[str, str], Callable[[], object]] = {("copy", "copy"): partial(out.copy_, values)}
    compression: dict[str, float] = {}
    with harness.refusing(parser):
        names = harness.chosen(known, options.cases)
    for name in names:
        codec = known[name]
        wire = torch.empty(codec.nbytes(values.numel(), values.dtype), dtype=torch.uint8)
        compression[name] = values.nbytes / wire.nbytes
        operations[name, "encode"] = partial(codec.encode, values, wire)
        operations[name, "encode, lost"] = partial(codec.encode, values, wire, lost=lost)
        operations[name, "decode"] = partial(codec.decode, wire, out)
        operations[name, "decode, add"] = partial(codec.decode, wire, out, add=True)
    operations["Rotated", "rotate"] = partial(rotation.prepare_, rotated, 1)
    operations["Rotated", "rotate back"] = partial(rotation.restore_, rotated, 1)

    rates = {what: _rates(operation, values.nbytes, options) for what, operation in operations.items()}
    medians = {what: statistics.median(found) for what, found in rates.items()}
    copy = medians["copy", "copy"]
    rows = [
        Row(
            benchmark="codecs",
            codec=codec,
            operation=operation,
            gigabytes_per_second=medians[codec, operation],  # of the values, by the CPU time of the one thread
            best=max(rates[codec, operation]),
            share_of_copy=medians[codec, operation] / copy,
            compression=compression.get(codec),
            values=options.values,
            cpu=f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
            **harness.made_with(),
        )
        for codec, operation in rates
    ]
    harness.publish(f"{options.values} float32 values on one core, GB/s of them", rows, options.out)

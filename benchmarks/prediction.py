"""What `ringstrategy-plan` predicts beside what the lab measures: a training step of the MLP, on throttled hosts.

python benchmarks/prediction.py --hosts 4 --rate 1gbit --rounds 7 --out outputs/prediction.jsonl

The prediction knows what its user would: the model, the hosts, the rate, the cores a host has, and how long a step
computes without any exchange; codecs are measured on one core while the other ranks wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
from contenders import DDP, Training, contenders
from harness import Case, Row
from lab import bits_per_second
from rich.console import Console
from rich.table import Table
from runs import ALONE
from tasks import mlp

from ringstrategy import Codec
from ringstrategy.app.plan import candidates, machines, measured_codecs
from ringstrategy.cost import CodecCost, Prediction, Profile, predict
from ringstrategy.cost.probe import pack_seconds

_INSIDE = 2e10  # bits a second between two processes of a host: taken for, it hardly matters
_LATENCY = 1e-4  # seconds: what `ringstrategy-plan` takes unless it is told otherwise


@dataclass
class Predicted(Row):
    """A row of a measured step, and what was predicted of it."""

    predicted_seconds: float
    deviation: float  # of the prediction from the measured median, relative


def worker(options: argparse.Namespace) -> None:
    """What runs on each rank."""
    rate = bits_per_second(options.rate)
    if rate is None:
        raise SystemExit("a prediction needs a rate, such as --rate 1gbit")
    task = mlp(options.width, options.layers)
    initial = task.model(0)
    batches = task.batches(options.steps, 1000 + dist.get_rank())
    known = contenders(initial, batches, timedelta(seconds=options.timeout), loss=task.loss)
    named = {name: algorithm for name, algorithm in candidates(options.processes > 1).items() if name in known}
    named = {name: named[name] for name in dict.fromkeys([DDP, *harness.chosen(named, options)])}
    alone = Training(task.model(0), batches, task.loss)
    trainings = {DDP: known[DDP](), ALONE: alone, **{name: known[name]() for name in named if name != DDP}}
    cases = [
        Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited, steps=len(batches))
        for name, made in trainings.items()
    ]
    costs: Mapping[tuple[Codec, bool], CodecCost] = {}
    packing = 0.0
    if dist.get_rank() == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        costs, packing = measured_codecs(named.values(), cpu), pack_seconds(cpu, undisturbed=True)
        torch.set_num_threads(threads)
    dist.barrier()
    measured = harness.interleave(cases, options.rounds, options.warmup)
    identical = {case.name: harness.identical_on_all_ranks(case.result()) for case in cases if case.name != ALONE}
    for training in trainings.values():
        training.close()
    counted = alone.phases_of_runs(options.steps)[options.warmup :]
    forward, backward, step = (statistics.median(phase) for phase in zip(*counted, strict=True))
    if dist.get_rank() != 0:
        return
    there = machines(
        options.hosts,
        options.processes,
        rate,
        inside_bits_per_second=_INSIDE,
        latency=_LATENCY,
        cores=(os.cpu_count() or 1) / dist.get_world_size(),
        codecs=costs,
        pack_seconds=packing,
    )
    parameters = dict(initial.named_parameters())
    profile = Profile(rest=forward + step, backward=backward)
    predictions = {name: predict(algorithm, parameters, there, profile) for name, algorithm in named.items()}
    size = f"{task.kind} of {alone.full / 1e6:.1f} M parameters, {task.batch}"
    errors: dict[str, float | None] = dict.fromkeys(named)
    shown = [case for case in cases if case.name in named]
    _report(harness.rows("prediction", size, shown, measured, errors, identical, options), predictions, options)


def _report(results: list[Row], predictions: Mapping[str, Prediction], options: argparse.Namespace) -> None:
    table = Table(title=f"{results[0].size}, {options.hosts} hosts at {options.rate}: predicted beside measured")
    table.add_column("case", no_wrap=True)
    for heading in ("measured s", "min..max", "predicted s", "deviation", "MB sent", "MB predicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = []
    for row in results:
        prediction = predictions[row.case]
        deviation = prediction.seconds / row.seconds_median - 1
        lines.append(Predicted(**asdict(row), predicted_seconds=prediction.seconds, deviation=deviation))
        table.add_row(
            row.case,
            f"{row.seconds_median:.4f}",
            f"{min(row.seconds):.3f}..{max(row.seconds):.3f}",
            f"{prediction.seconds:.4f}",
            f"{100 * deviation:+.1f} %",
            "-" if row.bytes_sent is None else f"{row.bytes_sent / 1e6:.2f}",
            f"{prediction.bytes_sent / 1e6:.2f}",
        )
    Console(width=140).print(table)
    harness.write(lines, options.out)


if __name__ == "__main__":
    parser = harness.arguments("What ringstrategy-plan predicts beside what the lab measures.")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a row, each time a case has its turn")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="hidden layers")
    parser.set_defaults(warmup=2)  # torch DDP lays its buckets out anew after the first step
    harness.main(parser, worker)

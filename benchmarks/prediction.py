"""What `ringstrategy-plan` predicts beside what the lab measures: a training step of the MLP, on throttled hosts.

python -m benchmarks prediction --hosts 4 --rate 1gbit --rounds 7 --out outputs/prediction.jsonl

The prediction knows what its user would: the model, the hosts, the rate, the cores a host has, and how long a step
computes without any exchange; codecs are measured on one core while the other ranks wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.contenders import DDP, Training, contenders
from benchmarks.harness import Case
from benchmarks.lab import bits_per_second
from benchmarks.rows import ALONE
from benchmarks.tasks import mlp
from ringstrategy import Codec
from ringstrategy.app.plan import candidates, machines, measured_codecs
from ringstrategy.cost import CodecCost, Profile, predict
from ringstrategy.cost.probe import pack_seconds

_INSIDE = 2e10  # bits a second between two processes of a host: taken for, it hardly matters
_LATENCY = 1e-4  # seconds: what `ringstrategy-plan` takes unless it is told otherwise


def worker(options: argparse.Namespace) -> None:
    """What runs on each rank."""
    task = mlp(options.width)
    initial = task.model(0)
    batches = task.batches(options.steps, 1000 + dist.get_rank())
    known = contenders(initial, batches, loss=task.loss)
    named = {name: algorithm for name, algorithm in candidates(options.processes > 1).items() if name in known}
    alone = Training(task.model(0), batches, task.loss)
    trainings = {DDP: known.pop(DDP)(), ALONE: alone, **{name: known[name]() for name in named if name != DDP}}
    costs: Mapping[tuple[Codec, bool], CodecCost] = {}
    packing = 0.0
    if dist.get_rank() == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        costs, packing = measured_codecs(named.values(), cpu), pack_seconds(cpu, undisturbed=True)
        torch.set_num_threads(threads)
    dist.barrier()
    cases = [made.case(name) for name, made in trainings.items()]
    harness.interleave(cases, options.rounds, options.warmup)
    shown = [case for case in cases if case.name != ALONE]
    for case in shown:
        case.identical = harness.identical_on_all_ranks(case.result())
    for training in trainings.values():
        training.close()
    counted = alone.phases_of_runs(options.steps)[options.warmup :]
    forward, backward, step = (statistics.median(phase) for phase in zip(*counted, strict=True))
    if dist.get_rank() != 0:
        return
    there = machines(
        options.hosts,
        options.processes,
        _rate(options),
        inside_bits_per_second=_INSIDE,
        latency=_LATENCY,
        cores=(os.cpu_count() or 1) / dist.get_world_size(),
        codecs=costs,
        pack_seconds=packing,
    )
    parameters = dict(initial.named_parameters())
    profile = Profile(rest=forward + step, backward=backward)
    predictions = {name: predict(algorithm, parameters, there, profile) for name, algorithm in named.items()}

    def predicted(case: Case) -> dict[str, Any]:
        seconds = predictions[case.name].seconds
        return {"predicted_seconds": seconds, "deviation": seconds / case.median - 1}

    notes = [
        f"{case.name}: predicted {predictions[case.name].seconds:.4f} s ({100 * predicted(case)['deviation']:+.1f} % "
        f"of the median) and {predictions[case.name].bytes_sent / 1e6:.2f} MB sent"
        for case in shown
    ]
    harness.report("prediction", task.described(initial), shown, options, notes, more=predicted)


def _rate(options: argparse.Namespace) -> float:
    """Bits a second; a ValueError if there is no throttle."""
    rate = bits_per_second(options.rate)
    if rate is None:
        raise ValueError("a prediction needs a rate, such as --rate 1gbit")
    return rate


def main(given: Sequence[str]) -> None:
    """The command."""
    # two rounds of warm-up: torch DDP lays its buckets out anew after the first step
    parser = harness.over_hosts("prediction", __doc__, warmup=2, cases=False)
    parser.add_argument("--steps", type=int, default=2, help="training steps in a row, each time a case has its turn")
    parser.add_argument("--width", type=int, default=2048)
    harness.run(parser, given, worker, check=_rate)

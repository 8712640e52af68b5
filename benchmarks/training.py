"""One training step of an MLP, a byte GPT or a CNN: our strategies' algorithms beside torch DDP and its hooks.

python -m benchmarks training --hosts 4 --rate 1gbit --steps 2 --rounds 9 --out outputs/training.jsonl
python -m benchmarks training --model gpt                                            # or cnn; default: mlp, 24 M
python -m benchmarks training --cases every --overlap-of gossip,gossip_exponential  # at intervals that hide the wire
python -m benchmarks training --cases "=ring_int8,fabric,horovod,process group,comm hook,fsdp2" --steps 1   # all doors
python -m benchmarks training --gpu nccl --cases "ddp fp16 hook,=ring,=ring_int8"    # on one GPU, which ranks share
python -m benchmarks training --predict                            # beside what `ringstrategy-plan` says of it

What chooses by itself (`ring_auto`) has chosen before anything is timed, and starts again from the first weights. All
cases are in memory at once: with the MLP about 8 GB a rank, so `--cases` may have to share them out among runs. A
prediction knows what its user would: the model, the hosts, the rate, the cores a host has, and how long a step computes
without any exchange; codecs are measured on one core while the other ranks wait.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, tasks
from benchmarks.contenders import (
    DDP,
    OUTER_DDP,
    SELDOM,
    SERVERS,
    TORCHFT,
    MakeOptimizer,
    Ours,
    Phases,
    Training,
    adamw,
    contenders,
    decentralized,
    flat,
    muon,
    named,
    ours,
    sgd,
)
from benchmarks.doors import DOORS
from benchmarks.harness import Case
from benchmarks.lab import bits_per_second
from benchmarks.rows import ALONE
from ringstrategy import AllReduce
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.app.plan import candidates, machines, measured_codecs
from ringstrategy.cost.probe import pack_seconds
from ringstrategy.cost.step import Profile, predict

_OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw, "muon": muon}
_SAID = {"sgd": "", "adamw": ", AdamW", "muon": ", Muon"}
_INSIDE = 2e10  # bits a second between two processes of a host: taken for, it hardly matters
_LATENCY = 1e-4  # seconds: what `ringstrategy-plan` takes unless it is told otherwise


class _Exchange(Ours):
    """A mixing and nothing else."""

    algorithm: Decentralized

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(copy.deepcopy(model), [], _at(name, interval=1, overlap=False))

    def run(self) -> None:
        self.after_step()


def _at(name: str, interval: int, overlap: bool) -> Decentralized:
    """The registered algorithm, with these instead of its own."""
    algorithm = named(name, interval=interval, overlap=overlap)
    assert isinstance(algorithm, Decentralized)
    return algorithm


class _Steps:
    """Training steps of one task."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.task, device = tasks.asked(options), harness.device_of(options)
        self.initial = self.task.model(0).to(device)
        batches = self.task.batches(options.steps, 0)
        self.batches = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
        self.trainings: dict[str, Training] = {}
        self.how: dict[str, Any] = {"loss": self.task.loss, "optimizer": _OPTIMIZERS[options.optimizer]}

    def add(self, name: str, training: Training) -> None:
        """It takes whole intervals, each time it has its turn."""
        training.take(self.options.steps)
        self.trainings[name] = training

    def alone(self, steps: int) -> str:
        """The case whose ranks compute so many steps in a row and send nothing, added if it is not there."""
        name = ALONE if steps == self.options.steps else f"{ALONE}, {steps} in a row"
        if name not in self.trainings:
            batches = list(islice(cycle(self.batches), steps))
            self.trainings[name] = Training(copy.deepcopy(self.initial), batches, **self.how)
        return name

    def door(self, make: Callable[..., Training]) -> Training:
        """What another door drives."""
        return make(copy.deepcopy(self.initial), self.batches, **self.how)

    def overlapping(self, name: str) -> tuple[str, str]:
        """Add it at the smallest interval whose compute takes `--margin` times as long as its exchange, both measured
        now; with overlap and without.
        """
        exchange = _Exchange(self.initial, name)
        step = Training(copy.deepcopy(self.initial), self.batches, **self.how).case("step")
        mixing = Case("exchange", exchange.run, exchange.result)
        harness.interleave([step, mixing], rounds=3, warmup=1)  # the slowest rank's: the same numbers on all ranks
        exchange.close()
        interval = math.ceil(float(self.options.margin) * mixing.median / step.median)
        pair = f"{name} every {interval}", f"{name} every {interval}, no overlap"
        for case, overlap in zip(pair, (True, False), strict=True):
            if case in self.trainings:  # a contender of --cases whose given interval is just this one
                self.trainings[case].close()
            algorithm = _at(name, interval, overlap)
            self.add(case, ours(copy.deepcopy(self.initial), self.batches, algorithm, **self.how))
        return pair

    def measure(self) -> None:
        """All cases, and what each takes beside computing and beside its limit."""
        options, trainings = self.options, self.trainings
        known = contenders(self.initial, self.batches, **self.how)
        if options.gpu is None:  # Fabric and Horovod choose a device by themselves
            known |= {name: partial(self.door, make) for name, make in DOORS.items()}
        planned = candidates(options.processes > 1) if options.predict else {}
        known = {name: make for name, make in known.items() if name in planned or not options.predict}
        self.add(DDP, known.pop(DDP)())
        self.alone(options.steps)
        on_demand = {*SELDOM, *TORCHFT, *SERVERS, *DOORS, OUTER_DDP}
        for name in harness.chosen(known, options.cases):
            if options.cases is not None or name not in on_demand:
                self.add(name, known[name]())
        pairs = [self.overlapping(name) for name in options.overlap_of]
        # What computing takes depends on how long a turn is: of short ones more is on cold caches.
        beside = {name: self.alone(len(training.batches)) for name, training in list(trainings.items())}
        beside |= {name: name for name in beside.values()}

        cases = {name: made.case(name) for name, made in trainings.items()}
        notes = [f"{name}: {line}" for name, training in trainings.items() for line in training.choose()]
        harness.interleave(list(cases.values()), options.rounds, options.warmup)
        _judge(list(cases.values()), self.initial)
        for training in trainings.values():
            training.close()
        phases = {
            name: trainings[name].phases_of_runs(cases[name].steps)[options.warmup :]
            for name in dict.fromkeys(beside.values())
        }
        for name, case in cases.items():
            case.limit_seconds = self.limit(case, trainings[name], phases[beside[name]])
        for late, early in pairs:
            waits = statistics.median(a / b for a, b in zip(cases[late].waits, cases[early].waits, strict=True))
            notes.append(f"{late}: waits {waits:.1%} of what it waits without overlap")
        alone = [statistics.median(phase) for phase in zip(*phases[ALONE], strict=True)]
        notes.append("compute alone: forward {:.4f} s, backward {:.4f} s, optimizer {:.4f} s".format(*alone))
        named = {name: planned[name] for name in cases if name in planned}
        predictions = self.predict(named, alone) if named else {}
        if dist.get_rank() == 0:
            kind = "prediction" if options.predict else "training"
            shown = [case for name, case in cases.items() if not options.predict or name in predictions]

            def more(case: Case) -> dict[str, Any]:
                said = predictions.get(case.name)
                return {} if said is None else {"predicted_seconds": said, "deviation": said / case.median - 1}

            size = self.task.described(self.initial) + _SAID[options.optimizer]
            harness.report(kind, size, shown, options, notes, more)

    def limit(self, case: Case, training: Training, alone: Sequence[Phases]) -> float | None:
        """Seconds a step that no run can beat, from those of ranks that only compute; None where nothing throttles."""
        if self.options.gpu is not None:
            return None  # phases are those of the host, which only launches
        nbytes = training.must_send(self.options.hosts)
        if nbytes is None and self.options.processes == 1:  # else what a rank sent stayed within its host in part
            nbytes = case.sent
        wire = None if nbytes is None else harness.wire_seconds(nbytes)
        return None if wire is None else statistics.median(training.limit(one, wire) for one in alone)

    def predict(self, named: Mapping[str, AllReduce], alone: Sequence[float]) -> Mapping[str, float]:
        """Seconds a step, by name, as `ringstrategy-plan` says; on rank 0, while the others wait."""
        options, predictions, cpu = self.options, {}, torch.device("cpu")
        if dist.get_rank() == 0:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            there = machines(
                options.hosts,
                options.processes,
                _rate(options),
                inside_bits_per_second=_INSIDE,
                latency=_LATENCY,
                cores=(os.cpu_count() or 1) / dist.get_world_size(),
                codecs=measured_codecs(named.values(), cpu),
                pack_seconds=pack_seconds(cpu),
            )
            torch.set_num_threads(threads)
            profile = Profile(rest=alone[0] + alone[2], backward=alone[1])
            parameters = dict(self.initial.named_parameters())
            predictions = {name: predict(made, parameters, there, profile).seconds for name, made in named.items()}
        dist.barrier()
        return predictions


def _judge(cases: Sequence[Case], initial: nn.Module) -> None:
    """Whether all ranks see the same bits, and how far weights ended from the baseline's, relative to its own way.

    There is no error for a case that made more steps than the baseline. Each result is taken once: it may be sent.
    """
    start = flat(initial.parameters())
    baseline = torch.zeros_like(start)
    for case in cases:
        result = case.result()
        case.identical = harness.identical_on_all_ranks(result)
        moved = flat(result) - start
        if case is cases[0]:
            baseline = moved
        elif case.steps == cases[0].steps:
            case.error = harness.max_over_ranks(harness.relative_error(moved, baseline))


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    _Steps(options).measure()


def _rate(options: argparse.Namespace) -> float:
    rate = bits_per_second(options.rate)
    if rate is None:
        raise ValueError("a prediction needs a rate, such as --rate 1gbit")
    return rate


def _check(options: argparse.Namespace) -> None:
    tasks.asked(options)
    if options.predict:
        _rate(options)
        if options.gpu is not None:
            raise ValueError("--predict is of CPUs: leave --gpu out")


def _names(text: str) -> list[str]:
    """Decentralized names, comma-separated."""
    names = text.split(",")
    if not set(names) <= set(decentralized()):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(decentralized())}")
    return names


def main(given: Sequence[str]) -> None:
    """The command."""
    # two rounds of warm-up: torch DDP lays its buckets out anew after the first step
    parser = harness.over_hosts("training", __doc__, warmup=2)
    tasks.add_options(parser, steps=2)
    add = parser.add_argument
    add("--optimizer", choices=_OPTIMIZERS, default="sgd")
    hidden = "also these names at the smallest interval that hides their exchange, with and without overlap"
    add("--overlap-of", type=_names, default=[], metavar="NAMES", help=hidden)
    margin = "with --overlap-of: how many times as long as an exchange the compute of an interval is to take"
    add("--margin", type=float, default=1.25, help=margin)
    harness.add_gpu(parser)
    add("--predict", action="store_true", help="beside each case what `ringstrategy-plan` says of it")
    harness.run(parser, given, worker, check=_check)

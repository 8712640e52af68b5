"""One training step of an MLP, a byte GPT or a CNN: our strategies' algorithms beside torch DDP and its hooks.

python -m benchmarks training --hosts 4 --rate 1gbit --steps 2 --rounds 9 --out outputs/training.jsonl
python -m benchmarks training --model gpt                                            # or cnn; default: mlp, 24 M
python -m benchmarks training --cases every --overlap-of gossip,gossip_exponential  # at intervals that hide the wire
python -m benchmarks training --exchanges --hosts 8 --rate 100mbit                  # one mixing alone, no steps

What chooses by itself (`ring_auto`) has chosen before anything is timed, and starts again from the first weights. All
cases are in memory at once: with the MLP about 8 GB a rank, so `--cases` may have to share them out among runs.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from benchmarks.contenders import DDP, Ours, Training, contenders, decentralized, flat, mixed, ours, reduced
from benchmarks.harness import Case
from benchmarks.rows import ALONE
from benchmarks.tasks import TASKS, Batches, Task
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES


class _Exchange(Ours):
    """A mixing and nothing else."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model, [], _at(name, interval=1, overlap=False))

    def run(self) -> None:
        self.after_step()


def _at(name: str, interval: int, overlap: bool) -> Decentralized:
    """The registered algorithm, with these instead of its own."""
    algorithm = STRATEGIES[name]()
    assert isinstance(algorithm, Decentralized)
    algorithm.interval, algorithm.overlap = interval, overlap
    return algorithm


def _task(options: argparse.Namespace) -> Task:
    """A ValueError if there is no such model."""
    if options.model == "cnn" and options.layers is not None:
        raise ValueError("--layers: the cnn always has two; --width makes it larger")
    shape = {name: value for name in ("width", "layers") if (value := getattr(options, name)) is not None}
    return TASKS[options.model](**shape)


def _repeated(batches: Batches, steps: int) -> Batches:
    return list(islice(cycle(batches), steps))


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    if options.exchanges:
        _measure_exchanges(options)
    else:
        _Steps(options).measure()


class _Steps:
    """Training steps of one task."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.task = _task(options)
        self.initial = self.task.model(0)
        self.batches = self.task.batches(options.steps, 0)
        self.trainings: dict[str, Training] = {}

    def alone(self, steps: int) -> Training:
        """Ranks that train apart, for so many steps in a row."""
        return Training(copy.deepcopy(self.initial), _repeated(self.batches, steps), loss=self.task.loss)

    def named_alone(self, steps: int) -> str:
        """The case that computes so many steps in a row and sends nothing."""
        return ALONE if steps == self.options.steps else f"{ALONE}, {steps} in a row"

    def add(self, name: str, training: Training) -> None:
        """With as many steps as whole intervals take."""
        steps = math.ceil(self.options.steps / training.interval) * training.interval
        training.batches = _repeated(self.batches, steps)
        self.trainings[name] = training

    def overlapping(self, name: str) -> tuple[str, str]:
        """Add it at the smallest interval that hides its exchange, with overlap and without."""
        interval = self.hiding_interval(name)
        pair = f"{name} every {interval}", f"{name} every {interval}, no overlap"
        for case, overlap in zip(pair, (True, False), strict=True):
            if case in self.trainings:  # a contender of --cases whose given interval is just this one
                self.trainings[case].close()
            algorithm = _at(name, interval, overlap)
            self.add(case, ours(copy.deepcopy(self.initial), self.batches, algorithm, loss=self.task.loss))
        return pair

    def hiding_interval(self, name: str) -> int:
        """The smallest number of steps whose compute takes `--margin` times as long as an exchange, measured now."""
        exchange = _Exchange(copy.deepcopy(self.initial), name)
        step, mixing = self.alone(self.options.steps).case("alone"), Case("exchange", exchange.run, exchange.result)
        harness.interleave([step, mixing], rounds=3, warmup=1)  # the slowest rank's: the same numbers on all ranks
        exchange.close()
        return math.ceil(float(self.options.margin) * mixing.median / step.median)

    def measure(self) -> None:
        """All cases, and what each takes beyond computing and beyond its limit."""
        options, trainings = self.options, self.trainings
        known = contenders(self.initial, self.batches, loss=self.task.loss)
        trainings |= {DDP: known.pop(DDP)(), ALONE: self.alone(options.steps)}
        for name in harness.chosen(known, options.cases):
            self.add(name, known[name]())
        pairs = [self.overlapping(name) for name in options.overlap_of]
        # What computing takes depends on how long a turn is: of short ones more is on cold caches.
        beside = {name: self.named_alone(len(training.batches)) for name, training in trainings.items()}
        for training in list(trainings.values()):
            steps = len(training.batches)
            if self.named_alone(steps) not in trainings:
                trainings[self.named_alone(steps)] = self.alone(steps)
        beside |= {name: name for name in beside.values()}

        cases = {name: made.case(name) for name, made in trainings.items()}
        chosen = [f"{name}: {line}" for name, training in trainings.items() for line in training.choose()]
        harness.interleave(list(cases.values()), options.rounds, options.warmup)
        _judge(list(cases.values()), self.initial)
        for training in trainings.values():
            training.close()
        phases = {
            name: trainings[name].phases_of_runs(len(trainings[name].batches))[options.warmup :]
            for name in dict.fromkeys(beside.values())
        }
        forward, backward, step = (statistics.median(phase) for phase in zip(*phases[ALONE], strict=True))
        notes = [
            f"compute alone, of the slowest rank: forward {forward:.4f} s, backward {backward:.4f} s, "
            f"optimizer {step:.4f} s; limit = forward + max(backward, wire) + optimizer of a round, its median; "
            "of parameters: compute + what the wire takes beyond the compute of the steps that overlap it (post-local "
            "SGD: none); compute is that of as many steps in a row",
        ]
        beyond = {
            name: statistics.median(s - a for s, a in zip(case.seconds, cases[beside[name]].seconds, strict=True))
            for name, case in cases.items()
        }
        for name, case in cases.items():
            said = f"{name}: {beyond[name]:.4f} s a step beyond compute alone"
            nbytes = _has_to_send(trainings[name], case, options)
            wire = None if nbytes is None else harness.wire_seconds(nbytes)
            if wire is not None:
                limits = [trainings[name].limit(phase, wire) for phase in phases[beside[name]]]
                case.limit_seconds = statistics.median(limits)
                share = 1 - case.limit_seconds / case.median
                said += f"; the wire alone needs {wire:.4f} s; beyond the limit {100 * share:.1f} % of the step"
            notes.append(said)
        for with_overlap, without in pairs:
            waits = zip(cases[with_overlap].waits, cases[without].waits, strict=True)
            notes.append(
                f"{with_overlap}: waits {100 * statistics.median(a / b for a, b in waits):.1f} % of what it waits "
                f"without; its time beyond compute alone is {100 * beyond[with_overlap] / beyond[without]:.1f} % of "
                "that without"
            )
        if dist.get_rank() == 0:
            parameters = sum(parameter.numel() for parameter in self.initial.parameters())
            size = f"{self.task.kind} of {parameters / 1e6:.1f} M parameters, {self.task.batch}"
            harness.report("training", size, list(cases.values()), options, [*notes, *chosen])


def _has_to_send(training: Training, case: Case, options: argparse.Namespace) -> float | None:
    """Bytes that have to leave a host in a step; of an algorithm that does not say, those that were sent."""
    known = training.must_send(options.hosts)
    if known is None and options.processes == 1:  # else what a rank sent stayed within its host in part
        return case.sent
    return known


def _judge(cases: Sequence[Case], initial: nn.Module) -> None:
    """Of each case: how far its weights have ended from the baseline's, relative to how far those have come (None if
    it made more steps than they), and whether all ranks see the same bits. Each result is taken once: it may be sent.
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


def _measure_exchanges(options: argparse.Namespace) -> None:
    """One mixing of each decentralized name, with nothing computed beside it, and gloo's all-reduce of as many values.

    Ranks begin far apart, so that there is something to send; each goes on from where its last mixing left it.
    """
    task, size = _task(options), dist.get_world_size()
    own = task.model(1 + dist.get_rank())
    values = flat(own.parameters()).float()
    start = values.clone()
    truth = torch.zeros(values.numel(), dtype=torch.float64)
    for rank in range(size):
        truth += flat(task.model(1 + rank).parameters()) / size

    cases = [
        Case("gloo all-reduce", lambda: dist.all_reduce(values), lambda: [values / size], lambda: values.copy_(start))
    ]
    cases[0].limit_seconds = harness.wire_seconds(reduced(4 * values.numel(), options.hosts))
    exchanges = {name: _Exchange(copy.deepcopy(own), name) for name in harness.chosen(decentralized(), options.cases)}
    for name, made in exchanges.items():
        cases.append(Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited))
        if options.processes == 1:
            assert isinstance(made.algorithm, Decentralized)
            cases[-1].limit_seconds = harness.wire_seconds(mixed(made.algorithm, values.numel()))
    harness.interleave(cases, options.rounds, options.warmup)
    for case in cases:
        result = case.result()
        case.error = harness.max_over_ranks(harness.relative_error(flat(result), truth))
        case.identical = harness.identical_on_all_ranks(result)
    for made in exchanges.values():
        made.close()
    if dist.get_rank() == 0:
        said = f"the {values.numel() / 1e6:.1f} M parameters of the {task.kind}, nothing computed"
        harness.report("exchange", said, cases, options)


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
    parser.add_argument("--model", choices=TASKS, default="mlp")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a row, each time a case has its turn")
    parser.add_argument("--width", type=int, help="units or channels; default: mlp 2048, gpt and cnn 384")
    parser.add_argument("--layers", type=int, help="hidden layers or blocks; default: 6; the cnn always has two")
    parser.add_argument(
        "--overlap-of",
        type=_names,
        default=[],
        metavar="NAMES",
        help="also these at the smallest interval that hides their exchange, with and without overlap",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=1.25,
        help="with --overlap-of: how many times as long as an exchange the compute of an interval is to take, both "
        "measured alone; where hosts share cores, as in the lab, each slows the other down and needs more",
    )
    parser.add_argument("--exchanges", action="store_true", help="instead: one mixing of each decentralized name alone")
    harness.run(parser, given, worker, check=_task)

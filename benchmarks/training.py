"""One training step of an MLP, a byte GPT or a CNN: our strategies' algorithms beside torch DDP and its hooks.

python benchmarks/training.py --hosts 4 --rate 1gbit --steps 2 --rounds 9 --out outputs/training.jsonl
python benchmarks/training.py --model gpt                                            # or cnn; default: mlp, 24 M
python benchmarks/training.py --cases every --overlap-of gossip,gossip_exponential  # at intervals that hide the wire
python benchmarks/training.py --exchanges --hosts 8 --rate 100mbit                  # one mixing alone, no steps

What chooses by itself (`ring_auto`) has chosen before anything is timed, and starts again from the first weights. All
cases are in memory at once: with the MLP about 8 GB a rank, so `--cases` may have to share them out among runs.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from datetime import timedelta
from itertools import cycle, islice

import harness
import torch
import torch.distributed as dist
from contenders import DDP, Ours, Training, contenders, decentralized, flat, mixed, ours, reduced
from harness import Case, Measured
from runs import ALONE
from tasks import TASKS, Task
from torch import Tensor, nn

from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES


class _Exchange(Ours):
    """A mixing and nothing else."""

    def __init__(self, model: nn.Module, algorithm: Decentralized, timeout: timedelta) -> None:
        super().__init__(model, [], _changed(algorithm, interval=1, overlap=False), timeout)

    def run(self) -> None:
        self.after_step()


def _changed(algorithm: Decentralized, interval: int, overlap: bool) -> Decentralized:
    """The same algorithm, not set up yet, with these instead of its own."""
    changed = copy.deepcopy(algorithm)
    changed.interval, changed.overlap = interval, overlap
    return changed


class _Bench:
    """What all cases of this rank have in common."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.timeout = timedelta(seconds=options.timeout)
        self.task = _task(options)
        self.initial = self.task.model(0)
        self.full = sum(parameter.numel() for parameter in self.initial.parameters())
        self.batches = self.task.batches(options.steps, 0)

    def model(self) -> nn.Module:
        """Another copy of the one that all cases start from."""
        return copy.deepcopy(self.initial)

    def alone(self, steps: int) -> Training:
        """Ranks that train apart, for so many steps in a row."""
        return Training(self.model(), list(islice(cycle(self.batches), steps)), loss=self.task.loss)

    def averaged(self, algorithm: Decentralized) -> Training:
        """By this algorithm instead of a registered one."""
        return ours(self.model(), self.batches, algorithm, self.timeout, loss=self.task.loss)

    def whole_intervals(self, training: Training) -> Training:
        """With as many steps as it takes."""
        steps = math.ceil(self.options.steps / training.interval) * training.interval
        training.batches = list(islice(cycle(self.batches), steps))
        return training


def _task(options: argparse.Namespace) -> Task:
    """A ValueError if there is no such model."""
    if options.model == "cnn" and options.layers is not None:
        raise ValueError("--layers: the cnn always has two; --width makes it larger")
    shape = {name: value for name in ("width", "layers") if (value := getattr(options, name)) is not None}
    return TASKS[options.model](**shape)


def _hiding_interval(bench: _Bench, algorithm: Decentralized) -> int:
    """The smallest number of steps whose compute takes `--margin` times as long as an exchange, both measured now."""
    alone = bench.alone(bench.options.steps)
    exchange = _Exchange(bench.model(), algorithm, bench.timeout)
    cases = [
        Case("alone", alone.run, alone.result, steps=bench.options.steps),
        Case("exchange", exchange.run, exchange.result),
    ]
    measured = harness.interleave(cases, rounds=3, warmup=1)  # the slowest rank's: the same numbers on all ranks
    exchange.close()
    step, mixing = (statistics.median(measured[case.name].seconds) for case in cases)
    return math.ceil(bench.options.margin * mixing / step)


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    bench = _Bench(options)
    if options.exchanges:
        _measure_exchanges(bench)
    else:
        _measure_steps(bench)


def _measure_steps(bench: _Bench) -> None:
    options = bench.options
    known = contenders(bench.initial, bench.batches, bench.timeout, loss=bench.task.loss)
    trainings = {DDP: known.pop(DDP)(), ALONE: bench.alone(options.steps)}
    for name in harness.chosen(known, options):
        trainings[name] = bench.whole_intervals(known[name]())
    pairs: list[tuple[str, str]] = []
    for name in options.overlap_of:
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, Decentralized)
        interval = _hiding_interval(bench, algorithm)
        with_overlap = f"{name} every {interval}"
        pairs.append((with_overlap, f"{with_overlap}, no overlap"))
        for case_name, overlap in zip(pairs[-1], (True, False), strict=True):
            if case_name in trainings:  # a contender of --cases whose given interval is just this one
                trainings[case_name].close()
            trainings[case_name] = bench.whole_intervals(bench.averaged(_changed(algorithm, interval, overlap)))
    # What computing takes depends on how long a turn is: of short ones more is on cold caches.
    turns = {_alone(steps, options): steps for steps in (len(training.batches) for training in trainings.values())}
    trainings |= {name: bench.alone(steps) for name, steps in turns.items() if name != ALONE}
    beside = {name: _alone(len(training.batches), options) for name, training in trainings.items()}

    cases = [
        Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited, steps=len(made.batches))
        for name, made in trainings.items()
    ]
    chosen = [f"{name}: {line}" for name, training in trainings.items() for line in training.choose()]
    measured = harness.interleave(cases, options.rounds, options.warmup)
    errors, identical = _judge(cases, bench.initial)
    for training in trainings.values():
        training.close()

    phases = {name: trainings[name].phases_of_runs(steps)[options.warmup :] for name, steps in turns.items()}
    forward, backward, step = (statistics.median(phase) for phase in zip(*phases[ALONE], strict=True))
    notes = [
        f"compute alone, of the slowest rank: forward {forward:.4f} s, backward {backward:.4f} s, "
        f"optimizer {step:.4f} s; limit = forward + max(backward, wire) + optimizer of a round, its median; "
        "of parameters: compute + what the wire takes beyond the compute of the steps that overlap it (post-local SGD: "
        "none); compute is that of as many steps in a row",
    ]
    beyond = _beyond(measured, beside)
    for case in cases:
        said = f"{case.name}: {beyond[case.name]:.4f} s a step beyond compute alone"
        nbytes = _has_to_send(trainings[case.name], measured[case.name], options)
        wire = None if nbytes is None else harness.wire_seconds(nbytes)
        if wire is not None:
            limit = trainings[case.name].limit
            case.limit_seconds = statistics.median(limit(*phase, wire) for phase in phases[beside[case.name]])
            share = 1 - case.limit_seconds / statistics.median(measured[case.name].seconds)
            said += f"; the wire alone needs {wire:.4f} s; beyond the limit {100 * share:.1f} % of the step"
        notes.append(said)
    for with_overlap, without in pairs:
        waits = zip(measured[with_overlap].waited, measured[without].waited, strict=True)
        notes.append(
            f"{with_overlap}: waits {100 * statistics.median(a / b for a, b in waits):.1f} % of what it waits without; "
            f"its time beyond compute alone is {100 * beyond[with_overlap] / beyond[without]:.1f} % of that without"
        )
    notes += chosen
    if dist.get_rank() == 0:
        size = f"{bench.task.kind} of {bench.full / 1e6:.1f} M parameters, {bench.task.batch}"
        results = harness.rows("training", size, cases, measured, errors, identical, options)
        harness.report(results, options, notes)


def _has_to_send(training: Training, measured: Measured, options: argparse.Namespace) -> float | None:
    """Bytes that have to leave a host in a step; of an algorithm that does not say, those that were sent."""
    known = training.must_send(options.hosts)
    if known is None and options.processes == 1:  # else what a rank sent stayed within its host in part
        return measured.bytes_sent
    return known


def _alone(steps: int, options: argparse.Namespace) -> str:
    """The case that computes so many steps in a row and sends nothing."""
    return ALONE if steps == options.steps else f"{ALONE}, {steps} in a row"


def _beyond(measured: dict[str, Measured], beside: dict[str, str]) -> dict[str, float]:
    """Of each case, seconds a step beyond the one beside it that only computes: the median over the rounds."""
    return {
        name: statistics.median(s - a for s, a in zip(case.seconds, measured[beside[name]].seconds, strict=True))
        for name, case in measured.items()
    }


def _judge(cases: Sequence[Case], initial: nn.Module) -> tuple[dict[str, float | None], dict[str, bool]]:
    """Of each case: how far its weights have ended from the baseline's, relative to how far those have come (None if
    it made more steps than they), and whether all ranks see the same bits. Each result is taken once: it may be sent.
    """
    start = flat(initial.parameters())
    baseline = torch.zeros_like(start)
    errors: dict[str, float | None] = {}
    identical: dict[str, bool] = {}
    for case in cases:
        result: Sequence[Tensor] = case.result()
        identical[case.name] = harness.identical_on_all_ranks(result)
        moved = flat(result) - start
        if case is cases[0]:
            baseline = moved
        comparable = case is not cases[0] and case.steps == cases[0].steps
        errors[case.name] = harness.max_over_ranks(harness.relative_error(moved, baseline)) if comparable else None
    return errors, identical


def _measure_exchanges(bench: _Bench) -> None:
    """One mixing of each decentralized name, with nothing computed beside it, and gloo's all-reduce of as many values.

    Ranks begin far apart, so that there is something to send; each goes on from where its last mixing left it.
    """
    options, size = bench.options, dist.get_world_size()
    own = bench.task.model(1 + dist.get_rank())
    truth = torch.zeros(bench.full, dtype=torch.float64)
    for rank in range(size):
        truth += flat(bench.task.model(1 + rank).parameters()) / size
    values = flat(own.parameters()).float()
    start = values.clone()

    def refill() -> None:
        values.copy_(start)

    cases = [Case("gloo all-reduce", lambda: dist.all_reduce(values), lambda: [values / size], refill)]
    cases[0].limit_seconds = harness.wire_seconds(reduced(4 * bench.full, options.hosts))
    exchanges: list[_Exchange] = []
    for name in harness.chosen(decentralized(), options):
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, Decentralized)
        made = _Exchange(copy.deepcopy(own), algorithm, bench.timeout)
        exchanges.append(made)
        cases.append(Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited))
        if options.processes == 1:
            cases[-1].limit_seconds = harness.wire_seconds(mixed(algorithm, bench.full))
    measured = harness.interleave(cases, options.rounds, options.warmup)
    errors: dict[str, float | None] = {}
    identical: dict[str, bool] = {}
    for case in cases:
        result = case.result()
        errors[case.name] = harness.max_over_ranks(harness.relative_error(flat(result), truth))
        identical[case.name] = harness.identical_on_all_ranks(result)
    for exchange in exchanges:
        exchange.close()
    if dist.get_rank() == 0:
        said = f"the {bench.full / 1e6:.1f} M parameters of the {bench.task.kind}, nothing computed"
        harness.report(harness.rows("exchange", said, cases, measured, errors, identical, options), options)


def _names(text: str) -> list[str]:
    """Decentralized names, comma-separated."""
    names = text.split(",")
    if not set(names) <= set(decentralized()):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(decentralized())}")
    return names


if __name__ == "__main__":
    parser = harness.arguments("A training step over throttled hosts.")
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
    parser.add_argument(
        "--exchanges", action="store_true", help="instead: one mixing of each decentralized name, alone"
    )
    parser.set_defaults(warmup=2)  # torch DDP lays its buckets out anew after the first step
    try:
        _task(parser.parse_args())
    except ValueError as error:
        parser.error(str(error))
    harness.main(parser, worker)

"""One training step of a 24 M-parameter MLP: our strategies' algorithm beside torch DDP and its hooks, in the same run.

python benchmarks/training.py --hosts 4 --rate 1gbit --steps 2 --rounds 9 --out benchmarks/results/training.jsonl
python benchmarks/training.py --cases every --overlap-of gossip,gossip_exponential  # at intervals that hide the wire
python benchmarks/training.py --exchanges --hosts 8 --rate 100mbit                  # one mixing alone, no steps
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice, pairwise

import harness
import torch
import torch.distributed as dist
from harness import Case, Measured
from powersgd_peer import PowerSGDOnOneThread
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import Algorithm, AllReduce, BlockInt, Direct
from ringstrategy.algorithms.decentralized import Decentralized
from ringstrategy.algorithms.powersgd import PowerSGD
from ringstrategy.collectives import connect
from ringstrategy.registry import STRATEGIES

_BATCH = 32
_INPUTS, _OUTPUTS = 1024, 512
_ALONE = "compute alone"
_BESIDE: dict[str, Callable[[], Algorithm]] = {  # worth knowing, though not names
    "ring of BlockInt(4)": lambda: AllReduce(BlockInt(4)),
    "direct of BlockInt(4)": lambda: AllReduce(BlockInt(4), Direct()),
}


def decentralized() -> list[str]:
    """The registered names that average parameters, not gradients."""
    return [name for name, make in STRATEGIES.items() if isinstance(make(), Decentralized)]


def _mlp(hidden: int, layers: int) -> nn.Sequential:
    widths = [_INPUTS] + [hidden] * layers
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(hidden, _OUTPUTS))


Batches = Sequence[tuple[Tensor, Tensor]]


class Training:
    """A model, its optimizer, and how it is averaged; one instance a case, all with the same data."""

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.phases: list[tuple[float, float, float]] = []  # forward, backward with exchange, optimizer; one a step

    def bytes_sent(self) -> int | None:
        """So far, as the transport counts; None if nobody counts."""
        return None

    def waited(self) -> float | None:
        """Seconds that the training thread has waited for exchanges so far; None if nobody counts."""
        return None

    def before_forward(self) -> None:
        """Called as each step begins."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of each step."""

    def after_backward(self) -> None:
        """Gradients are final when this returns."""

    def after_step(self) -> None:
        """Parameters are final when this returns."""

    def after_run(self) -> None:
        """Called after the last step of a run, within its time."""

    def close(self) -> None:
        """End what averages."""

    def result(self) -> list[Tensor]:
        """The weights as people would see them now: of ranks that have their own, the mean. All ranks call it."""
        return list(self.model.parameters())

    def run(self) -> None:
        """One step a batch."""
        for inputs, targets in self.batches:
            self.before_forward()
            begin = time.perf_counter()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            forwarded = time.perf_counter()
            self.before_backward(loss)
            loss.backward()
            self.after_backward()
            averaged = time.perf_counter()
            self.optimizer.step()
            self.after_step()
            self.optimizer.zero_grad(set_to_none=True)
            self.phases.append((forwarded - begin, averaged - forwarded, time.perf_counter() - averaged))
        self.after_run()


class Ours(Training):
    """Our algorithm, driven as the Lightning strategy drives it."""

    def __init__(self, model: nn.Module, batches: Batches, algorithm: Algorithm, timeout: timedelta) -> None:
        super().__init__(model, batches)
        self._peers = connect(torch.device("cpu"), timeout)
        self._algorithm = algorithm
        self._parameters = set(model.parameters())
        algorithm.setup(dict(model.named_parameters()), self._peers)

    def bytes_sent(self) -> int | None:
        """See `Training.bytes_sent`."""
        return self._peers.stats.bytes_sent

    def waited(self) -> float | None:
        """See `Training.waited`."""
        return self._peers.stats.exposed_seconds

    def before_backward(self, loss: Tensor) -> None:
        """See `Training.before_backward`."""
        self._algorithm.before_backward(loss)

    def after_backward(self) -> None:
        """See `Training.after_backward`."""
        self._algorithm.after_backward()

    def after_step(self) -> None:
        """See `Training.after_step`."""
        self._algorithm.after_step(self._parameters)

    def result(self) -> list[Tensor]:
        """See `Training.result`."""
        self._algorithm.enter_consensus()
        seen = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._algorithm.leave_consensus()
        return seen

    def close(self) -> None:
        """See `Training.close`."""
        self._algorithm.settle()
        self._algorithm.close()
        self._peers.close()


class _WholeIntervals(Ours):
    """A decentralized algorithm, timed from the start of one exchange to the end of another, as many as intervals.

    The mixing due after a run's last step begins the next run instead, and a run's last exchange is waited for within
    it. So a run begins and ends with nothing under way: it hides no wait in another case's time, counts exactly its
    own bytes, and gives each exchange one whole interval to hide behind, as in a long training.
    """

    def __init__(self, model: nn.Module, batches: Batches, algorithm: Decentralized, timeout: timedelta) -> None:
        super().__init__(model, batches, algorithm, timeout)
        for _ in range(algorithm.interval - 1):  # count up, so that the first step of each run begins with a mixing
            super().after_step()

    def before_forward(self) -> None:
        super().after_step()

    def after_step(self) -> None:
        pass

    def after_run(self) -> None:
        self._algorithm.settle()


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


class _PowerSGD(Training):
    """Torch DDP with PowerSGD of rank 1."""

    def __init__(self, model: nn.Module, batches: Batches, timeout: timedelta) -> None:
        wrapped = DistributedDataParallel(model)
        super().__init__(wrapped, batches)
        self._power_sgd = PowerSGDOnOneThread(dist.new_group(timeout=timeout))
        wrapped.register_comm_hook(None, self._power_sgd.hook)

    def close(self) -> None:
        self._power_sgd.close()


def _fp16_hook(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class _Bench:
    """What all cases of this rank have in common."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.hosts: int = options.hosts
        self.timeout = timedelta(seconds=options.timeout)
        self.initial = self.seeded(0)
        shapes = [parameter.shape for parameter in self.initial.parameters()]
        self.full = sum(shape.numel() for shape in shapes)
        self.factors = sum(sum(shape) for shape in shapes)  # of rank 1: a row and a column for a matrix, vectors as is
        data = torch.Generator().manual_seed(1000 + dist.get_rank())
        self.batches = [
            (torch.randn(_BATCH, _INPUTS, generator=data), torch.randn(_BATCH, _OUTPUTS, generator=data))
            for _ in range(options.steps)
        ]

    def seeded(self, seed: int) -> nn.Module:
        """A fresh model."""
        torch.manual_seed(seed)
        return _mlp(self.options.width, self.options.layers)

    def model(self) -> nn.Module:
        """Another copy of the one that all cases start from."""
        return copy.deepcopy(self.initial)

    def reduced(self, nbytes: int) -> float:
        """What a rank has to send for the sum of `nbytes` over all ranks."""
        return nbytes * 2 * (self.hosts - 1) / self.hosts

    def mixed(self, algorithm: Decentralized) -> int:
        """What a rank has to send for one mixing."""
        return algorithm.topology.degree(self.hosts) * algorithm.codec.nbytes(self.full, torch.float32)


@dataclass
class _Entry:
    """What can be measured."""

    make: Callable[[], Training]
    nbytes: float  # that a rank has to send in a step
    algorithm: Algorithm | None = None

    def limit(self, forward: float, backward: float, step: float, wire: float) -> float:
        """Seconds a step that nothing can beat, from those of its parts alone."""
        if isinstance(self.algorithm, Decentralized):
            compute = forward + backward + step
            return max(compute, wire) if self.algorithm.overlap else compute + wire
        return forward + max(backward, wire) + step


def _entries(bench: _Bench) -> dict[str, _Entry]:
    batches, timeout, full = bench.batches, bench.timeout, bench.full
    entries = {
        "ddp": _Entry(lambda: Training(DistributedDataParallel(bench.model()), batches), bench.reduced(4 * full)),
        _ALONE: _Entry(lambda: Training(bench.model(), batches), 0),
        "ddp fp16 hook": _Entry(lambda: Training(_fp16_hook(bench.model()), batches), bench.reduced(2 * full)),
        "ddp powersgd rank 1": _Entry(
            lambda: _PowerSGD(bench.model(), batches, timeout), bench.reduced(4 * bench.factors)
        ),
    }
    for name, make in {**STRATEGIES, **_BESIDE}.items():
        algorithm = make()
        if isinstance(algorithm, Decentralized):
            entries[name] = _mixing_entry(bench, algorithm)
        elif isinstance(algorithm, AllReduce | PowerSGD):
            entries[name] = _reducing_entry(bench, algorithm)
    return entries


def _reducing_entry(bench: _Bench, algorithm: AllReduce | PowerSGD) -> _Entry:
    carried = bench.factors if isinstance(algorithm, PowerSGD) else bench.full
    nbytes = bench.reduced(algorithm.codec.nbytes(carried, torch.float32))
    return _Entry(lambda: Ours(bench.model(), bench.batches, algorithm, bench.timeout), nbytes, algorithm)


def _mixing_entry(bench: _Bench, algorithm: Decentralized) -> _Entry:
    steps = math.ceil(len(bench.batches) / algorithm.interval) * algorithm.interval
    batches = list(islice(cycle(bench.batches), steps))
    nbytes = bench.mixed(algorithm) / algorithm.interval
    return _Entry(lambda: _WholeIntervals(bench.model(), batches, algorithm, bench.timeout), nbytes, algorithm)


def _hiding_interval(bench: _Bench, algorithm: Decentralized) -> int:
    """The smallest number of steps whose compute takes `--margin` times as long as an exchange, both measured now."""
    alone = Training(bench.model(), bench.batches)
    exchange = _Exchange(bench.model(), algorithm, bench.timeout)
    cases = [
        Case("alone", alone.run, alone.result, steps=len(bench.batches)),
        Case("exchange", exchange.run, exchange.result),
    ]
    measured = harness.interleave(cases, rounds=3, warmup=1)  # the slowest rank's: the same numbers on all ranks
    exchange.close()
    step, mixing = (statistics.median(measured[case.name].seconds) for case in cases)
    return math.ceil(bench.options.margin * mixing / step)


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    bench = _Bench(options)
    if options.exchanges:
        _measure_exchanges(bench)
    else:
        _measure_steps(bench)


def _measure_steps(bench: _Bench) -> None:
    options = bench.options
    entries = _entries(bench)
    pairs: list[tuple[str, str]] = []
    for name in options.overlap_of:
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, Decentralized)
        interval = _hiding_interval(bench, algorithm)
        with_overlap = f"{name} every {interval}"
        pairs.append((with_overlap, f"{with_overlap}, no overlap"))
        for case_name, overlap in zip(pairs[-1], (True, False), strict=True):
            entries[case_name] = _mixing_entry(bench, _changed(algorithm, interval, overlap))

    trainings: dict[str, Training] = {}
    cases: list[Case] = []
    for name, entry in entries.items():
        if name in ("ddp", _ALONE) or any(name in pair for pair in pairs) or harness.wanted(name, options):
            made = trainings[name] = entry.make()
            steps = len(made.batches)
            cases.append(Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited, steps=steps))

    measured = harness.interleave(cases, options.rounds, options.warmup)
    errors, identical = _judge(cases, bench.initial)
    for training in trainings.values():
        training.close()

    counted = trainings[_ALONE].phases[options.warmup * options.steps :]
    forward, backward, step = (harness.max_over_ranks(statistics.median(phase)) for phase in zip(*counted, strict=True))
    notes = [
        f"compute alone, the slowest rank's medians: forward {forward:.4f} s, backward {backward:.4f} s, "
        f"optimizer {step:.4f} s; limit = forward + max(backward, wire) + optimizer; "
        "of parameters: max(compute, wire), without overlap compute + wire",
    ]
    beyond = _beyond(measured)
    for case in cases:
        wire = harness.wire_seconds(entries[case.name].nbytes, options)
        case.limit_seconds = None if wire is None else entries[case.name].limit(forward, backward, step, wire)
        on_wire = "" if wire is None else f"; the wire alone needs {wire:.4f} s"
        notes.append(f"{case.name}: {beyond[case.name]:.4f} s a step beyond compute alone{on_wire}")
    for with_overlap, without in pairs:
        waits = zip(measured[with_overlap].waited, measured[without].waited, strict=True)
        notes.append(
            f"{with_overlap}: waits {100 * statistics.median(a / b for a, b in waits):.1f} % of what it waits without; "
            f"its time beyond compute alone is {100 * beyond[with_overlap] / beyond[without]:.1f} % of that without"
        )
    if dist.get_rank() == 0:
        size = f"MLP of {bench.full / 1e6:.1f} M parameters, batch {_BATCH} a rank"
        results = harness.rows("training", size, cases, measured, errors, identical, options)
        harness.report(results, options, notes)


def _beyond(measured: dict[str, Measured]) -> dict[str, float]:
    """Of each case, seconds a step beyond compute alone: the median over the rounds."""
    alone = measured[_ALONE].seconds
    return {
        name: statistics.median(s - a for s, a in zip(case.seconds, alone, strict=True))
        for name, case in measured.items()
    }


def _judge(cases: Sequence[Case], initial: nn.Module) -> tuple[dict[str, float | None], dict[str, bool]]:
    """Of each case: how far its weights have ended from the baseline's, relative to how far those have come (None if
    it made more steps than they), and whether all ranks see the same bits. Each result is taken once: it may be sent.
    """
    start = _flat(list(initial.parameters()))
    baseline = torch.zeros_like(start)
    errors: dict[str, float | None] = {}
    identical: dict[str, bool] = {}
    for case in cases:
        result = case.result()
        identical[case.name] = harness.identical_on_all_ranks(result)
        moved = _flat(result) - start
        if case is cases[0]:
            baseline = moved
        comparable = case is not cases[0] and case.steps == cases[0].steps
        errors[case.name] = harness.max_over_ranks(harness.relative_error(moved, baseline)) if comparable else None
    return errors, identical


def _measure_exchanges(bench: _Bench) -> None:
    """One mixing of each decentralized name, with nothing computed beside it, and gloo's all-reduce of as many values.

    Ranks begin far apart, so that there is something to send; each goes on from where its last mixing left it.
    """
    options = bench.options
    own = bench.seeded(1 + dist.get_rank())
    truth = torch.zeros(bench.full, dtype=torch.float64)
    for rank in range(bench.hosts):
        truth += _flat(list(bench.seeded(1 + rank).parameters())) / bench.hosts
    values = _flat(list(own.parameters())).float()
    start = values.clone()

    def refill() -> None:
        values.copy_(start)

    cases = [Case("gloo all-reduce", lambda: dist.all_reduce(values), lambda: [values / bench.hosts], refill)]
    cases[0].limit_seconds = harness.wire_seconds(bench.reduced(4 * bench.full), options)
    exchanges: list[_Exchange] = []
    for name in filter(lambda name: harness.wanted(name, options), decentralized()):
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, Decentralized)
        made = _Exchange(copy.deepcopy(own), algorithm, bench.timeout)
        exchanges.append(made)
        cases.append(Case(name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited))
        cases[-1].limit_seconds = harness.wire_seconds(bench.mixed(algorithm), options)
    measured = harness.interleave(cases, options.rounds, options.warmup)
    errors: dict[str, float | None] = {}
    identical: dict[str, bool] = {}
    for case in cases:
        result = case.result()
        errors[case.name] = harness.max_over_ranks(harness.relative_error(_flat(result), truth))
        identical[case.name] = harness.identical_on_all_ranks(result)
    for exchange in exchanges:
        exchange.close()
    if dist.get_rank() == 0:
        size = f"the {bench.full / 1e6:.1f} M parameters of an MLP, nothing computed"
        harness.report(harness.rows("exchange", size, cases, measured, errors, identical, options), options)


def _names(text: str) -> list[str]:
    """Decentralized names, comma-separated."""
    names = text.split(",")
    if not set(names) <= set(decentralized()):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(decentralized())}")
    return names


if __name__ == "__main__":
    parser = harness.arguments("A training step of an MLP over throttled hosts.")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a row, each time a case has its turn")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="hidden layers")
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
    harness.main(parser, worker)

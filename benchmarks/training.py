"""One training step of a 24 M-parameter MLP: our strategies' algorithm beside torch DDP and its hooks, in the same run.

python benchmarks/training.py --hosts 4 --rate 1gbit --steps 2 --rounds 9 --out benchmarks/results/training.jsonl
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise

import harness
import torch
import torch.distributed as dist
from harness import Case
from powersgd_peer import PowerSGDOnOneThread
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import Algorithm, AllReduce, BlockInt, Direct, Gossip
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


def _mlp(hidden: int, layers: int) -> nn.Sequential:
    widths = [_INPUTS] + [hidden] * layers
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(hidden, _OUTPUTS))


class _Training:
    """A model, its optimizer, and how its gradients are averaged; one instance a case, all with the same data."""

    def __init__(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.phases: list[tuple[float, float, float]] = []  # forward, backward with exchange, optimizer; one a step

    def bytes_sent(self) -> int | None:
        """So far, as the transport counts; None if nobody counts."""
        return None

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of each step."""

    def after_backward(self) -> None:
        """Gradients are final when this returns."""

    def after_step(self) -> None:
        """Parameters are final when this returns."""

    def close(self) -> None:
        """End what averages the gradients."""

    def parameters(self) -> list[Tensor]:
        """The weights as they are now."""
        return list(self.model.parameters())

    def run(self) -> None:
        """One step a batch."""
        for inputs, targets in self.batches:
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


class _Ours(_Training):
    """Our algorithm, driven as the Lightning strategy drives it."""

    def __init__(
        self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], algorithm: Algorithm, timeout: timedelta
    ) -> None:
        super().__init__(model, batches)
        self._peers = connect(torch.device("cpu"), timeout)
        self._algorithm = algorithm
        self._parameters = set(model.parameters())
        algorithm.setup(dict(model.named_parameters()), self._peers)

    def bytes_sent(self) -> int | None:
        return self._peers.stats.bytes_sent

    def before_backward(self, loss: Tensor) -> None:
        self._algorithm.before_backward(loss)

    def after_backward(self) -> None:
        self._algorithm.after_backward()

    def after_step(self) -> None:
        self._algorithm.after_step(self._parameters)

    def close(self) -> None:
        self._algorithm.settle()
        self._algorithm.close()
        self._peers.close()


class _PowerSGD(_Training):
    """Torch DDP with PowerSGD of rank 1."""

    def __init__(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], timeout: timedelta) -> None:
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


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    timeout = timedelta(seconds=options.timeout)
    torch.manual_seed(0)
    initial = _mlp(options.width, options.layers)
    shapes = [parameter.shape for parameter in initial.parameters()]
    data = torch.Generator().manual_seed(1000 + dist.get_rank())
    batches = [
        (torch.randn(_BATCH, _INPUTS, generator=data), torch.randn(_BATCH, _OUTPUTS, generator=data))
        for _ in range(options.steps)
    ]
    full = sum(shape.numel() for shape in shapes)
    factors = sum(sum(shape) for shape in shapes)  # of rank 1: a row and a column for a matrix, vectors as they are

    def model() -> nn.Module:
        return copy.deepcopy(initial)

    def reduced(nbytes: int) -> float:
        return nbytes * 2 * (options.hosts - 1) / options.hosts

    # name: what to make, bytes that a rank has to send in a step
    makers: dict[str, tuple[Callable[[], _Training], float]] = {
        "ddp": (lambda: _Training(DistributedDataParallel(model()), batches), reduced(4 * full)),
        _ALONE: (lambda: _Training(model(), batches), 0),
        "ddp fp16 hook": (lambda: _Training(_fp16_hook(model()), batches), reduced(2 * full)),
        "ddp powersgd rank 1": (lambda: _PowerSGD(model(), batches, timeout), reduced(4 * factors)),
    }
    for name, make_algorithm in {**STRATEGIES, **_BESIDE}.items():
        algorithm = make_algorithm()
        make = partial(_Ours, model(), batches, algorithm, timeout)
        if isinstance(algorithm, Gossip):
            neighbours = algorithm.topology.degree(options.hosts)
            makers[name] = make, neighbours * algorithm.codec.nbytes(full, torch.float32) / algorithm.interval
        elif isinstance(algorithm, AllReduce | PowerSGD):
            carried = factors if isinstance(algorithm, PowerSGD) else full
            makers[name] = make, reduced(algorithm.codec.nbytes(carried, torch.float32))
    trainings: dict[str, _Training] = {}
    cases: list[Case] = []
    for name, (make, _) in makers.items():
        if name in ("ddp", _ALONE) or harness.wanted(name, options):
            made = trainings[name] = make()
            cases.append(Case(name, made.run, made.parameters, bytes_sent=made.bytes_sent, steps=options.steps))

    measured = harness.interleave(cases, options.rounds, options.warmup)
    identical = {case.name: harness.identical_on_all_ranks(case.result()) for case in cases}
    errors = _distances(cases, initial)
    for training in trainings.values():
        training.close()

    counted = trainings[_ALONE].phases[options.warmup * options.steps :]
    forward, backward, step = (harness.max_over_ranks(statistics.median(phase)) for phase in zip(*counted, strict=True))
    notes = [
        f"compute alone, the slowest rank's medians: forward {forward:.4f} s, backward {backward:.4f} s, "
        f"optimizer {step:.4f} s; limit = forward + max(backward, wire) + optimizer",
    ]
    alone = measured[_ALONE].seconds
    for case in cases:
        wire = harness.wire_seconds(makers[case.name][1], options)
        case.limit_seconds = None if wire is None else forward + max(backward, wire) + step
        exposed = statistics.median(s - a for s, a in zip(measured[case.name].seconds, alone, strict=True))
        on_wire = "" if wire is None else f"; the wire alone needs {wire:.4f} s"
        notes.append(f"{case.name}: {exposed:.4f} s a step beyond compute alone{on_wire}")
    if dist.get_rank() == 0:
        size = f"MLP of {full / 1e6:.1f} M parameters, batch {_BATCH} a rank"
        results = harness.rows("training", size, cases, measured, errors, identical, options)
        harness.report(results, options, notes)


def _distances(cases: Sequence[Case], initial: nn.Module) -> dict[str, float | None]:
    """How far each case's weights have ended from the baseline's, relative to how far those have come."""
    start = _flat(list(initial.parameters()))
    baseline = _flat(cases[0].result()) - start
    distances: dict[str, float | None] = {cases[0].name: None}
    for case in cases[1:]:
        distances[case.name] = harness.max_over_ranks(harness.relative_error(_flat(case.result()) - start, baseline))
    return distances


if __name__ == "__main__":
    parser = harness.arguments("A training step of an MLP over throttled hosts.")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a row, each time a case has its turn")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6, help="hidden layers")
    parser.set_defaults(warmup=2)  # torch DDP lays its buckets out anew after the first step
    harness.main(parser, worker)

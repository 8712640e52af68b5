"""What our strategy costs a Lightning fit at world size 1, where it has nothing to do (target: under 1 %).

python -m benchmarks overhead --rounds 15 --out outputs/overhead.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.tasks import perceptron
from benchmarks.trainer import quiet_trainer
from ringstrategy import RingStrategy

_FEATURES = 64
_MODELS = {"tiny": (16, 1, 8), "middle": (512, 3, 64)}  # hidden width, hidden layers, batch
_STRATEGIES: dict[str, Callable[[], Strategy | str]] = {
    "single device": lambda: SingleDeviceStrategy("cpu"),
    "ddp": lambda: "ddp",
    "ring": RingStrategy,
}


class _Module(L.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = perceptron(_FEATURES, *[width] * layers, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Clock(L.Callback):
    """When the steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(time.perf_counter())


class _Fits:
    """Of one strategy: the weights that it ends with, bytes sent, and seconds a step of each counted fit."""

    def __init__(self, name: str, size: str, loader: DataLoader[tuple[Tensor, ...]], steps: int) -> None:
        width, layers, _ = _MODELS[size]
        self._make, self._loader, self._steps = _STRATEGIES[name], loader, steps
        self._shape = width, layers
        self.case = Case(name, self.fit, result=list)
        self.weights = torch.empty(0)

    def fit(self) -> list[float]:
        """Times of the steps after the first fifth, each from the end of the step before to its own end."""
        clock, module = _Clock(), _Module(*self._shape)
        trainer = quiet_trainer(
            strategy=self._make(),
            devices=1,
            max_steps=self._steps,
            callbacks=[clock],
            use_distributed_sampler=False,  # the same batches in the same order for all
        )
        trainer.fit(module, self._loader)
        self.weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double()
        if isinstance(trainer.strategy, RingStrategy):
            self.case.sent = trainer.strategy.stats.bytes_sent
        return [after - before for before, after in pairwise(clock.ends[self._steps // 5 :])]


def _measure(size: str, options: argparse.Namespace) -> None:
    batch = _MODELS[size][2]
    data = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(batch * options.steps, count, generator=data) for count in (_FEATURES, 1))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch)
    fits = [_Fits(name, size, loader, options.steps) for name in _STRATEGIES]
    for one, counts in harness.turns(fits, options.rounds, options.warmup):
        steps = one.fit()
        if counts:
            one.case.seconds.append(statistics.fmean(steps))
    alone, ddp, ring = fits
    for one in fits:
        one.case.error = harness.relative_error(one.weights, alone.weights)
    notes = [_compared(one, other) for one, other in ((ddp, alone), (ring, alone), (ring, ddp))]
    description = f"{size} model, {alone.weights.numel()} parameters, batch {batch}"
    harness.report("overhead", description, [one.case for one in fits], options, notes)


def _compared(one: _Fits, other: _Fits) -> str:
    pairs = list(zip(one.case.seconds, other.case.seconds, strict=True))
    low, middle, high = statistics.quantiles([100 * (mine / base - 1) for mine, base in pairs], n=4)
    microseconds = 1e6 * statistics.median(mine - base for mine, base in pairs)
    return (
        f"{one.case.name}: {middle:+.2f} % over {other.case.name} (quartiles {low:+.2f} .. {high:+.2f}), "
        f"{microseconds:+.0f} us a step"
    )


def main(given: Sequence[str]) -> None:
    """Measure both models."""
    parser = harness.arguments("overhead", __doc__, rounds=15, cases=False)
    parser.add_argument(
        "--steps", type=int, default=500, help="training steps of a fit; the first fifth is not counted"
    )
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=list(_MODELS))
    options = parser.parse_args(given)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, or there is no spread to show")
    options.hosts, options.processes, options.rate = 1, 1, "none"
    torch.set_num_threads(1)
    for size in options.models:
        _measure(size, options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

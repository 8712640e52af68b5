"""What our strategy costs a Lightning fit at world size 1, where it has nothing to do (target: under 1 %).

python benchmarks/overhead.py --rounds 15 --out outputs/overhead.jsonl
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import lightning as L
import torch
from harness import Case, Measured
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import RingStrategy

_FEATURES = 64
_MODELS = {"tiny": (16, 1, 8), "middle": (512, 3, 64)}  # hidden width, hidden layers, batch
_BASELINE = "single device"
_STRATEGIES: dict[str, Callable[[], Strategy | str]] = {
    _BASELINE: lambda: SingleDeviceStrategy("cpu"),
    "ddp": lambda: "ddp",
    "ring": RingStrategy,
}


class _Module(L.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(_FEATURES, width), nn.ReLU()]
        for _ in range(layers - 1):
            parts += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*parts, nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Clock(L.Callback):
    """Times of the steps after the warm-up, each from the end of the step before to its own end."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        self._ends.append(time.perf_counter())

    def mean_step(self) -> float:
        """Seconds a step."""
        ends = self._ends[self._warmup :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def quiet_step(self) -> float:
        """Seconds of the 10 % point of the steps: steadier where others use the machine too."""
        ends = self._ends[self._warmup :]
        return statistics.quantiles((after - before for before, after in pairwise(ends)), n=10)[0]


def _fit(strategy: Strategy | str, module: _Module, loader: DataLoader[Any], steps: int) -> tuple[_Clock, L.Trainer]:
    clock = _Clock(warmup=steps // 5)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the same batches in the same order for all
    )
    trainer.fit(module, loader)
    return clock, trainer


def _measure(size: str, options: argparse.Namespace) -> None:
    width, layers, batch = _MODELS[size]
    data = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch * options.steps, _FEATURES, generator=data)
    targets = torch.randn(batch * options.steps, 1, generator=data)
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, targets), batch_size=batch)

    names = list(_STRATEGIES)
    measured = {name: Measured() for name in names}
    quiet: dict[str, list[float]] = {name: [] for name in names}
    weights: dict[str, Tensor] = {}
    for round_ in range(options.warmup + options.rounds):
        for place in range(len(names)):
            name = names[(place + round_) % len(names)]
            module = _Module(width, layers)
            clock, trainer = _fit(_STRATEGIES[name](), module, loader, options.steps)
            weights[name] = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
            if isinstance(trainer.strategy, RingStrategy):
                measured[name].bytes_sent = trainer.strategy.stats.bytes_sent
            if round_ >= options.warmup:
                measured[name].seconds.append(clock.mean_step())
                quiet[name].append(clock.quiet_step())

    truth = weights[_BASELINE].double()
    errors: dict[str, float | None] = {name: harness.relative_error(weights[name], truth) for name in names}
    pairs = [(name, _BASELINE) for name in names[1:]] + [("ring", "ddp")]
    notes = []
    for name, other in pairs:
        notes.append("mean step, " + _compared(name, other, measured[name].seconds, measured[other].seconds))
        notes.append("quiet steps, " + _compared(name, other, quiet[name], quiet[other]))
    cases = [Case(name, run=lambda: None, result=lambda: []) for name in names]
    description = f"{size} model, {truth.numel()} parameters, batch {batch}"
    results = harness.rows("overhead", description, cases, measured, errors, dict.fromkeys(names, True), options)
    harness.report(results, options, notes)


def _compared(name: str, other: str, seconds: list[float], base: list[float]) -> str:
    percent = [100 * (s / b - 1) for s, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(percent, n=4)
    microseconds = 1e6 * statistics.median(s - b for s, b in zip(seconds, base, strict=True))
    return f"{name}: {middle:+.2f} % over {other} (quartiles {low:+.2f} .. {high:+.2f}), {microseconds:+.0f} us a step"


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description="Cost of the strategy in a Lightning fit at world size 1.")
    parser.add_argument(
        "--steps", type=int, default=500, help="training steps of a fit; the first fifth is not counted"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=list(_MODELS))
    parser.add_argument("--out", type=Path, help="append one JSON row a case to this file")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, or there is no spread to show")
    options.hosts, options.processes, options.rate, options.threads = 1, 1, "none", 1
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for size in options.models:
        _measure(size, options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

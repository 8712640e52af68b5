"""The same Lightning training on two hosts joined by a slow link, with `ddp` and then with `ring_int8`.

    sudo python -m benchmarks demo

The hosts are network namespaces of this machine (lab.py), so it takes root on Linux; no data are downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ringstrategy  # noqa: F401  # registers the names
from benchmarks.harness import interface_bytes
from benchmarks.lab import Lab, LabError, bits_per_second, exit_on_sigterm
from benchmarks.trainer import quiet_trainer
from ringstrategy.examples.data.digits import Digits


class Block(nn.Module):
    """Two convolutions beside a shortcut; a stride halves the image."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, inner, height, width) to (batch, outer, height / stride, width / stride)."""
        return F.relu(self.body(images) + self.shortcut(images))


class ResNet(L.LightningModule):
    """0.7 M parameters, for images of 8x8."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            *(Block(*width) for width in widths),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of right answers, of all ranks."""
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("right", right, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """SGD with momentum, at a rate that falls to 0: at a constant one accuracy would end where chance has it."""
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Outcome:
    """Of one run, as rank 0 saw it: seconds of its training steps, bytes that its host has sent meanwhile."""

    seconds: float
    nbytes: int | None
    right: float
    parameters: int


class Clock(L.Callback):
    """From the second step, when all is connected, to the end of training."""

    def __init__(self) -> None:
        self.begin = self.seconds = 0.0
        self.nbytes_before = self.nbytes = interface_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Start after the first."""
        if trainer.global_step == 1:
            self.begin, self.nbytes_before = time.perf_counter(), interface_bytes()

    def on_train_end(self, *_: object) -> None:
        """Stop."""
        self.seconds, self.nbytes = time.perf_counter() - self.begin, interface_bytes()


def train(strategy: str, steps: int, out: Path) -> None:
    """One rank's process on its host."""
    torch.set_num_threads(1)
    L.seed_everything(0)
    clock, model, data = Clock(), ResNet(), Digits(batch_size=32)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_steps=steps + 1,
        callbacks=[clock],
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=data)
    trainer.limit_val_batches = 1.0
    [metrics] = trainer.validate(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        nbytes = None if clock.nbytes is None or clock.nbytes_before is None else clock.nbytes - clock.nbytes_before
        parameters = sum(parameter.numel() for parameter in model.parameters())
        out.write_text(json.dumps(asdict(Outcome(clock.seconds, nbytes, metrics["right"], parameters))))


def measure(strategy: str, rate: str, steps: int) -> Outcome:
    """A fresh pair of hosts."""
    with tempfile.TemporaryDirectory() as folder, Lab(2, rate) as lab:
        out = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks", "demo"]
        command += [f"--train={strategy}", f"--steps={steps}", f"--out={out}"]
        for rank in range(2):
            lab.popen(rank, command, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"})
        if any(lab.wait()):
            sys.exit(f"the training with {strategy} failed")
        return Outcome(**json.loads(out.read_text()))


def show(outcomes: dict[str, Outcome], rate: str, steps: int) -> None:
    """The table."""
    base = next(iter(outcomes.values()))
    table = Table(title=f"{steps} steps of a {base.parameters / 1e6:.2g} M ResNet on two hosts joined by {rate}")
    for heading in ("strategy", "seconds", "x ddp", "MB a host", "right answers"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for strategy, outcome in outcomes.items():
        sent = "-" if outcome.nbytes is None else f"{outcome.nbytes / 1e6:.1f}"
        ratio = f"{base.seconds / outcome.seconds:.2f}"
        table.add_row(strategy, f"{outcome.seconds:.1f}", ratio, sent, f"{100 * outcome.right:.1f} %")
    console = Console()
    console.print(table)
    bits = bits_per_second(rate)
    if bits is not None:
        seconds = steps * 32 * base.parameters / bits
        console.print(f"The link alone needs {seconds:.1f} s for fp32 gradients, {seconds / 4:.1f} s for 8 bits.")


def main(given: Sequence[str]) -> None:
    """Run the strategies one after the other."""
    parser = argparse.ArgumentParser("python -m benchmarks demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link between the hosts; default 100mbit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategies", default="ddp,ring_int8", help="the first is compared with")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.train:
        train(options.train, options.steps, options.out)
        return
    exit_on_sigterm()
    try:
        outcomes = {each: measure(each, options.rate, options.steps) for each in options.strategies.split(",")}
    except LabError as error:
        sys.exit(f"{error}\nWithout root: `make train` compares both over loopback, where no link is slow.")
    show(outcomes, options.rate, options.steps)

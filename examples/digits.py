"""A LightningModule and a Trainer: only `import ringstrategy` and the strategy's name are new.

python examples/digits.py            # two processes on this machine
python examples/digits.py ddp        # the same with torch's DDP

On several hosts, each with two processes:
torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=10.0.0.1 --master-port=29500 examples/digits.py
"""

import os
import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy  # noqa: F401  # registers the names


class Digits(L.LightningModule):
    """A small network for images of 8x8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy over all ranks."""
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("right", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def loaders() -> tuple[DataLoader, DataLoader]:
    """For training and for validation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    training, validation = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
    return DataLoader(training, 32, shuffle=True), DataLoader(validation, 32)


def main() -> None:
    """Train for five epochs."""
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "ring_int8",
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)),  # of this host; torchrun sets both
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), *loaders())
    if trainer.is_global_zero:
        print(trainer.callback_metrics["right"].item(), getattr(trainer.strategy, "stats", ""))


if __name__ == "__main__":
    main()

"""The script whose processes `python -m benchmarks shrink` starts, kills and replaces: a small text model by ranks that
may be lost. It notes each step, and the loss of a validation at the end.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import AllReduce, BlockInt, Gossip, RingStrategy
from ringstrategy.algorithms.base import Algorithm

FOLDER, CASE, NAME, EPOCHS, SIZE = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
CASES: dict[str, Algorithm] = {
    "ring": AllReduce(),
    "ring_int8, feedback": AllReduce(BlockInt(8), error_feedback=True),
    "gossip": Gossip(),
}
FEATURES, CLASSES, SAMPLES, BATCH = 64, 10, 1437, 6
STEP_SECONDS = 0.02  # a step sleeps so long: 8 ranks of 2 cores compute for others too


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's, 8 x 8 pixels: to train on, and held out."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])


def note(name: str, **facts: object) -> None:
    """A line, with the time."""
    with (FOLDER / f"{NAME}.{name}.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **facts}) + "\n")


class Net(L.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.Tanh(), nn.Linear(128, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Of classification."""
        time.sleep(STEP_SECONDS)
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The same loss."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state that a replacement needs."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """The optimizer has stepped."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, RingStrategy)
        assert strategy.members is not None
        now = strategy.members.now
        assert now is not None
        note("steps", step=self.trainer.global_step, size=now.size, rank=now.rank, addresses=now.addresses)


torch.set_num_threads(1)
trainer = L.Trainer(
    strategy=RingStrategy(CASES[CASE], on_peer_loss="shrink", timeout=timedelta(seconds=60)),
    accelerator="cpu",
    devices=SIZE,
    max_epochs=EPOCHS,
    check_val_every_n_epoch=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model, (training, held_out) = Net(), digits()
trainer.fit(model, DataLoader(training, BATCH, shuffle=True), DataLoader(held_out, BATCH))
note("end", loss=float(trainer.callback_metrics["loss"]), weights=sum(float(p.sum()) for p in model.parameters()))

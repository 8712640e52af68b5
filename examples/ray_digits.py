"""Ray Train starts two workers, and again from the last checkpoint if one dies. Ray Data prepares their batches.

python examples/ray_digits.py           # two workers on this machine
python examples/ray_digits.py kill      # worker 1 kills itself in the third epoch

Ray's controller collects checkpoints every two seconds. So training may go on from an older one than the last.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import ray
import ray.data
import ray.train
import torch
from digits import Digits
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import AllReduce, BlockInt, RayRingStrategy

EPOCHS = 4


class Dies(L.Callback):
    """Worker 1 kills itself in the third epoch, unless a file says that it has done so before."""

    def __init__(self, done: str) -> None:
        self.done = Path(done)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """In the middle of the epoch."""
        if trainer.global_rank == 1 and trainer.current_epoch == 2 and batch_idx == 10 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Batches:
    """What a worker's share of the data yields in each epoch; each worker gets as many."""

    def __init__(self, share: ray.data.DataIterator) -> None:
        self.share = share

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels."""
        for batch in self.share.iter_torch_batches(batch_size=32, local_shuffle_buffer_size=256):
            yield batch["image"], batch["label"]


def prepared(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs in processes of Ray, which may be on machines without a GPU."""
    return {"image": batch["image"].astype(np.float32) / 16, "label": batch["label"]}


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    torch.set_num_threads(1)
    trainer = prepare_trainer(
        L.Trainer(
            strategy=RayRingStrategy(AllReduce(BlockInt(8), error_feedback=True)),
            accelerator="cpu",
            max_epochs=EPOCHS,
            callbacks=[RayTrainReportCallback(), *([Dies(config["died"])] if config["died"] else [])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    )
    last = ray.train.get_checkpoint()
    validation = DataLoader(TensorDataset(*map(torch.from_numpy, prepared(config["validation"]).values())), 32)
    loaders = Batches(ray.train.get_dataset_shard("train")), validation
    if last is None:
        trainer.fit(Digits(), *loaders)
    else:
        with last.as_directory() as folder:
            path = Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME
            epoch, residuals = torch.load(path, weights_only=True)["epoch"], len(list(path.parent.rglob("rank_*.pt")))
            print(f"worker {trainer.global_rank} goes on after epoch {epoch}, with the residuals of {residuals} ranks")
            trainer.fit(Digits(), *loaders, ckpt_path=path)
    print(f"worker {trainer.global_rank} of {trainer.world_size}: {trainer.strategy.stats}")


def main() -> None:
    """Train for four epochs, and say how well."""
    digits = load_digits()
    images, labels = digits.images, digits.target
    ray.init(num_cpus=3)  # as Ray counts them: for two workers, and one task that prepares batches
    rows = [{"image": image, "label": label} for image, label in zip(images[:1440], labels[:1440], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        trained = TorchTrainer(
            train,
            train_loop_config={
                "died": f"{folder}/died" if sys.argv[1:] == ["kill"] else "",
                "validation": {"image": images[1440:], "label": labels[1440:]},
            },
            datasets={"train": ray.data.from_items(rows, override_num_blocks=8).map_batches(prepared)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
    ray.shutdown()
    print(trained.metrics)


if __name__ == "__main__":
    main()

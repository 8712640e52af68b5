"""Ray Train starts two workers, and starts them again from the last checkpoint if one dies.

python examples/ray_digits.py           # two workers on this machine
python examples/ray_digits.py kill      # worker 1 kills itself in the third epoch

Ray's controller collects checkpoints every two seconds. So training may go on from an older one than the last.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import ray
import ray.train
import torch
from digits import Digits
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
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


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    torch.set_num_threads(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    trainer = prepare_trainer(
        L.Trainer(
            strategy=RayRingStrategy(AllReduce(BlockInt(8))),
            accelerator="cpu",
            max_epochs=EPOCHS,
            callbacks=[RayTrainReportCallback(), *([Dies(config["died"])] if config["died"] else [])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    )
    last = ray.train.get_checkpoint()
    loaders = (
        DataLoader(TensorDataset(images[:1440], labels[:1440]), 32, shuffle=True),
        DataLoader(TensorDataset(images[1440:], labels[1440:]), 32),
    )
    if last is None:
        trainer.fit(Digits(), *loaders)
    else:
        with last.as_directory() as folder:
            path = Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME
            print(f"worker {trainer.global_rank} goes on after epoch", torch.load(path, weights_only=True)["epoch"])
            trainer.fit(Digits(), *loaders, ckpt_path=path)
    print(f"worker {trainer.global_rank} of {trainer.world_size}: {trainer.strategy.stats}")


def main() -> None:
    """Train for four epochs, and say how well."""
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2)
        trained = TorchTrainer(
            train,
            train_loop_config={"died": f"{folder}/died" if sys.argv[1:] == ["kill"] else ""},
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

"""Spark's TorchDistributor runs the training function as one process a task.

python examples/spark_digits.py              # torchrun starts two processes on this machine
python examples/spark_digits.py executors    # a process for each of two tasks of Spark, as on a cluster
"""

import os
import sys

import digits
import lightning as L
import torch
from pyspark import cloudpickle
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

import ringstrategy  # noqa: F401  # registers the names

cloudpickle.register_pickle_by_value(digits)  # executors have no `examples` on their path
PROCESSES = 2


def train(devices: int, num_nodes: int) -> str:
    """What each process does; the text of one of them comes back."""
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="ring_int8",
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(digits.Digits(), *digits.loaders())
    right = trainer.callback_metrics["right"].item()
    return f"rank {trainer.global_rank} of {trainer.world_size}: {right:.3f} right, {trainer.strategy.stats}"


def main() -> None:
    """Without `executors` the driver's machine trains, and Spark only starts torchrun there."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else executors take the first `python3` of the path
    spark = SparkSession.builder.appName("digits").master(f"local[{PROCESSES}]").getOrCreate()
    executors = sys.argv[1:] == ["executors"]
    devices, num_nodes = (1, PROCESSES) if executors else (PROCESSES, 1)
    distributor = TorchDistributor(num_processes=PROCESSES, local_mode=not executors, use_gpu=False)
    print(distributor.run(train, devices, num_nodes))
    spark.stop()


if __name__ == "__main__":
    main()

"""submitit sends a function to Slurm, which runs it as two tasks. Without Slurm it runs them on this machine.

python examples/slurm_digits.py            # two processes on this machine
# On a cluster: python examples/slurm_digits.py slurm
"""

import sys

import cloudpickle
import digits
import lightning as L
import submitit
import torch

import ringstrategy  # noqa: F401  # registers the names

cloudpickle.register_pickle_by_value(digits)  # the tasks have no `examples` on their path


def train() -> str:
    """What each task does."""
    task = submitit.helpers.TorchDistributedEnvironment()
    task.export(set_cuda_visible_devices=False)  # first of all; Lightning chooses the GPU of a rank
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy="ring_int8",
        accelerator="cpu",
        num_nodes=task.world_size // task.local_world_size,
        devices=task.local_world_size,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(digits.Digits(), *digits.loaders())
    right = trainer.callback_metrics["right"].item()
    return f"task {trainer.global_rank} of {trainer.world_size}: {right:.3f} right, {trainer.strategy.stats}"


def main() -> None:
    """Wait for both tasks."""
    executor = submitit.AutoExecutor("submitit", cluster=sys.argv[1] if len(sys.argv) > 1 else "local")
    executor.update_parameters(nodes=1, tasks_per_node=2, timeout_min=10)
    for line in executor.submit(train).results():
        print(line)


if __name__ == "__main__":
    main()

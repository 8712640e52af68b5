"""A learner of Decoupled DiLoCo, as Slurm or Kubernetes starts it on each host; its processes are those of torchrun.

ringstrategy-syncer --bind 127.0.0.1:29600 --secret-file secret --checkpoint theta
RINGSTRATEGY_SYNCER=127.0.0.1:29600 RINGSTRATEGY_SECRET_FILE=secret \
    torchrun --standalone --nproc-per-node=2 examples/decoupled_digits.py

See slurm_decoupled.sbatch and kubernetes/decoupled.yaml.
"""

import os

import lightning as L
import torch
from digits import Digits, loaders

from ringstrategy import Decoupled


def main() -> None:
    """Train; the number of the learner comes from Slurm or Kubernetes."""
    number = int(os.environ.get("SLURM_NODEID", os.environ.get("JOB_COMPLETION_INDEX", "0")))
    torch.set_num_threads(1)
    L.seed_everything(number)  # another order of the data for each learner
    decoupled = Decoupled(fragments=2, quorum=1, interval=16, name=f"learner{number}")
    trainer = L.Trainer(
        strategy="ring",  # within the learner
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=int(os.environ.get("EPOCHS", "20")),
        callbacks=[decoupled],
        logger=False,
        enable_checkpointing=False,  # started again, it begins with the parameters of all
        enable_progress_bar=False,
    )
    model, (training, validation) = Digits(), loaders()
    trainer.fit(model, training)
    right = trainer.validate(model, validation, verbose=False)[0]["right"]
    if decoupled.learner is not None:
        print(f"learner {number}: {right:.3f} right, {trainer.strategy.stats}, pushes {decoupled.learner.counts}")


if __name__ == "__main__":
    main()

"""The script that torchrun starts, kills and starts again for `python -m benchmarks restart`.

It writes the moment at which each part of its start has ended, so it imports nothing but what a user's script would.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER, CASE, EPOCHS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
FILE = FOLDER / f"attempt{ATTEMPT}.rank{RANK}.jsonl"


def note(what: str, seconds: float | None = None, **facts: object) -> None:
    """A line with a moment, in seconds since the machine has started: as the kernel counts the start of a process."""
    moment = time.clock_gettime(time.CLOCK_BOOTTIME) if seconds is None else seconds
    with FILE.open("a") as file:
        file.write(json.dumps({"what": what, "at": moment, "pid": os.getpid(), **facts}) + "\n")


born = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
note("agent", born)
note("python")

import torch  # noqa: E402

note("import torch")

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

note("import lightning")

import ringstrategy  # noqa: E402
from ringstrategy import AllReduce, BlockInt, Gossip, RingStrategy  # noqa: E402
from ringstrategy.algorithms.base import GradientAlgorithm  # noqa: E402

note("import ringstrategy", file=ringstrategy.__file__)

import hashlib  # noqa: E402

from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

WIDTH, STEPS, BATCH = 256, 5, 8
STEP_SECONDS = 0.02  # a step sleeps so long: saves are not all that happens
CASES: dict[str, Callable[[], str | RingStrategy]] = {
    "ddp": lambda: "ddp",
    "ring_int8, feedback": lambda: RingStrategy(AllReduce(BlockInt(8), error_feedback=True)),
    "gossip": lambda: RingStrategy(Gossip()),
}


class Net(L.LightningModule):
    """Small, and other weights if the data of a step, or what a checkpoint holds, is not the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A step of regression."""
        time.sleep(STEP_SECONDS)
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sin())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state that must be restored."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Notes(L.Callback):
    """Says when each part of the start has ended, and as each epoch begins a digest of all that this rank has."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The ranks have met."""
        note("rendezvous")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: object) -> None:
        """Lightning has read the checkpoint."""
        note("load the checkpoint")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The strategy and the data are there."""
        note("connect and set up")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The checkpoint of the epoch before is saved."""
        state = trainer.optimizers[0].state
        kept = [state[each]["momentum_buffer"] for each in pl_module.parameters() if each in state]
        algorithm = getattr(trainer.strategy, "algorithm", None)
        if isinstance(algorithm, GradientAlgorithm):
            kept += [value for _, value in algorithm.residuals()]
        digest = hashlib.sha256()
        for tensor in (*pl_module.parameters(), *kept):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        note("epoch", step=trainer.global_step, digest=digest.hexdigest())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        """The optimizer has stepped."""
        note("step")


torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
size = int(os.environ["WORLD_SIZE"])
data = TensorDataset(torch.randn(size * STEPS * BATCH, WIDTH, generator=generator))
trainer = L.Trainer(
    strategy=CASES[CASE](),
    accelerator="cpu",
    devices=size,
    max_epochs=EPOCHS,
    callbacks=[ModelCheckpoint(FOLDER / "checkpoints", save_last=True), Notes()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
note("make the trainer")
trainer.fit(Net(), DataLoader(data, batch_size=BATCH), ckpt_path="last")

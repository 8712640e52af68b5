"""A byte GPT whose steps take a given time, trained by a learner of Decoupled DiLoCo or by ranks of DDP."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.trainer import quiet_trainer
from ringstrategy import BlockInt, Cast, Decoupled, Nesterov
from ringstrategy.examples.data.stdlib_text import StdlibText, Windows
from ringstrategy.examples.models.gpt import GPT
from ringstrategy.server.merges import radial_directional

FRAGMENTS = 2
MERGE, OUTER = radial_directional, Nesterov(0.7, 0.9)  # as in the paper
_CONTEXT, _WIDTH, _LAYERS, _BATCH = 64, 64, 2, 8
_INTERVAL, _GRACE = 16, 0.5
_SAVED = 8  # steps from checkpoint to checkpoint
_MOST = 100_000  # steps of a life


class Paced(GPT):
    """A step begins its backward pass `pace` seconds after its begin."""

    def __init__(self, seed: int, pace: float = 0.0) -> None:
        torch.manual_seed(seed)
        super().__init__(_CONTEXT, _WIDTH, _LAYERS)
        self.pace = pace

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        self._begin = time.monotonic()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """As the GPT does it, and sleep until the pace is kept."""
        loss = super().training_step(batch, batch_idx)
        time.sleep(max(0.0, self._begin + self.pace - time.monotonic()))
        return loss


class _Notes(Callback):
    """A line a step, with the versions of Theta in use, and checkpoints."""

    def __init__(self, notes: Path, checkpoints: Path, learner: Decoupled | None) -> None:
        self._notes, self._checkpoints, self._decoupled = notes.open("ab", buffering=0), checkpoints, learner
        self._parent = os.getppid()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        learner = None if self._decoupled is None else self._decoupled.learner
        state = {"fragments": []} if learner is None else learner.state_dict()
        uses = [(each["boot"], each["version"]) for each in state["fragments"]]
        self._notes.write(json.dumps([time.time(), trainer.global_step, uses]).encode() + b"\n")
        if trainer.global_step % _SAVED == 0:
            new = self._checkpoints / "new"
            trainer.save_checkpoint(new)
            if trainer.is_global_zero:  # those of DDP are kept
                new.replace(self._checkpoints / f"{trainer.global_step if learner is None else 0}.ckpt")
        if os.getppid() != self._parent:
            os._exit(1)


def learn(
    rank: int, life: int, seed: int, options: argparse.Namespace, folder: Path, port: int, ddp: bool, last: int = -1
) -> None:
    """A life of a learner, or of a rank of DDP; ends by SIGKILL, or after the step `last`."""
    own = folder / ("ddp" if ddp else f"{rank}")
    own.mkdir(exist_ok=True)
    saved = max(own.glob("*.ckpt"), key=lambda file: int(file.stem), default=None)
    decoupled = None
    strategy: Any = SingleDeviceStrategy(torch.device("cpu"))
    if ddp:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.learners, "GROUP_RANK": 0}
        environment |= {"LOCAL_WORLD_SIZE": options.learners, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in environment.items()}, TORCHELASTIC_RUN_ID="chaos")
        strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=TorchElasticEnvironment())
    elif port:
        syncer, secret, name = f"127.0.0.1:{port}", folder / "secret", f"learner{rank}"
        how: dict[str, Any] = {"outer": OUTER, "merge": MERGE, "syncer": syncer, "secret_file": secret, "name": name}
        decoupled = Decoupled(FRAGMENTS, options.quorum, _GRACE, _INTERVAL, **how)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=options.learners if ddp else 1,
        max_steps=last,
        max_epochs=-1,
        callbacks=[*([decoupled] if decoupled else []), _Notes(folder / f"notes{rank}", own, decoupled)],
        use_distributed_sampler=False,
    )
    draws = torch.Generator().manual_seed(1_000_000 * seed + 1000 * rank + life)
    starts = torch.randint(len(_text()) - _CONTEXT, (_BATCH * _MOST,), generator=draws)
    data = DataLoader(Windows(_text(), starts, _CONTEXT), _BATCH)
    trainer.fit(Paced(seed, options.pace if port else 0.0), data, ckpt_path=saved, weights_only=False)


@cache
def _text() -> Tensor:
    """Read once, before processes are forked."""
    text = StdlibText(context=_CONTEXT, max_bytes=3_000_000)
    text.setup("fit")
    return text.training.text


def warm_up(options: argparse.Namespace) -> None:
    """What processes would import and compile after each fork; leaves no thread behind."""
    for codec in (BlockInt(8), Cast("bfloat16")):
        codec.warm_up(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for last in (_SAVED, _SAVED + 1):  # the second one resumes
            learn(0, 0, 0, options, Path(folder), 0, False, last)
    assert threading.active_count() == 1

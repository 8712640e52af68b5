"""One rank that trains a tiny model and strikes itself where a plan says so.

Also a script, `python -m benchmarks.faulted PLAN.json`, for launchers that start one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ranks import note, noted
from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    Cast,
    Direct,
    Gossip,
    LocalSGD,
    Nesterov,
    PowerSGD,
    RingStrategy,
)
from ringstrategy.algorithms.base import Algorithm

FEATURES, BATCH, STEPS, EPOCHS = 6, 4, 3, 3  # steps of an epoch without a loss
_STALL_SECONDS = 1.0  # less than any timeout
_SAVE_SECONDS = 0.004  # a kill in a save comes at most so long after its beginning

STRATEGIES: dict[str, Callable[..., Algorithm]] = {
    "ring": partial(AllReduce, bucket_mb=1e-4),
    "ring_int8, feedback": partial(AllReduce, BlockInt(8), error_feedback=True, bucket_mb=1e-4),
    "direct bf16": partial(AllReduce, Cast("bfloat16"), Direct(), bucket_mb=1e-4),
    "powersgd": partial(PowerSGD, 2),
    "gossip": Gossip,
    "gossip at once": partial(Gossip, overlap=False),
    "local SGD": partial(LocalSGD, 3, Nesterov(0.5, 0.5), BlockInt(8), overlap=2),
    "auto": Auto,
}


@dataclass(frozen=True)
class Plan:
    """What the ranks of one start do.

    Attributes:
        folder: of checkpoints, and of what each rank notes.
        strategy: a key of STRATEGIES.
        policy: `on_peer_loss`.
        size: how many ranks.
        attempt: its number; a later one goes on from the last checkpoint.
        epochs: how many.
        accumulate: batches of a step.
        timeout: of the strategy, seconds.
        launcher: what starts the ranks.
        fault: what happens to the victims; "" for nothing.
        place: where.
        step: at which, counted from the beginning of the first attempt.
        delay: seconds after the place "any", messages of the step before the place "send", share of a save.
        victims: ranks.
    """

    folder: str
    strategy: str = "ring"
    policy: Literal["raise", "shrink", "wait"] = "raise"
    size: int = 3
    attempt: int = 0
    epochs: int = EPOCHS
    accumulate: int = 1
    timeout: float = 30.0
    launcher: Literal["environment", "lightning", "spawn", "fork", "torchrun"] = "environment"
    fault: str = ""
    place: str = ""
    step: int = 0
    delay: float = 0.0
    victims: tuple[int, ...] = ()

    def write(self) -> Path:
        """For the script."""
        path = Path(self.folder) / f"plan{self.attempt}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def saved(self) -> Path:
        """Where checkpoints lie."""
        return Path(self.folder) / "saved"

    def notes(self, rank: int) -> Path:
        """The file of one rank."""
        return Path(self.folder) / f"attempt{self.attempt}.rank{rank}.jsonl"

    def noted(self, what: str) -> list[list[dict[str, Any]]]:
        """The notes of one kind, of each rank, in their order."""
        return [[each for each in noted(self.notes(rank)) if each["what"] == what] for rank in range(self.size)]


class _Notes:
    """Lines of JSON of this rank, with the time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.rank = int(os.environ.get("LOCAL_RANK", "0"))  # at the beginning: ranks of survivors change

    def add(self, what: str, **facts: object) -> None:
        note(self._plan.notes(self.rank), what=what, at=time.time(), **facts)


def samples(size: int) -> TensorDataset:
    """Inputs, targets, and the number of each."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size * STEPS * BATCH, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :3].sin() + 1, torch.arange(len(x)))


class Net(L.LightningModule):
    """Two layers of other weights on each rank, until rank 0 sends its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 17), nn.Tanh(), nn.Linear(17, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of regression."""
        return nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Of a batch."""
        return self.loss(batch[0], batch[1])

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """With a collective of Lightning's."""
        self.log("loss", self.loss(batch[0], batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With a state."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class _Noting(L.Callback):
    """What this rank trains on, what it has after each step, and how it ends."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._notes.rank = int(os.environ.get("LOCAL_RANK", "0"))  # in a process that was spawned

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._notes.add("begin", **_state(trainer, pl_module))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, _: int) -> None:
        assert isinstance(trainer.strategy, RingStrategy)
        members = None if trainer.strategy.members is None else trainer.strategy.members.now
        now = {"world": 0, "addresses": ()}
        if members is not None:
            now = {"world": members.generation, "addresses": members.addresses}
        now |= {"size": trainer.world_size, "step": trainer.global_step, "epoch": trainer.current_epoch}
        self._notes.add("batch", samples=batch[2].tolist(), rank=trainer.global_rank, **now)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._notes.add("step", **_state(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._notes.add("trained", values=[p.tolist() for p in pl_module.parameters()], **_state(trainer, pl_module))


def _state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Digests of the parameters, and of all that this rank has."""
    states = trainer.optimizers[0].state
    kept = [states[parameter]["momentum_buffer"] for parameter in module.parameters() if parameter in states]
    assert isinstance(trainer.strategy, RingStrategy)
    kept += [value for _, value in trainer.strategy.algorithm.residuals()]
    digests = [hashlib.sha256(), hashlib.sha256()]
    for number, tensor in enumerate((*module.parameters(), *kept)):
        digests[1].update(tensor.detach().contiguous().numpy().tobytes())
        if number < len(list(module.parameters())):
            digests[0].update(tensor.detach().contiguous().numpy().tobytes())
    weights, whole = (digest.hexdigest()[:16] for digest in digests)
    return {"step": trainer.global_step, "size": trainer.world_size, "weights": weights, "digest": whole}


class _Strike(L.Callback):
    """The fault, at its place."""

    def __init__(self, plan: Plan, notes: _Notes) -> None:
        self._plan, self._notes = plan, notes
        self._struck = False
        self._sent: int | None = None  # messages, in the step of the fault

    def strike(self, place: str, step: int) -> None:
        """Once in a run; this is noted."""
        if self._struck or not self._plan.fault:
            return
        self._struck = True
        cut = _reset_connections() if self._plan.fault == "reset" else None
        self._notes.add("struck", cut=cut, place=place, step=step)
        match self._plan.fault:
            case "kill" | "kill all":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(0)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stall":
                time.sleep(_STALL_SECONDS)
            case "raise":
                raise ValueError("this row is broken")

    def _at(self, place: str, trainer: L.Trainer) -> None:
        here = trainer.global_step == self._plan.step or place in ("set-up", "start")
        if place == self._plan.place and here and self._notes.rank in self._plan.victims:
            self.strike(place, trainer.global_step)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._at("set-up", trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._notes.rank in self._plan.victims:
            self._count_messages(trainer)
            if self._plan.place == "any":
                threading.Timer(self._plan.delay, self.strike, ("any", trainer.global_step)).start()
        self._at("start", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, _: int) -> None:
        self._at("forward", trainer)
        if trainer.global_step == self._plan.step:
            self._sent = 0

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        def hook(gradient: Tensor) -> Tensor:
            self._at("backward", trainer)
            nan = self._plan.fault == "nan" and self._struck
            return gradient * float("nan") if nan else gradient

        first = next(pl_module.parameters())
        if trainer.global_step == self._plan.step:
            first.register_hook(hook)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._at("optimizer", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._sent = None
        self._at("batch end", trainer)

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._at("validation", trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Any) -> None:
        here = (self._plan.place, self._plan.step) == ("save", trainer.global_step)
        if here and self._notes.rank in self._plan.victims:
            delay = self._plan.delay * _SAVE_SECONDS
            threading.Timer(delay, self.strike, ("save", trainer.global_step)).start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at("epoch end", trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._notes.rank in self._plan.victims:
            self.strike("end", trainer.global_step)  # what has not come yet comes here

    def _count_messages(self, trainer: L.Trainer) -> None:
        send = dist.isend

        def counted(*args: Any, **options: Any) -> Any:
            if self._sent is not None and self._plan.place == "send":
                if self._sent == int(self._plan.delay):
                    self.strike("send", self._plan.step)
                self._sent += 1
            return send(*args, **options)

        dist.isend = counted


def _reset_connections() -> int:
    """All that this process has over TCP, but those to the store; how many."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            ports = {connection.getpeername()[1], connection.getsockname()[1]}
            if connection.type == socket.SOCK_STREAM and int(os.environ["MASTER_PORT"]) not in ports:
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def be_a_rank(plan: Plan, *callbacks: L.Callback) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    torch.set_num_threads(1)
    notes = _Notes(plan)
    algorithm = STRATEGIES[plan.strategy](**{"on_nonfinite": "raise"} if plan.fault == "nan" else {})
    data = samples(plan.size)
    trainer = L.Trainer(
        strategy=RingStrategy(
            algorithm,
            timeout=timedelta(seconds=plan.timeout),
            on_peer_loss=plan.policy,
            start_method=plan.launcher if plan.launcher in ("spawn", "fork") else "popen",
        ),
        accelerator="cpu",
        devices=plan.size,
        max_epochs=plan.epochs,
        accumulate_grad_batches=plan.accumulate,
        callbacks=[*callbacks, _Noting(notes), _Strike(plan, notes), ModelCheckpoint(plan.saved, save_last=True)],
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Net(notes.rank), DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH), ckpt_path="last")
    except BaseException as error:
        notes.add("error", kind=type(error).__name__, message=str(error)[:2000], rank=getattr(error, "rank", None))
        raise


def main(arguments: Sequence[str]) -> None:
    """Of the script."""
    given = json.loads(Path(arguments[0]).read_text())
    plan = Plan(**{**given, "victims": tuple(given["victims"])})
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        plan = replace(plan, attempt=plan.attempt + 1, fault="", victims=())
    be_a_rank(plan)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A rank dies while the others wait in the default process group: each survivor soon names it, and no other rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from test_failures import Job, job, note
from test_strategy import Net, rows, trainer_with
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ringstrategy import AllReduce, RingStrategy

__all__ = ["job"]
SOON = 2.0  # seconds after the death within which every survivor has named the rank
LINGERS = 4.0  # as a rank does that saves a checkpoint after an exception: its sockets stay open
COMPUTES = 8.0  # longer than a rank that hosts the store waits for those that do not know yet
pytestmark = pytest.mark.timeout(120)


class Dies(Net):
    """Rank `victim` is killed at a `place` of the fit, just before a collective in which the others wait for it."""

    def __init__(self, victim: int, place: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3)))
        self.victim, self.place = victim, place
        self.metric = MeanMetric()

    def at(self, place: str) -> None:
        if self.place == place and self.global_rank == self.victim:
            time.sleep(0.5)  # until all others wait
            note("struck.json")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.at("buffers")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            if self.place == "a collective of the user":
                self.at(self.place)
                dist.all_reduce(torch.ones(3))
            if self.place == "while rank 3 computes":
                if self.global_rank == 3:
                    time.sleep(COMPUTES)
                self.at(self.place)
                dist.all_reduce(torch.ones(3))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.at("the decision before a batch")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.metric.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.at("a metric")
        self.metric.compute()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("a checkpoint")


class Lingers(L.Callback):
    """Writes when the error has come, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        note(f"named{trainer.global_rank}.json")
        time.sleep(self.seconds)


def _dies(victim: int, place: str) -> None:
    strategy = RingStrategy(AllReduce(bucket_mb=1e-4), timeout=timedelta(seconds=60))
    trainer = trainer_with(
        strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=place == "a checkpoint",
        callbacks=[Lingers(LINGERS if place == "the decision before a batch" else 0.0)],
    )
    trainer.fit(Dies(victim, place), rows(64), rows(32) if place == "a metric" else None)


def check_named(running: Job, victim: int, late: dict[int, float]) -> None:
    survivors = [rank for rank in range(4) if rank != victim]
    assert running.wait(survivors) == [1, 1, 1]
    struck = json.loads((running.folder / "struck.json").read_text())["time"]
    for rank in survivors:
        record = running.record(rank)
        assert record["message"].startswith(f"lost rank {victim} (host {socket.gethostname()}) "), record["message"]
        assert f"rank {rank}: {record['kind']}: lost rank {victim} " in running.output(rank)  # logged
        named = json.loads((running.folder / f"named{rank}.json").read_text())["time"]
        assert named - struck < SOON + late.get(rank, 0.0)


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "place",
    [
        "the decision before a batch",
        "buffers",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in ("a collective of the user", "a metric", "a checkpoint")
        ),
    ],
)
def test_all_survivors_name_the_rank_that_died_before(job: Callable[..., Job], place: str, victim: int) -> None:
    check_named(job(4, _dies, victim, place), victim, {})


@pytest.mark.slow
def test_a_rank_that_computes_meanwhile_is_not_blamed_and_names_it_too(job: Callable[..., Job]) -> None:
    """Rank 0 ends before, and its store with it."""
    check_named(job(4, _dies, 2, "while rank 3 computes"), 2, {0: 2.0, 1: 2.0, 3: COMPUTES})

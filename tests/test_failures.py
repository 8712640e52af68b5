"""Lost peers, interrupts and bad input under real trainers: an error with a name and a cure, never a hang.

A rank that notices another's death only when a third one ends would never end here: nobody ends before all have named.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from jobs import die
from jobs import job as job  # fixtures
from jobs import program as program
from pool import Pool
from test_strategy import Net, fit, rows, trainer_with
from torch import Tensor

from benchmarks import faults
from benchmarks.faulted import Plan, be_a_rank
from benchmarks.ranks import Job, note
from ringstrategy.failure import progress
from ringstrategy.transport.connect import connect

slow, nightly = pytest.mark.slow, pytest.mark.nightly


# Lost while the others train


class EndsLast(L.Callback):
    """A rank whose error has come waits until it has come to all of these; who waits for ever uses no CPU."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        note(f"named{trainer.global_rank}", message=str(exception))
        while trainer.global_rank in self.ranks and not all(Path(f"named{rank}").exists() for rank in self.ranks):
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("fault", "place", "victim", "strategy"),
    [
        ("kill", "backward", 0, "ring"),  # rank 0 takes the store with it
        ("kill", "batch end", 2, "ring"),  # the others wait for it in the default group; so at the next two places
        pytest.param("kill", "save", 2, "ring", marks=slow),
        pytest.param("kill", "validation", 0, "ring", marks=nightly),
        ("raise", "forward", 0, "ring"),
        pytest.param("freeze", "backward", 2, "ring", marks=slow),
        pytest.param("freeze", "backward", 0, "gossip", marks=slow),
    ],
)
def test_every_survivor_names_the_lost_rank(
    job: Callable[..., Job], tmp_path: Path, fault: str, place: str, victim: int, strategy: str
) -> None:
    size, timeout = 4 if fault == "kill" else 3, 4.0 if fault == "freeze" else 60.0
    strike = {"fault": fault, "place": place, "step": 3, "victims": (victim,)}
    survivors = [rank for rank in range(size) if rank != victim]
    plan = Plan(str(tmp_path), strategy, size=size, timeout=timeout, **strike)  # type: ignore[arg-type]
    running = job(size, be_a_rank, plan, EndsLast(survivors))
    assert running.wait(survivors) == [1] * len(survivors)
    assert not faults.missed(plan)
    for rank in survivors:
        record = running.record(rank)
        assert record["message"].startswith(f"lost rank {victim} (host {socket.gethostname()}) "), record["message"]
        if (place, strategy) == ("backward", "ring"):  # gossip has no buckets
            assert re.match(r".*?\) at step 3, in bucket \d+", record["message"]), record["message"]
        assert fault != "raise" or "it stopped with ValueError: this row is broken" in record["message"]
        assert f"rank {rank}: {record['kind']}: lost rank {victim} " in running.output(rank)  # logged


# Lost before the ranks have met


class FailsInSetUp(Net):
    """Rank 1 fails after the barrier behind set-up, or dies there; the others go on to meet."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        if os.environ["LOCAL_RANK"] == "1":
            if self.how == "raises":
                raise FileNotFoundError("no weights on this host")
            die()


def _fails_in_set_up(how: str) -> None:
    """Or cannot make the group in which the others wait for it, for longer than any test may take."""
    if how != "connects":
        fit("ring", FailsInSetUp(how))
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    if dist.get_rank() == 1:
        dist.new_group = mock.Mock(side_effect=FileNotFoundError("no interface eth7"))
    connect(torch.device("cpu"), timedelta(hours=1))


@pytest.mark.parametrize("how", ["raises", "connects", pytest.param("dies", marks=slow)])
def test_a_rank_that_fails_before_it_meets_the_others_is_named(job: Callable[..., Job], how: str) -> None:
    running = job(3, _fails_in_set_up, how)
    assert running.wait([0, 2]) == [1, 1]
    for rank in (0, 2):
        lost, message = running.named(rank)
        assert lost == 1, message
        assert how == "dies" or "it stopped with FileNotFoundError: no " in message, message


# Ranks that wait for each other at different places


class Strays(Net):
    """Rank 1 skips its second batch, is the only one that stops, or calls a collective that no other rank calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "skips" and (self.global_rank, batch_idx) == (1, 1) else None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "stops" and self.global_rank == 1:
            self.trainer.should_stop = True

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.how == "waits" and (self.global_rank, batch_idx) == (1, 1):
            dist.barrier()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if (self.global_rank, batch_idx) == (1, 1):
            self.log("alone", 1.0, sync_dist=True)


def _strays(how: str, epochs: int) -> str:
    trainer = trainer_with("ring", num_sanity_val_steps=0, max_epochs=epochs)
    with mock.patch.object(progress, "DOUBT_SECONDS", 2.0), pytest.raises(RuntimeError) as caught:
        trainer.fit(Strays(how), rows(), rows(12) if how == "logs" else None)
    return str(caught.value)


IN_BARRIER = r"it waits in barrier\(\) at .*{}.py:\d+, and rank 0 in {}:.*on all ranks or on none"


@pytest.mark.parametrize(
    ("how", "epochs", "where"),
    [
        ("skips", 2, "its next batch, having skipped batch 2 after "),
        ("skips", 1, "the end of its training, having skipped batch 2 after "),
        ("stops", 1, "the end of its training after "),
        ("waits", 2, IN_BARRIER.format("test_failures", "an exchange")),
        ("logs", 2, IN_BARRIER.format("distributed", "the broadcast before its next batch")),  # in Lightning
    ],
)
def test_a_rank_that_strays_is_named_by_all_with_its_place(ranks: Pool, how: str, epochs: int, where: str) -> None:
    for said in ranks(2, _strays, how, epochs):
        assert re.search(f"^lost rank 1 .*{where}", said), said

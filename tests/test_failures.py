"""Lost peers, interrupts and bad input under real trainers: an error with a name and a cure, never a hang.

A rank that notices another's death only when a third one ends would never end here: nobody ends before all have named.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
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
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from pool import Pool
from test_strategy import Net, fit, rows, trainer_with
from torch import Tensor, nn

from benchmarks import faults
from benchmarks.faulted import Plan, be_a_rank
from benchmarks.ranks import Job, Program, note
from ringstrategy import AllReduce, PeerLostError, PlanMismatchError, RingStrategy
from ringstrategy.failure import progress
from ringstrategy.names import STRATEGIES
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
    fit("ring", FailsInSetUp(how))


@pytest.mark.parametrize("how", ["raises", pytest.param("dies", marks=slow)])
def test_a_rank_that_fails_before_it_meets_the_others_is_named(job: Callable[..., Job], how: str) -> None:
    running = job(3, _fails_in_set_up, how)
    assert running.wait([0, 2]) == [1, 1]
    for rank in (0, 2):
        lost, message = running.named(rank)
        assert lost == 1, message
        assert how == "dies" or "it stopped with FileNotFoundError: no weights on this host" in message, message


def _has_no_interface() -> None:
    """Rank 1 cannot make the group in which the others wait for it, for longer than any test may take."""
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    if dist.get_rank() == 1:
        dist.new_group = mock.Mock(side_effect=RuntimeError("no interface eth7"))
    connect(torch.device("cpu"), timedelta(hours=1))


def test_a_rank_that_fails_while_it_connects_is_named_at_once(job: Callable[..., Job]) -> None:
    running = job(3, _has_no_interface)
    assert running.wait() == [1, 1, 1]
    for rank in (0, 2):
        lost, message = running.named(rank)
        assert lost == 1, message
        assert "it stopped with RuntimeError: no interface eth7" in message, message


def _other_strategies() -> None:
    fit("ring_int8" if os.environ["LOCAL_RANK"] == "0" else "ddp", Net())


def test_a_rank_with_ddp_beside_ours_is_an_error_at_once(job: Callable[..., Job]) -> None:
    running = job(2, _other_strategies)
    assert running.wait([0, 1]) == [1, 1]
    record = running.record(0)
    assert record["kind"] == PlanMismatchError.__name__
    assert "rank 1 does not train with a RingStrategy" in record["message"]
    assert "give every rank the same Trainer(strategy=...)" in record["message"]


# Ranks that wait for each other at different places


def _uneven(name: str, validates: bool, normed: bool) -> None:
    """Rank 1 has half as many batches, with and without buffers, for which the default group is needed at each step."""
    progress.DOUBT_SECONDS = 4.0
    mine = 12 if os.environ["LOCAL_RANK"] == "1" else 24
    layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)) if normed else None
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=60))
    trainer = trainer_with(strategy, use_distributed_sampler=False, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Net(layers), rows(mine), rows(12) if validates else None)


@pytest.mark.parametrize(
    ("name", "validates", "normed"), [("ring", False, False), pytest.param("gossip_int8", True, True, marks=slow)]
)
def test_ranks_with_other_numbers_of_batches_are_told(
    job: Callable[..., Job], name: str, validates: bool, normed: bool
) -> None:
    running = job(3, _uneven, name, validates, normed)
    codes = running.wait([0, 1, 2])
    assert codes[::2] == [1, 1]
    messages = [running.record(rank)["message"] for rank in range(3) if codes[rank]]
    assert all("the same number of batches" in message for message in messages), messages
    assert all("uneven='join'" in message for message in messages), messages
    assert all("rank 1" in message for message in (messages[0], messages[-1])), messages


class Leaves(Net):
    """Rank 1 skips its second batch, or is the only one that stops."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "skips" and (self.global_rank, batch_idx) == (1, 1) else None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "stops" and self.global_rank == 1:
            self.trainer.should_stop = True


def _leaves(how: str, epochs: int) -> tuple[int, str]:
    with mock.patch.object(progress, "DOUBT_SECONDS", 1.0), pytest.raises(PeerLostError) as caught:
        fit("ring", Leaves(how), max_epochs=epochs)
    return caught.value.rank, str(caught.value)


@pytest.mark.parametrize(("how", "epochs"), [("skips", 2), ("skips", 1), ("stops", 1)])
def test_a_rank_that_leaves_an_epoch_alone_is_named_by_all(ranks: Pool, how: str, epochs: int) -> None:
    for rank, said in ranks(2, _leaves, how, epochs):
        assert rank == 1
        where = "its next batch" if epochs == 2 else "the end of its training"
        assert f"{where}{', having skipped batch 2' if how == 'skips' else ''} after " in said


class Alone(Net):
    """Rank 1 calls a collective that no other rank calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.where == "training" and (self.global_rank, batch_idx) == (1, 1):
            dist.barrier()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if self.where == "validation" and (self.global_rank, batch_idx) == (1, 1):
            self.log("alone", 1.0, sync_dist=True)


def _alone(where: str) -> str:
    trainer = trainer_with("ring", num_sanity_val_steps=0, max_epochs=2)
    with mock.patch.object(progress, "DOUBT_SECONDS", 2.0), pytest.raises(RuntimeError) as caught:
        trainer.fit(Alone(where), rows(), rows(12))
    return str(caught.value)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_rank_that_calls_a_collective_alone_is_named_by_all_with_its_place(ranks: Pool, where: str) -> None:
    other = "an exchange" if where == "training" else "the broadcast before its next batch"
    for said in ranks(2, _alone, where):
        assert "lost rank 1" in said
        caller = "test_failures" if where == "training" else "distributed"  # of Lightning, for what was logged
        assert re.search(rf"it waits in barrier\(\) at .*{caller}.py:\d+, and rank 0 in {other}:", said)
        assert "on all ranks or on none" in said


# All fail, or one ends all


class AllFail(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("everywhere")
        return super().training_step(batch, batch_idx)


class SlowlySaved(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(2)
        super().save_checkpoint(*args, **kwargs)


def _all_fail(folder: str) -> None:
    saver = OnExceptionCheckpoint(folder, "failed")
    with pytest.raises((ArithmeticError, PeerLostError)):
        fit("ring", AllFail(), callbacks=[saver], plugins=[SlowlySaved()], enable_checkpointing=True)
    fit("ring", Net(), ckpt_path=f"{folder}/failed.ckpt", max_epochs=3)  # each rank at once


def test_ranks_that_all_failed_wait_for_each_others_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _all_fail, str(tmp_path))


def _abort_while_all_wait() -> None:
    """Rank 0 aborts while its own thread and all others wait for bytes that nobody sends."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peers = connect(torch.device("cpu"), timedelta(seconds=60))
    before = threading.active_count()
    nothing = torch.empty(8, dtype=torch.uint8)
    handles = []

    def wait() -> None:
        handles.append(peers.post({}, {(peers.rank + 1) % peers.size: nothing}))
        handles[0].wait()

    ticket = peers.submit(wait, "in a test")
    while not handles:
        time.sleep(0.01)
    dist.barrier()
    if peers.rank == 0:
        peers.abort("TestError: enough")
    with pytest.raises(PeerLostError, match="TestError: enough") as caught:
        ticket.wait()
    assert caught.value.rank == 0
    peers.close()
    assert threading.active_count() == before - 1


def test_an_abort_ends_every_wait(ranks: Pool) -> None:
    """Ranks 2 and 3 of 5 are not waiting for rank 0; the cascade must reach them."""
    ranks(5, _abort_while_all_wait)


ENDLESS = """
from test_failures import Endless, fit, rows

fit("ring", Endless(), data=rows(4096), devices=2, max_epochs=1000)
"""


class Endless(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            note(f"trains{self.global_rank}")


@slow
def test_ctrl_c_ends_all_processes_cleanly(program: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDLESS)
    running = program(sys.executable, "script.py")
    running.until(lambda: all((tmp_path / f"trains{rank}").exists() for rank in range(2)), "both ranks train")
    assert len(running.pids()) == 2
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
    assert running.wait() == 1
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in running.errors
    assert "Exception in thread" not in running.errors
    assert "Traceback" not in running.errors


# Ranks that differ


class Wider(Net):
    def __init__(self) -> None:
        width = 17 + (os.environ["LOCAL_RANK"] == "1")
        super().__init__(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)))


def _differing() -> list[str]:
    odd, said = os.environ["LOCAL_RANK"] == "1", []
    strategies: dict[str, Any] = {"model": "ring", "codec": "ring_fp16", "bucket": RingStrategy(AllReduce(bucket_mb=1))}
    for what, strategy in strategies.items():
        with pytest.raises(PlanMismatchError) as caught:
            fit(strategy if odd else "ring", Wider() if what == "model" else Net())
        said.append(str(caught.value))
    return said


def test_ranks_that_differ_are_an_error_on_all(ranks: Pool) -> None:
    words = ["rank 1 has 'layers.2.weight: (3, 18) torch.float32", "rank 1 has 'AllReduce(codec=Cast(", "bucket_mb=1"]
    for messages in ranks(3, _differing):
        for message, word in zip(messages, words, strict=True):
            assert word in message, message
            assert "rank 2 has" not in message
            assert "Give every rank the same model" in message


# Bad input


def test_a_gpu_of_apple_is_refused() -> None:
    with pytest.raises(ValueError, match="accelerator='cpu'"):
        RingStrategy(parallel_devices=[torch.device("mps")])._configure_launcher()
    with pytest.raises(ValueError, match="accelerator='cpu'"):
        L.Trainer(strategy=RingStrategy(parallel_devices=[torch.device("mps")]), barebones=True)


def test_a_gpu_without_triton_is_refused_and_a_cpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ringstrategy.integrations.lightning.refusals.find_spec", lambda name: None if name == "triton" else object()
    )
    with pytest.raises(ValueError, match=r"needs triton.* python -m pip install triton"):  # a Trainer calls it at birth
        RingStrategy(parallel_devices=[torch.device("cuda", 0)])._configure_launcher()
    L.Trainer(strategy="ring_int8", accelerator="cpu", devices=2, barebones=True)


class Newton(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def _lbfgs() -> None:
    if int(os.environ["WORLD_SIZE"]) == 1:
        assert fit("ring", Newton(), max_epochs=1).global_step > 0
        return
    with pytest.raises(ValueError, match=r"LBFGS.*another optimizer"):
        fit("ring", Newton())


@pytest.mark.parametrize("size", [1, 2])
def test_lbfgs_is_refused_unless_it_is_alone(ranks: Pool, size: int) -> None:
    ranks(size, _lbfgs)

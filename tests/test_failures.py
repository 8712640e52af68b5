"""Lost peers, interrupts and bad input under real trainers: an error with a name and a cure, never a hang.

A rank that notices another's death only when a third one ends would never end here: nobody ends before all have named.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
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
from jobs import HERE, Job, die, note, shell, until
from jobs import job as job  # a fixture
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from pairs import all_pairs
from pool import Pool
from test_strategy import Net, fit, rows, trainer_with
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ringstrategy import AllReduce, PeerLostError, PlanMismatchError, RingStrategy
from ringstrategy.failure import progress
from ringstrategy.names import STRATEGIES
from ringstrategy.transport.connect import connect

slow, nightly = pytest.mark.slow, pytest.mark.nightly


def wait_for_files(*names: str) -> None:
    """In a rank; whoever waits for ever uses no CPU, and is ended."""
    while not all(Path(name).exists() for name in names):
        time.sleep(0.1)


# Lost in a backward


class Victim(Net):
    """In batch 3, when the backward pass comes to its last parameter, rank `victim` gets a signal, or raises."""

    def __init__(self, victim: int, how: str) -> None:
        super().__init__()
        self.victim, self.how = victim, how

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            if self.global_rank != self.victim:
                note(f"waits{self.global_rank}.json")
            elif self.how == "ValueError":
                raise ValueError("this row is broken")
            else:
                self.layers[0].weight.register_hook(self._strike)
        return super().training_step(batch, batch_idx)

    def _strike(self, gradient: Tensor) -> None:
        wait_for_files(*(f"waits{rank}.json" for rank in range(self.trainer.world_size) if rank != self.victim))
        os.kill(os.getpid(), getattr(signal, self.how))


def _with_a_victim(victim: int, how: str, timeout: float = 60.0, name: str = "", **options: Any) -> None:
    algorithm = STRATEGIES[name]() if name else AllReduce(bucket_mb=1e-4)
    strategy = RingStrategy(algorithm, timeout=timedelta(seconds=timeout))
    fit(strategy, Victim(victim, how), data=rows(128), max_epochs=1, **options)


def check_survivors(job: Job, victim: int, survivors: list[int]) -> list[str]:
    """Each names the lost rank, its host and the place, and ends with a code that is not 0."""
    assert job.wait(survivors) == [1] * len(survivors)
    messages = []
    for rank in survivors:
        lost, message = job.named(rank)
        assert lost == victim, message
        assert message.startswith(f"lost rank {victim} (host {socket.gethostname()}) at step 3, in bucket ")
        messages.append(message)
    return messages


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=nightly)])
def test_a_killed_rank_is_named_by_every_survivor(job: Callable[..., Job], victim: int) -> None:
    """Rank 0 takes the store with it, and rank 2 is not its neighbour."""
    running = job(4, _with_a_victim, victim, "SIGKILL")
    check_survivors(running, victim, [rank for rank in range(4) if rank != victim])
    assert running.wait([victim]) == [-signal.SIGKILL]


def test_a_rank_that_raises_is_quoted_by_the_others(job: Callable[..., Job]) -> None:
    running = job(3, _with_a_victim, 0, "ValueError")
    assert running.wait([0, 1, 2]) == [1, 1, 1]
    assert running.record(0)["kind"] == "ValueError"
    for rank in (1, 2):
        lost, message = running.named(rank)
        assert lost == 0, message
        assert "it stopped with ValueError: this row is broken" in message


@slow
@pytest.mark.parametrize(("victim", "name"), [(2, ""), (0, "gossip_int8"), pytest.param(0, "ring", marks=nightly)])
def test_a_rank_that_hangs_is_named_after_the_timeout(job: Callable[..., Job], victim: int, name: str) -> None:
    """Rank 0 owns the store, which does not answer then."""
    running = job(3, _with_a_victim, victim, "SIGSTOP", 4.0, name)
    left = [rank for rank in range(3) if rank != victim]
    if victim:
        assert all("silent beyond the timeout" in message for message in check_survivors(running, victim, left))
    else:
        assert running.wait(left) == [1, 1]
        assert all("lost rank 0 (host " in running.record(rank)["message"] for rank in left)


# Lost while the others wait in the default process group


class Dies(Net):
    """Rank `victim` is killed at a `place` of the fit, just before a collective in which the others wait for it."""

    def __init__(self, victim: int, place: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3)))
        self.victim, self.place = victim, place
        self.metric = MeanMetric()

    def at(self, place: str) -> None:
        if self.place == place:
            if self.global_rank != self.victim:
                note(f"waits{self.global_rank}.json", pid=os.getpid())
                return
            wait_for_files(*(f"waits{rank}.json" for rank in range(4) if rank != self.victim))
            die()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.at("buffers")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.place in ("a collective of the user", "while rank 3 computes"):
            self.at(self.place)
            if self.place == "while rank 3 computes" and self.global_rank == 3:
                wait_for_files("waits0.json", "waits1.json")
                for rank in (1, 0):  # and rank 0 takes the store with it
                    pid = json.loads(Path(f"waits{rank}.json").read_text())["pid"]
                    while Path(f"/proc/{pid}").exists():
                        time.sleep(0.1)
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


class EndsLast(L.Callback):
    """A rank whose error has come waits until it has come to all of these."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        note(f"named{trainer.global_rank}.json")
        if trainer.global_rank in self.ranks:
            wait_for_files(*(f"named{rank}.json" for rank in self.ranks))


def _dies(victim: int, place: str) -> None:
    strategy = RingStrategy(AllReduce(bucket_mb=1e-4), timeout=timedelta(seconds=60))
    survivors = [rank for rank in range(4) if rank != victim]
    trainer = trainer_with(
        strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=place == "a checkpoint",
        callbacks=[EndsLast([0, 1] if place == "while rank 3 computes" else survivors)],
    )
    trainer.fit(Dies(victim, place), rows(64), rows(32) if place == "a metric" else None)


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        ("the decision before a batch", 2),
        *(
            pytest.param(place, victim, marks=slow)
            for place, victim in [("buffers", 0), ("a checkpoint", 2), ("while rank 3 computes", 2)]
        ),
        *(
            pytest.param(place, victim, marks=nightly)
            for place, victim in [("a metric", 0), ("a collective of the user", 2), ("the decision before a batch", 0)]
        ),
    ],
)
def test_all_survivors_name_the_rank_that_died_before(job: Callable[..., Job], place: str, victim: int) -> None:
    running = job(4, _dies, victim, place)
    survivors = [rank for rank in range(4) if rank != victim]
    assert running.wait(survivors) == [1, 1, 1]
    for rank in survivors:
        record = running.record(rank)
        assert record["message"].startswith(f"lost rank {victim} (host {socket.gethostname()}) "), record["message"]
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


def _uneven_cases() -> list[Any]:
    """The first ones of all pairs for which a test run has the time."""
    cases = all_pairs(["ring", "gossip_int8", "ring_int8", "gossip"], [False, True], [False, True])
    marks: list[Any] = [(), slow, slow, *[nightly] * len(cases)]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=False)]


@pytest.mark.parametrize(("name", "validates", "normed"), _uneven_cases())
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


# Whole jobs, as a shell starts them


def processes_of(folder: Path) -> list[int]:
    """Those whose command line names the folder: a job's, and nobody else's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(folder) in path.read_text():
                found.append(int(path.parent.name))
    return found


ENDLESS = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from test_failures import Endless, fit, rows

fit("ring", Endless(), data=rows(4096), devices=2, max_epochs=1000)
"""


class Endless(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            note(f"trains{self.global_rank}.json")


@slow
def test_ctrl_c_ends_all_processes_cleanly(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDLESS)
    command = [sys.executable, str(tmp_path / "script.py")]
    with open(tmp_path / "stderr", "w") as stderr:
        running = subprocess.Popen(command, env=shell(), cwd=tmp_path, stderr=stderr, start_new_session=True)
    try:
        trains = [tmp_path / f"trains{rank}.json" for rank in range(2)]
        until(lambda: all(path.exists() for path in trains), "both ranks train", lambda: [running.pid])
        assert len(processes_of(tmp_path)) == 2
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        until(lambda: running.poll() is not None, "the first process ends", lambda: [running.pid])
        until(lambda: not processes_of(tmp_path), "no process is left", lambda: processes_of(tmp_path))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    said = (tmp_path / "stderr").read_text()
    assert running.returncode == 1
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in said
    assert "Exception in thread" not in said
    assert "Traceback" not in said, said


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

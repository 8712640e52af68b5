"""Lost peers, interrupts and bad input under real trainers: an error with a name and a cure, never a hang."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from pool import Pool, reserve_port
from test_strategy import HERE, Net, check_replicas, fit, rows, run_script, shell, trainer_with
from torch import Tensor, nn

from ringstrategy import AllReduce, Gossip, Identity, PeerLostError, PlanMismatchError, RingStrategy
from ringstrategy.names import STRATEGIES
from ringstrategy.session import Session
from ringstrategy.topologies import Star
from ringstrategy.transport import lifeline
from ringstrategy.transport.connect import connect
from ringstrategy.transport.lifeline import Lifeline

PROMPT = 15.0  # seconds within which survivors must have noticed
pytestmark = pytest.mark.timeout(120)


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds:.0f} s"
        time.sleep(0.05)


class Job:
    """Ranks that may die: processes of their own, not the pool's. Each writes its output and its errors to a file."""

    def __init__(self, folder: Path, size: int, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning.pytorch", "ringstrategy"])
        self._holder = reserve_port()
        port = self._holder.getsockname()[1]
        self.folder = folder
        self.ranks = [
            context.Process(target=_rank, args=(str(folder), rank, size, port, function, args), daemon=True)
            for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def add(self, rank: int, function: Callable[..., None], *args: Any) -> None:
        """A process in the place of a rank that has ended."""
        port = self._holder.getsockname()[1]
        given = (str(self.folder), rank, len(self.ranks), port, function, args)
        self.ranks[rank] = multiprocessing.get_context("forkserver").Process(target=_rank, args=given, daemon=True)
        self.ranks[rank].start()

    def wait(self, ranks: list[int], seconds: float = 60.0) -> list[int | None]:
        """Exit codes of `ranks`, which must end within that time."""
        try:
            wait_until(lambda: all(not self.ranks[r].is_alive() for r in ranks), seconds, f"ranks {ranks} ended")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._where(ranks)}") from None
        return [self.ranks[rank].exitcode for rank in ranks]

    def _where(self, ranks: list[int]) -> str:
        """What each rank has printed, and the stacks of those that have not ended."""
        for rank in ranks:
            if self.ranks[rank].is_alive():
                os.kill(self.ranks[rank].pid or 0, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"rank {rank}, exit code {self.ranks[rank].exitcode}:\n{self.output(rank)}" for rank in ranks)

    def record(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"record{rank}.json"
        assert path.exists(), f"rank {rank} recorded no error; it said:\n{self.output(rank)}"
        return json.loads(path.read_text())

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text()

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        self._holder.close()


def _rank(folder: str, rank: int, size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(NODE_RANK="0", OMP_NUM_THREADS="1")
    os.chdir(folder)
    log = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException as error:
        note(f"record{rank}.json", kind=type(error).__name__, message=str(error), rank=getattr(error, "rank", None))
        raise


def note(path: str, **facts: Any) -> None:
    """Write at once whole, with the time."""
    Path(f"{path}.part").write_text(json.dumps({"time": time.time(), **facts}))
    os.rename(f"{path}.part", path)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(size: int, function: Callable[..., None], *args: Any) -> Job:
        jobs.append(Job(tmp_path, size, function, *args))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


# Lost peers


class Victim(Net):
    """In batch 3, when the backward pass comes to its last parameter, rank `victim` gets a signal, or raises."""

    def __init__(self, victim: int, how: str) -> None:
        super().__init__()
        self.victim, self.how = victim, how

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == self.victim:
            if self.how == "ValueError":
                note("struck.json")
                raise ValueError("this row is broken")
            self.layers[0].weight.register_hook(self._strike)
        return super().training_step(batch, batch_idx)

    def _strike(self, gradient: Tensor) -> None:
        time.sleep(0.3)  # until the earlier buckets are under way, and the others wait for this one
        note("struck.json")
        os.kill(os.getpid(), getattr(signal, self.how))


def _with_a_victim(victim: int, how: str, timeout: float = 60.0, **options: Any) -> None:
    strategy = RingStrategy(AllReduce(bucket_mb=1e-4), timeout=timedelta(seconds=timeout))
    fit(strategy, Victim(victim, how), data=rows(128), max_epochs=1, **options)


def check_survivors(job: Job, victim: int, survivors: list[int], seconds: float = PROMPT) -> list[str]:
    """Each names the lost rank, its host and the place, soon, and ends with a code that is not 0."""
    assert all(code == 1 for code in job.wait(survivors))
    struck = json.loads((job.folder / "struck.json").read_text())["time"]
    messages = []
    for rank in survivors:
        record = job.record(rank)
        assert record["kind"] == PeerLostError.__name__, job.output(rank)
        assert record["rank"] == victim, record["message"]
        assert record["message"].startswith(f"lost rank {victim} (host {socket.gethostname()}) at step 3, in bucket ")
        assert record["time"] - struck < seconds
        messages.append(record["message"])
    return messages


@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_rank_is_named_by_every_survivor(job: Callable[..., Job], victim: int) -> None:
    """Rank 0 takes the store with it."""
    running = job(4, _with_a_victim, victim, "SIGKILL")
    check_survivors(running, victim, [rank for rank in range(4) if rank != victim])
    assert running.wait([victim]) == [-signal.SIGKILL]


def test_a_rank_that_raises_is_quoted_by_the_others(job: Callable[..., Job]) -> None:
    running = job(4, _with_a_victim, 1, "ValueError")
    assert all(code == 1 for code in running.wait([0, 1, 2, 3]))
    assert running.record(1)["kind"] == "ValueError"
    for rank in (0, 2, 3):
        record = running.record(rank)
        assert record["kind"] == PeerLostError.__name__, running.output(rank)
        assert record["rank"] == 1, record["message"]
        assert "it stopped with ValueError: this row is broken" in record["message"]
        assert record["time"] - running.record(1)["time"] < PROMPT


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_timeout(job: Callable[..., Job]) -> None:
    running = job(4, _with_a_victim, 2, "SIGSTOP", 4.0)
    messages = check_survivors(running, 2, [0, 1, 3], seconds=4.0 + 8.0)
    assert all("silent beyond the timeout" in message for message in messages)


def _with_fewer_batches() -> None:
    mine = 12 if os.environ["LOCAL_RANK"] == "1" else 24
    fit("ring", Net(), data=rows(mine), use_distributed_sampler=False, max_epochs=1)


def test_a_rank_with_fewer_batches_is_named(job: Callable[..., Job]) -> None:
    running = job(3, _with_fewer_batches)
    codes = running.wait([0, 1, 2])
    for rank in (0, 2):
        assert codes[rank] == 1
        message = running.record(rank)["message"]
        assert message.startswith("lost rank 1 "), message
        assert "after 3 batches" in message
        assert "is at batch 4" in message or "is before batch 4" in message, message
        assert "do all ranks have the same number of batches" in message
        assert "uneven='join'" in message


class Lagging:
    """A client of a store as torch's is: a write is on its way until this client next waits for an answer."""

    def __init__(self, server: dict[str, bytes]) -> None:
        self._server, self._on_the_way = server, dict[str, bytes]()

    def set(self, key: str, value: str) -> None:
        self._on_the_way[key] = value.encode()

    def _answered(self) -> dict[str, bytes]:
        self._server.update(self._on_the_way)
        self._on_the_way.clear()
        return self._server

    def check(self, keys: list[str]) -> bool:
        return self._answered().keys() >= set(keys)

    def get(self, key: str) -> bytes:
        return self._answered()[key]

    def add(self, key: str, amount: int) -> int:
        self._answered()[key] = str(int(self._server.get(key, b"0")) + amount).encode()
        return int(self._server[key])


def test_what_a_rank_writes_is_there_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may look as soon as a barrier, or a closed connection, tells it that this one went on."""
    server: dict[str, bytes] = {}
    clients = [Lagging(server) for _ in range(2)]
    runs = []
    for client in clients:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda client=client: client)
        runs.append(lifeline.announce(clients.index(client)))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: clients[0])
    lifeline.check_all_announced(runs[0], 2)
    with pytest.raises(PlanMismatchError, match="rank 2 does not train with a RingStrategy"):
        lifeline.check_all_announced(runs[0], 3)
    Lifeline(clients[1], 1, 2).leave("ValueError: no such file")  # type: ignore[arg-type]
    assert clients[0].get("left/1") == b"ValueError: no such file"


class InStep(Lagging):
    """Clients that look in the same instant: what one writes, the others find when they look the next time."""

    def _answered(self) -> dict[str, bytes]:
        return self._server

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert not expected
        return self._server.setdefault(key, value.encode())

    def arrive(self) -> None:
        super()._answered()


@pytest.mark.parametrize("later", [0, 1])
def test_ranks_that_look_in_step_see_where_the_others_are(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """Rank 0 waits for a batch that rank 1 does not have; the one who writes later hides what the other wrote."""
    monkeypatch.setattr(lifeline, "DOUBT_SECONDS", 0.05)
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 0.1)
    server: dict[str, bytes] = {}
    clients = [InStep(server) for _ in range(2)]
    lines = [Lifeline(client, rank, 2) for rank, client in enumerate(clients)]  # type: ignore[arg-type]
    for line in lines:
        line.begin_batch()
        line.begin_exchange()
        line.end_batch()
    lines[1].leave_training("the end of its training")
    for _ in range(10):
        for line in lines:
            error = line.news("near batch 1")
            if error is not None:
                assert "went on to the end of its training after 1 batches" in str(error)
                return
        clients[1 - later].arrive()
        clients[later].arrive()
        time.sleep(0.02)
    pytest.fail("rank 0 does not see that rank 1 went on")


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    base = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    second, nothing = timedelta(seconds=1), lambda: None

    def lines(name: str) -> list[Lifeline]:
        return [Lifeline(dist.PrefixStore(name, base), rank, 3) for rank in range(3)]

    never = lines("never")
    base.set("never/host/1", "there 4711")
    with pytest.raises(PeerLostError, match=r"rank 2 .*while setting up: it did not come to set up in time") as caught:
        never[0].greet("here 4711", second, nothing)
    assert caught.value.rank == 2
    fails = lines("fails")
    fails[2].fail("ValueError: no such file")
    for line in fails[:2]:
        with pytest.raises(PeerLostError, match="it stopped with ValueError: no such file") as caught:
            line.greet("here 4711", 60 * second, nothing)
        assert caught.value.rank == 2
    comes = lines("comes")
    base.set("comes/host/1", "there 4711")
    base.set("comes/host/2", "elsewhere 4712")
    assert comes[0].greet("here 4711", second, nothing) == ["here 4711", "there 4711", "elsewhere 4712"]
    assert comes[0].hosts == ["here", "there", "elsewhere"]


def _freezes_rank_0(name: str) -> None:
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=4))
    fit(strategy, Freezes(), data=rows(128), max_epochs=1)


def _dies_before_it_sends_its_buffers() -> None:
    send, calls = Session.send_buffers, []

    def die_first(self: Session, **options: Any) -> None:
        calls.append(self)
        if len(calls) == 4 and os.environ["LOCAL_RANK"] == "0":
            time.sleep(0.3)  # until the others wait for it
            note("struck.json")
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, **options)

    Session.send_buffers = die_first  # type: ignore[method-assign]
    layers = nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Linear(17, 3))
    fit("ring", Net(layers), data=rows(128), max_epochs=1)


def test_a_rank_that_dies_before_it_sends_its_buffers_is_named(job: Callable[..., Job]) -> None:
    """The others wait in a collective of the default group."""
    running = job(3, _dies_before_it_sends_its_buffers)
    assert running.wait([1, 2]) == [1, 1]
    struck = json.loads((running.folder / "struck.json").read_text())["time"]
    for rank in (1, 2):
        record = running.record(rank)
        assert (record["kind"], record["rank"]) == (PeerLostError.__name__, 0), record
        assert "near batch 3" in record["message"], "not in a backward"
        assert record["time"] - struck < PROMPT


class Freezes(Net):
    """Rank 0, whose process owns the store, freezes within its fourth backward."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 0:
            self.layers[0].weight.register_hook(self._freeze)
        return super().training_step(batch, batch_idx)

    def _freeze(self, gradient: Tensor) -> None:
        time.sleep(0.3)
        note("struck.json")
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "gossip_int8"])
def test_a_frozen_owner_of_the_store_is_named_too(job: Callable[..., Job], name: str) -> None:
    running = job(3, _freezes_rank_0, name)
    assert running.wait([1, 2], 40) == [1, 1]
    struck = json.loads((running.folder / "struck.json").read_text())["time"]
    for rank in (1, 2):
        record = running.record(rank)
        assert "lost rank 0 (host " in record["message"], record
        assert record["time"] - struck < 4 + 12


class FailsInSetUp(Net):
    """Rank 1 fails after the barrier behind set-up, or dies there; the others go on to meet."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        if os.environ["LOCAL_RANK"] == "1":
            time.sleep(0.5)
            note("struck.json")
            if self.how == "raises":
                raise FileNotFoundError("no weights on this host")
            os.kill(os.getpid(), signal.SIGKILL)


def _fails_in_set_up(how: str) -> None:
    fit("ring", FailsInSetUp(how))


@pytest.mark.parametrize("how", ["dies", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_rank_that_fails_before_it_meets_the_others_is_named(job: Callable[..., Job], how: str) -> None:
    running = job(3, _fails_in_set_up, how)
    running.wait([0, 1, 2], 30)
    struck = json.loads((running.folder / "struck.json").read_text())["time"]
    for rank in (0, 2):
        record = running.record(rank)
        assert record["kind"] == PeerLostError.__name__, record
        assert record["message"].startswith("lost rank 1 "), record
        if how == "raises":
            assert "it stopped with FileNotFoundError: no weights on this host" in record["message"]
        assert record["time"] - struck < 8


def _uneven(name: str, validates: bool, normed: bool) -> None:
    lifeline.DOUBT_SECONDS = 4.0
    mine = 12 if os.environ["LOCAL_RANK"] == "1" else 24
    layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)) if normed else None
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=60))
    trainer = trainer_with(strategy, use_distributed_sampler=False, max_epochs=1, num_sanity_val_steps=0)
    begin = time.time()
    try:
        trainer.fit(Net(layers), rows(mine), rows(12) if validates else None)
    finally:
        note(f"took{os.environ['LOCAL_RANK']}.json", seconds=time.time() - begin)


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("name", ["ring", "ring_int8", "gossip", "gossip_int8"])
def test_ranks_with_other_numbers_of_batches_are_told(
    job: Callable[..., Job], name: str, validates: bool, normed: bool
) -> None:
    """With and without buffers, for which Lightning's process group is needed at each step."""
    running = job(3, _uneven, name, validates, normed)
    codes = running.wait([0, 1, 2], 40)
    assert codes[::2] == [1, 1]
    messages = [running.record(rank)["message"] for rank in range(3) if codes[rank]]
    took = [json.loads((running.folder / f"took{rank}.json").read_text())["seconds"] for rank in range(3)]
    assert max(took) < 20, took
    assert all("the same number of batches" in message for message in messages), messages
    assert all("rank 1" in message for message in (messages[0], messages[-1])), messages


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("name", ["ring", "gossip"])
def test_who_waits_for_its_next_batch_is_told_that_the_other_has_none(
    job: Callable[..., Job], name: str, validates: bool
) -> None:
    """Of two ranks neither has begun what the other could not have."""
    running = job(2, _uneven, name, validates, False)
    codes = running.wait([0, 1], 40)
    assert codes[0] == 1
    messages = [running.record(rank)["message"] for rank in range(2) if codes[rank]]
    causes = ["rank 0 waits for batch 4", "rank 0 is at batch 4"]
    if not validates:
        causes.append("the end of its training")
    assert any(cause in message for cause in causes for message in messages), messages
    assert all("lost rank 1" in m and "the same number of batches" in m for m in messages), messages


class Skips(Net):
    """In manual optimization rank 1 does not step in batch 2."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx != 2 or self.global_rank != 1:
            optimizer.step()


def _skips_a_step(overlap: bool) -> None:
    fit(RingStrategy(Gossip(Star(), overlap=overlap)), Skips(), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_step_less_often_than_others_are_told(job: Callable[..., Job], overlap: bool) -> None:
    running = job(3, _skips_a_step, overlap)
    assert 0 not in running.wait([0, 1, 2], 40)
    for rank in range(3):
        message = running.record(rank)["message"]
        assert "step equally often?" in message, message


def _validates_slowly() -> None:
    """One rank takes its time to validate, while the others wait for it in their next batch."""

    class Slow(Net):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            time.sleep(3 * (self.global_rank == 1))

    for name in ("ring", "gossip"):
        trainer = trainer_with(name, num_sanity_val_steps=0, val_check_interval=2, max_epochs=1)
        trainer.fit(Slow(), rows(), rows(4))
        check_replicas(trainer)


@pytest.mark.slow
def test_a_rank_that_validates_slowly_is_waited_for(ranks: Pool) -> None:
    ranks(3, _validates_slowly)


def _other_strategies() -> str:
    name = "ring_int8" if os.environ["LOCAL_RANK"] == "0" else "ddp"
    fit(name, Net())
    return ""


def test_a_rank_with_ddp_beside_ours_is_an_error_at_once(job: Callable[..., Job]) -> None:
    running = job(2, _other_strategies)
    assert running.wait([0, 1], 30) == [1, 1]
    record = running.record(0)
    assert record["kind"] == PlanMismatchError.__name__
    assert "rank 1 does not train with a RingStrategy" in record["message"]
    assert "give every rank the same Trainer(strategy=...)" in record["message"]


class AllFail(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            time.sleep(0.3 * (self.global_rank == 0))  # the others are there first
            raise ArithmeticError("everywhere")
        return super().training_step(batch, batch_idx)


class SlowlySaved(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(2)
        super().save_checkpoint(*args, **kwargs)


def _all_fail(folder: str) -> float:
    saver = OnExceptionCheckpoint(folder, "failed")
    begin = time.monotonic()
    with pytest.raises((ArithmeticError, PeerLostError)):
        fit("ring", AllFail(), callbacks=[saver], plugins=[SlowlySaved()], enable_checkpointing=True)
    took = time.monotonic() - begin
    fit("ring", Net(), ckpt_path=f"{folder}/failed.ckpt", max_epochs=3)  # each rank at once
    return took


def test_ranks_that_all_failed_wait_for_each_others_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    assert max(ranks(3, _all_fail, str(tmp_path))) < 20


def _abort_while_all_wait() -> float:
    """Rank 0 aborts while its own thread and all others wait for bytes that nobody sends."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peers = connect(torch.device("cpu"), timedelta(seconds=60))
    before = threading.active_count()
    nothing = torch.empty(8, dtype=torch.uint8)
    ticket = peers.submit(lambda: peers.post({}, {(peers.rank + 1) % peers.size: nothing}).wait(), "in a test")
    dist.barrier()
    time.sleep(0.3)
    begin = time.monotonic()
    if peers.rank == 0:
        peers.abort("TestError: enough")
    with pytest.raises(PeerLostError, match="TestError: enough") as caught:
        ticket.wait()
    assert caught.value.rank == 0
    peers.close()
    assert threading.active_count() == before - 1
    return time.monotonic() - begin


def test_an_abort_ends_every_wait_at_once(ranks: Pool) -> None:
    """Ranks 2 and 3 of 5 are not waiting for rank 0; the cascade must reach them."""
    assert max(ranks(5, _abort_while_all_wait)) < 3


def _all_announce_again_and_again() -> tuple[int, int]:
    """All ranks and the store share one core, so that the store is often late; returns rounds, and ranks missed."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rounds = missed = 0
        for _ in range(1000):
            run = lifeline.announce(dist.get_rank())
            dist.barrier()
            try:
                lifeline.check_all_announced(run, dist.get_world_size())
            except PlanMismatchError:
                missed += 1
            rounds += 1
        dist.destroy_process_group()
    finally:
        os.sched_setaffinity(0, cores)
    return rounds, missed


@pytest.mark.slow
def test_who_announced_itself_is_not_missed_by_a_store_that_lags(ranks: Pool) -> None:
    """With a write that does not wait for the store, rank 1 misses rank 0 some twenty times."""
    assert ranks(2, _all_announce_again_and_again) == [(1000, 0), (1000, 0)]


# Whole jobs, as a shell starts them


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: a job's processes, and nobody else's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:  # it has just ended
            continue
        if str(folder) in command:
            found.append(command)
    return found


KILLED = """
from test_failures import _with_a_victim

_with_a_victim(2, "SIGKILL", devices=3)
"""


@pytest.mark.slow
def test_a_child_killed_under_lightnings_launcher_ends_the_job(tmp_path: Path) -> None:
    done = run_script(tmp_path, KILLED)
    assert done.returncode != 0
    assert (tmp_path / "struck.json").exists(), done.stderr
    wait_until(lambda: not processes_of(tmp_path), PROMPT, "no process was left")


ENDLESS = """
import time
from test_failures import Endless, fit, note, rows

fit("ring", Endless(), data=rows(4096), devices=2, max_epochs=1000)
"""


class Endless(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            note(f"trains{self.global_rank}.json")


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the terminal's process group", "the first process"])
def test_ctrl_c_ends_all_processes_cleanly(tmp_path: Path, whom: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{ENDLESS}")
    with open(tmp_path / "stderr", "w") as stderr:
        running = subprocess.Popen(
            [sys.executable, str(script)], env=shell(), cwd=tmp_path, stderr=stderr, start_new_session=True
        )
    try:
        trains = [tmp_path / f"trains{rank}.json" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in trains), 60, "both ranks trained")
        assert len(processes_of(tmp_path)) == 2
        if whom == "the first process":
            running.send_signal(signal.SIGINT)
        else:
            os.killpg(running.pid, signal.SIGINT)
        code = running.wait(10)
        wait_until(lambda: not processes_of(tmp_path), 10, "no process was left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    said = (tmp_path / "stderr").read_text()
    assert code == 1
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in said
    assert "Exception in thread" not in said
    if whom == "the first process":  # the other one was not interrupted: it may say whom it lost, and no more
        assert "Traceback" not in said or "it stopped with KeyboardInterrupt" in said, said
        assert said.count("Traceback") <= 3, said
    else:
        assert "Traceback" not in said, said


# Ranks that differ


class Wider(Net):
    def __init__(self) -> None:
        width = 17 + (os.environ["LOCAL_RANK"] == "1")
        super().__init__(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)))


def _differing(what: str) -> tuple[str, float]:
    odd = os.environ["LOCAL_RANK"] == "1"
    strategy: Any = "ring"
    if odd and what == "codec":
        strategy = "ring_fp16"
    elif odd and what == "bucket":
        strategy = RingStrategy(AllReduce(bucket_mb=1.0))
    begin = time.monotonic()
    with pytest.raises(PlanMismatchError) as caught:
        fit(strategy, Wider() if what == "model" else Net())
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("model", "rank 1 has 'layers.2.weight: (3, 18) torch.float32"),
        ("codec", "rank 1 has 'AllReduce(codec=Cast("),
        ("bucket", "bucket_mb=1.0"),
    ],
)
def test_ranks_that_differ_are_an_error_on_all(ranks: Pool, what: str, words: str) -> None:
    for message, seconds in ranks(3, _differing, what):
        assert "rank 2 has" not in message
        assert words in message, message
        assert "Give every rank the same model" in message
        assert seconds < PROMPT


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "cure"),
    [
        ({"tiemout": timedelta(1)}, TypeError, "did you mean 'timeout'"),
        ({"codec": Identity()}, TypeError, r"RingStrategy\(AllReduce\(codec=...\)\)"),
        ({"find_unused_parameters": True}, TypeError, r"RingStrategy\(AllReduce\(find_unused_parameters=...\)\)"),
        ({"ddp_comm_hook": print}, TypeError, "here a codec does that"),
        ({"static_graph": True}, TypeError, "'static_graph' is torch DDP's"),
        ({"algorithm": Identity()}, TypeError, r"AllReduce\(codec=..., collective=...\)"),
        ({"algorithm": "allreduce"}, TypeError, r"ringstrategy.AllReduce\(\)"),
        ({"algorithm": AllReduce}, TypeError, r"ringstrategy.AllReduce\(\)"),
        ({"timeout": timedelta(0)}, ValueError, "positive"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "positive"),
        ({"timeout": 60}, TypeError, "timedelta"),
        ({"broadcast_buffers": "no"}, TypeError, "broadcast_buffers"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_with_the_cure(arguments: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        RingStrategy(**arguments)


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


def _lbfgs() -> str:
    with pytest.raises(ValueError, match="LBFGS") as caught:
        fit("ring", Newton())
    return str(caught.value)


def _lbfgs_alone() -> None:
    assert fit("ring", Newton(), max_epochs=1).global_step > 0


def test_lbfgs_is_refused_unless_it_is_alone(ranks: Pool) -> None:
    assert all("another optimizer" in message for message in ranks(2, _lbfgs))
    ranks(1, _lbfgs_alone)

"""Ranks are killed, fail or stray while Lightning trains: others name them, or go on in the same processes.

A rank that notices another's death only when a third one ends would never end here: nobody ends before all have named.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from jobs import die
from jobs import job as job  # a fixture
from lightning.pytorch.callbacks import Callback
from on_ranks import on_ranks
from pairs import all_pairs
from test_strategy import Net, fit, rows, trainer_with
from test_uneven import Endless
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import faults
from benchmarks.faulted import STEPS, Plan, be_a_rank
from benchmarks.ranks import Job, note, noted
from ringstrategy import AllReduce, RingStrategy
from ringstrategy.failure import progress
from ringstrategy.integrations.lightning import stopping
from ringstrategy.integrations.lightning.elastic import Rest
from ringstrategy.integrations.lightning.launcher import BringingLauncherMixin, OutlivingLauncherMixin
from ringstrategy.integrations.lightning.processes import Given
from ringstrategy.transport.connect import connect

slow, nightly = pytest.mark.slow, pytest.mark.nightly


# Lost while the others train


class EndsLast(Callback):
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
@on_ranks(2)
def test_a_rank_that_strays_is_named_by_all_with_its_place(how: str, epochs: int, where: str) -> None:
    trainer = trainer_with("ring", num_sanity_val_steps=0, max_epochs=epochs)
    said = pytest.raises(RuntimeError, match=f"^lost rank 1 .*{where}")
    with mock.patch.object(progress, "DOUBT_SECONDS", 2.0), said:
        trainer.fit(Strays(how), rows(), rows(12) if how == "logs" else None)


# The others go on, as an oracle does

PLACES = ("backward", "validation", "save", "forward", "epoch end", "start", "optimizer", "batch end")
NAMES = ("ring", "ring_int8, feedback", "gossip", "local SGD", "powersgd", "gossip at once", "auto")


def _plan(folder: Path, place: str, step: int, policy: Any = "shrink", **how: Any) -> Plan:
    how = {"fault": "kill", "victims": (1,), "timeout": 20.0, **how}
    return Plan(str(folder), policy=policy, place=place, step=step, **how)


def _cases() -> list[Any]:
    """Each algorithm once; at night each at each place."""
    first = list(zip(PLACES, NAMES, itertools.cycle([0, 2]), strict=False))
    others = [case for case in all_pairs(PLACES, NAMES, [2, 0]) if case not in first]
    marks = [*[slow] * len(first), *[nightly] * len(others)]
    return [pytest.param(*case, marks=mark) for case, mark in zip([*first, *others], marks, strict=True)]


@pytest.mark.parametrize(("place", "strategy", "victim"), _cases())
def test_survivors_go_on(tmp_path: Path, place: str, strategy: str, victim: int) -> None:
    """And what they save begins another run, with the same bits if the algorithm gives them again."""
    step = STEPS if place in ("validation", "save", "epoch end") else 4
    plan = _plan(tmp_path, place, step, victims=(victim,), strategy=strategy)
    assert not [*faults.Start(plan).found, *faults.missed(plan), *faults.of_survivors(plan)]
    assert strategy not in faults.DRAWN or not faults.torn_by_survivors(plan)


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("backward", {"size": 4, "victims": (0, 2)}),  # half of the ranks, and the store
        pytest.param("send", {"delay": 7}, marks=slow),
        pytest.param("send", {"delay": 3, "victims": (0,), "strategy": "direct bf16"}, marks=nightly),
        pytest.param("backward", {"step": 2, "accumulate": 2, "victims": (0,)}, marks=slow),  # a window is drawn again
        pytest.param("batch end", {"step": 2, "accumulate": 2, "victims": (0,)}, marks=nightly),
        pytest.param("backward", {"fault": "freeze", "timeout": 4.0}, marks=slow),  # wakes when the others have ended
    ],
)
def test_survivors_do_as_an_oracle(tmp_path: Path, place: str, how: dict[str, Any]) -> None:
    plan = _plan(tmp_path, place, **{"step": 4, **how})
    assert not [*faults.Start(plan).found, *faults.missed(plan), *faults.of_survivors(plan)]
    left_behind = ["LeftBehindError"] * (plan.fault == "freeze")
    assert [error["kind"] for errors in plan.noted("error")[1:2] for error in errors] == left_behind


class Torn(Callback):
    """Rank `victim` is killed before its last message of a step, once another has got all of its own and stepped."""

    def __init__(self, plan: Plan, victim: int) -> None:
        self.plan, self.victim = plan, victim
        self.sent, self.last = 0, -1  # messages
        self.before = list[int]()  # each step

    def on_train_start(self, *_: Any) -> None:
        if int(os.environ["LOCAL_RANK"]) == self.victim:
            self.send, dist.isend = dist.isend, self.count

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(self.sent)
        if len(self.before) > self.plan.step:
            self.last = 2 * self.sent - self.before[-2]  # as many as in the step before

    def count(self, *args: Any, **options: Any) -> Any:
        self.sent += 1
        if self.sent == self.last:
            while not any(step["step"] > self.plan.step for steps in self.plan.noted("step") for step in steps):
                time.sleep(0.05)
            die()
        return self.send(*args, **options)


@slow
def test_survivors_that_are_a_step_apart_go_on(job: Callable[..., Job], tmp_path: Path) -> None:
    plan = _plan(tmp_path, "send", 4, victims=(0,))
    running = job(3, be_a_rank, replace(plan, fault=""), Torn(plan, 0))
    assert running.wait() == [-signal.SIGKILL, 0, 0], running.output(1) + running.output(2)
    made = [[step["step"] for step in steps if step["size"] == 3] for steps in plan.noted("step")]
    assert [steps[-1] for steps in made] == [4, 5, 4]
    assert not faults.of_survivors(plan)


# Replacements


def _replace(plan: Plan, addresses: list[str], *callbacks: Callback) -> None:
    os.environ["RINGSTRATEGY_JOIN"] = ",".join(addresses)
    be_a_rank(replace(plan, fault=""), *callbacks)


def _addresses(plan: Plan) -> list[str]:
    return plan.noted("batch")[0][0]["addresses"]


@pytest.mark.parametrize(
    ("place", "step"),
    [
        pytest.param("forward", 4, marks=slow),
        pytest.param("validation", STEPS, marks=nightly),
        pytest.param("epoch end", STEPS, marks=nightly),
    ],
)
def test_a_replacement_is_waited_for(job: Callable[..., Job], tmp_path: Path, place: str, step: int) -> None:
    plan = _plan(tmp_path, place, step, "wait")
    running = job(3, be_a_rank, plan)
    running.wait([1])
    running.add(1, _replace, plan, _addresses(plan))
    assert running.wait() == [0, 0, 0]
    assert not [*faults.missed(plan), *faults.wrong_means(plan, range(3)), *faults.lost_samples(plan)]


class Alone(Callback):
    """Notes how far the parameters are from those that ranks share when a rank that was alone has others again.

    It trains five batches alone, and goes on when another rank has come to its door.
    """

    batches = 0  # alone

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        members = trainer.strategy.members
        now, file = members.now, Path(f"joined{os.environ['LOCAL_RANK']}")
        self.batches += now.size == 1
        while now.size == 1 and self.batches > 5 and not members.newcomers():
            time.sleep(0.05)
        time.sleep(0.2)  # it looks for others once a second, and has some 60 batches left
        if now.size == 2 and now.generation > 1 and not file.exists():
            shared, held = trainer.strategy.algorithm.shared_values(), dict(pl_module.named_parameters())
            note(file, distance=max(float((value - held[name]).detach().abs().max()) for name, value in shared.items()))


@slow
def test_what_the_last_survivor_trained_alone_is_shared_with_its_replacement(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    plan = _plan(tmp_path, "forward", 4, size=2, epochs=12, strategy="local SGD")
    running = job(2, be_a_rank, plan, Alone())
    running.wait([1])
    running.until(lambda: sum(batch["size"] == 1 for batch in plan.noted("batch")[0]) > 4, "it trains alone")
    running.add(1, _replace, plan, _addresses(plan), Alone())
    assert running.wait() == [0, 0], running.output(0) + running.output(1)
    assert [noted(tmp_path / f"joined{rank}") for rank in range(2)] == [[{"distance": 0.0}]] * 2


class Signals(Callback):
    """These ranks get the signal at the end of this batch. Rank 0 never looks whether another rank has got one."""

    def __init__(self, rank: int = -1, step: int = -1) -> None:
        self.rank, self.step = rank, step

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        stopping._LOOK_SECONDS = math.inf

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("policy", "asked"), [("shrink", 2), ("wait", 2), pytest.param("wait", 0, marks=nightly)])
def test_a_loss_makes_no_rank_forget_sigterm(job: Callable[..., Job], tmp_path: Path, policy: str, asked: int) -> None:
    """Rank 2 gets it a batch before the loss, and writes it where nobody looks any more; or ranks wait for others."""
    plan = _plan(tmp_path, "forward", 2, policy)
    running = job(3, be_a_rank, plan, Signals(2, 2) if policy == "shrink" else Signals())
    if policy == "wait":
        running.until(lambda: "training waits for 1 more: there are 2 ranks" in running.output(0), "they wait", [0, 2])
        running.signal(asked, signal.SIGTERM)
    assert running.wait([0, 2]) == [0, 0]
    assert [running.record(rank)["kind"] for rank in (0, 2)] == ["SIGTERMException"] * 2
    assert {batch["world"] for batches in plan.noted("batch") for batch in batches} == {0}, "nobody trained since"
    [saved] = plan.saved.glob("*.ckpt")
    assert saved.name == "last.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(("samples", "skip", "size"), [(10, 0, 3), (10, 4, 3), (10, 9, 3), (10, 10, 2), (12, 6, 1)])
def test_what_is_left_of_an_epoch_is_shared_out_once(samples: int, skip: int, size: int) -> None:
    def shares(epoch: int) -> list[list[int]]:
        whole = DistributedSampler(range(samples), 2, 1, shuffle=True)
        rests = [Rest(whole, rank, size, skip=skip, done=4, epoch=epoch) for rank in range(size)]
        assert {len(rest) for rest in rests} == {4 + -(-(samples - skip) // size)}
        return [list(rest) for rest in rests]

    drawn = DistributedSampler(range(samples), 1, 0, shuffle=True)
    drawn.set_epoch(1)
    left = list(drawn)[skip:]
    of_ranks = shares(1)
    assert len({len(share) for share in of_ranks}) == 1
    together = [sample for row in zip(*of_ranks, strict=True) for sample in row]
    assert together[: len(left)] == left
    assert set(together) == set(left)
    assert skip > 8 or shares(2) != of_ranks


# Processes


def test_a_newcomer_is_not_rank_0_and_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    place = Given.newcomer()
    assert (place.global_rank(), place.world_size(), place.local_rank(), place.node_rank()) == (1, 2, 3, 0)
    assert place.creates_processes_externally
    given = Given(4, 5, 1, 2)
    assert (given.global_rank(), given.world_size(), given.local_rank(), given.node_rank()) == (4, 5, 1, 2)


class Launches:
    """In the place of Lightning's launcher."""

    def _wrapping_function(self, process_idx: int, *args: Any) -> None:
        raise SystemExit(process_idx)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> str:
        return "recovered"


class Bringing(BringingLauncherMixin, Launches):
    """Its base class is Lightning's only for type checkers."""


def test_a_process_that_sigterm_ends_hands_that_to_the_one_that_waits() -> None:
    results = mock.Mock()
    for process in (0, 1):
        with pytest.raises(SystemExit):
            Bringing()._wrapping_function(process, None, None, None, None, results)
    [((stopped,), _)] = results.put.call_args_list
    assert stopped.code == 0, "local rank 0's alone"
    with pytest.raises(SystemExit):
        Bringing()._recover_results_in_main_process(stopped, mock.Mock())


def test_processes_that_were_let_go_end_nobody() -> None:
    class Outliving(OutlivingLauncherMixin):
        cluster_environment = mock.Mock(creates_processes_externally=False)
        num_processes, num_nodes, procs = 2, 1, ["rank 1"]
        package, _call_children_scripts = mock.Mock(), mock.Mock()

        def __init__(self) -> None: ...

    launcher = Outliving()
    assert launcher.launch(lambda: "trained") == "trained"
    launcher._call_children_scripts.assert_called_once_with()
    watched = launcher.package.ChildProcessObserver
    watched.assert_called_once_with(os.getpid(), ["rank 1"])
    watched.return_value.start.assert_called_once_with()
    launcher.let_go()
    assert watched.return_value._child_processes == []


@pytest.mark.parametrize("data", [DataLoader(Endless(rows()), batch_size=4), {"a": rows(), "b": rows()}], ids=type)
@on_ranks(2)
def test_what_cannot_be_shared_out_again_is_refused_before_the_first_batch(data: Any) -> None:
    with pytest.raises(ValueError, match="one DataLoader over a data set with a length"):
        fit(RingStrategy(AllReduce(), on_peer_loss="shrink"), Net(), data=data)

"""Ranks are killed while Lightning trains, and the others go on in the same processes, as an oracle does."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import Job, die, note
from jobs import job as job  # a fixture
from lightning.pytorch.callbacks import ModelCheckpoint
from pairs import all_pairs
from pool import Pool
from test_stopping import Signals
from test_strategy import Net, fit, rows, trainer_with
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    Collective,
    Direct,
    Gossip,
    LocalSGD,
    Nesterov,
    PowerSGD,
    Ring,
    RingStrategy,
)
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.integrations.lightning import stopping
from ringstrategy.integrations.lightning.elastic import Rest
from ringstrategy.integrations.lightning.launcher import BringingLauncherMixin, OutlivingLauncherMixin
from ringstrategy.integrations.lightning.processes import Given
from ringstrategy.membership import members
from ringstrategy.session import Session

SAMPLES, BATCH, EPOCHS = 96, 4, 2
slow, nightly = pytest.mark.slow, pytest.mark.nightly


class Struck(Net):
    """Ranks die at a step and a place of the fit, and each notes the batches that it trains on."""

    def __init__(self, deaths: dict[int, tuple[str, int]]) -> None:
        super().__init__()
        self.deaths, self.born = deaths, int(os.environ.get("BORN") or os.environ.get("LOCAL_RANK", "0"))

    seconds = 0.0  # of a step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def at(self, place: str) -> None:
        if self.deaths.get(self.born) == (place, self.global_step):
            die()

    def on_train_start(self) -> None:
        self.at("start")

    def on_train_epoch_start(self) -> None:
        now = self.trainer.strategy.members.now
        note(f"members{self.born}.json", addresses=() if now is None else now.addresses)
        self.at("epoch start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("batch start")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with Path(f"batches{self.born}.jsonl").open("a") as file:
            now = self.trainer.strategy.members.now
            seen = {"world": now.generation, "size": now.size, "rank": now.rank, "born": self.born}
            seen |= {"epoch": self.current_epoch, "step": self.global_step}
            file.write(json.dumps({**seen, "x": batch[0].tolist(), "y": batch[1].tolist()}) + "\n")
        time.sleep(self.seconds)
        self.at("forward")
        if batch_idx > 0:  # buckets are planned
            self.layers[0].weight.register_hook(self._backward)
        return super().training_step(batch, batch_idx)

    def _backward(self, gradient: Tensor) -> None:
        self.at("backward")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.at("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch end")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.at("validation")
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.at("validation end")

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("save")


class Torn(Struck):
    """Rank `victim` is killed before its last message of a step, when another rank has got all of its own and stepped.

    Each rank notes the steps that its optimizer makes.
    """

    STEP = 3

    def __init__(self, victim: int) -> None:
        super().__init__({})
        self.victim = victim
        self.sent, self.last = 0, -1  # messages
        self.sent_before: list[int] = []  # each step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self._note_step)
        return optimizer

    def _note_step(self, *_: Any) -> None:
        with Path(f"steps{self.born}.jsonl").open("a") as file:
            world = self.trainer.strategy.members.now.generation
            file.write(json.dumps({"world": world, "step": self.global_step}) + "\n")

    def on_train_start(self) -> None:
        if self.born == self.victim:
            self._isend, dist.isend = dist.isend, self._count

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.sent_before.append(self.sent)
        if len(self.sent_before) > self.STEP:
            self.last = 2 * self.sent - self.sent_before[-2]  # as many as in the step before
        return super().training_step(batch, batch_idx)

    def _count(self, *args: Any, **options: Any) -> Any:
        """In place of `isend`."""
        self.sent += 1
        if self.sent == self.last:
            while not any(self.STEP in steps for steps in _steps(Path()).values()):
                time.sleep(0.05)
            die()
        return self._isend(*args, **options)


def _steps(folder: Path, world: int = 0) -> dict[int, list[int]]:
    """That each rank has made in a world."""
    steps: dict[int, list[int]] = {}
    for file in folder.glob("steps*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps[int(file.stem[5:])] = [line["step"] for line in lines if line["world"] == world]
    return steps


def _train(
    deaths: dict[int, tuple[str, int]] | Struck,
    on_peer_loss: Any,
    *,
    algorithm: Algorithm | None = None,
    val: bool = False,
    seconds: float = 0.0,
    **options: Any,
) -> None:
    algorithm = AllReduce(bucket_mb=1e-4) if algorithm is None else algorithm
    strategy = RingStrategy(algorithm, timeout=timedelta(seconds=20), on_peer_loss=on_peer_loss)
    model = deaths if isinstance(deaths, Struck) else Struck(deaths)
    model.seconds = seconds
    trainer = trainer_with(strategy, max_epochs=EPOCHS, **options)
    trainer.fit(model, rows(SAMPLES, shuffle=True), rows(24) if val else None)
    note(
        f"end{model.born}.json",
        rank=trainer.global_rank,
        size=trainer.world_size,
        steps=trainer.global_step,
        epoch=trainer.current_epoch,
        counted=trainer.strategy.algorithm.state_dict()["step"],
        weights=[parameter.tolist() for parameter in model.parameters()],
        threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("ringstrategy")],
    )


def _ends(running: Job, ranks: list[int], newcomers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Of these ranks, and of those that were born with these numbers."""
    codes = running.wait(ranks)
    assert codes == [0] * len(ranks), "\n".join(running.output(rank) for rank in ranks)
    if newcomers:
        running.wait(list(range(len(running.ranks))))
    ends = [running.notes(f"end{rank}") for rank in (*ranks, *newcomers)]
    assert len({end["counted"] for end in ends}) == 1
    assert sorted(end["rank"] for end in ends) == list(range(len(ends)))
    assert {(end["size"], end["epoch"]) for end in ends} == {(len(ends), EPOCHS)}
    assert all(end["threads"] == [] for end in ends)
    return ends


def _batches_of_steps(running: Job, steps: int, behind: int = 0) -> list[list[dict[str, Any]]]:
    """Of each step, in all epochs: what the ranks that made it have trained on. All samples, once.

    With gossip, up to `behind` ranks may leave out a step that another has made.
    """
    lines = [line for file in running.folder.glob("batches*.jsonl") for line in file.read_text().splitlines()]
    batches: list[list[dict[str, Any]]] = [[] for _ in range(steps)]
    for batch in map(json.loads, sorted(lines)):
        batches[batch["step"]].append(batch)
    for step, of_step in enumerate(batches):
        world = max(batch["world"] for batch in of_step)
        batches[step] = [batch for batch in of_step if batch["world"] == world]
        size = of_step[-1]["size"]
        assert size - behind <= len({batch["rank"] for batch in batches[step]}) <= size
    samples = Counter((batch["epoch"], row[0]) for of_step in batches for batch in of_step for row in batch["x"])
    for epoch in range(EPOCHS):
        often = [count for (of, _), count in samples.items() if of == epoch]
        assert SAMPLES - behind * BATCH <= len(often) <= SAMPLES
        assert sum(often) <= SAMPLES + 4  # some fill the last batches up
    return batches


def _as_an_oracle(running: Job, ends: list[dict[str, Any]], accumulated: int = 1) -> None:
    """The same as one process that takes, for each step, the mean over all batches of the ranks that made it."""
    model = Struck({})
    optimizer = model.configure_optimizers()
    for batches in _batches_of_steps(running, ends[0]["steps"]):
        optimizer.zero_grad()
        for batch in batches:
            loss = model.loss((torch.tensor(batch["x"]), torch.tensor(batch["y"])))
            (loss / batch["size"] / accumulated).backward()
        optimizer.step()
    for end in ends:
        assert end["weights"] == ends[0]["weights"]
    for mine, theirs in zip(model.parameters(), ends[0]["weights"], strict=True):
        torch.testing.assert_close(mine.detach(), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


# Wherever a rank dies, with every algorithm

PLACES = {"backward": 3, "validation": 8, "save": 8, "epoch start": 8, "forward": 3, "epoch end": 8, "start": 0}
PLACES |= {"batch start": 3, "optimizer": 3, "batch end": 3, "validation end": 8}
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "exact": lambda: AllReduce(bucket_mb=1e-4),
    "feedback": lambda: AllReduce(BlockInt(8), error_feedback=True),
    "gossip": Gossip,
    "LocalSGD": lambda: LocalSGD(3, Nesterov(0.5, 0.5), BlockInt(8), overlap=2),
    "PowerSGD": lambda: PowerSGD(2),
    "gossip in step": lambda: Gossip(overlap=False),
    "auto": Auto,
}


def _cases() -> list[Any]:
    """Each algorithm once; at night each at each place."""
    first = list(zip(PLACES, ALGORITHMS, itertools.cycle([0, 2]), strict=False))
    others = [case for case in all_pairs(PLACES, ALGORITHMS, [2, 0]) if case not in first]
    marks = [(), *[slow] * (len(first) - 1), *[nightly] * len(others)]
    return [pytest.param(*case, marks=mark) for case, mark in zip([*first, *others], marks, strict=True)]


def _train_and_save_all(deaths: dict[int, tuple[str, int]], algorithm: str, folder: str) -> None:
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=-1)
    given = {"algorithm": ALGORITHMS[algorithm](), "val": True, "enable_checkpointing": True, "callbacks": [saver]}
    _train(deaths, "shrink", **given)


@pytest.mark.parametrize(("place", "algorithm", "victim"), _cases())
def test_survivors_go_on(
    job: Callable[..., Job], place: str, algorithm: str, victim: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    running = job(3, _train_and_save_all, {victim: (place, PLACES[place])}, algorithm, str(folder))
    ends = _ends(running, [rank for rank in range(3) if rank != victim])
    if algorithm == "exact":
        _as_an_oracle(running, ends)
        assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == ends[0]["steps"]
    elif ALGORITHMS[algorithm]().decentralized:
        _batches_of_steps(running, ends[0]["steps"], behind=2)
    else:
        _batches_of_steps(running, ends[0]["steps"])
        assert ends[0]["weights"] == ends[1]["weights"]


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param({2: ("forward", 2), 0: ("forward", 2)}, marks=slow),
        *(
            pytest.param(deaths, marks=nightly)
            for deaths in (
                {0: ("forward", 2), 1: ("backward", 5)},
                {3: ("optimizer", 2), 2: ("batch start", 3), 0: ("epoch start", 9)},
                {1: ("backward", 4), 0: ("batch end", 4)},
                {1: ("backward", 4), 0: ("epoch start", 7)},
                {1: ("backward", 4), 0: ("epoch end", 7)},
            )
        ),
    ],
)
def test_several_are_lost(job: Callable[..., Job], deaths: dict[int, tuple[str, int]]) -> None:
    running = job(4, _train, deaths, "shrink")
    _as_an_oracle(running, _ends(running, [rank for rank in range(4) if rank not in deaths]))


def _train_torn(victim: int, collective: Collective) -> None:
    _train(Torn(victim), "shrink", algorithm=AllReduce(collective=collective, bucket_mb=1e-4))


@pytest.mark.parametrize(
    ("collective", "victim", "ahead", "behind"),
    [
        pytest.param(Ring(), 0, 2, 1, marks=slow),
        pytest.param(Ring(), 2, 1, 0, marks=nightly),
        pytest.param(Direct(), 1, 2, 0, marks=nightly),
    ],
)
def test_survivors_that_are_a_step_apart_go_on(
    job: Callable[..., Job], collective: Collective, victim: int, ahead: int, behind: int
) -> None:
    running = job(3, _train_torn, victim, collective)
    ends = _ends(running, sorted([ahead, behind]))
    before, after = _steps(running.folder), _steps(running.folder, world=1)
    assert before[ahead] == [*range(Torn.STEP), Torn.STEP]
    assert before[behind] == [*range(Torn.STEP)]
    assert after[ahead] == after[behind] == [*range(Torn.STEP + 1, ends[0]["steps"])]
    _as_an_oracle(running, ends)


@pytest.mark.parametrize(
    "place", [pytest.param("backward", marks=slow), *(pytest.param(p, marks=nightly) for p in ("forward", "batch end"))]
)
def test_a_window_of_accumulated_batches_is_drawn_again(job: Callable[..., Job], place: str) -> None:
    running = job(3, partial(_train, accumulate_grad_batches=2), {0: (place, 2)}, "shrink")
    _as_an_oracle(running, _ends(running, [1, 2]), accumulated=2)


# Replacements


def _replace(addresses: list[str], born: int, *args: Any, **options: Any) -> None:
    os.environ.update(RINGSTRATEGY_JOIN=",".join(addresses), BORN=str(born))
    _train({}, *args, **options)


@pytest.mark.parametrize(
    ("place", "step"),
    [
        pytest.param("forward", 3, marks=slow),
        pytest.param("validation", 8, marks=nightly),
        pytest.param("epoch end", 8, marks=nightly),
    ],
)
def test_a_replacement_is_waited_for(job: Callable[..., Job], place: str, step: int) -> None:
    running = job(3, partial(_train, val=True), {1: (place, step)}, "wait")
    running.wait([1])
    running.add(1, partial(_replace, val=True), running.notes("members0")["addresses"], 3, "wait")
    ends = _ends(running, [0, 2], newcomers=(3,))
    assert [end["rank"] for end in ends] == [0, 1, 2]
    _as_an_oracle(running, ends)


def _train_until_a_meeting(victim: int, number: int, *args: Any, **options: Any) -> None:
    """Rank `victim` is killed in its meeting of this number, once all have connected."""
    compare, meetings = Session.compare_optimizers, itertools.count(1)

    def or_die(session: Session) -> None:
        if int(os.environ["LOCAL_RANK"]) == victim and next(meetings) == number:
            die()
        compare(session)

    Session.compare_optimizers = or_die  # type: ignore[method-assign]
    _train(*args, **options)


@slow
def test_a_survivor_is_lost_while_a_newcomer_meets(job: Callable[..., Job]) -> None:
    """The newcomer closes what it has opened, meets again, and waits with the other for a second newcomer."""
    running = job(3, _train_until_a_meeting, 2, 3, {1: ("forward", 3)}, "wait")
    running.wait([1])
    addresses = running.notes("members0")["addresses"]
    running.add(1, _replace, addresses, 3, "wait")
    assert running.wait([2]) == [-signal.SIGKILL]
    running.add(2, _replace, addresses, 4, "wait")
    _as_an_oracle(running, _ends(running, [0], newcomers=(3, 4)))


class Alone(Struck):
    """Notes how far the parameters are from those that ranks share when a rank that was alone has others again."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        now = self.trainer.strategy.members.now
        if now.size == 2 and now.generation > 1 and not Path(f"joined{self.born}.json").exists():
            shared, held = self.trainer.strategy.algorithm.shared_values(), dict(self.named_parameters())
            distance = max(float((value - held[name]).detach().abs().max()) for name, value in shared.items())
            note(f"joined{self.born}.json", distance=distance)
        return super().training_step(batch, batch_idx)


def _train_alone(deaths: dict[int, tuple[str, int]], addresses: tuple[str, ...] = ()) -> None:
    if addresses:
        os.environ.update(RINGSTRATEGY_JOIN=",".join(addresses), BORN="2")
    _train(Alone(deaths), "shrink", algorithm=LocalSGD(2, Nesterov(0.4, 0.8)), seconds=0.2)


@slow
def test_what_the_last_survivor_trained_alone_is_shared_with_its_replacement(job: Callable[..., Job]) -> None:
    running = job(2, _train_alone, {1: ("forward", 3)})
    running.wait([1])
    batches = running.folder / "batches0.jsonl"
    running.until(lambda: batches.read_text().count('"size": 1') > 4, "it trains alone")
    running.add(1, _train_alone, {}, running.notes("members0")["addresses"])
    assert running.wait([0, 1]) == [0, 0], running.output(0) + running.output(1)
    assert [running.notes(f"joined{born}")["distance"] for born in (0, 2)] == [0.0, 0.0]


# Signals


def _train_and_save(deaths: dict[int, tuple[str, int]], on_peer_loss: str, folder: str, signals: Signals) -> None:
    """Rank 0 never looks whether another rank has got a signal."""
    stopping._LOOK_SECONDS = math.inf
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=10)
    _train(deaths, on_peer_loss, enable_checkpointing=True, callbacks=[saver, signals])


def _stopped_at(running: Job, ranks: list[int], folder: Path) -> int:
    """The step before which all of them stopped, with a checkpoint, and trained on nothing since the loss."""
    assert running.wait(ranks) == [0] * len(ranks)
    assert [running.record(rank)["kind"] for rank in ranks] == ["SIGTERMException"] * len(ranks)
    batches = [json.loads(line) for file in running.folder.glob("batches*") for line in file.read_text().splitlines()]
    assert {batch["world"] for batch in batches} == {0}
    assert [file.name for file in folder.glob("*.ckpt")] == ["last.ckpt"]
    return int(torch.load(folder / "last.ckpt", weights_only=True)["global_step"])


@pytest.mark.parametrize("asked", [2, pytest.param(0, marks=nightly)])
def test_ranks_that_wait_for_a_replacement_obey_sigterm(job: Callable[..., Job], asked: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    running = job(3, _train_and_save, {1: ("forward", 3)}, "wait", str(folder), Signals(-1, -1))
    running.until(lambda: "training waits for 1 more: there are 2 ranks" in running.output(0), "they wait", [0, 2])
    running.signal(asked, signal.SIGTERM)
    assert _stopped_at(running, [0, 2], folder) == 3


def _wait_for_long(folder: str) -> None:
    """To a rank that began no batch for 2 s it seems that it was silent for the timeout, of 20 s."""
    seconds = members._seconds
    members._seconds = lambda: 10 * seconds()
    _train_and_save({1: ("forward", 3)}, "wait", folder, Signals(-1, -1))


@slow
def test_to_wait_for_longer_than_the_timeout_is_not_to_be_silent(job: Callable[..., Job], tmp_path: Path) -> None:
    """Else rank 2 would have to stop when rank 0 dies as well: others might have gone on without it."""
    folder = tmp_path / "checkpoints"
    running = job(3, _wait_for_long, str(folder))
    running.until(lambda: "training waits for 1 more: there are 2 ranks" in running.output(0), "they wait", [0, 2])
    time.sleep(3.0)  # longer than that timeout
    running.signal(0, signal.SIGKILL)
    running.until(lambda: "training waits for 2 more: there are 1 rank" in running.output(2), "it waits alone", [2])
    running.signal(2, signal.SIGTERM)
    assert _stopped_at(running, [2], folder) == 3


def test_a_loss_makes_no_rank_forget_sigterm(job: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 2 gets it a batch before the loss, and writes it where nobody looks any more."""
    folder = tmp_path / "checkpoints"
    running = job(3, _train_and_save, {1: ("forward", 3)}, "shrink", str(folder), Signals(2, 3))
    assert _stopped_at(running, [0, 2], folder) == 3


def test_a_newcomer_that_nobody_takes_in_obeys_sigterm(job: Callable[..., Job]) -> None:
    running = job(1, _replace, ["127.0.0.1:1"], 3, "wait")
    running.until((running.folder / "members3.json").exists, "it comes to its first batch")
    running.signal(0, signal.SIGTERM)
    assert running.wait([0]) == [0]
    assert running.record(0)["kind"] == "SIGTERMException"


# What is left of an epoch, and who is refused


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


def _on_one_rank(data: Any) -> str:
    try:
        fit(RingStrategy(AllReduce(), on_peer_loss="shrink"), Net(), data=data)
    except ValueError as error:
        return str(error)
    return ""


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(6), torch.ones(3)


@pytest.mark.parametrize("data", [DataLoader(Endless(), batch_size=4), {"a": rows(), "b": rows()}], ids=type)
def test_what_cannot_be_shared_out_again_is_refused_before_the_first_batch(ranks: Pool, data: Any) -> None:
    assert all("one DataLoader over a data set with a length" in said for said in ranks(2, _on_one_rank, data))


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

    def __init__(self) -> None:
        self._give, self._take = mock.Mock(), mock.Mock()


def test_a_rank_leaves_the_others_before_it_closes_the_store_that_they_share() -> None:
    """Else torch's client writes traces of what it cannot tell them any more."""
    strategy, calls = RingStrategy(on_peer_loss="shrink"), mock.Mock()
    strategy.session, strategy.members = calls.session, calls.members
    with mock.patch("lightning.pytorch.strategies.DDPStrategy.teardown"):
        strategy.teardown()
    assert [name for name, *_ in calls.mock_calls] == ["session.close", "members.close"]


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

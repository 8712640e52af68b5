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

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import Pool
from test_failures import Job, note, wait_until
from test_failures import job as job  # a fixture
from test_stopping import Signals
from test_strategy import Net, fit, rows, trainer_with
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

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
from ringstrategy.session import Session
from ringstrategy.transport import members

pytestmark = pytest.mark.timeout(180)
SAMPLES, BATCH, EPOCHS = 96, 4, 2


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
            os.kill(os.getpid(), signal.SIGKILL)

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
            wait_until(lambda: any(self.STEP in steps for steps in _steps(Path()).values()), 30, "stepped")
            os.kill(os.getpid(), signal.SIGKILL)
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


def _ends(running: Job, ranks: list[int]) -> list[dict[str, Any]]:
    codes = running.wait(ranks)
    assert codes == [0] * len(ranks), "\n".join(running.output(rank) for rank in ranks)
    ends = [json.loads((running.folder / f"end{rank}.json").read_text()) for rank in ranks]
    assert len({end["counted"] for end in ends}) == 1
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
        assert end["epoch"] == EPOCHS
    for mine, theirs in zip(model.parameters(), ends[0]["weights"], strict=True):
        torch.testing.assert_close(mine.detach(), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


PLACES = ["start", "epoch start", "batch start", "forward", "backward", "optimizer", "batch end"]


def test_survivors_go_on_without_rank_0(job: Callable[..., Job]) -> None:
    running = job(3, _train, {0: ("backward", 3)}, "shrink")
    ends = _ends(running, [1, 2])
    assert [(end["rank"], end["size"]) for end in ends] == [(0, 2), (1, 2)]
    _as_an_oracle(running, ends)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 0])
@pytest.mark.parametrize(("place", "step"), [*((place, 3) for place in PLACES[2:]), ("epoch start", 8), ("start", 0)])
def test_survivors_go_on(job: Callable[..., Job], victim: int, place: str, step: int) -> None:
    running = job(3, _train, {victim: (place, step)}, "shrink")
    ends = _ends(running, [rank for rank in range(3) if rank != victim])
    assert [(end["rank"], end["size"]) for end in ends] == [(0, 2), (1, 2)]
    _as_an_oracle(running, ends)


def _train_and_validate(deaths: dict[int, tuple[str, int]], folder: str) -> None:
    checkpoint = ModelCheckpoint(folder, save_last=True, save_top_k=-1)
    _train(deaths, "shrink", val=True, enable_checkpointing=True, callbacks=[checkpoint])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 0])
@pytest.mark.parametrize("place", ["validation", "validation end", "epoch end", "save"])
def test_survivors_go_on_from_an_epochs_end(job: Callable[..., Job], victim: int, place: str, tmp_path: Path) -> None:
    running = job(3, _train_and_validate, {victim: (place, 8)}, str(tmp_path / "checkpoints"))
    ends = _ends(running, [rank for rank in range(3) if rank != victim])
    _as_an_oracle(running, ends)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == ends[0]["steps"] == 8 + 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: ("forward", 2), 1: ("backward", 5)},
        {2: ("forward", 2), 0: ("forward", 2)},
        {3: ("optimizer", 2), 2: ("batch start", 3), 0: ("epoch start", 9)},
        {1: ("backward", 4), 0: ("batch end", 4)},
        {1: ("backward", 4), 0: ("epoch start", 7)},
        {1: ("backward", 4), 0: ("epoch end", 7)},
    ],
)
def test_several_are_lost(job: Callable[..., Job], deaths: dict[int, tuple[str, int]]) -> None:
    running = job(4, _train, deaths, "shrink")
    ends = _ends(running, [rank for rank in range(4) if rank not in deaths])
    assert [(end["rank"], end["size"]) for end in ends] == [(rank, 4 - len(deaths)) for rank in range(4 - len(deaths))]
    _as_an_oracle(running, ends)


def _train_torn(victim: int, collective: Collective) -> None:
    _train(Torn(victim), "shrink", algorithm=AllReduce(collective=collective, bucket_mb=1e-4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "victim", "ahead", "behind"),
    [(Ring(), 2, 1, 0), (Ring(), 0, 2, 1), (Direct(), 1, 2, 0)],
    ids=["ring", "ring_without_rank_0", "direct"],
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


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim"), [("backward", 0), ("validation", 2), ("epoch end", 0)])
@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(BlockInt(8), error_feedback=True),
        PowerSGD(2),
        Auto(),
        Gossip(),
        Gossip(overlap=False),
        LocalSGD(3, Nesterov(0.5, 0.5), BlockInt(8), overlap=2),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_every_algorithm_goes_on(job: Callable[..., Job], algorithm: Algorithm, victim: int, place: str) -> None:
    step = 8 if place in ("validation", "epoch end") else 3
    running = job(3, partial(_train, algorithm=algorithm, val=True), {victim: (place, step)}, "shrink")
    ends = _ends(running, [rank for rank in range(3) if rank != victim])
    assert [(end["rank"], end["size"], end["epoch"]) for end in ends] == [(0, 2, EPOCHS), (1, 2, EPOCHS)]
    _batches_of_steps(running, ends[0]["steps"], behind=2 if algorithm.decentralized else 0)
    if not algorithm.decentralized:
        assert ends[0]["weights"] == ends[1]["weights"]


@pytest.mark.slow
def test_ranks_that_gossip_count_the_same_steps(job: Callable[..., Job]) -> None:
    """Some are lost in their first mixing, others before it; who mixes with whom depends on the count."""
    running = job(4, partial(_train, algorithm=Gossip()), {3: ("start", 0)}, "shrink")
    assert [end["size"] for end in _ends(running, [0, 1, 2])] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "batch end"])
def test_a_window_of_accumulated_batches_is_drawn_again(job: Callable[..., Job], place: str) -> None:
    running = job(3, partial(_train, accumulate_grad_batches=2), {0: (place, 2)}, "shrink")
    ends = _ends(running, [1, 2])
    assert ends[0]["size"] == 2
    _as_an_oracle(running, ends, accumulated=2)


def _replace(addresses: list[str], born: int, *args: Any, **options: Any) -> None:
    os.environ.update(RINGSTRATEGY_JOIN=",".join(addresses), BORN=str(born))
    _train({}, *args, **options)


@pytest.mark.slow
def test_a_replacement_is_waited_for(job: Callable[..., Job]) -> None:
    running = job(3, _train, {1: ("forward", 3)}, "wait")
    running.wait([1])
    addresses = json.loads((running.folder / "members0.json").read_text())["addresses"]
    running.add(1, _replace, addresses, 3, "wait")
    ends = [*_ends(running, [0, 2]), json.loads((running.folder / "end3.json").read_text())]
    assert [(end["rank"], end["size"]) for end in ends] == [(0, 3), (1, 3), (2, 3)]
    _as_an_oracle(running, ends)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["validation", "epoch end"])
def test_a_replacement_is_waited_for_after_a_validation(job: Callable[..., Job], place: str) -> None:
    running = job(3, partial(_train, val=True), {1: (place, 8)}, "wait")
    running.wait([1])
    addresses = json.loads((running.folder / "members0.json").read_text())["addresses"]
    running.add(1, partial(_replace, val=True), addresses, 3, "wait")
    ends = [*_ends(running, [0, 2]), json.loads((running.folder / "end3.json").read_text())]
    assert [(end["rank"], end["size"]) for end in ends] == [(0, 3), (1, 3), (2, 3)]
    _as_an_oracle(running, ends)


def _train_until_a_meeting(victim: int, number: int, *args: Any, **options: Any) -> None:
    """Rank `victim` is killed in its meeting of this number, once all have connected."""
    compare, meetings = Session.compare_optimizers, itertools.count(1)

    def or_die(session: Session) -> None:
        if int(os.environ["LOCAL_RANK"]) == victim and next(meetings) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        compare(session)

    Session.compare_optimizers = or_die  # type: ignore[method-assign]
    _train(*args, **options)


@pytest.mark.slow
def test_a_survivor_is_lost_while_a_newcomer_meets(job: Callable[..., Job]) -> None:
    """The newcomer closes what it has opened, meets again, and waits with the other for a second newcomer."""
    running = job(3, _train_until_a_meeting, 2, 3, {1: ("forward", 3)}, "wait")
    running.wait([1])
    addresses = json.loads((running.folder / "members0.json").read_text())["addresses"]
    running.add(1, _replace, addresses, 3, "wait")
    assert running.wait([2]) == [-signal.SIGKILL]
    running.add(2, _replace, addresses, 4, "wait")
    running.wait([1, 2])
    ends = [*_ends(running, [0]), *(json.loads((running.folder / f"end{born}.json").read_text()) for born in (3, 4))]
    assert [(end["rank"], end["size"], end["threads"]) for end in ends] == [(0, 3, []), (1, 3, []), (2, 3, [])]
    _as_an_oracle(running, ends)


@pytest.mark.slow
def test_replacements_are_taken_in(job: Callable[..., Job]) -> None:
    """While the others train on."""
    running = job(3, partial(_train, seconds=0.3), {1: ("forward", 3), 0: ("backward", 5)}, "shrink")
    running.wait([0, 1])
    addresses = json.loads((running.folder / "members2.json").read_text())["addresses"]
    running.add(1, _replace, addresses, 3, "shrink")
    running.add(0, _replace, addresses, 4, "shrink")
    running.wait([0, 1])
    ends = [*_ends(running, [2]), *(json.loads((running.folder / f"end{born}.json").read_text()) for born in (3, 4))]
    assert [end["size"] for end in ends] == [3, 3, 3]
    assert {end["rank"] for end in ends} == {0, 1, 2}
    _as_an_oracle(running, ends)


class Alone(Struck):
    """Notes how far the parameters are from those that ranks share when a rank that was alone has others again."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        now = self.trainer.strategy.members.now
        if now.size == 2 and now.generation > 1 and not Path(f"joined{self.born}.json").exists():
            shared, held = self.trainer.strategy.algorithm.shared_values(), dict(self.named_parameters())
            distance = max(float((value - held[name]).detach().abs().max()) for name, value in shared.items())
            note(f"joined{self.born}.json", distance=distance)
        return super().training_step(batch, batch_idx)


def _train_alone(deaths: dict[int, tuple[str, int]]) -> None:
    _train(Alone(deaths), "shrink", algorithm=LocalSGD(2, Nesterov(0.4, 0.8)), seconds=0.2)


def _replace_alone(addresses: list[str]) -> None:
    os.environ.update(RINGSTRATEGY_JOIN=",".join(addresses), BORN="2")
    _train_alone({})


@pytest.mark.slow
def test_what_the_last_survivor_trained_alone_is_shared_with_its_replacement(job: Callable[..., Job]) -> None:
    running = job(2, _train_alone, {1: ("forward", 3)})
    running.wait([1])
    addresses = json.loads((running.folder / "members0.json").read_text())["addresses"]
    batches = running.folder / "batches0.jsonl"
    wait_until(lambda: batches.read_text().count('"size": 1') > 4, 40, "trained alone")
    running.add(1, _replace_alone, addresses)
    assert running.wait([0, 1]) == [0, 0], running.output(0) + running.output(1)
    joined = [json.loads((running.folder / f"joined{born}.json").read_text()) for born in (0, 2)]
    assert [each["distance"] for each in joined] == [0.0, 0.0]


def _train_and_save(deaths: dict[int, tuple[str, int]], on_peer_loss: str, folder: str, signals: Signals) -> None:
    """Rank 0 never looks whether another rank has got a signal."""
    stopping._LOOK_SECONDS = math.inf
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=10)
    _train(deaths, on_peer_loss, enable_checkpointing=True, callbacks=[saver, signals])


def _stopped_at(running: Job, ranks: list[int], folder: Path) -> int:
    """The step before which all of them stopped, with a checkpoint, and trained on nothing since the loss."""
    assert running.wait(ranks, 20) == [0] * len(ranks)
    assert [running.record(rank)["kind"] for rank in ranks] == ["SIGTERMException"] * len(ranks)
    batches = [json.loads(line) for file in running.folder.glob("batches*") for line in file.read_text().splitlines()]
    assert {batch["world"] for batch in batches} == {0}
    assert [file.name for file in folder.glob("*.ckpt")] == ["last.ckpt"]
    return int(torch.load(folder / "last.ckpt", weights_only=True)["global_step"])


@pytest.mark.parametrize("asked", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_that_wait_for_a_replacement_obey_sigterm(job: Callable[..., Job], asked: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    running = job(3, _train_and_save, {1: ("forward", 3)}, "wait", str(folder), Signals(-1, -1))
    running.wait([1])
    wait_until(lambda: "training waits for 1 more: there are 2 ranks" in running.output(0), 30, "waited")
    time.sleep(1.0)
    begin = time.time()
    os.kill(running.ranks[asked].pid or 0, signal.SIGTERM)
    assert _stopped_at(running, [0, 2], folder) == 3
    assert all(running.record(rank)["time"] - begin < 5 for rank in (0, 2))


def _wait_for_long(folder: str) -> None:
    """To a rank that began no batch for 2 s it seems that it was silent for the timeout, of 20 s."""
    seconds = members._seconds
    members._seconds = lambda: 10 * seconds()
    _train_and_save({1: ("forward", 3)}, "wait", folder, Signals(-1, -1))


@pytest.mark.slow
def test_to_wait_for_longer_than_the_timeout_is_not_to_be_silent(job: Callable[..., Job], tmp_path: Path) -> None:
    """Else rank 2 would have to stop when rank 0 dies as well: others might have gone on without it."""
    folder = tmp_path / "checkpoints"
    running = job(3, _wait_for_long, str(folder))
    running.wait([1])
    wait_until(lambda: "training waits for 1 more: there are 2 ranks" in running.output(0), 30, "waited")
    time.sleep(3.0)
    os.kill(running.ranks[0].pid or 0, signal.SIGKILL)
    wait_until(lambda: "training waits for 2 more: there are 1 rank" in running.output(2), 30, "waited alone")
    os.kill(running.ranks[2].pid or 0, signal.SIGTERM)
    assert _stopped_at(running, [2], folder) == 3


def test_a_loss_makes_no_rank_forget_sigterm(job: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 2 gets it a batch before the loss, and writes it where nobody looks any more."""
    folder = tmp_path / "checkpoints"
    running = job(3, _train_and_save, {1: ("forward", 3)}, "shrink", str(folder), Signals(2, 3))
    assert _stopped_at(running, [0, 2], folder) == 3


class Requeues(Signals):
    """As under Slurm: rank `rank` gets its signal, and each rank notes at which step it saves."""

    def setup(self, trainer: Any, *_: Any, stage: str) -> None:
        trainer._signal_connector._slurm_sigusr_handler_fn = lambda *_: note(
            f"requeued{trainer.lightning_module.born}.json", step=trainer.global_step
        )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)


def test_a_loss_makes_no_rank_forget_slurms_signal(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job(3, _train_and_save, {1: ("forward", 3)}, "shrink", str(tmp_path), Requeues(2, 3))
    ends = _ends(running, [0, 2])
    assert [json.loads((running.folder / f"requeued{rank}.json").read_text())["step"] for rank in (0, 2)] == [3, 3]
    _as_an_oracle(running, ends)


def test_a_newcomer_that_nobody_takes_in_obeys_sigterm(job: Callable[..., Job]) -> None:
    running = job(1, _replace, ["127.0.0.1:1"], 3, "wait")
    wait_until((running.folder / "members3.json").exists, 60, "came to its first batch")
    begin = time.time()
    os.kill(running.ranks[0].pid or 0, signal.SIGTERM)
    assert running.wait([0], 20) == [0]
    assert running.record(0)["kind"] == "SIGTERMException"
    assert running.record(0)["time"] - begin < 5


def _on_one_rank(options: dict[str, Any], data: Any) -> str:
    try:
        fit(RingStrategy(AllReduce(), on_peer_loss="shrink", **options), Net(), data=data)
    except ValueError as error:
        return str(error)
    return ""


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(6), torch.ones(3)


def test_what_cannot_be_shared_out_again_is_refused_before_the_first_batch(ranks: Pool) -> None:
    for said in ranks(2, _on_one_rank, {}, DataLoader(Endless(), batch_size=4)):
        assert "one DataLoader over a data set with a length" in said
    for said in ranks(2, _on_one_rank, {}, {"a": rows(), "b": rows()}):
        assert "one DataLoader" in said


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"on_peer_loss": "shrinks"}, "'shrink'"),
        ({"start_method": "spawn"}, "popen"),
        ({"process_group_backend": "nccl"}, "process_group_backend='gloo'"),
        ({"algorithm": AllReduce(uneven="join")}, "uneven='error'"),
        ({"algorithm": LocalSGD(4, within_host=True)}, "within_host=False"),
    ],
)
def test_what_cannot_go_on_is_refused_at_construction(options: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        RingStrategy(**{"on_peer_loss": "shrink", **options})

"""The strategy under real trainers, on real processes with different rows on each; Lightning's `ddp` is the oracle."""

from __future__ import annotations

import csv
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from listening import listening
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy as ring
from ringstrategy import AllReduce, Auto, BlockInt, Cast, CommunicationMonitor, Direct, Gossip, RingStrategy, Stats
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.integrations.lightning import meeting
from ringstrategy.names import STRATEGIES


class Net(L.LightningModule):
    """Born with other weights on every rank, so that rank 0's must be sent; remembers its last batch."""

    def __init__(self, layers: nn.Module | None = None, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)) if layers is None else layers
        self.lr = lr
        self.batch: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def normed(norm: type[nn.Module] = nn.BatchNorm1d) -> Net:
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    return Net(nn.Sequential(nn.Linear(6, 5), norm(5), nn.Linear(5, 3)))


def rows(count: int = 48, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].sin() + 1), **{"batch_size": 4, **options})


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def trainer_with(strategy: Any, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 2, "devices": world()}
    return L.Trainer(strategy=strategy, accelerator="cpu", **{**quiet, **options})


def fit(strategy: Any, model: Any, *, data: Any = None, ckpt_path: str | None = None, **options: Any) -> L.Trainer:
    trainer = trainer_with(strategy, **options)
    trainer.fit(model, rows() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return everyone


def same_everywhere(tensor: Tensor) -> bool:
    return all(torch.equal(other, tensor) for other in gathered(tensor))


def check_replicas(trainer: L.Trainer) -> None:
    """It was our strategy on several processes, it sent something, and all ranks hold the same finite parameters."""
    strategy = trainer.strategy
    assert isinstance(strategy, RingStrategy)
    assert strategy.world_size == dist.get_world_size() > 1
    assert strategy.stats.steps > 0
    assert strategy.stats.bytes_sent is not None
    assert strategy.stats.bytes_sent > 0
    for name, parameter in trainer.lightning_module.named_parameters():
        assert parameter.isfinite().all(), name
        assert same_everywhere(parameter), f"{name} differs between ranks"


# One training


class Watches(L.Callback):
    """Gradients in users' hooks are the ranks' mean; what was sent in the epoch."""

    seen = sent = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.sent = -trainer.strategy.stats.bytes_sent

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sent += trainer.strategy.stats.bytes_sent
        self.bar = dict(trainer.progress_bar_metrics)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        assert pl_module.batch is not None
        parameters = list(pl_module.parameters())
        alone = torch.autograd.grad(pl_module.loss(pl_module.batch), parameters)
        for parameter, own in zip(parameters, alone, strict=True):
            assert not same_everywhere(own)
            assert torch.allclose(parameter.grad, torch.stack(gathered(own)).mean(0), rtol=1e-5, atol=1e-7)
        self.on_before_optimizer_step(trainer, pl_module)
        self.seen += 1

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert all(same_everywhere(parameter.grad) for parameter in pl_module.parameters())


@on_ranks(3)
def test_hooks_see_means_and_the_monitor_logs_them(tmp_path: Path) -> None:
    watch, logger = Watches(), CSVLogger(tmp_path, name="", version="")
    how: dict[str, Any] = {"logger": logger, "callbacks": [watch, CommunicationMonitor()], "log_every_n_steps": 4}
    trainer = fit(RingStrategy(AllReduce(bucket_mb=1e-4)), Net(), data=rows(96), max_epochs=1, **how)
    check_replicas(trainer)
    assert watch.seen == trainer.global_step == 8
    trainer.strategy.teardown()  # again
    if not trainer.is_global_zero:
        return
    with open(tmp_path / "metrics.csv") as file:
        logged = list(csv.DictReader(file))
    assert [int(row["step"]) for row in logged] == [3, 7]
    assert sum(4 * float(row["communication/bytes_sent"]) for row in logged) == watch.sent > 0
    assert all(float(row[f"communication/{key}"]) > 0 for row in logged for key in ("exposed_ms", "communication_ms"))
    last = {"sent_MB": 1e-6 * float(logged[-1]["communication/bytes_sent"])}
    last |= {"waited_ms": float(logged[-1]["communication/exposed_ms"])}
    assert watch.bar == pytest.approx(last)


# Names and objects


def test_trainers_share_no_algorithm_and_a_strategy_serves_one_trainer() -> None:
    options: dict[str, Any] = {"devices": 2, "barebones": True}
    first, second = (L.Trainer(strategy="ring", accelerator="cpu", **options).strategy for _ in range(2))
    assert isinstance(first, RingStrategy)
    assert isinstance(second, RingStrategy)
    assert first.algorithm is not second.algorithm
    algorithm = AllReduce(Cast("fp16"))
    strategy, other = RingStrategy(algorithm), RingStrategy(algorithm)
    assert len({id(algorithm), id(strategy.algorithm), id(other.algorithm)}) == 3
    assert repr(strategy.algorithm) == repr(algorithm)
    L.Trainer(strategy=strategy, accelerator="cpu", **options)
    for accelerator in ("cpu", "auto"):
        L.Trainer(strategy=RingStrategy(strategy.algorithm), accelerator=accelerator, **options)
        with pytest.raises(ValueError, match="belongs to another Trainer already: make one for each"):
            L.Trainer(strategy=strategy, accelerator=accelerator, **options)
    with pytest.raises(Exception, match="accelerator set through both"):  # Lightning's own words stay
        L.Trainer(strategy=RingStrategy(accelerator=CPUAccelerator()), accelerator="cpu", **options)


@on_ranks(2)
def test_lightning_cli_builds_the_strategy_from_class_paths() -> None:
    algorithm = "strategy.init_args.algorithm"
    arguments = {
        "strategy": "ringstrategy.RingStrategy",
        "strategy.init_args.broadcast_buffers": "false",
        algorithm: "ringstrategy.AllReduce",
        f"{algorithm}.init_args.bucket_mb": "0.5",
        f"{algorithm}.init_args.codec": "ringstrategy.Cast",
        f"{algorithm}.init_args.codec.init_args.dtype": "torch.bfloat16",
        **{"accelerator": "cpu", "devices": str(world()), "max_epochs": "1", "barebones": "true"},
    }
    args = [f"--trainer.{name}={value}" for name, value in arguments.items()]
    cli = LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False, args=args)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, RingStrategy)
    assert repr(strategy.algorithm) == repr(AllReduce(Cast("bfloat16"), bucket_mb=0.5))
    assert not strategy._broadcast_buffers
    cli.trainer.fit(cli.model, rows())
    check_replicas(cli.trainer)


# One process


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=1)


@on_ranks(1, 2)
def test_one_process_is_told_how_to_get_more() -> None:
    trainer, model = trainer_with("ring"), Lbfgs() if world() == 1 else Net()
    heard = []
    for loop in (trainer.validate, trainer.test, trainer.fit, trainer.fit):
        trainer.fit_loop.max_epochs = 1 + trainer.current_epoch
        with listening() as lines:
            loop(model, rows())
        heard.append([line for line in lines if "nothing is averaged" in line])
    assert [len(lines) for lines in heard] == [0, 0, int(world() == 1), 0]
    assert all("devices=2" in line and "torchrun" in line for line in heard[2])


# Loops other than one fit


@pytest.mark.parametrize(
    "algorithm",
    [AllReduce(BlockInt(4), Direct(), error_feedback=True), Gossip(), ring.LocalSGD(2, ring.Nesterov(), overlap=1)],
    ids=["feedback", "gossip", "local_sgd"],
)
@on_ranks(2)
def test_a_learning_rate_is_found(algorithm: Algorithm, tmp_path: Path) -> None:
    """What it tries changes nothing, and the next fit is one as any other."""
    os.chdir(tmp_path)
    model, untuned = Net(), Net()
    trainer = trainer_with(RingStrategy(algorithm), max_epochs=1)
    found = Tuner(trainer).lr_find(model, rows(400), num_training=20)
    assert found.suggestion() is not None
    assert same_everywhere(torch.tensor(found.suggestion()))
    untuned.lr = model.lr
    trainer.fit(model, rows(), rows(24))
    fit(RingStrategy(algorithm), untuned, max_epochs=1)
    for one, other in zip(model.parameters(), untuned.parameters(), strict=True):
        assert torch.equal(one, other)
        assert same_everywhere(one)


# Layers and what belongs to them


class Normed(Net):
    """Notes whether batch-norm statistics are rank 0's, at each forward in training and in validation."""

    def __init__(self) -> None:
        super().__init__(normed().layers)
        self.synchronized: list[bool] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        norm = self.layers[1]
        self.synchronized.append(same_everywhere(norm.running_mean) and same_everywhere(norm.num_batches_tracked))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(torch.cat([b.detach().double().reshape(-1) for b in self.buffers()]))


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2)
def test_ranks_train_and_validate_with_rank_0s_buffers_unless_told_otherwise(broadcast: bool) -> None:
    rank = int(os.environ["RANK"])
    trainer = trainer_with(
        RingStrategy(broadcast_buffers=broadcast), val_check_interval=2, use_distributed_sampler=False
    )
    of_rank = rows(48, sampler=range(24 * rank, 24 * (rank + 1)))
    trainer.fit(model := Normed(), of_rank, rows(24, sampler=range(4 * (1 + rank))))  # one batch, or two
    check_replicas(trainer)
    assert any(model.synchronized[1:]) == broadcast
    first = model.validated[:: 1 + rank][1:]  # but that before any training
    assert len(first) >= 4
    assert {same_everywhere(value) for value in first} == {broadcast}


# The start and the end


class Failing(Net):
    def training_step(self, *_: Any) -> Tensor:
        raise ValueError("no")


@on_ranks(1)
def test_ranks_disconnect_at_exit() -> None:
    """A process disconnects at its exit, unless its last fit failed: then it would wait for others there."""
    at_exit: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        unregister = lambda function: at_exit.remove(function) if function in at_exit else None  # noqa: E731
        patch.setattr(meeting, "atexit", SimpleNamespace(register=at_exit.append, unregister=unregister))
        fit("ring", Net(), max_epochs=1)
        assert at_exit == [meeting.disconnect]
        with pytest.raises(ValueError, match="no"):
            fit("ring", Failing())
        assert at_exit == []
        fit("ring", Net(), max_epochs=1)
        assert at_exit == [meeting.disconnect]


@on_ranks(2)
def test_ranks_start_late() -> None:
    """Ranks may come later than `timeout`, which counts from when all are there."""
    waits, timeout = [], timedelta(seconds=50)
    make = meeting.guarded_store

    def noting(rank: int, size: int, start: timedelta) -> Any:
        waits.append(start)
        return make(rank, size, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "guarded_store", noting)
        check_replicas(fit(RingStrategy(timeout=timeout), Net(), max_epochs=1))
    assert waits == [default_pg_timeout]
    assert dist.distributed_c10d._get_default_store().timeout == timeout


# Launchers


def alone(function: Any, *args: Any) -> Any:
    """Its result in a process that may start others: forked as those of the pool, but no daemon."""
    server = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, server, torch.set_num_threads, (1,)) as executor:
        return executor.submit(function, *args).result()


def _started(names: list[str]) -> list[tuple[Stats, Algorithm]]:
    """In the process that called `fit`."""
    found = []
    for name in names:
        strategy = fit(name, Net(), devices=2).strategy
        found.append((strategy.stats, strategy.algorithm))
        assert not multiprocessing.active_children()
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["ring_fp16_fork", "ring_auto_fork"],
        pytest.param(["ring_fp16_notebook", "ring_fp16_spawn"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("ranks")  # its server
def test_what_forked_and_spawned_processes_count_and_choose_comes_back(names: list[str]) -> None:
    for stats, algorithm in alone(_started, names):
        assert stats.steps == 12
        assert stats.values_averaged == 12 * (6 * 17 + 17 + 17 * 3 + 3)
        assert stats.exposed_seconds > 0
        assert stats.bytes_sent > 0
        if isinstance(algorithm, Auto):
            assert algorithm.chosen.bucket_mb == 25, "all sizes come to the same here"
            assert 0 < stats.probe_bytes_sent < 10_000


@on_ranks(2)
def test_validate_test_and_predict_without_fit() -> None:
    ours, theirs = Net(), Net()
    for loop in ("validate", "test"):
        found, expected = (
            getattr(trainer_with(name), loop)(model, rows(), verbose=False)
            for name, model in (("ring", ours), ("ddp", theirs))
        )
        assert found == expected
        assert found[0]["loss"] > 0
    trainer = trainer_with("ring")
    predictions = trainer.predict(ours, rows())
    assert predictions is not None
    mine = torch.cat([torch.as_tensor(p) for p in predictions])
    everyone = torch.cat(gathered(mine))
    assert len(mine) == 48 // world()
    assert len(everyone.unique(dim=0)) == 48
    assert isinstance(trainer.strategy, RingStrategy)
    assert trainer.strategy.stats == Stats()


@on_ranks(2)
def test_each_fit_ends_with_a_line_of_what_it_sent() -> None:
    strategy, parameters = RingStrategy("ring_int8"), sum(each.numel() for each in Net().parameters())
    trainer = trainer_with(strategy, max_epochs=0)
    with mock.patch.object(ring.integrations.lightning.strategy, "rank_zero_info") as said:
        for epochs in (1, 2):  # the second fit counts anew
            before = strategy.stats.bytes_sent
            trainer.fit_loop.max_epochs += epochs
            trainer.fit(Net(), rows())
            sent, steps = strategy.stats.bytes_sent - before, 6 * epochs
            share = sent / (4 * parameters * steps)
            words = f"rank 0 sent {sent / 1e3:.3g} kB in {steps} steps, {sent / steps:.3g} B a step, {share:.2g} of"
            assert words in said.call_args.args[0]
            assert "; training waited " in said.call_args.args[0]


def test_statistics_in_words() -> None:
    told = Stats(9 * 10**5, 0, 10, 0.312, 2.1, 40)
    assert told.summary() == "sent 900 kB in 40 steps, 22.5 kB a step; training waited 0.31 s for exchanges of 2.1 s"
    assert ", 0.25 of those of float32; " in told.summary(9 * 10**5)
    assert told.since(Stats(10**5, 0, 10, None, 2.0, 30)) == Stats(8 * 10**5, 0, 0, None, pytest.approx(0.1), 10)
    told.uncountable()
    assert told.summary(1.0).startswith("sent bytes that the backend does not count; training")
    assert Stats(3_100_000_000, steps=None, exposed_seconds=None).summary() == "sent 3.1 GB"


@pytest.mark.slow
@on_ranks(2)
def test_every_name_trains_identical_replicas_and_sends_what_it_says() -> None:
    sent: dict[str, Any] = {}
    every = next(iter(rows(480, batch_size=480)))
    for name in STRATEGIES:
        model = Net(nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 3)))
        before = float(model.loss(every))
        trainer = fit(name, model, data=rows(480), max_epochs=1)
        check_replicas(trainer)
        assert float(model.loss(every)) < 0.9 * before, name
        sent[name] = trainer.strategy.stats.bytes_sent  # type: ignore[attr-defined]
    fewer = {"ring_fp16": 1.9, "ring_bf16": 1.9, "ring_int8": 3.5, "ring_fp8": 3.5, "ring_int4": 6, "ring_int2": 9}
    for name, factor in {**fewer, "ring_sign": 12, "ring_topk": 14, "ring_powersgd": 4}.items():
        assert sent[name] < sent["ring"] / factor, (name, sent["ring"] / sent[name])

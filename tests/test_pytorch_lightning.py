"""One source serves both packages of Lightning, in one process: the same names, the same bits.

That is `lightning.pytorch` and `pytorch_lightning`, and for Fabric `lightning.fabric` and `lightning_fabric`.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from pool import Pool
from test_strategy import rows, run_script
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import ringstrategy
from ringstrategy import AllReduce, BlockInt, Direct, LocalSGD, Nesterov
from ringstrategy.integrations.lightning import stopping
from ringstrategy.integrations.lightning.files import WholeCheckpointIOMixin, finish_writing
from ringstrategy.integrations.lightning.register import START_METHODS
from ringstrategy.names import STRATEGIES

pytestmark = pytest.mark.timeout(120)
DOOR = Path(ringstrategy.__file__).parent / "integrations" / "lightning"
PACKAGES: dict[str, tuple[Any, Any]] = {
    "lightning.pytorch": (lightning.pytorch, ringstrategy),
    "pytorch_lightning": (pytorch_lightning, ringstrategy.pytorch_lightning),
}
BOTH = list(PACKAGES)
FABRICS: dict[str, tuple[Any, Any]] = {
    "lightning.fabric": (lightning.fabric, ringstrategy),
    "lightning_fabric": (lightning_fabric, ringstrategy.lightning_fabric),
}
BOTH_FABRICS = list(FABRICS)
CLASSES = {
    "lightning.pytorch": "RingStrategy",
    "pytorch_lightning": "RingStrategy",
    "lightning.fabric": "RingFabricStrategy",
    "lightning_fabric": "RingFabricStrategy",
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "ring": lambda ours: "ring",
    "ring_int8": lambda ours: "ring_int8",
    "feedback": lambda ours: ours.RingStrategy(AllReduce(BlockInt(4), error_feedback=True, bucket_mb=1e-3)),
    "gossip": lambda ours: "gossip",
    "gossip_int8": lambda ours: "gossip_int8",
    "local_sgd": lambda ours: ours.RingStrategy(LocalSGD(1, Nesterov(0.7, 0.3), BlockInt(4), Direct(), overlap=1)),
}


def model_of(pl: ModuleType) -> Any:
    """A module of that package, born with other weights on every rank."""

    class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(int(os.environ.get("RANK", "0")))
            self.layers = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return self.loss(batch)

        def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.05)

    return Net()


def trainer_of(pl: ModuleType, strategy: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 3, "devices": int(os.environ.get("WORLD_SIZE", "2"))}
    return pl.Trainer(strategy=strategy, accelerator="cpu", **{**quiet, **options})


def fitted(pl: ModuleType, strategy: Any, *, data: Any = None, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = trainer_of(pl, strategy, **options)
    trainer.fit(model_of(pl), rows() if data is None else data, rows(24), ckpt_path=ckpt_path)
    return trainer


def check_same(one: Any, other: Any) -> None:
    """Trainers of the two packages ended with the same bits, and sent the same bytes; each has classes of its own."""
    strategies = one.strategy, other.strategy
    assert [type(strategy).__bases__[-1].__module__.split(".")[0] for strategy in strategies] != ["lightning"] * 2
    theirs = other.lightning_module.state_dict()
    for name, value in one.lightning_module.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert one.callback_metrics["loss"] == other.callback_metrics["loss"]
    assert one.global_step == other.global_step == strategies[1].stats.steps > 0
    assert strategies[0].stats.bytes_sent == strategies[1].stats.bytes_sent
    assert one.strategy.world_size == 2


def _equal_fits(kind: str, folder: str) -> None:
    trainers, logged = [], []
    for name, (pl, ours) in PACKAGES.items():
        logger = pl.loggers.CSVLogger(folder, name.replace(".", "-"), version=0)
        callbacks = [ours.CommunicationMonitor(consensus_every_n_steps=4)]
        apart = "gossip" in kind or kind == "local_sgd"
        if "gossip" in kind:
            callbacks.append(pl.callbacks.EMAWeightAveraging(decay=0.5))
        else:
            callbacks.append(ours.ReplicaCheck(every_n_steps=2))
        trainer = fitted(pl, KINDS[kind](ours), callbacks=callbacks, logger=logger, log_every_n_steps=1)
        assert type(trainer.strategy) is ours.RingStrategy
        trainers.append(trainer)
        if trainer.is_global_zero:
            # exchanges of parameters overlap with the steps at which they are counted
            varies = ("_ms", "bytes_sent") if apart else ("_ms",)
            with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
                lines = list(csv.DictReader(file))
            logged.append([{key: line[key] for key in line if not key.endswith(varies)} for line in lines])
    check_same(*trainers)
    if logged:
        assert logged[0] == logged[1]
        shown = "communication/consensus_distance" if apart else "communication/bytes_sent"
        assert sum(float(line[shown] or 0) for line in logged[0]) > 0


@pytest.mark.parametrize("kind", ["ring", "ring_int8", "gossip", "local_sgd"])
def test_a_fit_gives_the_same_bits(ranks: Pool, tmp_path: Path, kind: str) -> None:
    ranks(2, _equal_fits, kind, str(tmp_path))


def _resumed(kind: str, saves: str, resumes: str, folder: str) -> None:
    """As if there had been no break, and no other package."""
    pl, ours = PACKAGES[saves]
    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fitted(pl, KINDS[kind](ours), callbacks=[saver], enable_checkpointing=True)
    pl, ours = PACKAGES[resumes]
    resumed = fitted(pl, KINDS[kind](ours), ckpt_path=str(Path(folder) / "epoch=0.ckpt"))
    theirs = whole.lightning_module.state_dict()
    for name, value in resumed.lightning_module.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert (whole.global_step, resumed.global_step, resumed.strategy.stats.steps) == (18, 18, 12)


@pytest.mark.parametrize(
    "kind",
    ["feedback", "gossip", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gossip_int8", "local_sgd"))],
)
@pytest.mark.parametrize(("saves", "resumes"), [BOTH, BOTH[::-1]])
def test_each_resumes_from_the_others_checkpoint(
    ranks: Pool, tmp_path: Path, kind: str, saves: str, resumes: str
) -> None:
    ranks(2, _resumed, kind, saves, resumes, str(tmp_path))


class Uneven(IterableDataset[Any]):
    """More batches on rank 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(40 - 12 * int(os.environ["RANK"]), batch_size=None).dataset)


def _other_ways(folder: str) -> None:
    """What meets more of Lightning's classes: batches that ranks lack, checkpoints written later, a stop by signal."""
    trainers = []
    for pl, ours in PACKAGES.values():
        joins = ours.RingStrategy(AllReduce(BlockInt(8), uneven="join"))
        trainers.append(fitted(pl, joins, data=DataLoader(Uneven(), batch_size=4), use_distributed_sampler=False))
    check_same(*trainers)
    assert trainers[0].global_step == 3 * 10

    stopping._LOOK_SECONDS = 0.0
    stopped, write = [], WholeCheckpointIOMixin.save_checkpoint

    def slowly(*args: Any, **how: Any) -> None:
        time.sleep(0.5)
        write(*args, **how)

    for name, (pl, _) in PACKAGES.items():

        class Signals(pl.Callback):  # type: ignore[name-defined, misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if (trainer.global_rank, trainer.global_step) == (1, 6):
                    os.kill(os.getpid(), signal.SIGTERM)

        saver = pl.callbacks.ModelCheckpoint(Path(folder) / name, save_last=True, every_n_epochs=10)
        later = pl.plugins.io.AsyncCheckpointIO()
        stops = pytest.raises(import_module(f"{name}.utilities.exceptions").SIGTERMException)
        with stops, patch.object(WholeCheckpointIOMixin, "save_checkpoint", slowly):
            fitted(pl, "ring_int8", callbacks=[saver, Signals()], enable_checkpointing=True, plugins=[later])
        assert type(later.checkpoint_io).__name__ == "WholeCheckpointIO"
        stopped.append(torch.load(Path(folder) / name / "last.ckpt", weights_only=True))
    assert 6 <= stopped[0]["global_step"] < 18
    if stopped[0]["global_step"] == stopped[1]["global_step"]:  # rank 0 notices it at once, or a batch later
        assert all(
            torch.equal(value, stopped[1]["state_dict"][name]) for name, value in stopped[0]["state_dict"].items()
        )


def test_uneven_ranks_and_signals(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _other_ways, str(tmp_path))


class Loop:
    """A training loop of one package's Fabric, with a fixed order of batches.

    Args:
        name: of the package.
        strategy: of the names.
    """

    def __init__(self, name: str, strategy: str) -> None:
        package, self.ours = FABRICS[name]
        self.fabric = package.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        assert type(self.fabric.strategy) is self.ours.RingFabricStrategy
        torch.manual_seed(self.fabric.global_rank)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.05))
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + self.fabric.global_rank))
            self.optimizer.zero_grad()
            with self.fabric.no_backward_sync(self.model, enabled=True):
                self.fabric.backward(nn.functional.mse_loss(self.model(x[:4]), x[:4, :3].sin()))
            inputs = x[4:].requires_grad_()
            outputs = self.model(inputs)
            (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)  # Fabric may refuse it
            self.fabric.backward(nn.functional.mse_loss(outputs, x[4:, :3].sin()) + slopes.square().mean())
            self.optimizer.step()

    def end(self) -> dict[str, Tensor]:
        """Parameters of this rank, and their mean under gossip."""
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        with self.ours.consensus(self.model):
            found |= {f"mean {name}": value.clone() for name, value in self.model.state_dict().items()}
        assert self.fabric.strategy.stats.bytes_sent > 0
        self.fabric.strategy.close()
        return found


def _fabrics(kind: str, saves: str, resumes: str, folder: str) -> None:
    """One package trains and saves half-way; the other does the same, and goes on from what the first has saved."""
    path = str(Path(folder) / "saved.ckpt")
    first, second, resumed = (Loop(name, kind) for name in (saves, resumes, resumes))
    first.train(range(4))
    first.fabric.save(path, first.state)
    first.train(range(4, 8))
    second.train(range(8))
    resumed.fabric.load(path, resumed.state)
    resumed.train(range(4, 8))
    expected = first.end()
    for other in (second.end(), resumed.end()):
        for name, value in expected.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("kind", ["ring", "ring_int4", "gossip"])
@pytest.mark.parametrize(("saves", "resumes"), [BOTH_FABRICS, BOTH_FABRICS[::-1]])
def test_fabrics_give_the_same_bits_and_read_each_others_checkpoints(
    ranks: Pool, tmp_path: Path, kind: str, saves: str, resumes: str
) -> None:
    ranks(2, _fabrics, kind, saves, resumes, str(tmp_path))


@pytest.mark.parametrize("to", CLASSES)
@pytest.mark.parametrize("given", CLASSES)
def test_the_wrong_strategy_is_an_error_that_names_the_right_one(given: str, to: str) -> None:
    packages = PACKAGES | FABRICS
    strategy = getattr(packages[given][1], CLASSES[given])()
    package, ours = packages[to]
    make = package.Trainer if to in PACKAGES else package.Fabric
    if given == to:
        assert make(accelerator="cpu", devices=2, strategy=strategy).strategy is strategy
        return
    with pytest.raises(ValueError, match=f"is for {given} .take.*{ours.__name__}.{CLASSES[to]} for {to}[,)]"):
        make(accelerator="cpu", devices=2, strategy=strategy)


@pytest.mark.parametrize("package", CLASSES)
def test_every_name_is_in_the_registry_of_each_package(package: str) -> None:
    strategies = import_module(f"{package}.strategies")
    registry = strategies.StrategyRegistry if package in PACKAGES else strategies.STRATEGY_REGISTRY
    ours = getattr((PACKAGES | FABRICS)[package][1], CLASSES[package])
    for name in STRATEGIES:
        for suffix, start_method in START_METHODS.items():
            strategy = registry.get(name + suffix)
            assert type(strategy) is ours
            assert strategy._start_method == start_method


@pytest.mark.parametrize("package", BOTH)
def test_a_batch_size_finder_is_refused(package: str) -> None:
    pl, ours = PACKAGES[package]
    with pytest.raises(ValueError, match="BatchSizeFinder works with one process"):
        trainer_of(pl, ours.RingStrategy(), devices=1, callbacks=[pl.callbacks.BatchSizeFinder()]).fit(
            model_of(pl), rows()
        )


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("averages", [False, True])
def test_an_average_counts_as_swapped_even_if_it_is_equal(package: str, averages: bool) -> None:
    pl, ours = PACKAGES[package]
    callbacks = [pl.callbacks.EMAWeightAveraging()] if averages else []
    trainer = trainer_of(pl, ours.RingStrategy(), devices=1, callbacks=callbacks)
    session: Any = SimpleNamespace(glance=lambda **_: [])  # no parameters, so none has changed
    assert ours.RingStrategy.looks(trainer, session, lambda error: None).replaced() is averages


@pytest.mark.parametrize("package", CLASSES)
def test_files_are_written_whole(package: str) -> None:
    root, _ = (PACKAGES | FABRICS)[package]
    io = import_module(
        {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}.get(package, package)
    )
    make = root.Trainer if package in PACKAGES else root.Fabric
    strategy = make(accelerator="cpu", devices=2, strategy="ring", plugins=[io.plugins.TorchCheckpointIO()]).strategy
    assert isinstance(strategy.checkpoint_io, WholeCheckpointIOMixin)
    assert isinstance(strategy.checkpoint_io, io.plugins.CheckpointIO)


@pytest.mark.parametrize("package", BOTH)
def test_files_that_are_written_later_are_waited_for(package: str, tmp_path: Path) -> None:
    plugins = import_module(f"{package}.plugins")

    class Slow(plugins.TorchCheckpointIO):  # type: ignore[name-defined, misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            time.sleep(0.2)
            super().save_checkpoint(checkpoint, path, storage_options)

    later = plugins.AsyncCheckpointIO(Slow())
    later.save_checkpoint({"step": 1}, tmp_path / "saved.ckpt")
    finish_writing(later)
    assert (tmp_path / "saved.ckpt").exists()


@pytest.mark.parametrize(
    ("name", "other"), [("for_lightning", "for_pytorch_lightning"), ("for_fabric", "for_lightning_fabric")]
)
def test_two_files_differ_in_the_packages_name_alone(name: str, other: str) -> None:
    ours, theirs = ((DOOR / f"{each}.py").read_text() for each in (name, other))
    for root, its in (("lightning.fabric", "lightning_fabric"), ("lightning.pytorch", "pytorch_lightning")):
        ours = ours.replace(f"from {root}", f"from {its}").replace(f'"{root}"', f'"{its}"')
    assert ours.partition('"""\n')[2] == theirs.partition('"""\n')[2]


ABSENT = """
import importlib, sys
absent, names = sys.argv[1].split(), sys.argv[2:]

class Absent:
    @staticmethod
    def find_spec(name, path, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
import ringstrategy
for name in names:
    importlib.import_module(name)
"""
TRAINS = """
import torch
from {package}.demos.boring_classes import BoringModel
from {package} import Trainer
ours = importlib.import_module({ours!r})
quiet = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(strategy="ring_int8_fork", max_steps=3, **quiet)
trainer.fit(BoringModel())
assert type(trainer.strategy) is ours.RingStrategy
print("sent", trainer.strategy.stats.bytes_sent)
"""
FABRIC_TRAINS = """
import torch
from lightning_fabric import Fabric

def train(fabric):
    model = torch.nn.Linear(3, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(model(torch.ones(4, 3)).sum())
    optimizer.step()
    assert fabric.strategy.stats.bytes_sent > 0
    return type(fabric.strategy).__module__

print(Fabric(strategy="ring_int8_fork", accelerator="cpu", devices=2).launch(train))
"""
LIGHTNING, PYTORCH_LIGHTNING = ["lightning"], ["pytorch_lightning", "lightning_fabric"]


def without(absent: list[str], names: list[str], code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ABSENT + code, " ".join(absent), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("package", BOTH)
def test_each_package_trains_without_the_other(package: str) -> None:
    absent = PYTORCH_LIGHTNING if package == "lightning.pytorch" else LIGHTNING
    done = without(absent, [], TRAINS.format(package=package, ours=PACKAGES[package][1].__name__))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("sent")[1]) > 0


@pytest.mark.slow
def test_fabric_trains_without_any_trainer() -> None:
    done = without(["lightning", "pytorch_lightning"], [], FABRIC_TRAINS)
    assert done.stdout.strip().endswith("for_lightning_fabric"), done.stderr


def test_without_either_the_rest_works() -> None:
    doors = {path.stem for path in DOOR.glob("*.py") if not path.stem.startswith(("for_", "__"))}
    names = [f"ringstrategy.integrations.lightning.{name}" for name in sorted(doors)]
    code = "print(ringstrategy.Gossip())\nringstrategy.RingStrategy"
    done = without([*LIGHTNING, *PYTORCH_LIGHTNING], [*names, "ringstrategy.session"], code)
    assert done.stdout.startswith("Gossip("), done.stderr
    assert "take ringstrategy.pytorch_lightning.RingStrategy" in done.stderr.splitlines()[-1]


SPAWNS = """
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import ringstrategy
from ringstrategy import AllReduce, BlockInt

if __name__ == "__main__":
    strategy = ringstrategy.pytorch_lightning.RingStrategy(AllReduce(BlockInt(8)), start_method="spawn")
    callbacks = [ringstrategy.pytorch_lightning.CommunicationMonitor(), ringstrategy.pytorch_lightning.ReplicaCheck(1)]
    pl.Trainer(strategy=strategy, callbacks=callbacks, accelerator="cpu", devices=2, max_steps=3).fit(BoringModel())
    assert strategy.stats.bytes_sent > 0
    print("sent", strategy.stats.bytes_sent)
"""


@pytest.mark.slow
def test_the_strategy_and_the_callbacks_can_be_pickled(tmp_path: Path) -> None:
    done = run_script(tmp_path, SPAWNS)
    assert done.returncode == 0, done.stderr
    assert "sent" in done.stdout


SHRINKS = """
import os, signal
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers import CSVLogger
import ringstrategy

class Dies(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if (trainer.world_size, trainer.global_rank, trainer.global_step) == (3, 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)

strategy = ringstrategy.pytorch_lightning.RingStrategy(ringstrategy.Gossip(overlap=False), on_peer_loss="shrink")
quiet = dict(enable_checkpointing=False, enable_progress_bar=False, logger=CSVLogger("logs"), log_every_n_steps=1)
trainer = pl.Trainer(strategy=strategy, callbacks=[Dies()], accelerator="cpu", devices=3, max_epochs=1, **quiet)
trainer.fit(BoringModel())
print("went on:", trainer.world_size)
"""


@pytest.mark.slow
def test_survivors_go_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, SHRINKS)
    assert done.returncode == 0, done.stderr
    assert "went on: 2" in done.stdout

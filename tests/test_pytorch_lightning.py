"""One source serves both packages of Lightning, in one process: the same names, the same bits.

That is `lightning.pytorch` and `pytorch_lightning`, and for Fabric `lightning.fabric` and `lightning_fabric`.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from on_ranks import on_ranks
from test_strategy import rows
from torch import Tensor, nn

import ringstrategy
from ringstrategy.integrations.lightning.files import WholeCheckpointIOMixin
from ringstrategy.integrations.lightning.register import START_METHODS
from ringstrategy.names import STRATEGIES

DOOR = Path(ringstrategy.__file__).parent / "integrations" / "lightning"
PACKAGES: dict[str, tuple[Any, Any]] = {
    "lightning.pytorch": (lightning.pytorch, ringstrategy),
    "pytorch_lightning": (pytorch_lightning, ringstrategy.pytorch_lightning),
}
FABRICS: dict[str, tuple[Any, Any]] = {
    "lightning.fabric": (lightning.fabric, ringstrategy),
    "lightning_fabric": (lightning_fabric, ringstrategy.lightning_fabric),
}
ALL = PACKAGES | FABRICS
CLASSES = {name: "RingStrategy" if name in PACKAGES else "RingFabricStrategy" for name in ALL}


def made(name: str, strategy: Any, **options: Any) -> Any:
    """A Trainer, or a Fabric."""
    make = ALL[name][0].Trainer if name in PACKAGES else ALL[name][0].Fabric
    return make(accelerator="cpu", strategy=strategy, **{"devices": 2, **options})


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


@on_ranks(2)
def test_one_resumes_from_the_others_checkpoint(tmp_path: Path) -> None:
    """As if there had been no break, and no other package: the same bits, and the same lines in the logs."""
    folder = str(tmp_path)
    trainers, logged = [], []
    for name, ckpt_path in (("pytorch_lightning", None), ("lightning.pytorch", f"{folder}/epoch=0.ckpt")):
        pl, ours = PACKAGES[name]
        logger = pl.loggers.CSVLogger(folder, name, version=0)
        callbacks = [ours.CommunicationMonitor(consensus_every_n_steps=4), pl.callbacks.EMAWeightAveraging(decay=0.5)]
        if ckpt_path is None:
            callbacks.append(pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
        how: dict[str, Any] = {"callbacks": callbacks, "logger": logger, "enable_checkpointing": ckpt_path is None}
        how |= {"max_epochs": 3, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = made(name, "gossip", **how)
        trainer.fit(model_of(pl), rows(), rows(24), ckpt_path=ckpt_path)
        assert type(trainer.strategy) is ours.RingStrategy
        trainers.append(trainer)
        if trainer.is_global_zero:
            with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
                # at step 6 an epoch begins, or a fit
                lines = [each for each in csv.DictReader(file) if int(each["step"]) > 6]
            # exchanges of parameters overlap with the steps at which they are counted
            same = [key for key in lines[0] if not key.endswith(("_ms", "bytes_sent"))]
            logged.append([{key: line[key] for key in same} for line in lines])
    whole, resumed = trainers
    theirs = whole.lightning_module.state_dict()
    for name, value in resumed.lightning_module.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    assert whole.callback_metrics["loss"] == resumed.callback_metrics["loss"]
    assert (whole.global_step, resumed.global_step, resumed.strategy.stats.steps) == (18, 18, 12)
    if logged:
        assert logged[0] == logged[1]
        assert [int(line["step"]) for line in logged[0] if line["communication/consensus_distance"]] == [7, 11, 15]


@pytest.mark.parametrize("to", ALL)
def test_the_wrong_strategy_is_an_error_that_names_the_right_one(to: str) -> None:
    for given in ALL:
        strategy = getattr(ALL[given][1], CLASSES[given])()
        if given == to:
            assert made(to, strategy).strategy is strategy
            continue
        right = f"{ALL[to][1].__name__}.{CLASSES[to]} for {to}"
        with pytest.raises(ValueError, match=f"is for {given} .take.*{right}[,)]"):
            made(to, strategy)


@pytest.mark.parametrize("package", ALL)
def test_every_name_is_in_the_registry_of_each_package(package: str) -> None:
    strategies = import_module(f"{package}.strategies")
    registry = strategies.StrategyRegistry if package in PACKAGES else strategies.STRATEGY_REGISTRY
    suffixes = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    assert suffixes == START_METHODS
    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in suffixes.items():
            strategy = registry.get(name + suffix)
            assert type(strategy) is getattr(ALL[package][1], CLASSES[package])
            assert strategy._start_method == start_method
            assert repr(strategy.algorithm) == repr(algorithm())
            assert strategy.algorithm is not registry.get(name + suffix).algorithm


@pytest.mark.parametrize("package", ALL)
def test_files_are_written_whole(package: str) -> None:
    io = import_module(
        {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}.get(package, package)
    )
    strategy = made(package, "ring", plugins=[io.plugins.TorchCheckpointIO()]).strategy
    assert isinstance(strategy.checkpoint_io, WholeCheckpointIOMixin)
    assert isinstance(strategy.checkpoint_io, io.plugins.CheckpointIO)


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
LIGHTNING, PYTORCH_LIGHTNING = ["lightning"], ["pytorch_lightning", "lightning_fabric"]


def without(absent: list[str], names: list[str], code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ABSENT + code, " ".join(absent), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=250)


@pytest.mark.parametrize(
    ("absent", "package"),
    [
        (PYTORCH_LIGHTNING, "lightning.pytorch"),
        (LIGHTNING, "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], "lightning_fabric"),
    ],
)
def test_each_package_has_its_door_without_the_others(absent: list[str], package: str) -> None:
    ours, door = ALL[package][1].__name__, CLASSES[package]
    done = without(absent, [ours, package], f"print(sys.modules[{ours!r}].{door}().algorithm)")
    assert done.stdout.startswith("AllReduce("), done.stderr


def test_without_either_the_rest_works() -> None:
    doors = {path.stem for path in DOOR.glob("*.py") if not path.stem.startswith(("for_", "__"))}
    names = [f"ringstrategy.integrations.lightning.{name}" for name in sorted(doors)]
    code = "print(ringstrategy.Gossip())\nringstrategy.RingStrategy"
    done = without([*LIGHTNING, *PYTORCH_LIGHTNING], [*names, "ringstrategy.session"], code)
    assert done.stdout.startswith("Gossip("), done.stderr
    assert "take ringstrategy.pytorch_lightning.RingStrategy" in done.stderr.splitlines()[-1]

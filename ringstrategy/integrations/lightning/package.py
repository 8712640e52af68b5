"""Lightning comes in two packages, `lightning` and `pytorch_lightning`: the same source, but no class in common.

The same is true of Fabric, in `lightning.fabric` and `lightning_fabric`. So what derives from Lightning here is a
mixin, and `classes.py` puts the mixins before the classes of one package. A mixin finds whatever else it needs of
Lightning in its `package`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric import plugins as fabric
    from lightning.fabric.strategies.launchers import subprocess_script
    from lightning.fabric.utilities import distributed
    from lightning.pytorch import callbacks, loggers
    from lightning.pytorch.loggers import csv_logs
    from lightning.pytorch.loops import fetchers
    from lightning.pytorch.plugins.io import wrapper
    from lightning.pytorch.utilities import exceptions
    from torch.nn import Module
    from torch.utils.data import DataLoader, Sampler


TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")

_STRATEGIES = {
    "lightning.pytorch": "ringstrategy.RingStrategy",
    "pytorch_lightning": "ringstrategy.pytorch_lightning.RingStrategy",
    "lightning.fabric": "ringstrategy.RingFabricStrategy",
    "lightning_fabric": "ringstrategy.lightning_fabric.RingFabricStrategy",
}


def is_for(name: str) -> str:
    """For the repr of a strategy: its package, and the classes for the other packages."""
    others = ", ".join(f"{strategy} for {other}" for other, strategy in _STRATEGIES.items() if other != name)
    return f"which is for {name} (take {others})"


def imported(roots: Iterable[str], name: str) -> list[ModuleType]:
    """The modules of that name in these packages, as far as they are imported: nothing has classes of the others."""
    return [sys.modules[f"{root}.{name}"] for root in roots if f"{root}.{name}" in sys.modules]


def taken(module: str, name: str) -> Any:
    """What a module of Lightning has under this name, or under the name with an underscore."""
    home = import_module(module)
    return getattr(home, name, None) or getattr(home, f"_{name}")


@dataclass(frozen=True)
class FabricPackage:
    """What the Fabric door takes from one of the packages: each field is named as there, without an underscore.

    The types are those of `lightning`.

    Args:
        name: as users import it, "lightning.fabric" or "lightning_fabric".
    """

    name: str
    TorchCheckpointIO: type[fabric.TorchCheckpointIO]
    init_dist_connection: Callable[..., None]
    validate_keys_for_strict_loading: Callable[..., None]

    @classmethod
    def of(cls, fabric: str) -> FabricPackage:
        """Import it."""
        homes = {
            "TorchCheckpointIO": "plugins",
            "init_dist_connection": "utilities.distributed",
            "validate_keys_for_strict_loading": "strategies.strategy",
        }
        return cls(fabric, **{name: taken(f"{fabric}.{home}", name) for name, home in homes.items()})


@dataclass(frozen=True)
class Package:
    """What the Trainer's door takes from one of the packages: each field is named as there, without an underscore.

    The types are those of `lightning`.

    Args:
        name: as users import it, "lightning.pytorch" or "pytorch_lightning".
    """

    name: str
    BatchSizeFinder: type[callbacks.BatchSizeFinder]
    CSVLogger: type[loggers.CSVLogger]
    DistributedSamplerWrapper: type[distributed.DistributedSamplerWrapper]
    ExperimentWriter: type[csv_logs.ExperimentWriter]
    ModelCheckpoint: type[callbacks.ModelCheckpoint]
    StochasticWeightAveraging: type[callbacks.StochasticWeightAveraging]
    SIGTERMException: type[exceptions.SIGTERMException]
    TorchCheckpointIO: type[fabric.TorchCheckpointIO]
    WeightAveraging: type[callbacks.WeightAveraging]
    ChildProcessObserver: type[subprocess_script._ChildProcessObserver]
    PrefetchDataFetcher: type[fetchers._PrefetchDataFetcher]
    WrappingCheckpointIO: type[wrapper._WrappingCheckpointIO]
    init_dist_connection: Callable[..., None]
    sync_module_states: Callable[[Module], None]
    update_dataloader: Callable[[DataLoader[Any], Sampler[Any]], DataLoader[Any]]

    @classmethod
    def of(cls, pytorch: str, fabric: str) -> Package:
        """Import it, and the Fabric beside it."""
        homes = {
            "BatchSizeFinder": f"{pytorch}.callbacks",
            "CSVLogger": f"{pytorch}.loggers",
            "DistributedSamplerWrapper": f"{fabric}.utilities.distributed",
            "ExperimentWriter": f"{pytorch}.loggers.csv_logs",
            "ModelCheckpoint": f"{pytorch}.callbacks",
            "StochasticWeightAveraging": f"{pytorch}.callbacks",
            "SIGTERMException": f"{pytorch}.utilities.exceptions",
            "TorchCheckpointIO": f"{fabric}.plugins",
            "WeightAveraging": f"{pytorch}.callbacks",
            "ChildProcessObserver": f"{fabric}.strategies.launchers.subprocess_script",
            "PrefetchDataFetcher": f"{pytorch}.loops.fetchers",
            "WrappingCheckpointIO": f"{pytorch}.plugins.io.wrapper",
            "init_dist_connection": f"{fabric}.utilities.distributed",
            "sync_module_states": f"{pytorch}.overrides.distributed",
            "update_dataloader": f"{pytorch}.utilities.data",
        }
        return cls(pytorch, **{name: taken(home, name) for name, home in homes.items()})

"""Lightning comes in two packages, `lightning` and `pytorch_lightning`: the same source, but no class in common.

The same is true of Fabric, in `lightning.fabric` and `lightning_fabric`. So what derives from Lightning here is a
mixin, and each `for_....py` puts the mixins before the classes of one package. A mixin finds whatever else it needs of
Lightning in its `package`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

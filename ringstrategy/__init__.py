"""Bandwidth-frugal data-parallel training for PyTorch Lightning.

Importing registers the names: `import ringstrategy`, then `Trainer(strategy="ring")`. The classes are imported when
they are first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ringstrategy._version import __version__
from ringstrategy.integrations import backends
from ringstrategy.integrations.lightning.register import register

if TYPE_CHECKING:
    from ringstrategy.algorithms.auto import Auto
    from ringstrategy.algorithms.base import Algorithm
    from ringstrategy.algorithms.gradients.allreduce import AllReduce
    from ringstrategy.algorithms.gradients.powersgd import PowerSGD
    from ringstrategy.algorithms.parameters.choco import Choco
    from ringstrategy.algorithms.parameters.gossip import Gossip
    from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
    from ringstrategy.algorithms.parameters.outer import Nesterov
    from ringstrategy.algorithms.parameters.push_sum import PushSum
    from ringstrategy.algorithms.policy import SmallExact
    from ringstrategy.algorithms.server.central_storage import CentralStorage
    from ringstrategy.algorithms.server.parameter_server import ParameterServer
    from ringstrategy.codecs import (
        BlockFloat8,
        BlockInt,
        Cast,
        Codec,
        Gaussian,
        Identity,
        Rotated,
        Sign,
        TopK,
    )
    from ringstrategy.collectives import BySize, Collective, Direct, Hierarchical, Native, Ring
    from ringstrategy.errors import LeftBehindError, PeerLostError, PlanMismatchError
    from ringstrategy.integrations.ddp_hook import ddp_hook
    from ringstrategy.integrations.fsdp import FsdpResiduals, fsdp
    from ringstrategy.integrations.lightning.fabric import consensus, finish
    from ringstrategy.integrations.lightning.for_fabric import RingFabricStrategy
    from ringstrategy.integrations.lightning.for_lightning import (
        CommunicationMonitor,
        Decoupled,
        ReplicaCheck,
        RingStrategy,
    )
    from ringstrategy.integrations.process_group import GroupOptions, RingProcessGroup
    from ringstrategy.integrations.ray import RayRingStrategy as RayRingStrategy
    from ringstrategy.names import describe
    from ringstrategy.optimizers import MuonAdamW
    from ringstrategy.server.rules import Staleness
    from ringstrategy.transport import Peers, Stats
    from ringstrategy.transport.timelines import merge_timelines
    from ringstrategy.transport.trace import timeline

_HOMES = {
    "algorithms.base": ("Algorithm",),
    "algorithms.gradients.allreduce": ("AllReduce",),
    "algorithms.auto": ("Auto",),
    "algorithms.parameters.choco": ("Choco",),
    "algorithms.parameters.gossip": ("Gossip",),
    "algorithms.parameters.local_sgd": ("LocalSGD",),
    "algorithms.parameters.outer": ("Nesterov",),
    "algorithms.gradients.powersgd": ("PowerSGD",),
    "algorithms.parameters.push_sum": ("PushSum",),
    "algorithms.policy": ("SmallExact",),
    "algorithms.server.central_storage": ("CentralStorage",),
    "algorithms.server.parameter_server": ("ParameterServer",),
    "codecs": (
        *("BlockFloat8", "BlockInt", "Cast", "Codec", "Gaussian"),
        *("Identity", "Rotated", "Sign", "TopK"),
    ),
    "collectives": ("BySize", "Collective", "Direct", "Hierarchical", "Native", "Ring"),
    "errors": ("LeftBehindError", "PeerLostError", "PlanMismatchError"),
    "integrations.ddp_hook": ("ddp_hook",),
    "integrations.fsdp": ("FsdpResiduals", "fsdp"),
    "integrations.process_group": ("GroupOptions", "RingProcessGroup"),
    "integrations.ray": ("RayRingStrategy",),  # not in __all__: it needs the extra `ray`
    "integrations.lightning.fabric": ("consensus", "finish"),
    "integrations.lightning.for_fabric": ("RingFabricStrategy",),
    "integrations.lightning.for_lightning": ("CommunicationMonitor", "Decoupled", "ReplicaCheck", "RingStrategy"),
    "names": ("describe",),
    "optimizers": ("MuonAdamW",),
    "server.rules": ("Staleness",),
    "transport": ("Peers", "Stats"),
    "transport.timelines": ("merge_timelines",),
    "transport.trace": ("timeline",),
}
_HOME_OF = {name: f"ringstrategy.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "AllReduce",
    "Auto",
    "BlockFloat8",
    "BlockInt",
    "BySize",
    "Cast",
    "CentralStorage",
    "Choco",
    "Codec",
    "Collective",
    "CommunicationMonitor",
    "Decoupled",
    "Direct",
    "FsdpResiduals",
    "Gaussian",
    "Gossip",
    "GroupOptions",
    "Hierarchical",
    "Identity",
    "LeftBehindError",
    "LocalSGD",
    "MuonAdamW",
    "Native",
    "Nesterov",
    "ParameterServer",
    "PeerLostError",
    "Peers",
    "PlanMismatchError",
    "PowerSGD",
    "PushSum",
    "ReplicaCheck",
    "Ring",
    "RingFabricStrategy",
    "RingProcessGroup",
    "RingStrategy",
    "Rotated",
    "Sign",
    "SmallExact",
    "Staleness",
    "Stats",
    "TopK",
    "__version__",
    "consensus",
    "ddp_hook",
    "describe",
    "finish",
    "fsdp",
    "merge_timelines",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOME_OF[name])
    except ModuleNotFoundError as error:
        if error.name == "lightning":
            other = "lightning_fabric" if name == "RingFabricStrategy" else "pytorch_lightning"
            cure = f"pip install lightning, or with {other} take ringstrategy.{other}.{name}"
            raise ModuleNotFoundError(f"ringstrategy.{name} is for lightning: {cure}", name=error.name) from error
        raise
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
backends.register()
del register, backends

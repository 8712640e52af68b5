"""Make this door's classes for one of Lightning's packages: a mixin of ours before a class of theirs."""

from __future__ import annotations

from functools import wraps
from typing import Any

from ringstrategy.integrations.lightning.callbacks import CommunicationMonitorMixin, ReplicaCheckMixin
from ringstrategy.integrations.lightning.decoupled import DecoupledMixin
from ringstrategy.integrations.lightning.fabric import EndingLauncherMixin, RingFabricStrategyMixin
from ringstrategy.integrations.lightning.files import WholeCheckpointIOMixin
from ringstrategy.integrations.lightning.joined import JoinedFetcherMixin
from ringstrategy.integrations.lightning.launcher import BringingLauncherMixin, OutlivingLauncherMixin
from ringstrategy.integrations.lightning.looks import LooksMixin
from ringstrategy.integrations.lightning.package import FabricPackage, Package, taken
from ringstrategy.integrations.lightning.strategy import RingStrategyMixin


def trainer_classes(pytorch: str, fabric: str, module: str) -> dict[str, type]:
    """The classes for a Trainer, by name.

    Args:
        pytorch: "lightning.pytorch" or "pytorch_lightning".
        fabric: the Fabric beside it, "lightning.fabric" or "lightning_fabric".
        module: where the classes will be found, for pickle.
    """
    package = Package.of(pytorch, fabric)
    callback, launchers = taken(f"{pytorch}.callbacks", "Callback"), f"{pytorch}.strategies.launchers"
    parts: dict[str, Any] = {
        "package": package,
        "bringing_launcher": _made(
            "BringingLauncher", module, BringingLauncherMixin, taken(launchers, "MultiProcessingLauncher")
        ),
        "outliving_launcher": _made(
            "OutlivingLauncher",
            module,
            OutlivingLauncherMixin,
            taken(launchers, "SubprocessScriptLauncher"),
            package=package,
        ),
        "looks": _made("Looks", module, LooksMixin, callback, package=package),
        "joined_fetcher": _made("JoinedFetcher", module, JoinedFetcherMixin, package.PrefetchDataFetcher),
        "whole_checkpoint_io": _made("WholeCheckpointIO", module, WholeCheckpointIOMixin, package.TorchCheckpointIO),
    }
    ddp = taken(f"{pytorch}.strategies", "DDPStrategy")
    public = [
        _made("RingStrategy", module, RingStrategyMixin, ddp, **parts),
        _made("CommunicationMonitor", module, CommunicationMonitorMixin, callback),
        _made("ReplicaCheck", module, ReplicaCheckMixin, callback),
        _made("Decoupled", module, DecoupledMixin, callback),
    ]
    return {made.__name__: made for made in (*public, *parts.values()) if isinstance(made, type)}


def fabric_classes(fabric: str, module: str) -> dict[str, type]:
    """The classes for a Fabric, by name; see `trainer_classes`."""
    package, ddp = FabricPackage.of(fabric), taken(f"{fabric}.strategies", "DDPStrategy")
    launcher = taken(f"{fabric}.strategies.launchers.multiprocessing", "MultiProcessingLauncher")

    # Fabric refuses `torch.autograd.grad`, and so a gradient penalty, where it finds another `backward` than its own
    @wraps(ddp.backward, assigned=())
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        RingFabricStrategyMixin.backward(self, *args, **kwargs)

    parts: dict[str, Any] = {
        "ending_launcher": _made("EndingLauncher", module, EndingLauncherMixin, launcher),
        "whole_checkpoint_io": _made("WholeCheckpointIO", module, WholeCheckpointIOMixin, package.TorchCheckpointIO),
    }
    strategy = _made(
        "RingFabricStrategy", module, RingFabricStrategyMixin, ddp, package=package, backward=backward, **parts
    )
    return {made.__name__: made for made in (strategy, *parts.values())}


def _made(name: str, module: str, mixin: type, base: type, **attributes: Any) -> type:
    return type(name, (mixin, base), {"__module__": module, "__doc__": mixin.__doc__, **attributes})

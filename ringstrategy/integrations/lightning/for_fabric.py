"""The classes for Fabric of `lightning.fabric`. `for_lightning_fabric.py` has the same, and a test compares the two."""

from __future__ import annotations

from functools import wraps
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch import Tensor
from torch.nn import Module

from ringstrategy.integrations.lightning.fabric import EndingLauncherMixin, RingFabricStrategyMixin
from ringstrategy.integrations.lightning.files import WholeCheckpointIOMixin
from ringstrategy.integrations.lightning.package import FabricPackage


class EndingLauncher(EndingLauncherMixin, _MultiProcessingLauncher):
    """See `EndingLauncherMixin`."""


class WholeCheckpointIO(WholeCheckpointIOMixin, TorchCheckpointIO):
    """See `WholeCheckpointIOMixin`."""


class RingFabricStrategy(RingFabricStrategyMixin, DDPStrategy):
    __doc__ = RingFabricStrategyMixin.__doc__

    package = FabricPackage(
        name="lightning.fabric",
        TorchCheckpointIO=TorchCheckpointIO,
        init_dist_connection=_init_dist_connection,
        validate_keys_for_strict_loading=_validate_keys_for_strict_loading,
    )
    ending_launcher = EndingLauncher
    whole_checkpoint_io = WholeCheckpointIO

    # Fabric refuses `torch.autograd.grad`, and so a gradient penalty, where it finds another `backward` than its own
    @wraps(DDPStrategy.backward, assigned=())
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """See `RingFabricStrategyMixin.backward`."""
        super().backward(tensor, module, *args, **kwargs)

"""The classes for Fabric of `lightning.fabric`. `for_lightning_fabric.py` has the same, and a test compares the two."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.distributed import _init_dist_connection

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

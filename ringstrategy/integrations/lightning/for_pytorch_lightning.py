"""The classes for `pytorch_lightning`. `for_lightning.py` has the same ones, and a test compares the two."""

from __future__ import annotations

from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper, _init_dist_connection
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from pytorch_lightning.utilities.data import _update_dataloader
from pytorch_lightning.utilities.exceptions import SIGTERMException

from ringstrategy.integrations.lightning.callbacks import CommunicationMonitorMixin, ReplicaCheckMixin
from ringstrategy.integrations.lightning.files import WholeCheckpointIOMixin
from ringstrategy.integrations.lightning.joined import JoinedFetcherMixin
from ringstrategy.integrations.lightning.launcher import BringingLauncherMixin, OutlivingLauncherMixin
from ringstrategy.integrations.lightning.looks import LooksMixin
from ringstrategy.integrations.lightning.package import Package
from ringstrategy.integrations.lightning.strategy import RingStrategyMixin

PACKAGE = Package(
    name="pytorch_lightning",
    BatchSizeFinder=BatchSizeFinder,
    CSVLogger=CSVLogger,
    DistributedSamplerWrapper=DistributedSamplerWrapper,
    ExperimentWriter=ExperimentWriter,
    ModelCheckpoint=ModelCheckpoint,
    StochasticWeightAveraging=StochasticWeightAveraging,
    SIGTERMException=SIGTERMException,
    TorchCheckpointIO=TorchCheckpointIO,
    WeightAveraging=WeightAveraging,
    ChildProcessObserver=_ChildProcessObserver,
    PrefetchDataFetcher=_PrefetchDataFetcher,
    WrappingCheckpointIO=_WrappingCheckpointIO,
    init_dist_connection=_init_dist_connection,
    sync_module_states=_sync_module_states,
    update_dataloader=_update_dataloader,
)


class BringingLauncher(BringingLauncherMixin, _MultiProcessingLauncher):
    """See `BringingLauncherMixin`."""


class OutlivingLauncher(OutlivingLauncherMixin, _SubprocessScriptLauncher):
    """See `OutlivingLauncherMixin`."""

    package = PACKAGE


class Looks(LooksMixin, Callback):
    """See `LooksMixin`."""

    package = PACKAGE


class JoinedFetcher(JoinedFetcherMixin, _PrefetchDataFetcher):
    """See `JoinedFetcherMixin`."""


class WholeCheckpointIO(WholeCheckpointIOMixin, TorchCheckpointIO):
    """See `WholeCheckpointIOMixin`."""


class RingStrategy(RingStrategyMixin, DDPStrategy):
    __doc__ = RingStrategyMixin.__doc__

    package = PACKAGE
    bringing_launcher = BringingLauncher
    outliving_launcher = OutlivingLauncher
    looks = Looks
    joined_fetcher = JoinedFetcher
    whole_checkpoint_io = WholeCheckpointIO


class CommunicationMonitor(CommunicationMonitorMixin, Callback):
    __doc__ = CommunicationMonitorMixin.__doc__


class ReplicaCheck(ReplicaCheckMixin, Callback):
    __doc__ = ReplicaCheckMixin.__doc__

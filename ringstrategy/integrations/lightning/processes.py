"""`ddp`'s processes with this package's manners: collectives that name lost peers, and a rank that says why it goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.errors import PeerLostError, is_of_a_connection, last_words
from ringstrategy.failure.board import Board
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.reach import address_towards
from ringstrategy.integrations.lightning import refusals
from ringstrategy.integrations.lightning.launcher import BringingLauncherMixin, OutlivingLauncherMixin
from ringstrategy.integrations.lightning.meeting import disconnect_at_exit, meet, stay_connected_at_exit
from ringstrategy.integrations.lightning.package import Package
from ringstrategy.membership.members import JOIN, Members
from ringstrategy.membership.rendezvous import announce, check_all_announced, first_of_run
from ringstrategy.membership.worlds import Membership
from ringstrategy.session import Session
from ringstrategy.transport.backend import claim_gpu
from ringstrategy.transport.connect import this_host

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.fabric.utilities.types import ReduceOp
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object
    ClusterEnvironment = object  # nobody asks for the class of the one that a strategy has

_log = logging.getLogger("ringstrategy")


class ProcessesMixin(DDPStrategy):
    """How ranks are launched, meet, and part; abstract, for `RingStrategyMixin`.

    Attributes:
        package: of the trainer.
        bringing_launcher: for that package.
        outliving_launcher: for that package.
        algorithm: of this strategy.
        session: of the fit that is under way; None outside of one.
        members: of the job, where training goes on after a loss (`on_peer_loss`).
    """

    package: Package
    bringing_launcher: type[BringingLauncherMixin]
    outliving_launcher: type[OutlivingLauncherMixin]
    algorithm: Algorithm
    session: Session | None = None
    members: Members | None = None
    on_peer_loss: str = "raise"
    _run = 0
    _has_met = _has_told = _has_joined = False

    # Launching

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    def _accelerator(self) -> Accelerator | None:
        # This name is what a Trainer asks a strategy for that it is given, and before all else.
        if self._launcher is not None:
            raise ValueError(
                "this RingStrategy belongs to another Trainer already: make one for each, RingStrategy(...). They may "
                "share the algorithm, RingStrategy(other.algorithm), which is copied"
            )
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    def _configure_launcher(self) -> None:
        for device in self.parallel_devices or []:
            refusals.check_device(device)
        if self.joins:
            self.cluster_environment = Given.newcomer()
            return  # it is one process
        super()._configure_launcher()
        if self.on_peer_loss != "raise":
            assert self.cluster_environment is not None
            self._launcher = self.outliving_launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        if self._start_method != "popen":
            self._launcher = self.bringing_launcher(self, self._start_method)

    def setup_environment(self) -> None:
        """As `ddp`; and at exit the ranks disconnect, as Lightning does it for NCCL alone."""
        module = self.lightning_module
        if module is not None:  # else a user starts the processes without a Trainer
            refusals.check_callbacks(module.trainer, self.package)
        super().setup_environment()
        self._has_met = self._has_told = False
        backend = None if self.world_size == 1 else self._get_process_group_backend()
        refusals.check_on_peer_loss(self.on_peer_loss, backend, self._start_method, self.algorithm)
        if self.on_peer_loss != "raise" and self.world_size > 1 and self.members is None:
            assert self._timeout is not None
            known = os.environ[JOIN].partition(",")[0].rpartition(":")[0] if self.joins else ""
            self.members = Members(self._timeout, address_towards(known) if known else None)
            if not self.joins:
                self.members.found()
        if self.world_size > 1 and not self.joins:
            self._run = announce(self.global_rank)
            claim_gpu(self.root_device, self.global_rank, this_host(), first_of_run(self._run))
        disconnect_at_exit()

    def setup_distributed(self) -> None:
        """As `ddp`; but ranks may start later than `timeout`, and torchrun may restart them."""
        assert self.cluster_environment is not None
        assert self._timeout is not None
        self.set_world_ranks()
        if self.joins:
            return  # before its first batch
        backend, connect = self._get_process_group_backend(), self.package.init_dist_connection
        meet(self.cluster_environment, backend, self.root_device, self._timeout, connect)
        super().setup_distributed()

    # Other ranks than before

    @property
    def joins(self) -> bool:
        """Whether this process is to take the place of a rank that was lost, and has not taken it yet."""
        return self.on_peer_loss != "raise" and bool(os.environ.get(JOIN)) and not self._has_joined

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As `ddp`, of the ranks that are there now."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def on_regrouping(self) -> None:
        """From now on the processes that Lightning has started outlive each other."""
        if isinstance(self._launcher, OutlivingLauncherMixin):
            self._launcher.let_go()

    def joined(self, while_waiting: Callable[[], None]) -> Membership:
        """Wait until the members take this process in; `while_waiting` is called often, and may raise."""
        assert self.members is not None
        assert self._timeout is not None
        return self.members.join(os.environ[JOIN].split(","), self._timeout, while_waiting)

    def take_place(self, now: Membership) -> None:
        """Be a rank of the new default group."""
        assert self.members is not None
        assert self._timeout is not None
        self.members.apply(self._timeout)
        self.cluster_environment = Given(now.rank, now.size, self.local_rank, self.node_rank)
        self.set_world_ranks()
        self.on_regrouping()

    def connect_ranks(self, trainer: Trainer) -> None:
        """Open the session with the ranks of now."""
        raise NotImplementedError

    def on_regrouped(self) -> None:
        """All ranks of now train on."""
        raise NotImplementedError

    def _meet(self) -> None:
        """All ranks are about to connect. PeerLostError if one never came as far."""
        self._has_met = True
        check_all_announced(self._run, self.world_size)  # Lightning had a barrier since

    @property
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and trainer.state.fn == "fit"

    # Collectives that stay exact

    @property
    def alone(self) -> bool:
        """Did this rank's run end in an exception? Then nobody answers its collectives any more."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    def _naming_lost_peers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.session is None else self.session.link.naming_lost_peers("")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp`; after an exception only with other ranks that have failed, and hanging nobody."""
        if self.alone:
            if self.session is not None and self.session.link.detector is not None:
                self.session.link.detector.barrier.wait()
            return
        with self._naming_lost_peers():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As `ddp`; after an exception this rank's own object."""
        if self.alone:
            return obj
        with self._naming_lost_peers():
            return super().broadcast(obj, src)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """As `ddp`: exact, never through a codec; after an exception this rank's own tensor."""
        if self.alone:
            return tensor
        with self._naming_lost_peers():
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As `ddp`."""
        with self._naming_lost_peers():
            return super().all_gather(tensor, group, sync_grads)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes; no collective."""
        super().on_exception(exception)
        stay_connected_at_exit()
        self.tell(exception)

    def tell(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes, once; no collective."""
        if self._has_told:
            return
        self._has_told = True
        refusals.add_cure(exception, self.lightning_module)
        if self.session is not None:
            lost = isinstance(exception, PeerLostError) or is_of_a_connection(exception)
            self.session.tell(exception)
            if lost:  # whoever ends survivors may not leave time for a traceback
                _log.error("rank %d: %s: %s", self.global_rank, type(exception).__name__, exception)
        elif not self._has_met and self._is_fitting and self.world_size > 1 and dist.is_initialized():
            self._has_met = True
            # ranks that are ready wait for this one
            FailureDetector(Board.create(self.global_rank, self.world_size)).fail(last_words(exception))


class Given(ClusterEnvironment):
    """Ranks that the members of a job have agreed on."""

    def __init__(self, rank: int, size: int, local_rank: int, node_rank: int) -> None:
        super().__init__()
        self._rank, self._size, self._local_rank, self._node_rank = rank, size, local_rank, node_rank

    @classmethod
    def newcomer(cls) -> Given:
        """Not rank 0, so that it opens no logs, and not alone; until it joins it asks nobody."""
        return cls(1, 2, int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("NODE_RANK", 0)))

    @property
    def creates_processes_externally(self) -> bool:
        """Yes."""
        return True

    @property
    def main_address(self) -> str:
        """Nobody needs it."""
        raise NotImplementedError

    @property
    def main_port(self) -> int:
        """Nobody needs it."""
        raise NotImplementedError

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """They are given."""

    def teardown(self) -> None:
        """Nothing to do."""

    @staticmethod
    def detect() -> bool:
        """Only given."""
        return False

    def world_size(self) -> int:
        """How many."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """It is given."""

    def global_rank(self) -> int:
        """This one."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """It is given."""

    def local_rank(self) -> int:
        """The one that it was started with."""
        return self._local_rank

    def node_rank(self) -> int:
        """The one that it was started with."""
        return self._node_rank

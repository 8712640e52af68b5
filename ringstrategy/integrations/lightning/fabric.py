"""The door of Lightning Fabric: `Fabric(strategy="ring_int8")`, with a session for each model that is set up."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import secrets
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.synchronous import reachable
from ringstrategy.errors import PeerLostError, is_of_a_connection
from ringstrategy.integrations.lightning import refusals
from ringstrategy.integrations.lightning.files import LOG, RankFiles, WholeCheckpointIOMixin, finish_writing
from ringstrategy.integrations.lightning.meeting import disconnect, disconnect_at_exit, meet, stay_connected_at_exit
from ringstrategy.integrations.lightning.package import FABRICS, FabricPackage, imported, is_for
from ringstrategy.session import Session
from ringstrategy.session.optimizers import loss_scale, stepped_by
from ringstrategy.session.state import collect, found, restore, written_by_all
from ringstrategy.transport.stats import Stats

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.types import _PATH, ReduceOp
else:
    DDPStrategy = _MultiProcessingLauncher = object
    _BackwardSyncControl = object  # nobody asks for the class of the one that a strategy has

_log = logging.getLogger("ringstrategy")
_KEY = "ringstrategy"  # in a checkpoint


class RingModule(Module):
    """What `fabric.setup` makes of a model: its forward first gives all ranks rank 0's buffers, as torch DDP's does.

    Args:
        module: the model.
        session: of the model; it is open.
    """

    def __init__(self, module: Module, session: Session) -> None:
        super().__init__()
        self.module, self.session = module, session
        self.optimizers: list[Optimizer] = []  # that step any of its parameters
        self._batches = 0
        self._between = True  # two batches
        self._prepare = torch.compiler.disable(self._before_forward)  # collectives are no part of a graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        self._prepare()
        return self.module(*args, **kwargs)

    def _before_forward(self) -> None:
        trains = torch.is_grad_enabled()
        if trains:
            self.begin_batch()
        self.session.send_buffers(between=not trains and not self.module.training)

    def begin_batch(self) -> None:
        """Unless one is under way."""
        if self._between:
            self._between = False
            self._batches += 1
            place = f"near batch {self._batches} of {type(self.module).__name__}"
            self.session.begin_batch(place, self.optimizers, first=False, later_epoch=False)
            for line in self.session.algorithm.news():
                rank_zero_info(line)

    def end_batch(self) -> None:
        """An optimizer has stepped."""
        self._between = True

    def stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether it steps any parameter of this model."""
        return not stepped_by(optimizer).isdisjoint(self.module.parameters())


class RingFabricStrategyMixin(DDPStrategy):
    """Data-parallel training with Fabric as with `ddp`, but an `Algorithm` of this package does the averaging.

    Each model that `fabric.setup` or `fabric.setup_module` gets has a copy of the algorithm, and connections of its
    own. With one process training is as without a strategy: nothing is encoded or sent.

    Args:
        algorithm: decides what is averaged, and when; or a name such as "ring_int4". It is copied. None: `AllReduce()`.
        accelerator: see Fabric's `DDPStrategy`, as for the other arguments not named here.
        parallel_devices: see `DDPStrategy`.
        cluster_environment: see `DDPStrategy`.
        checkpoint_io: see `DDPStrategy`.
        precision: see `DDPStrategy`.
        process_group_backend: "gloo" or "nccl"; None: gloo on CPUs, NCCL on GPUs.
        timeout: how long a peer may stay silent before it counts as lost (`PeerLostError`). None: torch's default, and
            for so long ranks wait at the start in any case.
        start_method: "popen", "spawn", "fork" or "forkserver".
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before each training forward, and
            before the first forward of an evaluation. With gossip and `LocalSGD` each rank keeps its own.
    """

    package: FabricPackage
    ending_launcher: type[EndingLauncherMixin]
    whole_checkpoint_io: type[WholeCheckpointIOMixin]

    def __init__(  # noqa: PLR0913
        self,
        algorithm: Algorithm | str | None = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        broadcast_buffers: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(refusals.unknown_arguments(unknown, type(self)))
        timeout = default_pg_timeout if timeout is None else timeout
        refusals.check_arguments(timeout, broadcast_buffers)
        self.algorithm: Algorithm = refusals.algorithm_of(algorithm)
        refusals.check_for_fabric(self.algorithm)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._broadcast_buffers = broadcast_buffers
        self._backward_sync_control = _NoSync()
        self._models: list[RingModule] = []
        self._optimizers: list[Optimizer] = []
        self._stats: list[Stats] = []  # of each model
        self._carried: dict[str, dict[str, Any]] = {}  # by a model's key: with one rank, for its next checkpoints
        self._has_told = False
        self._excepthook: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        """Names the algorithm and the right class: a Fabric of another package, or a Trainer, prints it."""
        return f"RingFabricStrategy({self.algorithm}), {is_for(self.package.name)}"

    @property
    def stats(self) -> Stats:
        """What was sent, and how long training waited: totals over all models. A copy."""
        columns = {field.name: [getattr(stats, field.name) for stats in self._stats] for field in fields(Stats)}
        totals: dict[str, Any] = {name: None if None in column else sum(column) for name, column in columns.items()}
        return Stats(**totals)

    # Launching

    def _configure_launcher(self) -> None:
        for device in self.parallel_devices or []:
            refusals.check_device(device)
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self.ending_launcher(self, self._start_method)

    def _setup_distributed(self) -> None:
        """As `ddp`; but ranks may start later than `timeout`, and torchrun may restart them."""
        assert self.cluster_environment is not None
        assert self._timeout is not None
        self._set_world_ranks()
        backend, connect = self._get_process_group_backend(), self.package.init_dist_connection
        meet(self.cluster_environment, backend, self.root_device, self._timeout, connect)
        super()._setup_distributed()
        self._has_told = False
        disconnect_at_exit()

    # Setting up

    def setup_module(self, module: Module) -> RingModule:  # type: ignore[override]
        """Open a session for the model, and give all ranks rank 0's parameters and buffers. All ranks call it.

        Raises:
            PlanMismatchError: on every rank, if ranks have different models, algorithms or optimizers.
        """
        refusals.check_module(module, self.root_device, None)
        for model in self._models:
            if not set(model.module.parameters()).isdisjoint(module.parameters()):
                raise ValueError(
                    f"this {type(module).__name__} shares parameters with the {type(model.module).__name__} that was "
                    "set up before, and each of them would average their gradients: make one nn.Module of both and "
                    "set that up, or call fabric.strategy.close() first if the other one trains no more"
                )
        if self.world_size == 1 and not self._models:
            rank_zero_info(
                "RingFabricStrategy: there is one process, so nothing is averaged and nothing is sent. For more pass "
                "Fabric(devices=2), since devices='auto' is one on CPUs, or start them with torchrun or Slurm"
            )
        assert self._timeout is not None
        session = Session(
            module,
            copy.deepcopy(self.algorithm),
            timeout=self._timeout,
            stats=Stats(),
            broadcast_buffers=self._broadcast_buffers,
        )
        try:
            session.open(self.root_device, scaled_loss=self._scaler is not None)
            session.synchronize()
        except BaseException:
            session.close()
            raise
        if self._excepthook is None:
            self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
            atexit.register(self.close)
        for line in session.algorithm.news():
            rank_zero_info(line)
        model = RingModule(module, session)
        self._models.append(model)
        self._stats.append(session.stats)
        self._bind(model)
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Announce the optimizer to the models that it steps. ValueError if it cannot work."""
        refusals.check_optimizers([optimizer], self.world_size)
        self._optimizers.append(optimizer)
        for model in self._models:
            if model.stepped_by(optimizer):
                self._bind(model)
        return optimizer

    def _bind(self, model: RingModule) -> None:
        model.optimizers = [optimizer for optimizer in self._optimizers if model.stepped_by(optimizer)]
        if model.optimizers:
            others = {parameter for other in self._models for parameter in other.module.parameters()}
            model.session.bind(model.optimizers, others=others)
            model.session.compare_optimizers()

    # A step

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward, and the end of the exchange: the gradients of the models that it reaches are averaged after it.

        Args:
            tensor: the loss.
            module: average the gradients of this model alone. None: of each model that the loss depends on.
            args: for `Tensor.backward`.
            kwargs: likewise.
        """
        models = self._reached_by(tensor, module)
        self.precision.pre_backward(tensor, module)
        scale = self._loss_scale()
        for model in models:
            model.session.before_backward(tensor, scale)
        self.precision.backward(tensor, module, *args, **kwargs)
        for model in models:
            model.session.after_backward()
        self.precision.post_backward(tensor, module)

    def _reached_by(self, loss: Tensor, module: Module | None) -> list[RingModule]:
        if isinstance(module, RingModule):
            return [module]
        if not self._models:
            raise RuntimeError(
                "fabric.backward(loss) came before any model was set up, so no gradients would be averaged: call "
                "model, optimizer = fabric.setup(model, optimizer) first"
            )
        if len(self._models) == 1:
            return self._models
        leaves = reachable(loss)
        models = [model for model in self._models if not leaves.isdisjoint(model.module.parameters())]
        if not models:
            raise RuntimeError(
                "this loss depends on no parameter of a model that was set up, as far as its graph shows, so no "
                "gradients would be averaged: name the model, fabric.backward(loss, model=model), or set it up "
                "with fabric.setup(model, optimizer)"
            )
        return models

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The optimizer's step, then the algorithm's."""
        models = [model for model in self._models if model.stepped_by(optimizer)]
        closure = kwargs.get("closure")
        if closure is not None:
            kwargs["closure"] = _checked(closure, models, optimizer)
        with ExitStack() as steps:
            for model in models:
                if closure is None:
                    model.session.algorithm.start()  # weights may have been loaded since the batch began
                    model.session.check_step(optimizer)
                else:
                    model.begin_batch()  # else the closure's forward would, within the step
                steps.callback(model.end_batch)
                steps.enter_context(model.session.stepping(optimizer, self._loss_scale))
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """As `ddp`. ValueError if replicas would differ, because some parameters are never averaged."""
        for model in self._models:
            if model.stepped_by(optimizer):
                model.session.algorithm.check(scaled_loss=False, clips_by_norm=True)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    def _loss_scale(self) -> Tensor | None:
        return None if self.world_size == 1 else loss_scale(self._scaler, self.root_device)

    # Collectives that stay exact

    @contextmanager
    def _collective(self, what: str, group: Any = None) -> Generator[None, None, None]:
        of_all = group is None or group is torch.distributed.group.WORLD
        with ExitStack() as around:
            for session in (model.session for model in self._models):
                around.enter_context(session.link.collective(what) if of_all else session.link.naming_lost_peers())
            yield

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp`; its errors name the rank that was lost."""
        with self._collective("fabric.barrier()"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As `ddp`, likewise."""
        with self._collective("fabric.broadcast()"):
            return super().broadcast(obj, src)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """As `ddp`, likewise: exact, never through a codec."""
        with self._collective("fabric.all_reduce()", group):
            return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As `ddp`, likewise."""
        with self._collective("fabric.all_gather()", group):
            return super().all_gather(tensor, group, sync_grads)

    # Checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one that writes files whole or not at all."""
        if self._checkpoint_io is None or type(self._checkpoint_io) is self.package.TorchCheckpointIO:
            self._checkpoint_io = self.whole_checkpoint_io()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """That of the model, under the names that it has without Fabric, with this rank's own values."""
        return super().get_module_state_dict(_without_ring(module))

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_without_ring(module), state_dict, strict)
        if isinstance(module, RingModule) and self.world_size > 1:
            module.session.algorithm.forget()

    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """As `ddp`, with the state of the algorithms, and a file of what is its own for each rank beside.

        Where ranks have different parameters, the checkpoint holds what `consensus` shows. All ranks call it. The
        files of the ranks are on the disk before the checkpoint that names them replaces the one before. RuntimeError
        on all ranks if one of them could not write.
        """
        if _KEY in state:
            raise ValueError(f"the key {_KEY!r} of a checkpoint is this package's: give your state another one")
        path, token = self.broadcast((os.fspath(path), secrets.token_hex(4)))
        files = RankFiles(self.checkpoint_io, path, storage_options=storage_options)
        models = {key: value for key, value in state.items() if isinstance(value, RingModule)}
        filter = filter or {}
        apart = self.algorithm.decentralized and self.world_size > 1
        checkpoint = own = self._convert_stateful_objects_in_state(state, filter)
        if apart:
            means: dict[str, Any] = {}
            owns: dict[str, Any] = {}  # also if this is within `consensus`
            for key, model in models.items():
                with model.session.link.collective("fabric.save()"):
                    both = model.session.means_of(model.module.state_dict)
                    means[key], owns[key] = dict(both.means), dict(both.own)
            filters = {key: value for key, value in filter.items() if key in means}
            checkpoint = own | self._convert_stateful_objects_in_state(means, filters)
            own = own | self._convert_stateful_objects_in_state(owns, filters)
        ours: dict[str, Any] = {}
        for number, (key, mine) in enumerate(_by_model(models, state, own).items()):
            if self.world_size == 1:
                ours |= {key: self._carried[key]} if key in self._carried else {}
            else:
                ranks = self._ranks(models[key].session.algorithm)
                ours[key] = collect(ranks, mine if apart else None, files, f"{token}-{number}")
        if ours:
            checkpoint = checkpoint | {_KEY: ours}

        def write() -> None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
                finish_writing(self.checkpoint_io)

        written_by_all(self._ranks(self.algorithm), files, write, undo=lambda: None)
        saves = [shared["files"] for shared in ours.values() if shared["files"] is not None]
        if saves and self.local_rank == 0:  # of each node: its disk may be its own
            files.keep_only(*saves)

    def load_checkpoint(
        self,
        path: _PATH,
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As `ddp`, and each rank gets back what is its own. All ranks call it, after `fabric.setup`.

        ValueError on all ranks if the file of one of them is damaged.
        """
        if not isinstance(state, dict) or not state:
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            if isinstance(state, RingModule):
                self._bind(state)
            return rest
        checkpoint: dict[str, Any] = dict(self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
        shared = checkpoint.pop(_KEY, {})
        files = RankFiles(self.checkpoint_io, path, weights_only=weights_only)
        models = {key: value for key, value in state.items() if isinstance(value, RingModule)}
        saved = {
            key: found(self._ranks(model.session.algorithm), files, shared[key], LOG)
            for key, model in models.items()
            if key in shared
        }
        for key in shared.keys() & state.keys() - models.keys():
            rank_zero_warn(
                f"{path}: {key!r} gets its weights, but not what else ranks have saved for it, such as error-feedback "
                "residuals: to go on with its training, call fabric.setup before fabric.load"
            )
        for each in saved.values():
            checkpoint |= {} if each.own is None else each.own["checkpoint"]
        self.package.validate_keys_for_strict_loading(state.keys(), checkpoint.keys(), strict=strict)
        for key, value in list(state.items()):
            if key not in checkpoint:
                continue
            content = checkpoint.pop(key)
            if isinstance(value, Module):
                self.load_module_state_dict(value, content, strict)
            elif isinstance(value, Stateful):
                value.load_state_dict(content)
            else:
                state[key] = content
        for key, model in models.items():
            algorithm = model.session.algorithm
            if key in saved:
                carried = restore(self._ranks(algorithm), saved[key], LOG)
                self._carried |= {} if carried is None else {key: carried}
            self._bind(model)
        return checkpoint

    def _ranks(self, algorithm: Algorithm) -> _Ranks:
        """With the algorithm of one model."""
        ranks = self.global_rank, self.world_size, self.root_device
        return _Ranks(algorithm, *ranks, self.all_gather, self.all_reduce)

    # The end

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook = self._excepthook
        self.tell(error)
        assert hook is not None
        hook(kind, error, trace)

    def tell(self, error: BaseException) -> None:
        """This rank ends in an exception: tell the others why. No collective.

        Nobody needs to call it for an exception that ends the process.
        """
        if self._has_told or not self._models:
            return
        self._has_told = True
        stay_connected_at_exit()
        lost = isinstance(error, PeerLostError) or is_of_a_connection(error)
        for model in self._models:
            model.session.tell(error)
        if lost:  # whoever ends survivors may not leave time for a traceback
            _log.error("rank %d: %s: %s", self.global_rank, type(error).__name__, error)

    def close(self) -> None:
        """Close the sessions of all models: join threads, remove hooks. They train no more, but others can be set up.

        At the end of a process it is called by itself. No collective; an exchange of parameters under way is dropped.
        """
        models, self._models, self._optimizers = self._models, [], []
        if self._excepthook is not None:
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._excepthook
            self._excepthook = None
            atexit.unregister(self.close)
        with ExitStack() as ends:  # each of them, whatever the others raise
            for model in models:
                ends.callback(model.session.close)

    def teardown(self) -> None:
        """`close`, and whatever Fabric tears down."""
        with ExitStack() as ends:
            ends.callback(super().teardown)
            ends.callback(self.close)


@contextmanager
def consensus(model: Module, *, replaced: bool = False) -> Generator[None, None, None]:
    """Within, a model that `fabric.setup` returned is the same on all ranks; then each rank gets its own back.

    With gossip ranks have different parameters, and validate, or export, their mean; with `LocalSGD` the shared
    parameters of the last agreement. All ranks enter. Where replicas are equal, under another strategy too, nothing
    happens.

    Args:
        model: which Fabric has set up.
        replaced: it holds other weights than those that are trained, such as a moving average: show their mean.

    Raises:
        TypeError: Fabric has not set up this model.
    """
    ring = _set_up(model, "consensus")
    with ExitStack() as within:
        if ring is not None:
            with ring.session.link.collective("the mean of all ranks"):
                within.enter_context(ring.session.consensus(replaced=replaced))
        yield


def finish(model: Module) -> None:
    """Training of a model that `fabric.setup` returned has ended, after as many batches on all ranks, who all call it.

    With `LocalSGD` all ranks take their exact mean, so that steps after the last agreement count; error feedback adds
    what codecs have lost so far. Otherwise nothing happens.

    Raises:
        TypeError: Fabric has not set up this model.
    """
    ring = _set_up(model, "finish")
    if ring is not None:
        with ring.session.link.collective("the end of training"):
            ring.session.finish()


def _set_up(model: Module, caller: str) -> RingModule | None:
    """What Fabric has wrapped; None if another strategy did."""
    wrappers = [module for module in imported(FABRICS, "wrappers") if module.is_wrapped(model)]
    if not wrappers:
        raise TypeError(
            f"{caller} needs the model that fabric.setup returned, and this {type(model).__name__} is not set up: "
            "call model, optimizer = fabric.setup(model, optimizer) first"
        )
    ring = wrappers[0]._unwrap_objects(model)
    return ring if isinstance(ring, RingModule) else None


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Gradients of a backward in here only accumulate: zero bytes are sent."""
        assert isinstance(module, RingModule), "Fabric refuses what it has not set up"
        return module.session.no_sync() if enabled else nullcontext()


class EndingLauncherMixin(_MultiProcessingLauncher):
    """A process that it starts tells the others why it fails, and disconnects at its end."""

    def _wrapping_function(self, process_idx: int, *args: Any) -> None:
        strategy: Any = self._strategy
        try:
            super()._wrapping_function(process_idx, *args)
        except BaseException as error:
            strategy.tell(error)
            strategy.close()
            raise
        strategy.close()
        disconnect()


@dataclass
class _Ranks:
    """See `ringstrategy.session.state.Ranks`."""

    algorithm: Algorithm
    global_rank: int
    world_size: int
    root_device: torch.device
    all_gather: Callable[..., Tensor]
    reduce: Callable[..., Tensor]
    alone: bool = False


def _checked(closure: Callable[[], Any], models: list[RingModule], optimizer: Optimizer) -> Callable[[], Any]:
    def gradients() -> Any:
        output = closure()
        for model in models:
            model.session.check_step(optimizer)
        return output

    return gradients


def _by_model(
    models: Mapping[str, RingModule], state: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What of `own` goes into each model's file: its parameters and optimizers; into the first one all the rest too."""
    parts: dict[str, dict[str, Any]] = {key: {} for key in models}
    for key, value in own.items() if models else ():
        whose = next(iter(models))
        if key in models:
            whose = key
        elif isinstance(state[key], Optimizer):
            whose = next((name for name, model in models.items() if model.stepped_by(state[key])), whose)
        parts[whose][key] = value
    return parts


def _without_ring(module: Module) -> Module:
    return module.module if isinstance(module, RingModule) else module

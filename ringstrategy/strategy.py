"""The Lightning strategy: one process a device, and an algorithm that averages."""

from __future__ import annotations

import atexit
import copy
import difflib
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH, ReduceOp
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.allreduce import AllReduce
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.checkpoints import collect, remove_residuals, restore
from ringstrategy.collectives.peers import Peers, connect
from ringstrategy.collectives.stats import Stats

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator

_BUFFER_BUCKET_BYTES = 250 * 2**20
_FROM_DDP = {
    "ddp_comm_hook": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "ddp_comm_state": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "ddp_comm_wrapper": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "bucket_cap_mb": "here it is RingStrategy(AllReduce(bucket_mb=...))",
    "gradient_as_bucket_view": "leave it out, gradients always are views of the buckets",
    "static_graph": "leave it out, nothing here depends on the graph",
    "model_averaging_period": "here it is RingStrategy(Gossip(interval=...))",
}


class RingStrategy(DDPStrategy):
    """Data parallelism whose averaging is an `Algorithm` of this package; everything else is as with `ddp`.

    The module stays unwrapped. With one process it trains exactly as without a strategy: nothing is encoded or sent.

    Args:
        algorithm: what is averaged, and when; copied, so that one object may be given to many trainers.
        accelerator: see Lightning's `DDPStrategy`, as for the other arguments not named here.
        parallel_devices: see `DDPStrategy`.
        cluster_environment: see `DDPStrategy`.
        checkpoint_io: see `DDPStrategy`.
        precision_plugin: see `DDPStrategy`.
        process_group_backend: "gloo" or "nccl"; None: gloo on CPUs, NCCL on GPUs. "gloo" works on GPUs too.
        timeout: how long a peer may stay silent before it counts as lost (`PeerLostError`). None: torch's default.
        start_method: "popen", "spawn", "fork" or "forkserver".
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before each training forward. With
            gossip each rank keeps its own, and people see their mean.

    Attributes:
        stats: what was sent, and how long training waited (`Stats`); totals over all fits of this strategy.
    """

    strategy_name = "ring"

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        broadcast_buffers: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_arguments(unknown))
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm is an Algorithm such as ringstrategy.AllReduce(), got {algorithm!r}"
                + ("; a codec or a collective goes into it: AllReduce(codec=..., collective=...)" if algorithm else "")
            )
        timeout = default_pg_timeout if timeout is None else timeout
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout is a datetime.timedelta such as timedelta(seconds=60), got {timeout!r}")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}")
        if not isinstance(broadcast_buffers, bool):
            raise TypeError(f"broadcast_buffers is True or False, got {broadcast_buffers!r}")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.algorithm: Algorithm = AllReduce() if algorithm is None else copy.deepcopy(algorithm)
        self.stats = Stats()
        self._broadcast_buffers = broadcast_buffers
        self._peers: Peers | None = None
        self._accumulating = False
        self._buffers_due = True
        self._resume: tuple[_PATH, Mapping[str, Any]] | None = None
        self._carried: dict[str, Any] | None = None
        self._own: Mapping[str, Any] = {}  # of the checkpoint that training resumes from, until it does
        self._left_with_children = False
        self._place = "while setting up"

    def __repr__(self) -> str:
        """The algorithm, and whose strategy this is: a `pytorch_lightning` Trainer prints it when it refuses us."""
        return f"RingStrategy({self.algorithm}), a strategy for `from lightning.pytorch import Trainer`"

    # Launching

    def _configure_launcher(self) -> None:
        for device in self.parallel_devices or []:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"RingStrategy runs on CPUs and CUDA GPUs, not on {device.type}: pass accelerator='cpu'"
                )
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = _StatsLauncher(self, start_method=self._start_method)

    # Setting up

    def setup_environment(self) -> None:
        """As `ddp`; and at exit the ranks disconnect, as Lightning does it for NCCL alone."""
        super().setup_environment()
        atexit.unregister(_disconnect)
        atexit.register(_disconnect)

    def setup(self, trainer: Trainer) -> None:
        """As `ddp`, but the module stays unwrapped."""
        super().setup(trainer)
        self._resume = None  # a checkpoint loaded for validation is none to resume from

    def configure_ddp(self) -> None:
        """Called by `setup` when fitting: plan, compare plans, and only then give all ranks rank 0's weights."""
        module = self.lightning_module
        assert module is not None
        if self.world_size > 1:
            self._attach(module)
        _sync_module_states(module)
        self._buffers_due = True
        if self._resume is not None:
            self._carried = restore(self, *self._resume)

    def _attach(self, module: LightningModule) -> None:
        assert self._timeout is not None
        self._peers = connect(self.root_device, self._timeout, self.stats)
        self.algorithm.setup(_shared_parameters(module), self._peers, sparse=_sparse_parameters(module))
        trainer = module.trainer
        self.algorithm.check(
            scaled_loss=getattr(self.precision_plugin, "scaler", None) is not None,
            clips_by_norm=bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm"),
        )
        self._log_news()

    def _log_news(self) -> None:
        for line in self.algorithm.news():
            rank_zero_info(line)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Refuse what cannot work."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS) and self.world_size > 1:
                raise ValueError(
                    "LBFGS decides from each rank's own loss how often to evaluate, so ranks would wait for each other "
                    "for ever: use another optimizer, or devices=1"
                )

    # One step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take in parameters that the model has got since setup; an epoch may have ended."""
        self._place = f"near batch {batch_idx}"
        module = self.lightning_module
        if batch_idx == 0 and self._peers is not None:
            assert module is not None
            self.algorithm.adopt(_shared_parameters(module), sparse=_sparse_parameters(module))
            for optimizer in self.optimizers if module.trainer.current_epoch else ():
                self.algorithm.after_epoch(_stepped(optimizer))
        self._log_news()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, after rank 0's buffers went to all; like torch DDP, not if the last forward only accumulated."""
        if (
            self._broadcast_buffers
            and self._buffers_due
            and self._peers is not None
            and not self.algorithm.decentralized
        ):
            self._send_buffers()
        self._buffers_due = not self._accumulating
        return super().training_step(*args, **kwargs)

    def _send_buffers(self) -> None:
        assert self.lightning_module is not None
        buffers = [buffer.detach() for buffer in _shared_buffers(self.lightning_module) if buffer.numel()]
        if buffers:
            with self._naming_lost_peers():
                world = dist.group.WORLD
                assert world is not None
                dist._broadcast_coalesced(world, buffers, _BUFFER_BUCKET_BYTES, 0)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of a backward in here only accumulate: zero bytes are sent."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, and the end of the exchange: hooks after this see averaged gradients."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._peers is not None:
            self.algorithm.before_backward(loss, sync=not self._accumulating, scale=self._loss_scale())
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if self._peers is not None:
            self.algorithm.after_backward()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The optimizer's step, then the algorithm's."""
        before = self._loss_scale()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._peers is not None:
            after = self._loss_scale()
            # a scaler backs off when it skips, and only then
            skipped = None if before is None or after is None else after < before
            self.algorithm.after_step(_stepped(optimizer), skipped)
        return output

    def _loss_scale(self) -> Tensor | None:
        """On the device, without waiting for it; not changed when the scaler's own is."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None or self._peers is None:
            return None
        scale: Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    # Collectives that stay exact

    @property
    def alone(self) -> bool:
        """Did this rank's run end in an exception? Then nobody answers its collectives any more."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    @contextmanager
    def _naming_lost_peers(self) -> Generator[None, None, None]:
        try:
            yield
        except dist.DistError as error:
            raise self._explained(error) from error
        except RuntimeError as error:
            if "gloo" not in str(error):  # gloo throws plain RuntimeErrors that name its source files
                raise
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> RuntimeError:
        return error if self._peers is None else self._peers.explain(error, self._place)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp`; nothing after an exception, so that its checkpoints hang nobody."""
        if self.alone:
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

    # What people look at, where ranks have parameters of their own

    def on_validation_start(self) -> None:
        """Within a fit: the mean of all ranks is validated."""
        super().on_validation_start()
        if self.algorithm.consensus:
            self._enter_consensus()

    def on_validation_end(self) -> None:
        """Each rank goes on with its own."""
        super().on_validation_end()
        self.algorithm.leave_consensus()

    def on_train_end(self) -> None:
        """The mean is what training returns."""
        super().on_train_end()
        self.algorithm.settle()
        if self.algorithm.consensus:
            self._enter_consensus()

    def _enter_consensus(self) -> bool:
        module = self.lightning_module
        assert module is not None
        return self.algorithm.enter_consensus([b for b in _shared_buffers(module) if b.is_floating_point()])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean of all ranks, who all call it; after an exception this rank's own."""
        entered = self.algorithm.decentralized and not self.alone and self._enter_consensus()
        state: dict[str, Any] = super().lightning_module_state_dict()
        if entered:
            for name, value in state.items():
                state[name] = value.clone() if isinstance(value, Tensor) else value
            self.algorithm.leave_consensus()
        return state

    # Checkpoints

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has; empty if all ranks have the same."""
        module = self.lightning_module
        if not self.algorithm.decentralized or module is None:
            return {}
        values = module.state_dict(keep_vars=True)
        return {
            "module": {n: self.algorithm.own(v).detach() for n, v in values.items() if isinstance(v, Tensor)},
            "optimizers": [self.optimizer_state(optimizer) for optimizer in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
            "algorithm": self.algorithm.own_state(),
        }

    def load_own_state(self, own: Mapping[str, Any]) -> bool:
        """Take back what `own_state` gave; its optimizers when they are loaded. See `Algorithm.load_own_state`."""
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(own["module"], strict=False)
        self._own = own
        return self.algorithm.load_own_state(own["algorithm"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """This rank's own, if it has any."""
        own, self._own = self._own, {}
        if own:
            checkpoint = {**checkpoint, "optimizer_states": own["optimizers"]}
            self.precision_plugin.load_state_dict(own["precision"])
        super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Add the algorithm's state, under the key `ringstrategy`, and a file of residuals for each rank beside.

        After training too; but not to a checkpoint of weights alone, from which no training goes on.
        """
        if "optimizer_states" in checkpoint:
            state = collect(self, filepath, storage_options) if self.world_size > 1 else self._carried
            if state is not None:
                checkpoint["ringstrategy"] = state
            if self._left_with_children:
                rank_zero_warn(
                    "the processes that trained are gone, and their error-feedback residuals with them: "
                    "this checkpoint has none. One that ModelCheckpoint saves during training has them"
                )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Keep the algorithm's state for `setup`, which comes later, unless training is under way."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        saved = checkpoint.get("ringstrategy")
        self._resume = None if saved is None else (checkpoint_path, saved)
        if self._resume is not None and self._peers is not None:
            restore(self, *self._resume)  # a tuner, such as the learning-rate finder, takes back its trial steps
            self._resume = None
        return checkpoint

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """The residuals beside it too."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:  # of each node: its disk may be its own
            remove_residuals(self.checkpoint_io, filepath)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes; no collective."""
        super().on_exception(exception)
        self.algorithm.leave_consensus()
        atexit.unregister(_disconnect)  # it would wait for peers that may not come
        if self._peers is not None:
            self._peers.abort(f"{type(exception).__name__}: {exception}"[:500])

    def teardown(self) -> None:
        """Join the communication thread, remove the hooks. No collective."""
        self.algorithm.close()
        peers, self._peers = self._peers, None
        try:
            if peers is not None:
                peers.close()
        finally:
            super().teardown()


class _StatsLauncher(_MultiProcessingLauncher):
    """Brings what local rank 0 knows back to the process that called `fit`: statistics, and what was chosen."""

    def __init__(self, strategy: RingStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method)
        self._ring = strategy

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        has_residuals = next(self._ring.algorithm.residuals(), None) is not None
        mine = {"ringstrategy_stats": self._ring.stats, "ringstrategy_residuals": has_residuals}
        mine["ringstrategy_outcome"] = self._ring.algorithm.outcome()
        return {**super().get_extra_results(trainer), **mine}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        self._ring.stats = extra.pop("ringstrategy_stats")
        self._ring._left_with_children = extra.pop("ringstrategy_residuals")
        self._ring.algorithm.take_outcome(extra.pop("ringstrategy_outcome"))
        super().update_main_process_results(trainer, extra)


def _disconnect() -> None:
    """Without it gloo's threads may abort a process that ends right after a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _ignored(module: Module) -> set[str]:
    """Names that a module has told torch DDP to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _stepped(optimizer: Optimizer) -> set[Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _shared_parameters(module: Module) -> dict[str, Parameter]:
    ignored = _ignored(module)
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def _shared_buffers(module: Module) -> list[Tensor]:
    ignored = _ignored(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def _sparse_parameters(module: Module) -> frozenset[str]:
    """Names of the parameters whose gradients are sparse: weights of modules with `sparse=True`, such as Embedding."""
    weights: set[Parameter] = {
        parameter
        for part in module.modules()
        if getattr(part, "sparse", False) is True
        for parameter in part.parameters(recurse=False)
    }
    return frozenset(name for name, parameter in module.named_parameters() if parameter in weights)


def _unknown_arguments(unknown: dict[str, Any]) -> str:
    own = [name for name in inspect.signature(RingStrategy.__init__).parameters if name not in ("self", "unknown")]
    inner = [name for name in inspect.signature(AllReduce.__init__).parameters if name != "self"]
    hints = []
    for name in unknown:
        if name in inner:
            hints.append(f"{name!r} belongs to the algorithm: RingStrategy(AllReduce({name}=...))")
        elif name in _FROM_DDP:
            hints.append(f"{name!r} is torch DDP's: {_FROM_DDP[name]}")
        else:
            close = difflib.get_close_matches(name, own, 1)
            hints.append(f"{name!r} is unknown" + (f", did you mean {close[0]!r}?" if close else ""))
    return f"RingStrategy: {'; '.join(hints)}. It takes {', '.join(own)}"

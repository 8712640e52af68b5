"""The Lightning strategy: one process a device, and an algorithm that averages."""

from __future__ import annotations

import atexit
import copy
import difflib
import inspect
import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH, ReduceOp
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, WeightAveraging
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.buckets.sample import same, sample
from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.integrations.lightning.checkpoints import (
    Means,
    Saved,
    averaged,
    collect,
    found,
    of_this_rank,
    remove_residuals,
    restore,
)
from ringstrategy.integrations.new_parts import NewParts
from ringstrategy.integrations.optimizer_steps import OptimizerSteps, announces_steps, any_of
from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import break_off
from ringstrategy.transport.lifeline import Lifeline, announce, check_all_announced
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.watch import Watch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator

_BROADCAST_BYTES = 250 * 2**20
_UNWRAPPED = {  # what only a module that torch DDP wraps has
    "no_sync": "accumulate under trainer.strategy.block_backward_sync() instead",
    "module": "leave out .module",
}
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
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before each training forward and
            before validation. With gossip each rank keeps its own, and people see their mean.

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
        self._watch: Watch | None = None
        self._has_met = self._has_told = False
        self._run = 0
        self._steps: OptimizerSteps | None = None
        self._new_parts: NewParts | None = None
        self._global_step = self._lightnings_steps = 0  # at this batch's beginning; how many of it were noticed
        self._known: set[Parameter] = set()  # to the algorithm
        self._optimized: list[set[Parameter]] = []  # by each optimizer, at this batch's beginning
        self._looks = _Looks(self)
        self._resume: Saved | None = None  # the checkpoint that training resumes from, until it does
        self._carried: dict[str, Any] | None = None
        self._means: Means | None = None  # last given to a checkpoint
        self._left_with_children = False
        self._place = "while setting up"

    def __repr__(self) -> str:
        """The algorithm, and whose strategy this is: a `pytorch_lightning` Trainer prints it when it refuses us."""
        return f"RingStrategy({self.algorithm}), a strategy for `from lightning.pytorch import Trainer`"

    # Launching

    @property
    def accelerator(self) -> Accelerator | None:
        """See `DDPStrategy`."""
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
            if device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"RingStrategy runs on CPUs and CUDA GPUs, not on {device.type}: pass accelerator='cpu'"
                )
            if device.type == "cuda" and find_spec("triton") is None:
                raise ValueError(
                    "on GPUs RingStrategy needs triton, which torch's CUDA builds bring along, and it is not installed "
                    "here: python -m pip install triton"
                )
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = _StatsLauncher(self, start_method=self._start_method)

    # Setting up

    def setup_environment(self) -> None:
        """As `ddp`; and at exit the ranks disconnect, as Lightning does it for NCCL alone."""
        module = self.lightning_module
        assert module is not None
        if any(isinstance(callback, BatchSizeFinder) for callback in _callbacks(module.trainer)):
            raise ValueError(
                "BatchSizeFinder works with one process and without a strategy for several: find the size in a run of "
                "its own with Trainer(strategy='auto', devices=1), and train with that size for each process"
            )
        super().setup_environment()
        self._has_met = self._has_told = False
        if self.world_size > 1:
            self._run = announce(self.global_rank)
        atexit.unregister(_disconnect)
        atexit.register(_disconnect)

    def setup(self, trainer: Trainer) -> None:
        """As `ddp`, but the module stays unwrapped."""
        super().setup(trainer)
        self._resume = None  # a checkpoint loaded for validation is none to resume from
        if self._peers is not None:
            self._bind()
            self.algorithm.compare("\n".join(map(_described, count(), self.optimizers)))
            self._looks.begin(trainer)

    def _bind(self) -> None:
        for optimizer in self.optimizers:
            self.algorithm.bind(_stepped(optimizer))

    def configure_ddp(self) -> None:
        """Called by `setup` when fitting: plan, compare plans, and only then give all ranks rank 0's weights."""
        module = self.lightning_module
        assert module is not None
        self._refuse_sync_batch_norm(module)
        if self.world_size > 1:
            self._attach(module)
        elif self.stats.steps == 0:  # once, not again at the next fit
            rank_zero_info(
                "RingStrategy: there is one process, so nothing is averaged and nothing is sent. For more pass "
                "Trainer(devices=2), since devices='auto' is one on CPUs, or start them with torchrun or Slurm"
            )
        own = None if self._resume is None or self._resume.own is None else _copied(module.state_dict())
        _sync_module_states(module)
        if own is not None:
            module.load_state_dict(own, strict=False)
        self._buffers_due = True
        if self._resume is not None:
            self._carried = restore(self, self._resume)

    def _refuse_sync_batch_norm(self, module: LightningModule) -> None:
        """On a CPU, where the first forward in training would fail."""
        names = [name for name, part in module.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
        if names and self.root_device.type == "cpu":
            cure = (
                "leave out sync_batchnorm=True" if self._layer_sync else "use nn.BatchNorm1d, 2d or 3d in their place"
            )
            raise ValueError(
                f"SyncBatchNorm works only on GPUs, and here {names[0]} ({len(names)} in all) would train on a CPU: "
                f"{cure}, then each process takes the statistics of its own batches; or use a norm without any, such "
                "as nn.GroupNorm"
            )

    def _attach(self, module: LightningModule) -> None:
        assert self._timeout is not None
        self._has_met, self._place = True, "while setting up"
        check_all_announced(self._run, self.world_size)  # Lightning had a barrier since
        self._peers = connect(self.root_device, self._timeout, self.stats)
        if self._lifeline is not None and "gloo" in dist.get_backend():
            self._watch = Watch(self._waits_in_vain, lambda: break_off(dist.group.WORLD))
        parameters = _shared_parameters(module)
        self.algorithm.setup(parameters, self._peers, sparse=_sparse_parameters(module))
        self._known = set(parameters.values())
        trainer = module.trainer
        self.algorithm.check(
            scaled_loss=getattr(self.precision_plugin, "scaler", None) is not None,
            clips_by_norm=bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm"),
        )
        self._steps = OptimizerSteps(self._before_step, self._after_step)
        self._new_parts = NewParts()
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
        if self._lifeline is not None:
            self._lifeline.begin_batch()
        if self._steps is not None:
            self._steps.forget()
        module = self.lightning_module
        if self._peers is not None and self._new_parts is not None:
            assert module is not None
            self._global_step, self._lightnings_steps = module.trainer.global_step, 0
            before, self._optimized = self._optimized, [_stepped(optimizer) for optimizer in self.optimizers]
            # nothing tells of a part that was deleted, except that its optimizer is given others
            if self._new_parts.any_since() or batch_idx == 0 or self._optimized != before:
                self._adopt(module)
            for optimizer in self.optimizers if batch_idx == 0 and module.trainer.current_epoch else ():
                self.algorithm.after_epoch(_stepped(optimizer))
        self._log_news()

    def _adopt(self, module: LightningModule) -> None:
        """Parameters that the model has got or lost since; new ones get rank 0's values, as those had it began with."""
        parameters = _shared_parameters(module)
        new = self.algorithm.adopt(parameters, sparse=_sparse_parameters(module))
        self._known = set(parameters.values())
        if new:
            self._from_rank_0([parameter.detach() for parameter in new if parameter.numel()])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, after rank 0's buffers went to all; like torch DDP, not if the last forward only accumulated."""
        self._send_buffers()
        self._buffers_due = not self._accumulating
        return super().training_step(*args, **kwargs)

    @property
    def _buffers_are_rank_0s(self) -> bool:
        return self._broadcast_buffers and self._peers is not None and not self.algorithm.decentralized

    def _send_buffers(self, *, between: bool = False) -> None:
        """`between` batches: no bytes may meet those of the next one, so a rank that has it is told of here."""
        module = self.lightning_module
        assert module is not None
        if self._buffers_are_rank_0s and self._buffers_due:
            buffers = [buffer.detach() for buffer in _shared_buffers(module) if buffer.numel()]
            if buffers and between:
                self.algorithm.compare("the buffers of rank 0")
            self._from_rank_0(buffers)
        self._buffers_due = False

    def _from_rank_0(self, tensors: list[Tensor]) -> None:
        if tensors:
            with self._naming_lost_peers():
                world = dist.group.WORLD
                assert world is not None
                dist._broadcast_coalesced(world, tensors, _BROADCAST_BYTES, 0)

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
            rates = "" if self.algorithm.decentralized else "\n".join(map(_rates, count(), self.optimizers))
            scale = self._loss_scale()
            self.algorithm.before_backward(loss, sync=not self._accumulating, scale=scale, same=rates)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if self._peers is not None:
            self.algorithm.after_backward()
        elif self.world_size == 1 and not self._accumulating:
            self.stats.steps += 1
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
        if self._steps is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        before = self._loss_scale()

        def gradients() -> Any:
            output = closure()
            self._check_step(_stepped(optimizer))
            return output

        with self._steps.expecting() as seen:
            output = super().optimizer_step(optimizer, gradients, model, **kwargs)
        if seen or announces_steps(optimizer):
            stepped = any_of(seen)
        else:
            after = self._loss_scale()
            # a scaler backs off when it skips, and only then
            stepped = True if before is None or after is None else after >= before
        self._lightnings_steps += 1
        self.algorithm.after_step(_stepped(optimizer), stepped)
        return output

    # What `OptimizerSteps` notices besides: raw optimizers, in manual optimization

    def _before_step(self, optimizer: Optimizer) -> None:
        self._check_step(_stepped(optimizer))

    def _after_step(self, optimizer: Optimizer) -> None:
        parameters = _stepped(optimizer)
        self._check_step(parameters)  # a step with a closure
        self._lightnings_steps += optimizer in self.optimizers
        self.algorithm.after_step(parameters, True)

    def _check_step(self, parameters: set[Parameter]) -> None:
        module = self.lightning_module
        has_new = self._new_parts is not None and self._new_parts.any
        if has_new and module is not None and not self.algorithm.decentralized:
            for name, parameter in _shared_parameters(module).items():
                if parameter in parameters and parameter not in self._known and parameter.grad is not None:
                    raise RuntimeError(
                        f"{name} joined the model within this batch, so its gradient is this rank's alone and replicas "
                        "would differ: make it before the batch, in on_train_start or on_train_batch_start, or give it "
                        "to the optimizer at the next batch"
                    )
        self.algorithm.before_step(parameters)

    def _notice_dropped_steps(self) -> None:
        """An `optimizer_step` of the user's may drop a batch, on this rank alone. Mixing goes on even so.

        In manual optimization nobody can tell a dropped step from none.
        """
        module = self.lightning_module
        if self._peers is None or self.alone or module is None or not module.automatic_optimization:
            return
        while self._lightnings_steps < module.trainer.global_step - self._global_step:
            self._lightnings_steps += 1
            self.algorithm.after_step(_stepped(self.optimizers[0]), False)

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
            with nullcontext() if self._watch is None else self._watch.over():
                yield
        except RuntimeError as error:
            if self._peers is None or not _is_of_a_connection(error):
                raise
            raise self._peers.explain(error, self._place) from error

    @property
    def _lifeline(self) -> Lifeline | None:
        return None if self._peers is None else self._peers.lifeline

    def _waits_in_vain(self) -> bool:
        lifeline = self._lifeline
        return lifeline is not None and lifeline.news(self._place) is not None

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp`; after an exception only with other ranks that have failed, and hanging nobody."""
        if self.alone:
            if self._lifeline is not None:
                self._lifeline.gather()
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

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `ddp`. Within a fit, the first batch of a validation is to find what is the same on all ranks."""
        self._looks.look()
        return super().batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `ddp`. Of a step that takes a `dataloader_iter` no batch was seen before."""
        self._looks.look()
        return super().validation_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """As `ddp`."""
        super().on_validation_start()
        self._place = "in validation"
        if self._lifeline is not None:
            self._lifeline.leave_training("validation")

    def on_validation_end(self) -> None:
        """Each rank goes on with its own."""
        super().on_validation_end()
        self._looks.end()

    def on_train_end(self) -> None:
        """The mean is what training returns."""
        super().on_train_end()
        self._place = "at the end of training"
        if self._lifeline is not None:
            self._lifeline.leave_training("the end of its training")
        self.algorithm.settle()
        if self._peers is not None and self.algorithm.consensus:
            self.enter_consensus(replaced=self._looks.replaced())

    def enter_consensus(self, *, replaced: bool = False) -> bool:
        """See `Algorithm.enter_consensus`."""
        module = self.lightning_module
        assert module is not None
        # validation runs in inference mode, and what is allocated there cannot be used outside
        with torch.inference_mode(False):
            return self.algorithm.enter_consensus(_shared_buffers(module), replaced=replaced)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean of all ranks, who all call it; after an exception this rank's own."""
        if not self.algorithm.decentralized or self._peers is None or self.alone:
            return super().lightning_module_state_dict()
        if self.enter_consensus():
            means = _copied(super().lightning_module_state_dict())
            self.algorithm.leave_consensus()
            own = super().lightning_module_state_dict()
        else:
            means = super().lightning_module_state_dict()
            with self.algorithm.as_own():
                own = _copied(super().lightning_module_state_dict())
        self._means = Means(means, own)
        return means

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Add the algorithm's state, under the key `ringstrategy`, and a file of residuals for each rank beside.

        After training too; but not to a checkpoint of weights alone, from which no training goes on.
        """
        means, self._means = self._means, None
        if "optimizer_states" in checkpoint:
            own = of_this_rank(checkpoint, means) if self.algorithm.decentralized else None
            state = collect(self, own, filepath, storage_options) if self.world_size > 1 else self._carried
            if state is not None:
                checkpoint["ringstrategy"] = state
            if self._left_with_children:
                rank_zero_warn(
                    "the processes that trained are gone, and their error-feedback residuals with them: "
                    "this checkpoint has none. One that ModelCheckpoint saves during training has them"
                )
        if means is not None:
            checkpoint["state_dict"] = averaged(self, checkpoint["state_dict"], means)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Keep the algorithm's state for `setup`, which comes later, unless training is under way.

        Ranks that have parameters of their own get their own checkpoint, if all of them find it.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._resume = None
        if "ringstrategy" not in checkpoint or not self._is_fitting:
            return checkpoint
        self._resume = found(self, checkpoint_path, checkpoint["ringstrategy"], weights_only)
        if self._resume.own is not None:
            checkpoint |= self._resume.own["checkpoint"]
        if self._peers is not None:
            restore(self, self._resume)  # a tuner, such as the learning-rate finder, takes back its trial steps
            self._resume = None
            self._bind()
        return checkpoint

    @property
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

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
        self._means = None
        atexit.unregister(_disconnect)  # it would wait for peers that may not come
        self._tell(exception)

    def _tell(self, exception: BaseException) -> None:
        if self._has_told:
            return
        self._has_told = True
        for name, cure in _UNWRAPPED.items():
            said = f"'{type(self.lightning_module).__name__}' object has no attribute '{name}'"
            if isinstance(exception, AttributeError) and str(exception) == said:
                exception.args = (f"{said}: RingStrategy does not wrap the module as torch DDP does, so {cure}",)
        if self._peers is not None and _is_of_a_connection(exception):  # Lightning has collectives of its own
            exception.args = (f"{self._peers.explain(exception, self._place)}",)
        cause = f"{type(exception).__name__}: {exception}"[:500]
        if self._peers is not None:
            self._peers.abort(cause)
        elif not self._has_met and self._is_fitting and self.world_size > 1 and dist.is_initialized():
            self._has_met = True
            Lifeline.cast(self.global_rank, self.world_size).fail(cause)  # those who are ready wait for this one

    def teardown(self) -> None:
        """Join the communication thread, remove the hooks. No collective, unless `fit` found nothing left to train."""
        if self._peers is not None and not self.alone and self.algorithm.consensus:
            self.enter_consensus()  # False if training has ended with that
        self._looks.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._means, self._known, self._optimized = None, set(), []
        steps, self._steps = self._steps, None
        new_parts, self._new_parts = self._new_parts, None
        for watching in (steps, new_parts):
            if watching is not None:
                watching.close()
        self.algorithm.close()
        peers, self._peers = self._peers, None
        try:
            if peers is not None:
                peers.close()
        finally:
            super().teardown()


class _Looks(Callback):
    """The first callback of all: sees parameters before others put something else there, such as a moving average.

    Lightning calls the strategy last when validation starts and ends. So the mean is entered at the first batch, when
    all who swap parameters have done so, and left before the first of them could take its own back.
    """

    def __init__(self, strategy: RingStrategy) -> None:
        self._strategy = strategy
        self._trainer: Trainer | None = None
        self._before: list[Tensor] = []
        self._due = self._replaced = False

    def begin(self, trainer: Trainer) -> None:
        """Take part in this fit."""
        self._trainer = trainer
        _callbacks(trainer).insert(0, self)

    def close(self) -> None:
        """Take part no more."""
        trainer, self._trainer = self._trainer, None
        callbacks = [] if trainer is None else _callbacks(trainer)
        if self in callbacks:
            callbacks.remove(self)
        self._due, self._before = False, []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others."""
        self._due = True
        if self._strategy.algorithm.consensus:
            self._before = self._glance()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others."""
        if self._strategy.algorithm.consensus:
            self._before = self._glance()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Before all others: when this ends, all exchanges of this batch have begun."""
        self._strategy._notice_dropped_steps()
        if self._strategy._lifeline is not None:
            self._strategy._lifeline.end_batch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Before others save checkpoints, which may take long: the other ranks wait for this one."""
        self._strategy._tell(exception)

    def look(self) -> None:
        """After all others: from now on the mean is looked at; where replicas are equal, with rank 0's buffers."""
        if not self._due:
            return
        self._due = False
        if self._strategy.algorithm.consensus:
            self._replaced = self.replaced()
            self._strategy.enter_consensus(replaced=self._replaced)
        else:
            self._strategy._send_buffers(between=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before all others. If nobody has swapped anything, they see the mean too."""
        self.look()  # on a rank without a batch
        if self._replaced:
            self.end()

    def end(self) -> None:
        """Each rank goes on with its own."""
        self._replaced = False
        self._strategy.algorithm.leave_consensus()

    def replaced(self) -> bool:
        """Has any rank put other values there since?"""
        # an average may have the very values of the parameters, as at first, and is swapped all the same
        averages = self._trainer is not None and any(isinstance(c, WeightAveraging) for c in _callbacks(self._trainer))
        mine = averages or not all(same(now, then) for now, then in zip(self._glance(), self._before, strict=True))
        return self._strategy.reduce_boolean_decision(mine, all=False)

    def _glance(self) -> list[Tensor]:
        module = self._strategy.lightning_module
        assert module is not None
        tensors = [*_shared_parameters(module).values(), *_shared_buffers(module)]
        return [sample(tensor.detach()) for tensor in tensors]


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


class _StatsLauncher(_MultiProcessingLauncher):
    """Brings what local rank 0 knows back to the process that called `fit`: statistics, and what was chosen."""

    def __init__(self, strategy: RingStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method)
        self._ring = strategy

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        has_residuals = next(self._ring.algorithm.residuals(), None) is not None
        mine = {"ringstrategy_stats": self._ring.stats, "ringstrategy_residuals": has_residuals}
        # as bytes, since Lightning looks for tensors in what is brought back, and refuses frozen dataclasses there
        mine["ringstrategy_outcome"] = pickle.dumps(self._ring.algorithm.outcome())
        return {**super().get_extra_results(trainer), **mine}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        self._ring.stats = extra.pop("ringstrategy_stats")
        self._ring._left_with_children = extra.pop("ringstrategy_residuals")
        self._ring.algorithm.take_outcome(pickle.loads(extra.pop("ringstrategy_outcome")))
        super().update_main_process_results(trainer, extra)


def _is_of_a_connection(error: BaseException) -> TypeGuard[RuntimeError]:
    if isinstance(error, PeerLostError | PlanMismatchError) or not isinstance(error, RuntimeError):
        return False
    # gloo throws plain RuntimeErrors that name its source files, or their first line
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in ("/gloo/", "gloo::", "pair closure"))


def _disconnect() -> None:
    """Without it gloo's threads may abort a process that ends right after a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _described(place: int, optimizer: Optimizer) -> str:
    """A line a group: what makes an optimizer step the same gradients alike."""
    kept = (bool, int, float, str, tuple)
    lines = []
    for i, group in enumerate(optimizer.param_groups):
        options = (f"{name}={_rounded(value)}" for name, value in sorted(group.items()) if isinstance(value, kept))
        lines.append(f"optimizer {place}, a {type(optimizer).__name__}, group {i}: {', '.join(options)}")
    return "\n".join(lines)


def _rates(place: int, optimizer: Optimizer) -> str:
    """A line a group: its learning rate."""
    lines = []
    for i, rate in enumerate(group.get("lr") for group in optimizer.param_groups):
        if isinstance(rate, Tensor) and rate.numel() == 1 and rate.device.type == "cpu":  # a GPU would be waited for
            rate = rate.item()
        if isinstance(rate, int | float):
            lines.append(f"optimizer {place}, group {i}: lr={_rounded(rate)}")
    return "\n".join(lines)


def _rounded(value: Any) -> str:
    """In so many digits as machines whose mathematics differ agree in."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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

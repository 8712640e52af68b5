"""The Lightning strategy: one process a device, and an algorithm that averages."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH, ReduceOp
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.integrations.lightning import arguments
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
from ringstrategy.integrations.lightning.launcher import StatsLauncher
from ringstrategy.integrations.lightning.looks import Looks, callbacks
from ringstrategy.session import Session
from ringstrategy.session.session import last_words
from ringstrategy.transport.lifeline import Lifeline, announce, check_all_announced
from ringstrategy.transport.stats import Stats

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator

_UNWRAPPED = {  # what only a module that torch DDP wraps has
    "no_sync": "accumulate under trainer.strategy.block_backward_sync() instead",
    "module": "leave out .module",
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
            raise TypeError(arguments.about(unknown, RingStrategy.__init__))
        timeout = default_pg_timeout if timeout is None else timeout
        arguments.check(algorithm, timeout, broadcast_buffers)
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
        self.session: Session | None = None  # while peers are connected
        self.left_with_children = False  # residuals, of processes that have ended
        self._broadcast_buffers = broadcast_buffers
        self._accumulating = False
        self._has_met = self._has_told = False
        self._run = 0
        self._global_step = 0  # at this batch's beginning
        self._looks = Looks(self)
        self._resume: Saved | None = None  # the checkpoint that training resumes from, until it does
        self._carried: dict[str, Any] | None = None
        self._means: Means | None = None  # last given to a checkpoint

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
            self._launcher = StatsLauncher(self, start_method=self._start_method)

    # Setting up

    def setup_environment(self) -> None:
        """As `ddp`; and at exit the ranks disconnect, as Lightning does it for NCCL alone."""
        module = self.lightning_module
        assert module is not None
        if any(isinstance(callback, BatchSizeFinder) for callback in callbacks(module.trainer)):
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
        if self.session is not None:
            self.session.bind(self.optimizers)
            self.session.compare_optimizers()
            self._looks.begin(trainer)

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
        self._has_met = True
        check_all_announced(self._run, self.world_size)  # Lightning had a barrier since
        self.session = Session(
            module,
            self.algorithm,
            timeout=self._timeout,
            stats=self.stats,
            broadcast_buffers=self._broadcast_buffers,
        )
        self.session.open(self.root_device)
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
        module = self.lightning_module
        if self.session is not None:
            assert module is not None
            trainer = module.trainer
            self._global_step = trainer.global_step
            later = trainer.current_epoch > 0
            self.session.begin_batch(
                f"near batch {batch_idx}", self.optimizers, first=batch_idx == 0, later_epoch=later
            )
        self._log_news()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, after rank 0's buffers went to all."""
        if self.session is not None:
            self.session.send_buffers()
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of a backward in here only accumulate: zero bytes are sent."""
        before, self._accumulating = self._accumulating, True
        with nullcontext() if self.session is None else self.session.no_sync():
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
        if self.session is not None:
            self.session.before_backward(loss, self._loss_scale())
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if self.session is not None:
            self.session.after_backward()
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
        session = self.session
        if session is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def gradients() -> Any:
            output = closure()
            session.check_step(optimizer)
            return output

        with session.stepping(optimizer, self._loss_scale):
            return super().optimizer_step(optimizer, gradients, model, **kwargs)

    def steps_of_batch(self) -> int | None:
        """How many Lightning has counted since the batch began, with those that a user's `optimizer_step` dropped.

        None in manual optimization, where nobody can tell a dropped step from none, and after an exception.
        """
        module = self.lightning_module
        if self.alone or module is None or not module.automatic_optimization:
            return None
        return module.trainer.global_step - self._global_step

    def _loss_scale(self) -> Tensor | None:
        """On the device, without waiting for it; not changed when the scaler's own is."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is None or self.session is None:
            return None
        scale: Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    # Collectives that stay exact

    @property
    def alone(self) -> bool:
        """Did this rank's run end in an exception? Then nobody answers its collectives any more."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    def _naming_lost_peers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.session is None else self.session.naming_lost_peers()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As `ddp`; after an exception only with other ranks that have failed, and hanging nobody."""
        if self.alone:
            if self.session is not None and self.session.lifeline is not None:
                self.session.lifeline.gather()
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
        if self.session is not None:
            self.session.leave_training("in validation", "validation")

    def on_validation_end(self) -> None:
        """Each rank goes on with its own."""
        super().on_validation_end()
        self._looks.end()

    def on_train_end(self) -> None:
        """The mean is what training returns."""
        super().on_train_end()
        if self.session is not None:
            self.session.leave_training("at the end of training", "the end of its training")
        self.algorithm.settle()
        if self.session is not None and self.algorithm.consensus:
            self.session.enter_consensus(replaced=self._looks.replaced())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean of all ranks, who all call it; after an exception this rank's own."""
        if not self.algorithm.decentralized or self.session is None or self.alone:
            return super().lightning_module_state_dict()
        if self.session.enter_consensus():
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
            if self.left_with_children:
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
        if self.session is not None:
            restore(self, self._resume)  # a tuner, such as the learning-rate finder, takes back its trial steps
            self._resume = None
            self.session.bind(self.optimizers)
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
        self.tell(exception)

    def tell(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes, once; no collective."""
        if self._has_told:
            return
        self._has_told = True
        for name, cure in _UNWRAPPED.items():
            said = f"'{type(self.lightning_module).__name__}' object has no attribute '{name}'"
            if isinstance(exception, AttributeError) and str(exception) == said:
                exception.args = (f"{said}: RingStrategy does not wrap the module as torch DDP does, so {cure}",)
        if self.session is not None:
            self.session.tell(exception)
        elif not self._has_met and self._is_fitting and self.world_size > 1 and dist.is_initialized():
            self._has_met = True
            # those who are ready wait for this one
            Lifeline.cast(self.global_rank, self.world_size).fail(last_words(exception))

    def teardown(self) -> None:
        """Join the communication thread, remove the hooks. No collective, unless `fit` found nothing left to train."""
        if self.session is not None and not self.alone and self.algorithm.consensus:
            self.session.enter_consensus()  # False if training has ended with that
        self._looks.close()
        self._means = None
        session, self.session = self.session, None
        try:
            if session is None:
                self.algorithm.close()
            else:
                session.close()
        finally:
            super().teardown()


def _disconnect() -> None:
    """Without it gloo's threads may abort a process that ends right after a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

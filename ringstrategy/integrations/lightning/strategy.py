"""The Lightning strategy: one process a device, and an algorithm that averages."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer

from ringstrategy.algorithms.auto import Auto
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.integrations.lightning import refusals
from ringstrategy.integrations.lightning.elastic import Elastic
from ringstrategy.integrations.lightning.files import LOG, RankFiles, WholeCheckpointIOMixin, finish_writing
from ringstrategy.integrations.lightning.joined import JoinedFetcherMixin, Joining
from ringstrategy.integrations.lightning.looks import LooksMixin
from ringstrategy.integrations.lightning.package import is_for
from ringstrategy.integrations.lightning.processes import ProcessesMixin
from ringstrategy.integrations.lightning.stopping import Stopping
from ringstrategy.session import Session
from ringstrategy.session.optimizers import loss_scale
from ringstrategy.session.state import (
    Means,
    Saved,
    averaged,
    collect,
    copied,
    found,
    of_this_rank,
    restore,
    written_by_all,
)
from ringstrategy.transport.stats import Stats

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision


class RingStrategyMixin(ProcessesMixin):  # noqa: PLR0904
    """Data-parallel training as with `ddp`, but an `Algorithm` of this package does the averaging.

    The module stays unwrapped. With one process it trains exactly as without a strategy: nothing is encoded or sent.

    Args:
        algorithm: decides what is averaged, and when; or a name, as in `RingStrategy("ring_int4", timeout=...)`. It is
            copied, so one object may be given to many trainers. None: `AllReduce()`.
        accelerator: see Lightning's `DDPStrategy`, as for the other arguments not named here.
        parallel_devices: see `DDPStrategy`.
        cluster_environment: see `DDPStrategy`.
        checkpoint_io: see `DDPStrategy`.
        precision_plugin: see `DDPStrategy`.
        process_group_backend: "gloo" or "nccl"; None: gloo on CPUs, NCCL on GPUs. "gloo" works on GPUs too.
        timeout: how long a peer may stay silent before it counts as lost (`PeerLostError`). None: torch's default, and
            for so long ranks wait at the start in any case.
        start_method: "popen", "spawn", "fork" or "forkserver".
        broadcast_buffers: give every rank rank 0's buffers (batch-norm statistics) before each training forward and
            before validation. With gossip and `LocalSGD` each rank keeps its own, and validation sees their mean.
        on_peer_loss: "raise": all ranks stop with a `PeerLostError`. "shrink": the others drop the batch and go on
            without the rank that was lost, with the mean over those that are there. "wait": they wait until another
            takes its place, and go on. For gloo, with processes of their own for each rank. See docs/failures.md.

    Attributes:
        stats: what was sent, and how long training waited (`Stats`); totals over all fits of this strategy.
    """

    strategy_name = "ring"
    looks: type[LooksMixin]
    joined_fetcher: type[JoinedFetcherMixin]
    whole_checkpoint_io: type[WholeCheckpointIOMixin]

    def __init__(  # noqa: PLR0913
        self,
        algorithm: Algorithm | str | None = None,
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
        on_peer_loss: Literal["raise", "shrink", "wait"] = "raise",
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(refusals.unknown_arguments(unknown, type(self)))
        timeout = default_pg_timeout if timeout is None else timeout
        refusals.check_arguments(timeout, broadcast_buffers)
        self.algorithm: Algorithm = refusals.algorithm_of(algorithm)
        refusals.check_on_peer_loss(on_peer_loss, process_group_backend, start_method, self.algorithm)
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
        self.stats = Stats()
        self.left_with_children = False  # residuals, of processes that have ended
        self._broadcast_buffers = broadcast_buffers
        self.on_peer_loss = on_peer_loss
        self._looks: LooksMixin | None = None  # with the session of several ranks
        self._has_ended = False  # training, in this fit
        self._elastic: Elastic | None = None  # likewise, if training goes on after a loss
        self._ends = ExitStack()  # of what else belongs to the fit
        self._resume: Saved | None = None  # the checkpoint that training resumes from, until it does
        self._resumed = ""  # from where, in words
        self._carried: dict[str, Any] | None = None
        self._means: Means | None = None  # last given to a checkpoint
        self._before = Stats()  # as this fit began
        self._fit_token = ""  # of the fit, for the files that ranks write when an exception ends it

    def __repr__(self) -> str:
        """Names the algorithm and the right class: the Trainer of another package prints it when it refuses us."""
        return f"RingStrategy({self.algorithm}), {is_for(self.package.name)}"

    def _outcome(self) -> Any:
        """What rank 0's process knows when it ends, for the process that started it. It can be pickled."""
        has_residuals = any(True for _ in self.algorithm.residuals())
        return self.stats, has_residuals, self.algorithm.outcome() if isinstance(self.algorithm, Auto) else None

    def _take_outcome(self, outcome: Any) -> None:
        self.stats, self.left_with_children, chosen = outcome
        if isinstance(self.algorithm, Auto):
            self.algorithm.take_outcome(chosen)

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        """As `ddp`, but the module stays unwrapped."""
        super().setup(trainer)
        self._resumed = ""
        self._resume = None  # a checkpoint loaded for validation is none to resume from
        if self.session is not None:
            self.session.bind(self.optimizers)
            self.session.compare_optimizers()
            if self.world_size > 1:
                self._looks, self._has_ended = self.looks(trainer, self.session, self.tell), False
                self._ends.callback(self._looks.close)
                stopping = Stopping(trainer, self.package, self.session, self.members)
                self._ends.callback(stopping.close)
                if self.members is not None:
                    self._elastic = Elastic(trainer, self, self.members, stopping)
                    self._ends.callback(self._elastic.close)
                    self.on_regrouping()

    def configure_ddp(self) -> None:
        """Called by `setup` when fitting: plan, compare plans, and only then give all ranks rank 0's weights."""
        module = self.lightning_module
        assert module is not None
        refusals.check_module(module, self.root_device, self._layer_sync)
        if self.joins:
            pass  # by itself, until it joins
        elif self.world_size > 1:
            refusals.check_weight_averages(module, self.algorithm, self.package)
            self._meet()
        elif self.stats.steps == 0:  # once, not again at the next fit
            rank_zero_info(
                "RingStrategy: there is one process, so nothing is averaged and nothing is sent. For more pass "
                "Trainer(devices=2), since devices='auto' is one on CPUs, or start them with torchrun or Slurm"
            )
        self._open_session(module)
        if self.session is not None:
            self.session.link.compare(f"  resumes from: {self._resumed or 'nothing'}")
        self._fit_token = str(self.broadcast(secrets.token_hex(4)))
        if self.joins:
            return
        own = None if self._resume is None or self._resume.own is None else copied(module.state_dict())
        self.package.sync_module_states(module)
        if own is not None:
            module.load_state_dict(own, strict=False)
        if self._resume is not None:
            self._carried = restore(self, self._resume, LOG)

    def _open_session(self, module: LightningModule) -> None:
        assert self._timeout is not None
        self._before = replace(self.stats)
        self.session = Session(
            module,
            self.algorithm,
            timeout=self._timeout,
            stats=self.stats,
            broadcast_buffers=self._broadcast_buffers,
        )
        if not self.joins:
            self.connect_ranks(module.trainer)

    def connect_ranks(self, trainer: Trainer) -> None:
        """Open the session with the ranks of now."""
        session = self._fit
        session.open(
            self.root_device,
            scaled_loss=self._scaler is not None,
            clips_by_norm=bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm"),
        )
        if session.uneven.is_open:
            self._ends.callback(Joining(trainer, session, self.package, self.joined_fetcher).close)
        self._log_news()

    def _log_news(self) -> None:
        for line in self.algorithm.news():
            rank_zero_info(line)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As `ddp`. ValueError for optimizers that cannot work."""
        super().setup_optimizers(trainer)
        refusals.check_optimizers(self.optimizers, self.world_size)

    @property
    def _fit(self) -> Session:
        assert self.session is not None, "within a fit"
        return self.session

    # Other ranks than before

    def process_dataloader(self, dataloader: object) -> object:
        """As `ddp`; in training after a loss, with what is left of the epoch."""
        loader = super().process_dataloader(dataloader)
        return loader if self._elastic is None else self._elastic.shared_out(loader)

    @property
    def _regroups(self) -> bool:
        """Whether this rank has left the ranks of before, and is none of the new ones yet."""
        return self._elastic is not None and self._elastic.kept is not None

    def on_regrouped(self) -> None:
        """All ranks of now train on."""
        self._has_joined, self._means = True, None
        self._fit_token = str(self.broadcast(secrets.token_hex(4)))

    # One step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take in parameters that the model has got since setup; an epoch may have ended."""
        assert self.lightning_module is not None
        later = self.lightning_module.trainer.current_epoch > 0
        self._fit.begin_batch(f"near batch {batch_idx}", self.optimizers, first=batch_idx == 0, later_epoch=later)
        if self._fit.uneven.idle:
            self.lightning_module.trainer.fit_loop._results.batch_size = 0  # for `log`: the weight in an epoch's mean
        self._log_news()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, after rank 0's buffers went to all."""
        self._fit.send_buffers()
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of a backward in here only accumulate: zero bytes are sent."""
        with nullcontext() if self.session is None else self.session.no_sync():
            yield

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, and the end of the exchange: hooks after this see averaged gradients.

        No backward on a rank that repeats a batch.
        """
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._fit.before_backward(loss, self._loss_scale())
        if not self._fit.uneven.idle:
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._fit.after_backward()
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
        session = self._fit

        def gradients() -> Any:
            output = closure()
            session.check_step(optimizer)
            return output

        with session.stepping(optimizer, self._loss_scale):
            return super().optimizer_step(optimizer, gradients, model, **kwargs)

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def _loss_scale(self) -> Tensor | None:
        return None if self.world_size == 1 else loss_scale(self._scaler, self.root_device)

    # Validation, where ranks have parameters of their own

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `ddp`. Within a fit, the first batch of a validation must see what all ranks see."""
        if self._looks is not None:
            self._looks.look()
        return super().batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `ddp`. Of a step that takes a `dataloader_iter` no batch was seen before."""
        if self._looks is not None:
            self._looks.look()
        return super().validation_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """As `ddp`."""
        super().on_validation_start()
        if self.session is not None:
            self.session.link.leave_training("in validation", "validation")

    def on_validation_end(self) -> None:
        """Each rank goes on with its own."""
        super().on_validation_end()
        if self._looks is not None:
            self._looks.end()

    def on_train_end(self) -> None:
        """What all ranks see is what training returns."""
        super().on_train_end()
        self._log_news()
        if self._looks is None or not self._looks.attends:
            self._fit.end_training()
        else:
            self._has_ended = True
            self._looks.after_train_end()
        if self.world_size > 1:
            rank_zero_info(f"RingStrategy: rank 0 {self._gain()}")

    def _gain(self) -> str:
        """What this fit sent, beside what an all-reduce of all gradients would have sent in each step."""
        assert self.lightning_module is not None
        made = self.stats.since(self._before)
        trained = sum(each.numel() for each in self.lightning_module.parameters() if each.requires_grad)
        steps = (made.steps or 0) / max(1, len(self.optimizers))
        return made.summary(2 * (self.world_size - 1) / self.world_size * trained * steps)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the mean of all ranks, who all call it; after an exception the state of this rank."""
        state = super().lightning_module_state_dict
        if self._looks is None or not self.algorithm.decentralized or self.alone or self._regroups:
            return state()
        self._means = self._fit.means_of(state)
        return dict(self._means.means)

    # Checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one that writes files whole or not at all."""
        if self._checkpoint_io is None or type(self._checkpoint_io) is self.package.TorchCheckpointIO:
            self._checkpoint_io = self.whole_checkpoint_io()
        elif isinstance(self._checkpoint_io, self.package.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self.whole_checkpoint_io()  # unless it has one already
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Add the algorithm's state, under the key `ringstrategy`, and a file of what is its own for each rank beside.

        After training too; but not to a checkpoint of weights alone, from which no training goes on. The files of the
        ranks are on the disk before the checkpoint that names them is written, which replaces the one before in one
        step. RuntimeError on all ranks if one of them could not write.
        """
        means, self._means = self._means, None
        named = None
        path, token = self._path_and_token(filepath)
        files = RankFiles(self.checkpoint_io, path, storage_options=storage_options)
        if "optimizer_states" in checkpoint:
            own = of_this_rank(checkpoint, means) if self.algorithm.decentralized else None
            state = collect(self, own, files, token) if self.world_size > 1 else self._carried
            if state is not None:
                checkpoint["ringstrategy"] = state
                named = state["files"]
            if self.left_with_children:
                rank_zero_warn(
                    "the processes that trained are gone, and their error-feedback residuals with them: "
                    "this checkpoint has none. One that ModelCheckpoint saves during training has them"
                )
        if means is not None:
            checkpoint["state_dict"] = averaged(self, checkpoint["state_dict"], means)

        def write() -> None:
            super(RingStrategyMixin, self).save_checkpoint(checkpoint, filepath, storage_options)
            if named is not None:
                finish_writing(self.checkpoint_io)

        if named is None or self.alone:
            write()
            return
        written_by_all(self, files, write, undo=lambda: None)  # who knows how far a user's `CheckpointIO` came
        if self.local_rank == 0:  # of each node: its disk may be its own
            files.keep_only(named)

    def _path_and_token(self, filepath: _PATH) -> tuple[_PATH, str]:
        """Of a save: the same on all ranks, the token another one each time. After an exception nobody answers.

        Rank 0's path: that of another rank may differ, by a metric in its name that is not the same on all ranks.
        """
        if self.alone or self.world_size == 1:
            return filepath, self._fit_token
        path, token = self.broadcast((os.fspath(filepath), secrets.token_hex(4)))
        return str(path), str(token)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Keep the algorithm's state for `setup`, which comes later, unless training is under way.

        Ranks that have parameters of their own get their own checkpoint, if all of them find it.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._resume = None
        if self._is_fitting:
            self._resumed = f"step {checkpoint.get('global_step')} of epoch {checkpoint.get('epoch')}"
        if "ringstrategy" not in checkpoint or not self._is_fitting:
            return checkpoint
        files = RankFiles(self.checkpoint_io, checkpoint_path, weights_only=weights_only)
        self._resume = found(self, files, checkpoint["ringstrategy"], LOG)
        if self._resume.own is not None:
            checkpoint |= self._resume.own["checkpoint"]
        if self.session is not None:
            restore(self, self._resume, LOG)  # a tuner, such as the learning-rate finder, takes back its trial steps
            self._resume = None
            self.session.bind(self.optimizers)
        return checkpoint

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """The residuals beside it too."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:  # of each node: its disk may be its own
            RankFiles(self.checkpoint_io, filepath).remove()

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one goes; no collective."""
        if self.session is not None:
            self.session.algorithm.leave_consensus()
        self._means = None
        super().on_exception(exception)

    def teardown(self) -> None:
        """Join the communication thread, remove the hooks. No collective, unless training has not ended in this fit."""
        session, looks, self._means = self.session, self._looks, None
        with ExitStack() as ends:  # each of them, last first, whatever the others raise
            ends.callback(super().teardown)
            if self.members is not None:  # after the session, whose store may be this member's
                ends.callback(self.members.close)
                self.members = None
            ends.callback(self.algorithm.close if session is None else session.close)
            ends.push(self._ends.pop_all())
            try:
                if looks is not None and session is not None and not self.alone and session.algorithm.consensus:
                    if looks.attends and not self._has_ended:
                        session.finish()
                    session.enter_consensus()  # False if training has ended with that
            finally:
                self.session = self._looks = self._elastic = None

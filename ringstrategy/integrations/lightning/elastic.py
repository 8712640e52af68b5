"""Training goes on in the same processes when a rank is lost, and takes in others: under Lightning's own loops."""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ringstrategy.errors import PeerLostError, is_of_a_connection
from ringstrategy.integrations.lightning.processes import ProcessesMixin
from ringstrategy.integrations.lightning.stopping import Newcomers, Stopping
from ringstrategy.kernels.sample import checksums
from ringstrategy.membership.members import JOIN, Members
from ringstrategy.membership.worlds import Membership
from ringstrategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_AFTER_STEP, _VALIDATION, _BATCH, _EPOCH_END = range(4)  # in the order in which a rank comes to them
_NEWCOMER = (-1, -1, -1, _BATCH)
_WAIT_SECONDS = 0.5  # between two looks for replacements

_CANNOT_SHARE = (
    "on_peer_loss='shrink' or 'wait' shares the samples of an epoch out again when a rank is lost. That takes one "
    "DataLoader over a data set with a length, with batch_size=..., whose sampler Lightning may replace "
    "(use_distributed_sampler=True); else use on_peer_loss='raise'"
)

_log = logging.getLogger("ringstrategy")


_Told = TypeVar("_Told")


class _Standing(NamedTuple):
    """How far a rank has come, and how its epoch's samples were shared out."""

    place: tuple[int, int, int, int]  # epochs begun, batches done, steps, and where: they compare
    digest: list[int]  # of the parameters that are equal on all ranks
    shares: tuple[int, int, int]


class _Look(NamedTuple):
    """What a rank sees before all go on."""

    wanted: int  # ranks; 0: any number, or it is new here
    may_wait: bool  # it is before a batch
    asked: int  # see `Stopping.asked`
    newcomers: int  # that wait to be taken in


class Elastic:
    """Takes the place of the methods of Lightning's loops in which ranks wait for each other, for one fit.

    Each of them is tried again when ranks were lost in it: a batch with the samples of the epoch that are left, shared
    out among the ranks that are there; a validation from its beginning. The hooks of an epoch's end are not repeated,
    because users' hooks may not stand that; what was left of them, a checkpoint too, is dropped.

    Ranks may have come differently far: who dies before its last message leaves others a step apart. So all take the
    state of the rank that is furthest, where theirs differs. Who was behind leaves its batch as if it had ended. A
    replacement is a rank that is far behind: it runs its own set-up by itself, and joins before its first batch.

    Args:
        trainer: of this fit.
        strategy: of this trainer.
        members: of the job, or a newcomer's.
        stopping: of this fit.

    Attributes:
        kept: between two sets of ranks: the algorithm's state, and this rank's residuals.
    """

    def __init__(self, trainer: Trainer, strategy: ProcessesMixin, members: Members, stopping: Stopping) -> None:
        self._package = strategy.package
        self._trainer, self._strategy, self._members, self._stopping = trainer, strategy, members, stopping
        self._wanted = strategy.world_size if strategy.on_peer_loss == "wait" and not strategy.joins else 0
        self.kept: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        fit = trainer.fit_loop
        self._fit, self._epoch, self._validation = fit, fit.epoch_loop, fit.epoch_loop.val_loop
        self._advance, self._validate, self._end_epoch = self._epoch.advance, self._validation.run, fit.on_advance_end
        self._begin_epoch, self._after_batch, self._set_up_data = (
            fit.on_advance_start,
            self._epoch.on_advance_end,
            fit.setup_data,
        )
        self._epoch.advance = self._batch  # type: ignore[method-assign, assignment]
        self._epoch.on_advance_end = self._batch_end  # type: ignore[method-assign, assignment]
        self._validation.run = self._one_validation  # type: ignore[method-assign]
        fit.on_advance_start = self._epoch_begins  # type: ignore[method-assign]
        fit.on_advance_end = self._epoch_ends  # type: ignore[method-assign]
        fit.setup_data = self._data  # type: ignore[method-assign]
        # of this epoch: batches x ranks that have drawn them; up to which batch that is counted; ranks since then
        self._drawn, self._counted, self._ranks = 0, 0, strategy.world_size
        self._regrouped = self._due = self._skips_epoch_end = self._in_training_data = False
        self._stops = False  # all ranks, before their next batch

    def close(self) -> None:
        """Give Lightning its own back."""
        for owner, names in (
            (self._epoch, ("advance", "on_advance_end")),
            (self._validation, ("run",)),
            (self._fit, ("on_advance_start", "on_advance_end", "setup_data")),
        ):
            for name in names:
                vars(owner).pop(name, None)

    # What Lightning calls

    def _batch(self, _: Any) -> None:
        self._members.beat()
        error: BaseException | None = Newcomers() if self._strategy.joins else None
        while True:
            if error is None:
                try:
                    self._wait_for_replacements()
                    if self._due:
                        self._share_out()
                    if self._strategy.world_size == 1:
                        self._epoch._broadcast_sigterm_tensor()  # Lightning asks several ranks only
                    assert self._fit._data_fetcher is not None
                    return self._advance(self._fit._data_fetcher)
                except (Newcomers, RuntimeError) as caught:
                    error = caught
            progress: Any = self._epoch.batch_progress.current
            stepped = progress.processed > progress.completed
            done = self._recover(_AFTER_STEP if stepped else _BATCH, error)
            error = None
            if done:
                return None

    def _batch_end(self, _: Any) -> None:
        assert self._fit._data_fetcher is not None
        self._after_batch(self._fit._data_fetcher)

    def _one_validation(self) -> Any:
        self._members.beat()
        while True:
            try:
                return self._validate()
            except RuntimeError as error:
                if self._trainer.sanity_checking:
                    raise
                done = self._recover(_VALIDATION, error)
            module = self._trainer.lightning_module
            self._validation._module_mode.restore(module)
            self._validation._results.reset()
            if done:
                return []

    def _epoch_begins(self) -> None:
        if self._regrouped:
            self._drawn, self._counted, self._ranks = 0, 0, self._strategy.world_size
            self._due = True  # before the first batch: the samples are those of the end of the last epoch
        self._begin_epoch()

    def _epoch_ends(self) -> None:
        try:
            if not self._skips_epoch_end:
                return self._end_epoch()
        except RuntimeError as error:
            self._recover(_EPOCH_END, error)
        self._skips_epoch_end = False
        _log.warning("a rank was lost at an epoch's end: what was left of its hooks is dropped, its checkpoint too")
        progress = self._fit.epoch_progress
        for tracker in (progress.total, progress.current):
            _end(tracker)
        return None

    def _data(self) -> None:
        self._in_training_data = True
        try:
            self._set_up_data()
        finally:
            self._in_training_data = False
        loaders = self._fit._combined_loader
        if loaders is not None and len(loaders.flattened) != 1:
            raise ValueError(_CANNOT_SHARE)

    # The samples

    def shared_out(self, loader: object) -> object:
        """The training loader, with what is left of the epoch. ValueError if nobody knows what that is."""
        if not self._in_training_data:
            return loader
        if (
            not isinstance(loader, DataLoader)
            or not isinstance(loader.sampler, DistributedSampler)
            or isinstance(loader.sampler, self._package.DistributedSamplerWrapper)
            or not isinstance(loader.batch_size, int)
        ):
            raise ValueError(_CANNOT_SHARE)
        if not self._regrouped:
            return loader
        epochs: Any = self._fit.epoch_progress.current
        done = self._epoch.batch_progress.current.ready if self._due else 0
        rest = Rest(
            loader.sampler,
            self._strategy.global_rank,
            self._strategy.world_size,
            skip=self._drawn * loader.batch_size,
            done=done * loader.batch_size,
            epoch=epochs.processed,
        )
        return self._package.update_dataloader(loader, rest)

    def _share_out(self) -> None:
        """All ranks draw from what is left of the epoch: its batches that have ended are done."""
        progress, every = self._epoch.batch_progress, self._trainer.accumulate_grad_batches
        behind = progress.current.ready % every  # batches whose gradients were not stepped yet, and are drawn again
        for tracker in (progress.current, progress.total):
            tracker.ready -= behind
            _end(tracker)
        self._drawn += (progress.current.ready - self._counted) * self._ranks
        self._counted, self._ranks = progress.current.ready, self._strategy.world_size
        before = self._fit._data_fetcher
        if before is not None and before.iterator is not None:  # else a loss came while it was set up
            before.teardown()
        self._fit._combined_loader = None
        self._fit.setup_data()
        fetcher = self._fit._data_fetcher
        assert fetcher is not None
        fetcher.fetched += progress.current.ready
        fetcher._start_profiler = self._epoch._on_before_fetch
        fetcher._stop_profiler = self._epoch._on_after_fetch
        self._due = False

    # After a loss

    def _recover(self, where: int, error: BaseException) -> bool:
        """Continue with the ranks that are there. True: this rank's batch, validation or epoch's end has ended by that.

        Raises `error` if no rank was lost.
        """
        while True:
            lost = isinstance(error, PeerLostError) or is_of_a_connection(error)
            if not lost and not isinstance(error, Newcomers):
                raise error
            try:
                return self._go_on(where, error)
            except RuntimeError as another:
                if another is error:
                    raise
                error = another

    def _go_on(self, where: int, error: BaseException) -> bool:
        strategy, before = self._strategy, self._members.now
        mine = self._standing(where)
        self._part(lost=not isinstance(error, Newcomers))
        if self._members.belongs:
            now = self._members.regroup(invite=isinstance(error, Newcomers))
            if before is not None and now.names == before.names and not isinstance(error, Newcomers):
                raise error  # nobody is lost: ranks wait for each other at different places
        else:
            now = strategy.joined(self._stopping.check)
        strategy.take_place(now)
        if before is not None and now.rank == 0 != before.rank:
            self._keep_logs()
        now = self._with_replacements(now, may_wait=isinstance(error, Newcomers))
        standings = self._all(mine)
        furthest = max(standings, key=lambda standing: standing.place)
        source = standings.index(furthest)
        self._drawn, self._counted, self._ranks = furthest.shares
        own_epoch = copy.deepcopy(self._fit.epoch_progress), copy.deepcopy(self._epoch.batch_progress)
        self._hand_over(standings, source)
        self._regrouped = self._due = True
        self._validation._combined_loader = None
        done = self._settle_progress(mine.place, furthest.place, own_epoch)
        self._meet_again()
        self._say(before, now, error)
        return done

    @property
    def _session(self) -> Session:
        assert self._strategy.session is not None, "within a fit"
        return self._strategy.session

    def _part(self, *, lost: bool) -> None:
        """Leave the ranks of now: connections end, and what the algorithm has of its own is kept.

        Args:
            lost: a rank was lost, and others may wait for this one: they are told first.
        """
        strategy, algorithm = self._strategy, self._strategy.algorithm
        algorithm.leave_consensus()
        if lost:
            self._session.link.leave()
        if self.kept is None and not strategy.joins:  # else it is from before another loss
            if strategy.world_size == 1:
                algorithm.forget()  # this rank has gone on by itself from what ranks shared
            self.kept = algorithm.state_dict(), {name: value.clone() for name, value in algorithm.residuals()}
        self._session.close()

    def _packed(self) -> dict[str, Any]:
        """All of this rank's state, for a rank that is behind."""
        checkpoint: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return {"checkpoint": checkpoint, "algorithm": None if self.kept is None else self.kept[0]}

    def _unpack(self, packed: dict[str, Any], *, newcomer: bool) -> None:
        """Take what another rank has packed. A rank that trained before keeps parameters that are its own."""
        connector = self._trainer._checkpoint_connector
        connector._loaded_checkpoint = packed["checkpoint"]
        try:
            if newcomer or not self._strategy.algorithm.decentralized:
                for callback in self._trainer.checkpoint_callbacks:
                    theirs = packed["checkpoint"].get("callbacks", {}).get(callback.state_key, {})
                    if isinstance(callback, self._package.ModelCheckpoint) and newcomer:
                        callback.dirpath = theirs.get("dirpath", callback.dirpath)
                connector.restore_datamodule()
                connector.restore_model()
                connector.restore_callbacks()
                connector.restore_training_state()
            else:
                connector.restore_loops()
        finally:
            connector._loaded_checkpoint = {}
        self.kept = packed["algorithm"], {} if self.kept is None else self.kept[1]

    def _meet_again(self) -> None:
        """All ranks of now connect, and the algorithm goes on. Residuals of ranks that were lost are lost."""
        strategy, session = self._strategy, self._session
        strategy.connect_ranks(self._trainer)
        session.bind(strategy.optimizers)
        session.compare_optimizers()
        assert self.kept is not None
        shared, residuals = self.kept
        # rank 0 has that of the furthest rank; one that was lost within a step may have counted it, and not made it
        session.algorithm.load_state_dict(strategy.broadcast(shared))
        session.algorithm.load_residuals(residuals)
        session.bind(strategy.optimizers)
        self.kept = None
        strategy.on_regrouped()

    def _keep_logs(self) -> None:
        """This rank logs from now on. Lightning's CSVLogger would delete what the lost rank has written."""
        for logger in self._trainer.loggers:
            if isinstance(logger, self._package.CSVLogger):
                file = Path(logger.log_dir) / self._package.ExperimentWriter.NAME_METRICS_FILE
                if file.exists():
                    file.rename(file.with_stem(f"{file.stem}-until-step-{self._trainer.global_step}"))

    def _say(self, before: Membership | None, now: Membership, error: BaseException) -> None:
        """Who trains now, in the log."""
        if before is None:
            _log.warning("this process has joined a run, as rank %d of %d", now.rank, now.size)
            return
        gone = [rank for rank, name in enumerate(before.names) if name not in now.names]
        came = sum(name not in before.names for name in now.names)
        if gone:
            saw = str(error).splitlines()[0]
            _log.warning("rank %d lost rank %s: %s", before.rank, ", ".join(map(str, gone)), saw)
        if now.rank == 0 and not self._stops:
            ranks = f"{now.size} {'rank' if now.size == 1 else 'ranks'}, {came} of them new"
            missing = self._wanted - now.size
            waits = f"training waits for {missing} more: there are {ranks}"
            what = waits if missing > 0 else f"training goes on with {ranks}"
            _log.warning("%s. A replacement is started as a rank was, with %s=%s", what, JOIN, ",".join(now.addresses))

    def _wait_for_replacements(self) -> None:
        """All ranks come here before a batch, wherever they have noticed the loss."""
        if self._strategy.world_size < self._wanted and not self._strategy.joins and not self._stops:
            raise Newcomers

    def _with_replacements(self, now: Membership, *, may_wait: bool) -> Membership:
        """Take replacements in as soon as there are enough; all ranks learn how many are wanted, and if one is to stop.

        They wait only if all of them are before a batch: whoever has noticed another loss meanwhile meets first. If one
        is to stop, they wait no longer: before their next batch they save, and stop.
        """
        while True:
            looks = self._all(_Look(self._wanted, may_wait, self._stopping.asked, self._members.newcomers()))
            self._wanted = max(look.wanted for look in looks)
            self._stops = self._stopping.agree(max(look.asked for look in looks))
            if self._stops or now.size >= self._wanted or not all(look.may_wait for look in looks):
                return now
            time.sleep(_WAIT_SECONDS)
            if now.size + looks[0].newcomers >= self._wanted:
                now = self._members.regroup(invite=True)
                self._strategy.take_place(now)
            self._members.beat()

    def _standing(self, where: int) -> _Standing:
        if self._strategy.joins:
            return _Standing(_NEWCOMER, [], (0, 0, 0))
        progress: Any = self._epoch.batch_progress.total
        epochs = self._fit.epoch_progress.total.ready
        digest = checksums([parameter.detach() for parameter in self._session.equal_values().values()]).tolist()
        place = (epochs, progress.processed, self._trainer.global_step, where)
        return _Standing(place, digest, (self._drawn, self._counted, self._ranks))

    @staticmethod
    def _all(mine: _Told) -> list[_Told]:
        """What all ranks tell each other, by rank."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return told

    def _hand_over(self, standings: list[_Standing], source: int) -> None:
        """The state of the furthest rank, to those that have another."""
        theirs, rank = standings[source], dist.get_rank()
        in_need = [
            other
            for other, standing in enumerate(standings)
            if standing.place[:3] != theirs.place[:3] or standing.digest != theirs.digest
        ]
        if rank == source and in_need:
            file = io.BytesIO()
            torch.save(self._packed(), file)
            payload = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            for other in in_need:
                dist.send(torch.tensor([payload.numel()]), other)
                dist.send(payload, other)
        elif rank in in_need:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, source)
            payload = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(payload, source)
            packed = torch.load(io.BytesIO(payload.numpy().tobytes()), map_location="cpu", weights_only=False)
            newcomer = standings[rank].place == _NEWCOMER
            self._unpack(packed, newcomer=newcomer)
            for loop in (self._fit, self._epoch, self._validation, self._epoch.automatic_optimization):
                loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            self._fit.restarting = False

    def _settle_progress(self, mine: tuple[int, ...], theirs: tuple[int, ...], own: tuple[Any, Any]) -> bool:
        """Count what has ended. True: this rank's own batch, validation or epoch's end has."""
        where, furthest = mine[3], theirs[3]
        progress = self._epoch.batch_progress
        self._epoch.automatic_optimization.optim_progress.reset_on_restart()
        newcomer = mine == _NEWCOMER
        if not newcomer and theirs[0] > mine[0]:  # they have begun the next epoch
            own_epochs, own_batches = own
            self._fit.epoch_progress, self._epoch.batch_progress = own_epochs, own_batches
            for tracker in (own_batches.current, own_batches.total):
                _end(tracker, at=tracker.ready)
            own_batches.is_last_batch = True
            self._epoch._skip_next_val = where != _EPOCH_END
            return True
        trackers: Any = progress.current, progress.total
        for tracker in trackers:
            _end(tracker, at=tracker.processed)
        if furthest == _BATCH:
            progress.is_last_batch = False
        if newcomer or where == furthest == _BATCH:
            return False
        if where == _VALIDATION:
            self._skips_epoch_end = furthest == _EPOCH_END
            return furthest != _VALIDATION
        if where in (_BATCH, _AFTER_STEP):
            self._epoch._skip_next_val = furthest in (_BATCH, _EPOCH_END)
            self._skips_epoch_end = furthest == _EPOCH_END
        return True


class Rest(Sampler[int]):
    """What is left of an epoch, shared out among the ranks.

    Args:
        whole: draws the epoch; of any rank and number of ranks.
        rank: this one.
        size: how many ranks there are.
        skip: samples that were drawn, from the beginning, by all ranks.
        done: samples that count as drawn by this rank: they are in the length.
        epoch: see `DistributedSampler.set_epoch`.
    """

    def __init__(
        self, whole: DistributedSampler[Any], rank: int, size: int, *, skip: int, done: int, epoch: int
    ) -> None:
        self._whole = copy.copy(whole)
        self._whole.num_replicas, self._whole.rank = 1, 0
        self._whole.num_samples = self._whole.total_size = len(whole.dataset)  # type: ignore[arg-type]
        self._rank, self._size, self._skip, self._done = rank, size, skip, done
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """See `DistributedSampler.set_epoch`."""
        self._whole.set_epoch(epoch)

    def __len__(self) -> int:
        left = max(0, self._whole.total_size - self._skip)
        return self._done + -(-left // self._size)

    def __iter__(self) -> Iterator[int]:
        """The last ones are padded with the first, so that all ranks draw as many."""
        left = list(self._whole)[self._skip :]
        missing = -len(left) % self._size
        left += [left[i % len(left)] for i in range(missing)]
        return iter(left[self._rank :: self._size])


def _end(tracker: Any, at: int | None = None) -> None:
    tracker.ready = tracker.ready if at is None else at
    tracker.started = tracker.processed = tracker.completed = tracker.ready

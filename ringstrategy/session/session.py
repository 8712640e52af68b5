"""Train a module on several ranks: connect them, drive an algorithm through each step, and close. No framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.base import Algorithm, check_family
from ringstrategy.errors import is_of_a_connection, last_words
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.orphans import end_with_agent
from ringstrategy.failure.progress import Progress
from ringstrategy.failure.waits import Wait
from ringstrategy.failure.watchdog import CollectiveWatchdog
from ringstrategy.kernels.sample import sample
from ringstrategy.kernels.threads import begin_threads, end_threads, free_cores
from ringstrategy.session.host import Host
from ringstrategy.session.joined import Batch, Joined, with_following
from ringstrategy.session.new_parts import NewParts
from ringstrategy.session.optimizer_steps import OptimizerSteps, announces_steps, any_of, stepped_within_backward
from ringstrategy.session.optimizers import check_alone, check_registered, options, rates, stepped_by
from ringstrategy.session.parameters import (
    averaged_buffers,
    check_tensors,
    copied_buffers,
    shared_buffers,
    shared_parameters,
    sparse_parameters,
)
from ringstrategy.session.state import Means, copied
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import break_off_default
from ringstrategy.transport.stats import Stats

_BROADCAST_BYTES = 250 * 2**20
_FROM_RANK_0 = "a broadcast of rank 0's tensors"
_NO_GROUP = "Session.open needs a process group: call torch.distributed.init_process_group before"


class Session:
    """A module's training on all ranks of a process group, as one of them sees it.

    Order of calls: `open`, `synchronize`, `bind`; then for each batch `begin_batch`, `send_buffers` before the forward,
    `before_backward` and `after_backward` around the backward (or `backward`), the optimizer's step, `end_batch`; at
    last `close`, after an `open` that failed too. Steps of torch's optimizers are noticed, whoever calls them; nothing
    is to be called for them. With one rank nothing is averaged or sent.

    Args:
        module: its parameters and buffers, except those that it tells torch DDP to ignore.
        algorithm: what is averaged, and when; not copied.
        timeout: how long a peer may stay silent before it counts as lost (`PeerLostError`).
        stats: counters to add to.
        broadcast_buffers: give every rank rank 0's buffers, where ranks have equal parameters.
        notice_steps: False: call `check_step` before and `after_step` after each step of an optimizer, and
            `check_within_backward` before one in a hook; for optimizers that are none of torch's.
        group: the ranks, whose connections nobody else may use for gradients. None: all, over connections of their own.
        divisor: of gradients. None: the number of ranks, so that they are averaged; 1: they are summed.

    Attributes:
        accumulating: gradients of a backward only accumulate on this rank, and nothing is sent.
        place: where training stands, for error messages.
    """

    def __init__(
        self,
        module: Module,
        algorithm: Algorithm,
        *,
        timeout: timedelta = default_pg_timeout,
        stats: Stats | None = None,
        broadcast_buffers: bool = True,
        notice_steps: bool = True,
        group: dist.ProcessGroup | None = None,
        divisor: float | None = None,
    ) -> None:
        check_family(algorithm)
        self.module, self.algorithm = module, algorithm
        self._gradients = algorithm  # gets what a backward and a step are to average
        self.stats = Stats() if stats is None else stats
        self.accumulating = False
        self.place = "while setting up"
        self._timeout, self._broadcast_buffers, self._notices_steps = timeout, broadcast_buffers, notice_steps
        self._group, self._divisor = group, divisor
        self._buffers_due = True
        self._joined = Joined(module)
        self._peers: Peers | None = None
        self._host: Host | None = None  # where gradients are averaged within it
        self._watch: CollectiveWatchdog | None = None
        self._steps: OptimizerSteps | None = None
        self._new_parts: NewParts | None = None
        self._noticed = 0  # steps in this batch
        self._known: set[Parameter] = set()  # to the algorithm
        self._equal: set[Parameter] = set()  # the known parameters whose gradients are averaged
        self._optimizers: Sequence[Optimizer] = ()
        self._optimized: list[set[Parameter]] = []  # by each optimizer, at this batch's beginning

    # From open to close

    def open(self, device: torch.device, *, scaled_loss: bool = False, clips_by_norm: bool = False) -> None:
        """Connect and compare plans; every rank calls it.

        PeerLostError if a rank does not come, PlanMismatchError if ranks differ; both on every rank. ValueError if the
        algorithm cannot be right with a loss scaler, with clipping by norm, or with a `SyncBatchNorm`, or for a tensor
        that is sparse, expanded, or in 8 bits of floating point.

        Args:
            device: where the parameters are.
            scaled_loss: there is a loss scaler.
            clips_by_norm: gradients are clipped by their norm.
        """
        if not dist.is_initialized():
            raise RuntimeError(_NO_GROUP)
        end_with_agent()
        if dist.get_world_size(self._group) == 1:
            self._known = set(shared_parameters(self.module).values())
            if self._notices_steps:
                self._steps = OptimizerSteps(lambda _: None, self.after_step, lambda _: None)
            return
        apart = self.algorithm.decentralized
        self._peers = connect(device, self._timeout, self.stats, beside_steps=apart, group=self._group)
        begin_threads(free_cores(self._peers.hosts.count(self._peers.hosts[self._peers.rank])))
        if backend_of("cpu") == "gloo":
            self._watch = CollectiveWatchdog(self._listen, self._waits_in_vain, break_off_default)
        check_tensors(self.module)
        parameters = shared_parameters(self.module)
        self.algorithm.setup(parameters, self._peers, sparse=sparse_parameters(self.module))
        self.algorithm.attend(
            lambda: averaged_buffers(self.module), lambda: self._optimizers, lambda: copied_buffers(self.module)
        )
        within = self.algorithm.within
        if within is not None:
            self._host = Host.around(self._peers, within, self._group, device, self._timeout)
        if self._host is not None:
            self._gradients = self._host.algorithm
            self._gradients.setup(parameters, self._host.peers, sparse=sparse_parameters(self.module))
        self._gradients.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)
        if self.algorithm.uneven == "join":
            self._joined.open(self._peers.size, device, scales_local=scaled_loss and apart)
        self._know(parameters)
        if self._notices_steps:
            self._steps = OptimizerSteps(self._before_step, self._after_step, self.check_within_backward)
        self._new_parts = NewParts()

    def _know(self, parameters: Mapping[str, Parameter]) -> None:
        self._known = set(parameters.values())
        self._equal = {p for n, p in parameters.items() if not self._gradients.is_local(n)}

    def compare(self, text: str) -> None:
        """PlanMismatchError on all ranks, which quotes the difference, unless all say the same; all ranks call it."""
        if self._peers is not None:
            compare_plans(self._peers, text)

    def synchronize(self) -> None:
        """Give every rank rank 0's parameters and buffers."""
        self._from_rank_0([*shared_parameters(self.module).values(), *shared_buffers(self.module)])

    def bind(self, optimizers: Sequence[Optimizer], *, others: Collection[Parameter] = ()) -> None:
        """Announce the optimizers. All ranks call it; where replicas are equal, optimizers must be equal too.

        ValueError if one steps a parameter that requires gradients and is not in the module, or exchanges parameters
        itself where each rank steps its own gradients.

        Args:
            optimizers: all that step parameters of the module.
            others: parameters that other sessions average, and these optimizers may step too.
        """
        self._optimizers = optimizers
        if self._peers is None:
            return
        check_registered(optimizers, {*self.module.parameters(), *others})
        if self.algorithm.decentralized:
            check_alone(optimizers)
        for optimizer in optimizers:
            self.algorithm.bind(stepped_by(optimizer))

    def compare_optimizers(self) -> None:
        """PlanMismatchError on every rank unless they step equal parameters by the same classes with the same options.

        Compared are the options that the optimizer's class has defaults for, such as `lr`, `momentum` and
        `weight_decay`; other entries of a group may be a rank's own.
        Where ranks have parameters of their own, optimizers may differ.
        """
        if self._peers is not None:
            self._gradients.compare("\n".join(options(self._optimizers, self._equal)))

    def close(self) -> None:
        """Join the communication thread, and remove the hooks. No collective. State for a checkpoint stays."""
        peers, self._peers, watch, self._watch = self._peers, None, self._watch, None
        host, self._host = self._host, None
        self._joined = Joined(self.module)
        with ExitStack() as ends:  # each of them, last first, whatever the others raise
            if peers is not None:
                ends.callback(end_threads)
                ends.callback(peers.close)
            ends.callback(self.algorithm.close)
            if host is not None:
                ends.callback(host.close)
                self._gradients = self.algorithm
            for watching in (self._new_parts, self._steps, watch):
                if watching is not None:
                    ends.callback(watching.close)

    # Ranks with different numbers of batches

    @property
    def joins(self) -> bool:
        """May ranks have different numbers of batches? Then `join` or `next_batch` comes before each of them."""
        return self._joined.is_open

    @property
    def idle(self) -> bool:
        """Has this rank run out of batches, so that the one it works on is its last one again, and counts nothing?"""
        return self._joined.idle

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch. All ranks iterate to the end.

        If the algorithm says `uneven="join"`, all ranks get as many as the one with most: the others get their last one
        again, and are `idle`. Else these are the loader's.

        Raises:
            ValueError: this rank has no batch, but others are to wait for it.
        """
        if not self.joins:
            yield from loader
            return
        any_more = True
        batches = with_following(loader)
        while any_more:
            batch, has, more = next(batches)
            any_more = self.next_batch(has, more)
            yield batch
        self._joined.end()

    def next_batch(self, has: bool, more: bool) -> bool:
        """Before `begin_batch`, for a loop that cannot use `join`: ranks tell each other who still has batches.

        Args:
            has: this rank has a batch now; else it repeats its last one.
            more: it has another one after that.

        Returns:
            Does any rank have another one? The same on all ranks.
        """
        assert self.joins, "the algorithm says uneven='error', or there is one rank"
        with self.naming_lost_peers():
            return self._joined.next_batch(has, more)

    # A batch

    def begin_batch(self, place: str, optimizers: Sequence[Optimizer], *, first: bool, later_epoch: bool) -> None:
        """Take in parameters that the module has got or lost; an epoch may have ended.

        Args:
            place: for errors.
            optimizers: of this batch.
            first: of its epoch.
            later_epoch: not of the first one.
        """
        self.place, self._noticed = place, 0
        self._joined.keep_buffers()
        for progress in self._progress():
            progress.begin_batch()
        if self._new_parts is None:
            return
        if self._steps is not None:
            self._steps.forget()
        self._optimizers = optimizers
        before, self._optimized = self._optimized, [stepped_by(optimizer) for optimizer in optimizers]
        # nothing tells of a part that was deleted, except that its optimizer is given others
        if self._new_parts.any_since() or first or self._optimized != before:
            self._adopt()
        self.start()
        for parameters in self._optimized if first and later_epoch else ():
            self.algorithm.after_epoch(parameters)

    def _adopt(self) -> None:
        """Add new parameters, and give them rank 0's values on all ranks."""
        check_tensors(self.module)
        parameters = shared_parameters(self.module)
        new = self.algorithm.adopt(parameters, sparse=sparse_parameters(self.module))
        if self._host is not None:
            self._host.algorithm.adopt(parameters, sparse=sparse_parameters(self.module))
        self._know(parameters)
        self._from_rank_0(new)

    def end_batch(self, steps: int | None, *, skipped: bool = False) -> None:
        """All exchanges of this batch have begun.

        Args:
            steps: how many the loop has counted, with those that a user dropped on this rank alone: mixing goes on
                even so. None: nobody can tell a dropped step from none.
            skipped: the user has skipped the batch, on all ranks. If another one waits in it, its error says so.

        Raises:
            ValueError: a step was dropped, and with several optimizers nobody knows whose it was.
        """
        missing = 0 if steps is None or self._peers is None else steps - self._noticed
        if missing > 0 and len(self._optimizers) > 1:
            raise ValueError(
                f"{self.place}: {missing} of {steps} steps were not made, and with {len(self._optimizers)} optimizers "
                "it is not known whose: make the step of each optimizer on every rank, or call end_batch(None)"
            )
        while self._peers is not None and steps is not None and self._noticed < steps:
            self._noticed += 1
            self._tell_of_step(stepped_by(self._optimizers[0]), False)
        self._joined.put_buffers_back()
        for progress in self._progress():
            progress.end_batch(skipped=skipped)

    def send_buffers(self, *, between: bool = False) -> None:
        """Before a forward: give all ranks rank 0's buffers; like torch DDP, not if the last one only accumulated.

        Args:
            between: batches, before a validation. No bytes may meet those of the next batch, so a rank that has one
                more is told of here.
        """
        sends = self._broadcast_buffers and self._buffers_due and self._peers is not None
        self._joined.put_buffers_back()
        if sends and not self._gradients.decentralized:
            buffers = [buffer for buffer in shared_buffers(self.module) if buffer.numel()]
            if buffers and between:
                self._gradients.compare("the buffers of rank 0")
            self._from_rank_0(buffers, None if self._host is None else self._host.group)
        self._joined.keep_buffers()
        self._buffers_due = between is False and not self.accumulating

    def _from_rank_0(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        if filled and self._peers is not None:
            with self.naming_lost_peers():
                group = group or self._group or dist.group.WORLD
                assert group is not None
                dist._broadcast_coalesced(group, filled, _BROADCAST_BYTES, 0)

    def before_backward(self, loss: Tensor | None = None, scale: Tensor | None = None) -> None:
        """See `Algorithm.before_backward`. Learning rates that differ between ranks are a PlanMismatchError.

        While this rank is `idle`, no backward may come between this and `after_backward`.
        """
        self._joined.put_buffers_back()
        divisor = self._joined.divisor(exchanged=not self.accumulating) or self._divisor
        if self._peers is not None:
            same = "\n".join(rates(self._optimizers, self._equal))
            self._gradients.before_backward(loss, sync=not self.accumulating, scale=scale, same=same, divisor=divisor)

    def after_backward(self) -> None:
        """Gradients are final when this returns, unless they accumulate."""
        if self._peers is not None:
            self._gradients.after_backward()

    def backward(self, loss: Tensor) -> None:
        """Both, and the backward between them, unless this rank is `idle`."""
        self.before_backward(loss)
        if not self.idle:
            loss.backward()
        self.after_backward()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of a backward in here only accumulate: zero bytes are sent."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    # Steps

    @contextmanager
    def stepping(self, optimizer: Optimizer, scale: Callable[[], Tensor | None]) -> Generator[None, None, None]:
        """Around a step of which the caller says that it is one, such as that of a loss scaler, which may skip it.

        Args:
            optimizer: as the caller knows it; it may wrap one of torch's, or be none.
            scale: the loss scale now; None without a loss scaler.
        """
        if self._peers is None:
            with nullcontext() if self._steps is None else self._steps.expecting():
                yield
            self.stats.step()
            return
        before = scale()
        seen: list[Tensor | bool] = []
        if self._steps is None:
            yield
        else:
            with self._steps.expecting() as seen:
                yield
        stepped: Tensor | bool
        if seen or (self._steps is not None and announces_steps(optimizer)):
            stepped = any_of(seen)
        else:
            after = scale()
            # a scaler backs off when it skips, and only then
            stepped = True if before is None or after is None else after >= before
        self._noticed += 1
        self._end_step(stepped_by(optimizer), stepped)

    def _before_step(self, optimizer: Optimizer) -> None:
        self.check_step(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        self.check_step(optimizer)  # a step with a closure
        self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. Parameters are final when this returns."""
        self._noticed += optimizer in self._optimizers
        parameters = stepped_by(optimizer)
        if not self._notices_steps or not self._known.isdisjoint(parameters):  # else another module's
            self._end_step(parameters, True)

    def _end_step(self, parameters: set[Parameter], stepped: Tensor | bool) -> None:
        self.stats.step()
        if self._peers is None:
            return
        self._joined.after_step(parameters)
        self._tell_of_step(parameters, stepped)

    def _tell_of_step(self, parameters: set[Parameter], stepped: Tensor | bool) -> None:
        if self._host is not None:
            self._host.algorithm.after_step(parameters, stepped)
        self._joined.put_buffers_back()  # an algorithm may average them
        self.algorithm.after_step(parameters, stepped)
        self._joined.keep_buffers()

    def check_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step. RuntimeError if it would step a gradient that was never averaged.

        While this rank is `idle`, what is not averaged has no gradient, so the step passes it over.
        """
        if self._peers is None:
            return
        parameters = stepped_by(optimizer)
        self._joined.before_step(parameters - self._equal)
        if not self._gradients.decentralized and self._new_parts is not None and self._new_parts.any:
            for name, parameter in shared_parameters(self.module).items():
                if parameter in parameters and parameter not in self._known and parameter.grad is not None:
                    raise RuntimeError(
                        f"{name} joined the model within this batch, so its gradient is this rank's alone and replicas "
                        "would differ: make it before the batch, in on_train_start or on_train_batch_start, or give it "
                        "to the optimizer at the next batch"
                    )
        self._gradients.before_step(parameters)

    def check_within_backward(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step within a backward. RuntimeError if it steps what is averaged at its end."""
        early = self._equal & stepped_by(optimizer)
        for name, parameter in shared_parameters(self.module).items() if early else ():
            if parameter in early and parameter.grad is not None:
                raise stepped_within_backward(name)

    # What all ranks see, where they have parameters of their own

    def leave_training(self, place: str, what: str) -> None:
        """This rank goes on to `what`, such as its validation; all ranks do, after as many batches."""
        self.place = place
        for progress in self._progress():
            progress.leave_training(what)

    def end_training(self) -> None:
        """Training has ended on this rank, and what it has begun to exchange."""
        self.leave_training("at the end of training", "the end of its training")
        self.settle()

    def compare_ends(self) -> None:
        """PeerLostError on all ranks if one trains on; all ranks call it when training has ended."""
        if self._peers is not None:
            self._gradients.compare("the end of training")

    @property
    def shows_consensus(self) -> bool:
        """Do validation, and whoever takes the model after training, see the same on all ranks?"""
        return self.algorithm.consensus

    def enter_consensus(self, *, replaced: bool = False) -> bool:
        """See `Algorithm.enter_consensus`, to which buffers are given too. False where replicas are equal."""
        # a validation may be in inference mode, and what is allocated there cannot be used outside
        with torch.inference_mode(False):
            return self.algorithm.enter_consensus(
                averaged_buffers(self.module), copied_buffers(self.module), replaced=replaced
            )

    def leave_consensus(self) -> None:
        """See `Algorithm.leave_consensus`."""
        self.algorithm.leave_consensus()

    def as_own(self) -> AbstractContextManager[None]:
        """See `Algorithm.as_own`."""
        return self.algorithm.as_own()

    @contextmanager
    def consensus(self, *, replaced: bool = False) -> Generator[None, None, None]:
        """Within, the module is the same on all ranks, which all enter; then each gets its own values back.

        See `Algorithm.enter_consensus`.
        """
        try:
            entered = self.enter_consensus(replaced=replaced)
        except BaseException:
            self.leave_consensus()  # perhaps it was half-way
            raise
        try:
            yield
        finally:
            if entered:
                self.leave_consensus()

    def means_of(self, state: Callable[[], dict[str, Any]]) -> Means:
        """What `state` gives of what all ranks see, and of this one; all ranks call it.

        Args:
            state: of the module, such as its `state_dict`.
        """
        if not self.enter_consensus():
            means = state()
            with self.as_own():
                return Means(means, copied(state()))
        try:
            means = copied(state())
        finally:
            self.leave_consensus()
        return Means(means, state())

    def consensus_distance(self, sample: int | None = None) -> float | None:
        """See `Algorithm.consensus_distance`."""
        return self.algorithm.consensus_distance(sample)

    def settle(self) -> None:
        """See `Algorithm.settle`."""
        self.algorithm.settle()

    def start(self) -> None:
        """See `Algorithm.start`; `begin_batch` calls it, and nobody within a step that a rank may skip."""
        self.algorithm.start()

    def finish(self) -> None:
        """See `Algorithm.finish`."""
        with self.naming_lost_peers():
            self.algorithm.finish()

    def forget(self) -> None:
        """See `Algorithm.forget`."""
        self.algorithm.forget()

    def equal_values(self) -> dict[str, Tensor]:
        """What has the same bits on all ranks between two steps, by parameter name."""
        if self.algorithm.decentralized:
            return self.algorithm.shared_values()
        return {name: value for name, value in shared_parameters(self.module).items() if value in self._equal}

    def glance(self, *, buffers: bool = True) -> list[Tensor]:
        """A few values of each parameter, and then of each buffer, to detect later whether they were replaced."""
        seen = (*shared_parameters(self.module).values(), *(shared_buffers(self.module) if buffers else ()))
        return [sample(tensor.detach()) for tensor in seen]

    # State

    def state_dict(self) -> dict[str, Any]:
        """State of this rank that, with the state of module and optimizers, continues bit for bit. All ranks call it.

        Tensors and primitives only. Tensors may be views of the memory in use, but for the residuals.
        """
        self.settle()
        return {
            "rank": dist.get_rank(self._group),
            "world_size": dist.get_world_size(self._group),
            "decentralized": self.algorithm.decentralized,
            "shared": self.algorithm.state_dict(),
            "residuals": {name: value.clone() for name, value in self._gradients.residuals()},
            "own": self.algorithm.own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, in place of `synchronize`, before `bind`; all ranks call it.

        ValueError if another rank gave it, or another algorithm, or there is no place for a residual.
        """
        mine = dist.get_rank(self._group), dist.get_world_size(self._group)
        if (state["rank"], state["world_size"]) != mine:
            raise ValueError(
                f"this state is of rank {state['rank']} of {state['world_size']}, and this is rank {mine[0]} of "
                f"{mine[1]}: give each rank what it saved itself, and start as many"
            )
        if self._peers is None:
            return
        if state["decentralized"] != self.algorithm.decentralized:
            averaged = "parameters" if state["decentralized"] else "gradients"
            raise ValueError(
                f"this state is of an algorithm that averages {averaged}, and this run of {self.algorithm}: give the "
                "run the algorithm with which it was saved"
            )
        if not self.algorithm.load_own_state(state["own"]):
            raise ValueError(f"this state is of {state['own']['of']}, and this run of {self.algorithm}")
        self.algorithm.load_state_dict(state["shared"])
        homeless = self._gradients.load_residuals(state["residuals"])
        if homeless:
            raise ValueError(
                f"this state has residuals of {', '.join(homeless)}, for which there is no place: give the run the "
                "model and the algorithm with which it was saved"
            )

    # Errors

    @contextmanager
    def collective(self, what: str) -> Generator[None, None, None]:
        """Around a collective that is no part of training: as `naming_lost_peers`, and all ranks learn where they wait.

        All ranks call it, after as many batches. A rank that trains on meanwhile is an error on all.

        Args:
            what: the collective, for messages.
        """
        detector = self.detector
        with nullcontext() if detector is None else detector.progress.elsewhere(what), self.naming_lost_peers():
            yield

    @property
    def detector(self) -> FailureDetector | None:
        """What this rank knows of failures, while peers are connected."""
        peers = self._peers
        return None if peers is None else peers.detector

    def _progress(self) -> list[Progress]:
        """Among all ranks, and among those of this host."""
        detectors = [self.detector, None if self._host is None else self._host.peers.detector]
        return [detector.progress for detector in detectors if detector is not None]

    def _listen(self, waits_in: Wait | None) -> None:
        detector = self.detector  # once: `close` may come between
        if detector is not None:
            detector.poll()
            world: Any = dist.group.WORLD  # torch's stubs lack the method
            detector.waits.compare(waits_in, world._get_sequence_number_for_group())

    def _waits_in_vain(self) -> bool:
        detector = self.detector  # once, as above
        return detector is not None and detector.check(self.place) is not None

    @contextmanager
    def naming_lost_peers(self, what: str = _FROM_RANK_0) -> Generator[None, None, None]:
        """Around a torch collective: ends it if ranks wait in vain, and makes its error name the lost rank.

        Args:
            what: this rank waits in, for messages, if no user's call of a collective shows it.
        """
        try:
            with nullcontext() if self._watch is None else self._watch.over(what):
                yield
        except RuntimeError as error:
            if self._peers is None or not is_of_a_connection(error):
                raise
            raise self._peers.explain(error, self.place) from error

    def part(self) -> None:
        """Before `close`, if this rank goes on with other ranks: disconnect, so that those that wait notice too."""
        if self._host is not None:
            self._host.peers.abort(None)
        if self._peers is not None:
            self._peers.abort(None)

    def tell(self, exception: BaseException) -> None:
        """This rank ends in an exception: tell the others why. No collective. A broken connection gets words."""
        if self._peers is None:
            return
        if is_of_a_connection(exception):  # a collective outside `naming_lost_peers`
            exception.args = (f"{self._peers.explain(exception, self.place)}",)
        if self._host is not None:
            self._host.peers.abort(last_words(exception))
        self._peers.abort(last_words(exception))

"""Train a module on several ranks: connect them, drive an algorithm through each step, and close. No framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session.link import Host, Link
from ringstrategy.session.optimizers import (
    OptimizerSteps,
    announces_steps,
    any_of,
    check_alone,
    check_registered,
    options,
    rates,
    stepped_by,
    stepped_within_backward,
)
from ringstrategy.session.parameters import (
    NewParts,
    averaged_buffers,
    check_tensors,
    copied_buffers,
    shared_buffers,
    shared_parameters,
    sparse_parameters,
)
from ringstrategy.session.state import Means, check_is_of, copied
from ringstrategy.session.uneven import Batch, UnevenInputs
from ringstrategy.transport.stats import Stats


class Session:  # noqa: PLR0904
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
        link: what this rank has of the others.
        uneven: whether ranks may have different numbers of batches, and whether this one is `idle`: has run out.
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
        self.module, self.algorithm = module, algorithm
        self._gradients = algorithm  # gets what a backward and a step are to average
        self.stats = Stats() if stats is None else stats
        self.accumulating = False
        self.link = Link(timeout, self.stats, group)
        self._timeout, self._broadcast_buffers, self._notices_steps = timeout, broadcast_buffers, notice_steps
        self._group, self._divisor = group, divisor
        self._buffers_due = True
        self.uneven = UnevenInputs(module, self.link)
        self._host: Host | None = None  # where gradients are averaged within it
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
        apart = self.algorithm.decentralized
        peers = self.link.open(device, beside_steps=apart, tagged=self.algorithm.tagged)
        if peers is None:
            self._known = set(shared_parameters(self.module).values())
            if self._notices_steps:
                self._steps = OptimizerSteps(lambda _: None, self.after_step, lambda _: None)
            return
        check_tensors(self.module)
        parameters = shared_parameters(self.module)
        self.algorithm.setup(parameters, peers, sparse=sparse_parameters(self.module))
        self.algorithm.attend(lambda: averaged_buffers(self.module), lambda: copied_buffers(self.module))
        within = self.algorithm.within
        if within is not None:
            self._host = Host.around(peers, within, self._group, device, self._timeout)
        if self._host is not None:
            self.link.add(self._host.peers)
            self._gradients = self._host.algorithm
            self._gradients.setup(parameters, self._host.peers, sparse=sparse_parameters(self.module))
        self._gradients.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)
        if self.algorithm.uneven == "join":
            self.uneven.open(peers.size, device, scales_local=scaled_loss and apart)
        self._know(parameters)
        if self._notices_steps:
            self._steps = OptimizerSteps(self.check_step, self.after_step, self.check_within_backward)
        self._new_parts = NewParts()

    def _know(self, parameters: Mapping[str, Parameter]) -> None:
        self._known = set(parameters.values())
        self._equal = {p for n, p in parameters.items() if not self._gradients.is_local(n)}

    def synchronize(self) -> None:
        """Give every rank rank 0's parameters and buffers."""
        self.link.broadcast([*shared_parameters(self.module).values(), *shared_buffers(self.module)])

    def bind(self, optimizers: Sequence[Optimizer], *, others: Collection[Parameter] = ()) -> None:
        """Announce the optimizers. All ranks call it; where replicas are equal, optimizers must be equal too.

        ValueError if one steps a parameter that requires gradients and is not in the module, or exchanges parameters
        itself where each rank steps its own gradients.

        Args:
            optimizers: all that step parameters of the module.
            others: parameters that other sessions average, and these optimizers may step too.
        """
        self._optimizers = optimizers
        if self.link.peers is None:
            return
        check_registered(optimizers, {*self.module.parameters(), *others})
        if self.algorithm.decentralized:
            check_alone(optimizers)
        for optimizer in optimizers:
            self.algorithm.bind(stepped_by(optimizer), optimizer if announces_steps(optimizer) else None)

    def compare_optimizers(self) -> None:
        """PlanMismatchError on every rank unless they step equal parameters by the same classes with the same options.

        Compared are the options that the optimizer's class has defaults for, such as `lr`, `momentum` and
        `weight_decay`; other entries of a group may be a rank's own.
        Where ranks have parameters of their own, optimizers may differ.
        """
        if self.link.peers is not None:
            self._gradients.compare("\n".join(options(self._optimizers, self._equal)))

    def close(self) -> None:
        """Join the communication thread, and remove the hooks. No collective. State for a checkpoint stays."""
        host, self._host = self._host, None
        watching = [each for each in (self._new_parts, self._steps) if each is not None]
        self._new_parts = self._steps = None
        self.uneven = UnevenInputs(self.module, self.link)
        with ExitStack() as ends:  # each of them, last first, whatever the others raise
            ends.callback(self.link.close)
            ends.callback(self.algorithm.close)
            if host is not None:
                ends.callback(host.close)
                self._gradients = self.algorithm
            for each in watching:
                ends.callback(each.close)

    # Ranks with different numbers of batches

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch. All ranks iterate to the end.

        If the algorithm says `uneven="join"`, all ranks get as many as the one with most: the others get their last one
        again, and are `idle`. Else these are the loader's.

        Raises:
            ValueError: this rank has no batch, but others are to wait for it.
        """
        return self.uneven.over(loader)

    # A batch

    def begin_batch(self, place: str, optimizers: Sequence[Optimizer], *, first: bool, later_epoch: bool) -> None:
        """Take in parameters that the module has got or lost; an epoch may have ended.

        Args:
            place: for errors.
            optimizers: of this batch.
            first: of its epoch.
            later_epoch: not of the first one.
        """
        self._noticed = 0
        self.uneven.keep_buffers()
        self.link.begin_batch(place)
        if self._new_parts is None:
            return
        if self._steps is not None:
            self._steps.forget()
        self._optimizers = optimizers
        before, self._optimized = self._optimized, [stepped_by(optimizer) for optimizer in optimizers]
        # nothing tells of a part that was deleted, except that its optimizer is given others
        if self._new_parts.any_since() or first or self._optimized != before:
            self._adopt()
        self.algorithm.start()
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
        self.link.broadcast(new)

    def end_batch(self, steps: int | None, *, skipped: bool = False) -> None:
        """All exchanges of this batch have begun.

        Args:
            steps: how many the loop has counted, with those that a user dropped on this rank alone: mixing goes on
                even so. None: nobody can tell a dropped step from none.
            skipped: the user has skipped the batch, on all ranks. If another one waits in it, its error says so.

        Raises:
            ValueError: a step was dropped, and with several optimizers nobody knows whose it was.
        """
        missing = 0 if steps is None or self.link.peers is None else steps - self._noticed
        if missing > 0 and len(self._optimizers) > 1:
            raise ValueError(
                f"{self.link.place}: {missing} of {steps} steps were not made, and with {len(self._optimizers)} "
                "optimizers it is not known whose: make the step of each on every rank, or call end_batch(None)"
            )
        for _ in range(missing):
            self._tell_of_step(stepped_by(self._optimizers[0]), False)
        self.uneven.put_buffers_back()
        self.link.end_batch(skipped=skipped)

    def send_buffers(self, *, between: bool = False) -> None:
        """Before a forward: give all ranks rank 0's buffers; like torch DDP, not if the last one only accumulated.

        Args:
            between: batches, before a validation. No bytes may meet those of the next batch, so a rank that has one
                more is told of here.
        """
        sends = self._broadcast_buffers and self._buffers_due and self.link.peers is not None
        self.uneven.put_buffers_back()
        if sends and not self._gradients.decentralized:
            buffers = [buffer for buffer in shared_buffers(self.module) if buffer.numel()]
            if buffers and between:
                self._gradients.compare("the buffers of rank 0")
            self.link.broadcast(buffers, None if self._host is None else self._host.group)
        self.uneven.keep_buffers()
        self._buffers_due = between is False and not self.accumulating

    def before_backward(self, loss: Tensor | None = None, scale: Tensor | None = None) -> None:
        """See `Algorithm.before_backward`. Learning rates that differ between ranks are a PlanMismatchError.

        While this rank is `idle`, no backward may come between this and `after_backward`.
        """
        self.uneven.put_buffers_back()
        divisor = self.uneven.divisor(exchanged=not self.accumulating)
        if divisor is None or (self._divisor is not None and math.isfinite(divisor)):
            divisor = self._divisor
        if self.link.peers is not None:
            same = "\n".join(rates(self._optimizers, self._equal))
            self._gradients.before_backward(loss, sync=not self.accumulating, scale=scale, same=same, divisor=divisor)

    def after_backward(self) -> None:
        """Gradients are final when this returns, unless they accumulate."""
        if self.link.peers is not None:
            self._gradients.after_backward()

    def backward(self, loss: Tensor) -> None:
        """Both, and the backward between them, unless this rank is `idle`."""
        self.before_backward(loss)
        if not self.uneven.idle:
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
        if self.link.peers is None:
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

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. Parameters are final when this returns."""
        self._noticed += optimizer in self._optimizers
        parameters = stepped_by(optimizer)
        if not self._notices_steps or not self._known.isdisjoint(parameters):  # else another module's
            self._end_step(parameters, True)

    def _end_step(self, parameters: set[Parameter], stepped: Tensor | bool) -> None:
        self.stats.step()
        if self.link.peers is None:
            return
        self.uneven.after_step(parameters)
        self._tell_of_step(parameters, stepped)

    def _tell_of_step(self, parameters: set[Parameter], stepped: Tensor | bool) -> None:
        if self._host is not None:
            self._host.algorithm.after_step(parameters, stepped)
        self.uneven.put_buffers_back()  # an algorithm may average them
        self.algorithm.after_step(parameters, stepped)
        self.uneven.keep_buffers()

    def check_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step. RuntimeError if it would step a gradient that was never averaged.

        While this rank is `idle`, what is not averaged has no gradient, so the step passes it over.
        """
        if self.link.peers is None:
            return
        parameters = stepped_by(optimizer)
        self.uneven.before_step(parameters - self._equal)
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

    def end_training(self, *, together: bool = False) -> None:
        """Training has ended on this rank, and what it has begun to exchange.

        Args:
            together: all ranks call it; if one trains on, it is a PeerLostError on all of them.
        """
        self.link.leave_training("at the end of training", "the end of its training")
        self.algorithm.settle()
        if together and self.link.peers is not None:
            self._gradients.compare("the end of training")

    def enter_consensus(self, *, replaced: bool = False) -> bool:
        """See `Algorithm.enter_consensus`, to which buffers are given too. False where replicas are equal."""
        # a validation may be in inference mode, and what is allocated there cannot be used outside
        with torch.inference_mode(False):
            return self.algorithm.enter_consensus(
                averaged_buffers(self.module), copied_buffers(self.module), replaced=replaced
            )

    @contextmanager
    def consensus(self, *, replaced: bool = False) -> Generator[None, None, None]:
        """Within, the module is the same on all ranks, which all enter; then each gets its own values back.

        See `Algorithm.enter_consensus`.
        """
        try:
            entered = self.enter_consensus(replaced=replaced)
        except BaseException:
            self.algorithm.leave_consensus()  # perhaps it was half-way
            raise
        try:
            yield
        finally:
            if entered:
                self.algorithm.leave_consensus()

    def means_of(self, state: Callable[[], dict[str, Any]]) -> Means:
        """What `state` gives of what all ranks see, and of this one; all ranks call it.

        Args:
            state: of the module, such as its `state_dict`.
        """
        if not self.enter_consensus():
            means = state()
            with self.algorithm.as_own():
                return Means(means, copied(state()))
        try:
            means = copied(state())
        finally:
            self.algorithm.leave_consensus()
        return Means(means, state())

    def finish(self) -> None:
        """See `Algorithm.finish`."""
        with self.link.naming_lost_peers():
            self.algorithm.finish()

    def equal_values(self) -> dict[str, Tensor]:
        """What has the same bits on all ranks between two steps, by parameter name."""
        if self.algorithm.decentralized:
            return self.algorithm.shared_values()
        return {name: value for name, value in shared_parameters(self.module).items() if value in self._equal}

    # State

    def state_dict(self) -> dict[str, Any]:
        """State of this rank that, with the state of module and optimizers, continues bit for bit. All ranks call it.

        Tensors and primitives only. Tensors may be views of the memory in use, but for the residuals.
        """
        self.algorithm.settle()
        return {
            "rank": self.link.rank,
            "world_size": self.link.size,
            "decentralized": self.algorithm.decentralized,
            "shared": self.algorithm.state_dict(),
            "residuals": {name: value.clone() for name, value in self._gradients.residuals()},
            "own": self.algorithm.own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, in place of `synchronize`, before `bind`; all ranks call it.

        ValueError if another rank gave it, or another algorithm, or there is no place for a residual.
        """
        check_is_of(self.link.rank, self.link.size, state)
        if self.link.peers is None:
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

    def tell(self, exception: BaseException) -> None:
        """This rank ends in an exception: tell the others why. No collective. A broken connection gets words."""
        self.link.tell(exception)

"""A communication hook for torch's DistributedDataParallel, whose residuals survive DDP's change of buckets."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types, and not with strings.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.policy import Policy
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.cast import wire_of
from ringstrategy.collectives.base import Collective, Summand, mean_, sums_dtype
from ringstrategy.integrations.encoded import Channel
from ringstrategy.session.optimizers import is_within_backward, stepped_by, stepped_within_backward
from ringstrategy.session.state import check_is_of
from ringstrategy.transport.agree import BUCKET, INDENT, agree_beside
from ringstrategy.transport.base import Peers, Waitable, Word
from ringstrategy.transport.connect import connect
from ringstrategy.transport.futures import Promise
from ringstrategy.transport.stats import Stats

_MODULE = "pass module=model, the DDP module, to ddp_hook: it knows the names of parameters"

Gradient = tuple[Parameter, Tensor]  # the tensor is a view of the buffer of a bucket of DDP
Hook = Callable[["DdpHookState", dist.GradBucket], Future[Tensor]]


def ddp_hook(
    codec: Codec | Policy | None = None,
    collective: Collective | None = None,
    *,
    error_feedback: bool = False,
    process_group: dist.ProcessGroup | None = None,
    module: Module | None = None,
    timeout: timedelta = default_pg_timeout,
) -> tuple["DdpHookState", Hook]:
    """What `register_comm_hook` of a DDP module takes: `model.register_comm_hook(*ddp_hook(codec, module=model))`.

    Gradients become the mean over the ranks, with the same bits on all of them. Exchanges run beside backward.

    Args:
        codec: what travels instead of float32; or a policy such as `SmallExact`. None: `Identity()`.
        collective: how it travels. None: `BySize()`.
        error_feedback: add what the codec lost to the next step's gradients.
        process_group: that of the DDP module. None: the default one.
        module: the DDP module, or the one within it: needed for a policy, and to save and load residuals.
        timeout: how long a peer may stay silent before it counts as lost.

    Returns:
        The state and the hook. `state.close()` ends the exchanges; so does the end of the process.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the collective cannot carry the codec, or there is a policy and no module.
    """
    state = DdpHookState(AllReduce(codec, collective, error_feedback), process_group, module, timeout)
    return state, DdpHookState.average


class DdpHookState:
    """What the hook of `ddp_hook` keeps between steps.

    Residuals are kept by parameter, in parameter space. DDP cuts its buckets anew after the first step; each residual
    then moves with its parameter, and nothing is lost.

    DDP tells a hook neither the loss scale nor whether the optimizer steps. So residuals are wrong by a factor when a
    loss scaler changes its scale, and keep the error of gradients that were clipped, or whose step was skipped. A
    parameter that no rank used loses its residual, because DDP drops what was exchanged for it. `Session` and the
    strategies have none of these limits.

    The ranks connect at the first bucket. If an exchange fails, `backward` raises a RuntimeError that quotes the error:
    exceptions lose their type on the way through DDP.

    Attributes:
        stats: bytes, exchanges and times; `steps` and `exposed_seconds` are None, because only DDP knows them.
    """

    def __init__(
        self, options: AllReduce, process_group: dist.ProcessGroup | None, module: Module | None, timeout: timedelta
    ) -> None:
        if module is None and not isinstance(options.codec, Codec):
            raise ValueError(f"a policy chooses by the names of parameters: {_MODULE}")
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._parameters = {} if inner is None else dict(inner.named_parameters())
        self._name_of = {parameter: name for name, parameter in self._parameters.items()}
        self._options, self._process_group, self._timeout = options, process_group, timeout
        self.stats = Stats(steps=None, exposed_seconds=None)
        self._connection: Channel | None = None
        self._error: BaseException | None = None  # of an earlier connection
        self._step = 0
        self._plans: dict[int, _Plan] = {}  # by index of the bucket
        self._agreed: Waitable | None = None  # on the latest plan
        self._residuals: dict[Parameter, Tensor] = {}  # views of those of the groups, or loaded for them
        self._loaded: list[list[Parameter]] = []  # by bucket, for the next step only
        self._held: list[tuple[dist.GradBucket, Promise]] = []  # until all buckets of that step are there

    @property
    def error(self) -> BaseException | None:
        """What ended the exchanges, such as the `PeerLostError` that names a rank. None while all goes well."""
        return self._error or (None if self._connection is None else self._connection.futures.error)

    # A bucket

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to average a bucket, in DDP's order. The future's value is its buffer, which then holds the mean."""
        buffer, index, last = bucket.buffer(), bucket.index(), bucket.is_last()
        if buffer.layout != torch.strided:
            raise TypeError("the hook got a sparse gradient: make the embedding with sparse=False")
        promise = Promise(buffer, buffer.device)
        if dist.get_world_size(self._process_group) == 1:
            promise.keep()
        elif self._loaded:
            self._held.append((bucket, promise))
            if last:
                self._exchange_as_loaded()
        else:
            self._keep(promise, [self._exchange(index, _gradients_of(bucket), buffer)])
            for gone in [known for known in self._plans if last and known > index]:
                del self._plans[gone]
        if last:
            self._step += 1
            self.stats.exchanges += 1
        return promise.future

    def _exchange_as_loaded(self) -> None:
        """The step after `load_state_dict`: in the saved buckets, since other ones would give other bits.

        DDP begins with other buckets than it ends with; the next steps have the latter again.
        """
        held, self._held = self._held, []
        loaded, self._loaded = self._loaded, []
        there = {p: gradient for bucket, _ in held for p, gradient in _gradients_of(bucket)}
        saved = [[(p, there.pop(p)) for p in parameters if p in there] for parameters in loaded]
        saved[-1] += there.items()  # were frozen when the state was saved
        exchanges = [self._exchange(index, gradients, None) for index, gradients in enumerate(saved) if gradients]
        for _, promise in held:
            self._keep(promise, exchanges)

    def _exchange(self, index: int, gradients: Sequence[Gradient], buffer: Tensor | None) -> Waitable:
        """Hand an exchange to the communication thread.

        Args:
            index: of the bucket.
            gradients: of its parameters, in the order in which they lie in the buffer.
            buffer: flat, with nothing else in it. None: they do not lie together.
        """
        peers, collective = self._connect(gradients[0][1].device), self._options.collective
        where = f"at step {self._step}, in bucket {index}"
        plan, agreed, step = self._plan(index, gradients, peers, where), self._agreed, self._step
        tensors = dict(gradients)
        self.stats.values_averaged += sum(gradient.numel() for gradient in tensors.values())

        def work() -> None:
            assert agreed is not None
            agreed.wait()
            for place, group in enumerate(plan.groups):
                own = [tensors[parameter] for parameter in group.parameters]
                group.average_(own, buffer, peers, collective, derive_seed(0, step, index, place))

        return peers.submit(work, where)

    def _connect(self, device: torch.device) -> Peers:
        """At the first bucket; every rank comes here."""
        if self._connection is None:
            tagged = self._options.collective.tagged
            peers = connect(device, self._timeout, self.stats, group=self._process_group, tagged=tagged)
            self._connection = Channel(peers, device)
            self._plans = {}  # the ranks are to compare them
            self._steps = register_optimizer_step_pre_hook(self._before_step)
        return self._connection.peers

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """RuntimeError if it steps a parameter within the backward that is to average it."""
        if is_within_backward():
            exchanged = {parameter for plan in self._plans.values() for parameter in plan.parameters}
            for parameter in exchanged & stepped_by(optimizer):
                raise stepped_within_backward(self._name_of.get(parameter, f"a parameter {tuple(parameter.shape)}"))

    def _keep(self, promise: Promise, exchanges: Sequence[Waitable]) -> None:
        assert self._connection is not None
        self._connection.futures.keep(promise, exchanges)

    # Which parameters travel together

    @torch.no_grad()
    def _plan(self, index: int, gradients: Sequence[Gradient], peers: Peers, where: str) -> "_Plan":
        """The groups of a bucket; if DDP has cut it anew, residuals move with their parameters."""
        parameters = [parameter for parameter, _ in gradients]
        plan = self._plans.get(index)
        if plan is not None and list(map(id, plan.parameters)) == list(map(id, parameters)):
            return plan
        members: dict[tuple[Codec, torch.dtype], list[Gradient]] = {}
        for parameter, gradient in gradients:
            codec = self._options.codec_of(self._name_of.get(parameter, ""), parameter)
            members.setdefault((codec, gradient.dtype), []).append((parameter, gradient))
        groups = [_Group(codec, own, self._options.feeds_back(codec)) for (codec, _), own in members.items()]
        for group in groups:
            for parameter, residual in group.residuals():
                before = self._residuals.get(parameter)
                if before is not None:
                    residual.copy_(before)
                self._residuals[parameter] = residual
        plan = self._plans[index] = _Plan(parameters, groups)
        lines = [f"{BUCKET}{index}: {len(gradients)} parameters"]
        lines += [
            f"{INDENT}{self._name_of.get(p, f'parameter {place} of bucket {index}')}: {tuple(p.shape)} {p.dtype}"
            for place, p in enumerate(parameters)
        ]
        text = self._options.plan_text(peers.size, lines)
        tagged = self._options.collective.tagged
        self._agreed = agree_beside(peers, Word(text, lambda: text), tagged=tagged, where=where)
        return plan

    # State

    def state_dict(self) -> dict[str, Any]:
        """State of this rank for a checkpoint, between two backwards: residuals by parameter name, tensors are copies.

        Each rank saves its own. Loaded together with the module and the optimizer, training goes on bit for bit, except
        from a checkpoint of the first step: only the second shows DDP's later buckets.

        Raises:
            ValueError: `ddp_hook` got no module.
        """
        self._check_names()
        known = self._loaded or [plan.parameters for _, plan in sorted(self._plans.items())]
        buckets = [[self._name_of[parameter] for parameter in bucket] for bucket in known]
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "step": self._step,
            "buckets": buckets,
            "residuals": {self._name_of[p]: residual.clone() for p, residual in self._residuals.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, between two backwards; all ranks call it.

        Raises:
            ValueError: another rank or world gave it, the module has no such parameter, or `ddp_hook` got no module.
        """
        self._check_names()
        check_is_of(dist.get_rank(), dist.get_world_size(), state)
        residuals = state["residuals"]
        lost = [
            name
            for name, value in residuals.items()
            if name not in self._parameters
            or self._parameters[name].shape != value.shape
            or not self._options.feeds_back(self._options.codec_of(name, self._parameters[name]))
        ]
        if lost:
            raise ValueError(
                f"there is no place for the residual of {lost[0]}: give the run the model, the codec and the "
                "error_feedback with which the state was saved"
            )
        self._step = int(state["step"])
        self._plans = {}
        self._residuals = {
            self._parameters[name]: value.to(self._parameters[name].device) for name, value in residuals.items()
        }
        self._loaded = [[self._parameters[name] for name in bucket] for bucket in state["buckets"]]

    def _check_names(self) -> None:
        if not self._parameters:
            raise ValueError(f"a state is saved by the names of parameters: {_MODULE}")

    def close(self) -> None:
        """Disconnect. Idempotent, and no collective. The next backward connects again; residuals stay."""
        if self._connection is not None:
            self._steps.remove()
            connection, self._connection = self._connection, None
            try:
                connection.close()
            finally:
                self._error = self._error or connection.futures.error


@dataclass
class _Plan:
    """A bucket's parameters in the order of its buffer, and as groups."""

    parameters: list[Parameter]
    groups: list["_Group"]


class _Group:
    """Parameters of a bucket that share a codec and a dtype: one exchange.

    Args:
        codec: of all.
        gradients: of its parameters.
        feedback: keep a residual.
    """

    def __init__(self, codec: Codec, gradients: Sequence[Gradient], feedback: bool) -> None:
        self.parameters = [parameter for parameter, _ in gradients]
        like = gradients[0][1]
        self._codec, self._dtype = wire_of(codec, like.dtype), sums_dtype(like.dtype)
        self._codec.check(self._dtype)
        self._codec.warm_up(like.device)
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self._numel = 0
        for _, gradient in gradients:
            self._places.append((gradient.shape, gradient.stride(), self._numel))
            self._numel += gradient.numel()
        # whole blocks, since a short one would not be rotated
        self._length = -(-self._numel // codec.block) * codec.block
        self._residual = torch.zeros(self._length, dtype=self._dtype, device=like.device) if feedback else None

    def residuals(self) -> list[tuple[Parameter, Tensor]]:
        """By parameter; views."""
        if self._residual is None:
            return []
        return list(zip(self.parameters, self._views(self._residual), strict=True))

    def _views(self, flat: Tensor) -> list[Tensor]:
        begin = flat.storage_offset()
        return [flat.as_strided(shape, strides, begin + offset) for shape, strides, offset in self._places]

    @torch.no_grad()
    def average_(
        self, gradients: Sequence[Tensor], buffer: Tensor | None, peers: Peers, collective: Collective, seed: int
    ) -> None:
        """Replace gradients by their mean over all ranks.

        Args:
            gradients: of the parameters.
            buffer: see `DdpHookState._exchange`. It is averaged in place if it has whole blocks of the dtype of sums.
            peers: to average over.
            collective: how.
            seed: the same on all ranks.
        """
        if buffer is not None and buffer.dtype == self._dtype and buffer.numel() == self._numel == self._length:
            values, copies = buffer, list[Tensor]()
        else:
            nbytes = self._length * self._dtype.itemsize
            values = peers.scratch("ddp_hook.values", nbytes, gradients[0].device)[:nbytes].view(self._dtype)
            copies = self._views(values)
        for copy, gradient in zip(copies, gradients, strict=bool(copies)):
            copy.copy_(gradient)
        values[self._numel :].zero_()
        values.div_(peers.size)
        if self._residual is not None:
            self._residual[self._numel :].zero_()  # belongs to no parameter
        mean_(Summand(values, self._codec, self._residual, seed=seed), peers, collective)
        for copy, gradient in zip(copies, gradients, strict=bool(copies)):
            gradient.copy_(copy)


def _gradients_of(bucket: dist.GradBucket) -> list[Gradient]:
    """In the memory format of the parameter, such as channels_last; the views of `GradBucket.gradients` ignore it."""
    gradients = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        strides = torch.empty_like(parameter, device="meta").stride()
        gradients.append((cast(Parameter, parameter), gradient.as_strided(parameter.shape, strides)))
    return gradients

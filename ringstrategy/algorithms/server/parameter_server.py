"""Ranks compute gradients; servers keep the parameters, and step them (Li et al., OSDI 2014)."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.parameters.consensus import Consensus
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.policy import Policy, check_codec, check_feedback, codec_of, described, split
from ringstrategy.algorithms.server.servers import Servers
from ringstrategy.algorithms.server.service import Service
from ringstrategy.algorithms.server.shards import check_optimizer, options_of
from ringstrategy.algorithms.server.stepped import Stepped, step_meta
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.plan import plan_buckets
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.direct import Direct
from ringstrategy.requests import Answer
from ringstrategy.server.rules import Async, Rule, Staleness, Sync
from ringstrategy.transport.agree import INDENT, compare_changes, compare_plans
from ringstrategy.transport.base import Peers
from ringstrategy.transport.trace import span

_KIND = "ParameterServer"


class ParameterServer(Algorithm):  # noqa: PLR0904
    """Servers hold parameters and optimizer; ranks push the gradients of each step, and pull what came of them.

    A bucket leaves when backward has filled it. The optimizer that a rank was given steps nothing on the rank: the
    servers run one like it, with the options that it has at each step, such as a schedule's learning rate. Its
    `state_dict` has the servers' state, so checkpoints are those of `ddp`.

    With `mode="sync"` it is the same as all-reduce: each step is by the mean of all ranks' gradients, and all ranks
    hold the same bits. Else each rank's gradient is a step of its own, and ranks do not wait for each other; the
    learning rate of a gradient that is s versions old is divided by 1 + s, because momentum diverges without
    (staleness-aware SGD, Zhang et al. 2016). Validation, checkpoints and what `fit` leaves are the servers' parameters;
    batch-norm statistics are averaged there.

    A server lives in a rank's process, and ends with it: a lost rank is a `PeerLostError` on all others.

    Args:
        servers: how many ranks serve, the first ones; "all": each has an equal share, so that no link carries more than
            with a ring.
        mode: "sync", "async", or `Staleness(s)`: as "async", but nobody is more than s steps ahead of the slowest.
        codec: of gradients, or a policy: see `AllReduce`.
        error_feedback: see `AllReduce`.
        pull: codec of parameters on their way back; those of 16 bits travel in 16 bits in any case. `Cast("bfloat16")`
            halves the bytes: servers keep float32, and ranks compute with rounded values.
        clip_norm: clip the gradient that is stepped by its norm over all parameters of an optimizer, in the place of
            `Trainer(gradient_clip_val=...)`, which would come after the gradients have left. None: do not.
        bucket_mb: see `Synchronous`.
    """

    regroups = False

    def __init__(
        self,
        servers: int | Literal["all"] = "all",
        mode: Literal["sync", "async"] | Staleness = "sync",
        codec: Codec | Policy | None = None,
        error_feedback: bool = False,
        pull: Codec | None = None,
        clip_norm: float | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        if servers != "all" and (type(servers) is not int or servers < 1):
            raise ValueError(f"servers is how many ranks serve, a whole number >= 1, or 'all', got {servers!r}")
        if mode not in ("sync", "async") and type(mode) is not Staleness:
            raise ValueError(f"mode is 'sync', 'async' or Staleness(most=...), got {mode!r}")
        if pull is not None and not isinstance(pull, Codec):
            raise TypeError(f"pull is a Codec such as ringstrategy.Cast('bfloat16'), got {pull!r}")
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < math.inf):
            raise ValueError(f"clip_norm is a number > 0, or None, got {clip_norm!r}")
        if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not bucket_mb > 0:
            raise ValueError(f"bucket_mb is a number of megabytes > 0, got {bucket_mb!r}")
        self.servers, self.mode = servers, mode
        self.codec, self.pull = Identity() if codec is None else codec, Identity() if pull is None else pull
        self.error_feedback, self.clip_norm, self.bucket_mb = error_feedback, clip_norm, bucket_mb
        check_feedback(error_feedback)
        check_codec(self.codec, Direct())
        self.decentralized = self.consensus = mode != "sync"
        self.replicates = not self.decentralized

        self._peers: Peers | None = None
        self._servers: Servers | None = None
        self._view: Consensus | None = None
        self._encoder: ThreadPoolExecutor | None = None
        self._parameters: dict[str, Parameter] = {}
        self._local_names: list[str] = []
        self._stepped: list[Stepped] = []
        self._nodes: dict[Parameter, tuple[Node, RemovableHandle]] = {}
        self._handles: list[RemovableHandle] = []
        self._fresh = True  # servers take what this rank has at the next batch
        self._has_ended = False  # optimizers have the servers' state
        self._passes = False  # gradients of this backward are pushed
        self._divisor = 1.0  # of them: servers add up
        self._pushes: list[Future[list[tuple[int, Future[Answer]]]]] = []
        self._step = 0
        self._residuals: dict[str, Tensor] = {}  # of parameters that no optimizer has yet; after `close` all
        self._parts: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        """The arguments in which ranks must not differ."""
        return (
            f"ParameterServer(servers={self.servers!r}, mode={self.mode!r}, codec={described(self.codec)}, "
            f"error_feedback={self.error_feedback}, pull={self.pull}, clip_norm={self.clip_norm}, "
            f"bucket_mb={self.bucket_mb})"
        )

    @property
    def _rule(self) -> Rule:
        assert self._peers is not None
        if isinstance(self.mode, Staleness):
            return self.mode
        return Sync(self._peers.size) if self.mode == "sync" else Async()

    # From setup to close

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        assert self._peers is None, "close() first"
        count = peers.size if self.servers == "all" else int(self.servers)
        if count > peers.size:
            raise ValueError(
                f"servers={count} of {peers.size} ranks: pass at most as many as there are ranks, or 'all'"
            )
        if sparse:
            raise ValueError(
                f"parameter {min(sparse)} has sparse gradients, which servers do not take: use sparse=False, or a "
                "strategy such as 'ring'"
            )
        self._peers, self._fresh, self._has_ended, self._step = peers, True, False, 0
        self._residuals, self._parts = {}, {}
        self._view = Consensus(peers, Exchange())
        self._learn(parameters)
        compare_plans(peers, self.plan_text(peers.size, self._lines()))
        self._encoder = ThreadPoolExecutor(1, "ringstrategy-encode")
        rule = self._rule
        self._servers = Servers(peers, count, lambda me, ranks: Service(me, ranks, rule, self.pull))

    def _lines(self) -> Iterator[str]:
        return (f"{INDENT}{name}: {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items())

    def _learn(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters, self._local_names = split(parameters, None)

    @override
    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        if scaled_loss:
            raise ValueError(
                "with a loss scaler each rank has a scale of its own, and servers step gradients of one: use "
                "precision='bf16-mixed' or 32 bits"
            )
        if clips_by_norm:
            raise ValueError(
                "gradients are clipped after they have left for the servers: leave out gradient_clip_val, and use "
                "ParameterServer(clip_norm=...), by which servers clip the gradient that they step"
            )

    @override
    def is_local(self, name: str) -> bool:
        return name in self._local_names

    @override
    def adopt(self, parameters: Mapping[str, Parameter], *, sparse: frozenset[str] = frozenset()) -> list[Parameter]:
        known = set(self._parameters.values())
        before = list(self._parameters)
        self._learn(parameters)
        new = {name: parameter for name, parameter in self._parameters.items() if parameter not in known}
        gone = [name for name in before if name not in self._parameters]
        if (new or gone) and self._peers is not None:
            compare_changes(self._peers, "", new, gone)
        return list(new.values())

    @override
    def compare(self, text: str) -> None:
        if self._peers is not None:
            compare_plans(self._peers, f"{self!r}\n{text}")

    @override
    def bind(self, parameters: Collection[Parameter], optimizer: Optimizer | None = None) -> None:
        if self._peers is None or self._servers is None:
            return
        named = {name: parameter for name, parameter in self._parameters.items() if parameter in parameters}
        if not named or any(stepped.bucket_of.keys() == set(named.values()) for stepped in self._stepped):
            return
        if optimizer is None:
            raise ValueError("servers step in the place of a torch.optim.Optimizer, and this loop announces none")
        for stepped in self._stepped:
            if stepped.is_of(parameters):
                raise ValueError(
                    "two optimizers step the same parameter, or one has got other parameters since training began: "
                    "give each parameter to one optimizer, from the start, and freeze what is not to be trained"
                )
        check_optimizer(optimizer, self._servers.count)
        planned = plan_buckets(
            named,
            frozenset(),
            lambda name, parameter: codec_of(self.codec, Direct(), name, parameter),
            lambda codec: self.error_feedback and not codec.lossless,
            max(1, int(self.bucket_mb * 2**20)),
            sum(len(stepped.buckets) for stepped in self._stepped),
        )
        buckets = [bucket for bucket in planned if isinstance(bucket, DenseBucket)]
        stepped = Stepped(len(self._stepped), optimizer, buckets, self._servers.count, self.pull)
        compare_plans(self._peers, "\n".join(bucket.describe() for bucket in buckets))
        self._stepped.append(stepped)
        self._load_residuals(stepped)
        self._handles += [
            optimizer.register_step_pre_hook(partial(self._before_step, stepped)),
            optimizer.register_state_dict_pre_hook(partial(self._fetch_state, stepped)),
            optimizer.register_state_dict_post_hook(partial(self._drop_state, stepped)),
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget()),
        ]
        self.forget()

    @override
    def forget(self) -> None:
        self._fresh = True

    @override
    def start(self) -> None:
        if not self._fresh or self._servers is None or not self._stepped:
            return
        self._servers.begin(self._serve)
        self._fresh = False
        for stepped in self._stepped:
            stepped.begin()
            self._drop_state(stepped)

    def _serve(self, service: Service, server: int, generation: int) -> None:
        shards = [stepped.shards[server] for stepped in self._stepped]
        made = [
            shard.fragment(stepped.buckets, stepped.optimizer)
            for shard, stepped in zip(shards, self._stepped, strict=True)
        ]
        service.begin(generation, made, shards, [stepped.buckets for stepped in self._stepped])

    def finish(self) -> None:
        """See `Algorithm.finish`. From now on the ranks' optimizers have the servers' state."""
        if self._servers is None or self._peers is None or self._fresh or self._has_ended:
            return
        for stepped in self._stepped:
            self._fetch_state(stepped)
        self._has_ended = True
        compare_plans(self._peers, "the end of training")  # servers are needed until all ranks have it

    def close(self) -> None:
        """Leave the servers, and remove the hooks. No collective. State for a checkpoint stays."""
        state = self.state_dict()
        self._residuals = {name: value.to("cpu", copy=True) for name, value in self.residuals()}
        self._parts = {name: value.cpu() for name, value in state["stepped"].items()}
        servers, encoder, self._servers, self._encoder = self._servers, self._encoder, None, None
        with ExitStack() as ends:
            if encoder is not None:
                ends.callback(encoder.shutdown)
            if servers is not None:
                ends.callback(servers.close)
            for handle in (*self._handles, *(handle for _, handle in self._nodes.values())):
                ends.callback(handle.remove)
        self._peers, self._view, self._stepped, self._passes = None, None, [], False
        self._handles, self._nodes, self._pushes = [], {}, []

    # A step

    @override
    def before_backward(
        self,
        loss: Tensor | None = None,
        *,
        sync: bool = True,
        scale: Tensor | None = None,
        same: str = "",
        divisor: float | None = None,
    ) -> None:
        if self._peers is None:
            return
        ranks = self._peers.size
        if self.decentralized and divisor not in (None, ranks):
            raise ValueError(f"each rank's gradient is a step of its own here, and none is {ranks / divisor} of a mean")
        self._divisor = 1.0 if self.decentralized else ranks if divisor is None else divisor
        for residuals in self._undecided():
            residuals.before_backward()
        self._passes = sync
        if sync:
            for stepped in self._stepped:
                stepped.begin_backward()
            self._attach()

    def _attach(self) -> None:
        """Hooks for parameters that train."""
        for stepped in self._stepped:
            for parameter in stepped.bucket_of:
                if parameter.requires_grad and parameter not in self._nodes:
                    # after the user's own hooks, which may change the gradient; the node lives while somebody holds it
                    node = get_gradient_edge(parameter).node
                    hook = node.register_hook(partial(self._on_gradient, stepped, parameter))
                    self._nodes[parameter] = node, hook

    def _on_gradient(self, stepped: Stepped, parameter: Parameter, *_: Any) -> None:
        if self._passes and parameter.requires_grad:
            place = stepped.ready(parameter)
            if place is not None:
                self._push(stepped, place)

    def _push(self, stepped: Stepped, place: int) -> None:
        assert self._encoder is not None
        assert self._peers is not None
        assert self._servers is not None
        bucket = stepped.buckets[place]
        with span("pack", bucket=bucket.index):
            bucket.pack(self._divisor)
            bucket.fill()
        seed = derive_seed(0, self._step, bucket.index)
        self._pushes.append(self._encoder.submit(stepped.push, place, self._servers.ask, seed, self._peers.rank))
        self._peers.stats.values_averaged += bucket.numel

    @override
    def after_backward(self) -> None:
        if self._servers is None or self._peers is None:
            return
        if self._passes:
            begin = time.perf_counter()
            for stepped in self._stepped:
                for place in stepped.rest():
                    self._push(stepped, place)
            pushes, self._pushes = self._pushes, []
            asked = [each for push in pushes for each in push.result()]
            self._servers.wait(asked, self._where)
            self._peers.stats.communication_seconds += time.perf_counter() - begin
            for stepped in self._stepped:
                for place in stepped.pushed:
                    stepped.buckets[place].residuals.after_exchange(lambda slot: slot.parameter.grad is not None)
            self._peers.stats.exchanges += bool(asked)
            self._step += 1
        self._passes = False
        for residuals in self._undecided():
            residuals.after_backward()
        for stepped in self._stepped:
            stepped.remember()

    @property
    def _where(self) -> str:
        return f"at step {self._step}"

    def _undecided(self) -> list[Any]:
        buckets = chain.from_iterable(stepped.buckets for stepped in self._stepped)
        return [bucket.residuals for bucket in buckets if bucket.residuals.undecided]

    def _before_step(
        self, stepped: Stepped, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An optimizer of torch's is about to step. If a closure makes its gradients, they leave after that."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._leave(stepped)
            return None

        def evaluated() -> Any:
            loss = closure()
            self._leave(stepped)
            return loss

        return ((args[0], evaluated, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluated})

    @torch.no_grad()
    def _leave(self, stepped: Stepped) -> None:
        """What was pushed is a step. The rank's optimizer is left without gradients."""
        servers = self._servers
        if servers is None:
            return
        members = {parameter for group in stepped.optimizer.param_groups for parameter in group["params"]}
        if not stepped.bucket_of.keys() <= members or any(
            parameter in members and parameter not in stepped.bucket_of for parameter in self._parameters.values()
        ):
            raise RuntimeError(
                f"{type(stepped.optimizer).__name__} has got or lost parameters since training began, and servers step "
                "those of the start: give it all from the start, and freeze what is not to be trained yet"
            )
        stepped.check()
        if not stepped.pushed:
            return
        scale = self._own_scale(stepped)
        options = list(options_of(stepped.optimizer))
        metas = [step_meta(stepped, server, options, scale) for server in range(servers.count)]
        for bucket in stepped.buckets:
            bucket.residuals.after_step(stepped.bucket_of.keys(), True)
        stepped.drop_gradients()
        stepped.steps += 1
        if self.clip_norm is not None and not self.decentralized:
            norms = [(s, servers.ask(s, "norm", meta, bulk=False)) for s, meta in enumerate(metas)]
            squares = [answer.meta["square"] for answer in servers.wait(norms, self._where)]
            clip = min(1.0, self.clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))
            metas = [{**meta, "clip": clip} for meta in metas]
        stepped.asked = [(s, servers.ask(s, "pull", meta, into=stepped.wires[s])) for s, meta in enumerate(metas)]

    def _own_scale(self, stepped: Stepped) -> float:
        """What clips this rank's gradient, where it is stepped by itself."""
        if self.clip_norm is None or not self.decentralized:
            return 1.0
        norm = float(torch.nn.utils.get_total_norm(stepped.gradients()))
        return min(1.0, self.clip_norm / (norm + 1e-6))

    @override
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        if self._view is not None and self._view.entered:
            raise RuntimeError(
                "an optimizer has stepped while the model shows what all ranks share, instead of this rank's own "
                "parameters: leave `with consensus(...)` before you train on"
            )
        for each in self._stepped:
            if each.is_of(parameters):
                for bucket in each.buckets if stepped is False else ():
                    bucket.residuals.after_step(parameters, False)
                self._take(each)

    def _take(self, stepped: Stepped) -> None:
        """The parameters are what the servers have made of the last step."""
        if stepped.asked and self._servers is not None and self._peers is not None:
            asked, stepped.asked = stepped.asked, []
            begin = time.perf_counter()
            stepped.write(self._servers.wait(asked, self._where))
            self._peers.stats.communication_seconds += time.perf_counter() - begin

    @override
    def settle(self) -> None:
        for stepped in self._stepped:
            self._take(stepped)

    # What all ranks see, where they do not wait for each other

    @torch.no_grad()
    @override
    def enter_consensus(
        self, others: Sequence[Tensor] = (), copied: Sequence[Tensor] = (), *, replaced: bool = False
    ) -> bool:
        view, servers, peers = self._view, self._servers, self._peers
        if not self.decentralized or view is None or servers is None or peers is None or view.entered:
            return False
        self.settle()
        compare_plans(peers, "the servers' parameters")  # no rank is within a step
        if not replaced and not self._fresh:
            for stepped in self._stepped:
                meta = {"fragment": stepped.number, "base": -1}
                asked = [(s, servers.ask(s, "pull", meta, into=wire)) for s, wire in enumerate(stepped.wires)]
                stepped.write(servers.wait(asked, "for the servers' parameters"))
        view.enter((), [*self._parameters.values(), *others], copied)
        return True

    @override
    def leave_consensus(self) -> None:
        if self._view is not None:
            self._view.leave()

    @override
    def as_own(self) -> AbstractContextManager[None]:
        return nullcontext() if self._view is None else self._view.hidden()

    # State

    def _fetch_state(self, stepped: Stepped, *_: Any) -> None:
        """The rank's optimizer has the servers' state, as if it had stepped itself."""
        if self._servers is None or self._fresh or self._has_ended:
            return
        meta = {"fragment": stepped.number}
        asked = [(s, self._servers.ask(s, "state", meta)) for s in range(self._servers.count)]
        answers = self._servers.wait(asked, "for the optimizer's state")
        for shard, answer in zip(stepped.shards, answers, strict=True):
            [content] = answer.buffers
            shard.put_state(stepped.optimizer, torch.load(io.BytesIO(content), weights_only=True))  # type: ignore[arg-type]

    def _drop_state(self, stepped: Stepped, *_: Any) -> None:
        """It is on the servers, and takes no memory here."""
        if not self._fresh and not self._has_ended:
            for parameter in stepped.bucket_of:
                stepped.optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """The step, from which codecs draw their seeds, and which part of gradients was stepped of late."""
        parts = dict(self._parts)
        for stepped in self._stepped:
            for bucket in stepped.buckets:
                parts |= bucket.residuals.parts()
        return {"step": self._step, "stepped": parts}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._parts = int(state["step"]), dict(state["stepped"])
        for stepped in self._stepped:
            for bucket in stepped.buckets:
                bucket.residuals.load_parts(self._parts)
        self.forget()

    def own_state(self) -> dict[str, Any]:
        """Nothing: servers have it."""
        return {"of": _KIND, "torn": False} if self.decentralized else {}

    @override
    def load_own_state(self, state: Mapping[str, Any]) -> bool:
        return not self.decentralized or state.get("of") == _KIND

    @override
    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        for stepped in self._stepped:
            for bucket in stepped.buckets:
                yield from bucket.residuals.state()
        yield from self._residuals.items()

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> list[str]:
        """See `Algorithm.load_residuals`. They wait for the optimizer that steps their parameters."""
        there = {name for name, parameter in self._parameters.items() if self.error_feedback}
        self._residuals = {
            name: value
            for name, value in residuals.items()
            if name in there and self._parameters[name].shape == value.shape
        }
        homeless = [name for name in residuals if name not in self._residuals]
        for stepped in self._stepped:
            self._load_residuals(stepped)
        return homeless

    def _load_residuals(self, stepped: Stepped) -> None:
        for bucket in stepped.buckets:
            bucket.residuals.load_parts(self._parts)
            for slot in bucket.slots:
                if slot.name in self._residuals and bucket.residuals.load(slot.name, self._residuals[slot.name]):
                    del self._residuals[slot.name]

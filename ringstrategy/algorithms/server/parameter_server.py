"""Ranks compute gradients; servers keep the parameters, and step them (Li et al., OSDI 2014)."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from ringstrategy.algorithms.parameters.consensus import Consensus
from ringstrategy.algorithms.parameters.exchange import Exchange
from ringstrategy.algorithms.policy import Policy, check_codec, check_feedback, codec_of, described
from ringstrategy.algorithms.server.served import Served
from ringstrategy.algorithms.server.servers import Servers
from ringstrategy.algorithms.server.service import Service
from ringstrategy.algorithms.server.shards import options_of
from ringstrategy.algorithms.server.stepped import Stepped
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.direct import Direct
from ringstrategy.requests import Answer
from ringstrategy.server.rules import Async, Rule, Staleness, Sync
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.base import Peers

_KIND = "ParameterServer"


class ParameterServer(Served[Stepped]):
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
        super().__init__(clip_norm, bucket_mb)
        self.servers, self.mode = servers, mode
        self.codec, self.pull = Identity() if codec is None else codec, Identity() if pull is None else pull
        self.error_feedback = error_feedback
        check_feedback(error_feedback)
        check_codec(self.codec, Direct())
        self.decentralized = self.consensus = mode != "sync"
        self.replicates = not self.decentralized

        self._servers: Servers | None = None
        self._view: Consensus | None = None
        self._encoder: ThreadPoolExecutor | None = None
        self._pushes: list[Future[list[tuple[int, Future[Answer]]]]] = []
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
        count = peers.size if self.servers == "all" else int(self.servers)
        if count > peers.size:
            raise ValueError(
                f"servers={count} of {peers.size} ranks: pass at most as many as there are ranks, or 'all'"
            )
        super().setup(parameters, peers, sparse=sparse)
        self._residuals, self._parts = {}, {}
        self._view = Consensus(peers, Exchange())
        self._encoder = ThreadPoolExecutor(1, "ringstrategy-encode")
        rule, in_turn = self._rule, count == peers.size and not self.decentralized
        self._servers = Servers(peers, count, lambda me, ranks: Service(me, ranks, rule, self.pull, in_turn))

    @property
    @override
    def _shares(self) -> int:
        assert self._servers is not None
        return self._servers.count

    @override
    def _codec_of(self, name: str, parameter: Parameter) -> Codec:
        return codec_of(self.codec, Direct(), name, parameter)

    @override
    def _feeds_back(self, codec: Codec) -> bool:
        return self.error_feedback and not codec.lossless

    @override
    def _take_over(self, optimizer: Optimizer, buckets: list[DenseBucket]) -> Stepped:
        stepped = Stepped(len(self._stepped), optimizer, buckets, self._shares, self.pull)
        self._load_residuals(stepped)
        return stepped

    @override
    def start(self) -> None:
        if self._has_ended:  # and goes on
            self._has_ended = False
            for stepped in self._stepped:
                self._drop_state(stepped)
        if not self._fresh or self._servers is None or not self._stepped:
            return
        assert self._peers is not None
        compare_plans(self._peers, "servers begin anew")  # nobody asks for what was before
        self._servers.begin(self._serve)
        self._fresh = False
        for stepped in self._stepped:
            stepped.begin()
            self._drop_state(stepped)

    def _serve(self, service: Service, server: int, generation: int) -> None:
        shards = [stepped.shards[server] for stepped in self._stepped]
        made = [
            shard.fragment(stepped.dtype, stepped.optimizer)
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
            ends.callback(super().close)
        self._view, self._pushes = None, []

    # A step

    @override
    def _divided_by(self, divisor: float | None) -> float:
        assert self._peers is not None
        ranks = self._peers.size
        self._wait_for_pushes()  # of a backward that failed half-way
        for residuals in self._undecided():
            residuals.before_backward()
        if not self.decentralized:
            return super()._divided_by(divisor)
        if divisor not in (None, ranks):
            raise ValueError(f"each rank's gradient is a step of its own here, and none is {ranks / divisor} of a mean")
        return 1.0

    @override
    def _push(self, stepped: Stepped, place: int) -> None:
        assert self._encoder is not None
        assert self._peers is not None
        assert self._servers is not None
        seed = derive_seed(0, self._step, stepped.buckets[place].index)
        parts: Iterable[tuple[int, Tensor]] = stepped.encoded(place, seed, self._peers.rank)
        if stepped.buckets[place].buffer.device.type != "cpu":
            parts = [*parts]  # on the device and the stream of the backward
        meta = {"fragment": stepped.number, "bucket": place, "seed": seed}
        self._pushes.append(self._encoder.submit(self._servers.send_each, "push", meta, parts))

    @override
    def _wait_for_pushes(self) -> None:
        if self._servers is None or self._peers is None:
            return
        begin = time.perf_counter()
        pushes, self._pushes = self._pushes, []
        asked = [each for push in pushes for each in self._servers.wait_until_sent(push, self._where)]
        if not asked:
            return
        self._servers.wait(asked, self._where)
        self._peers.stats.communication_seconds += time.perf_counter() - begin
        for stepped in self._stepped:
            for place in stepped.pushed:
                stepped.buckets[place].residuals.after_exchange(lambda slot: slot.parameter.grad is not None)
        self._peers.stats.exchanges += 1

    @override
    def after_backward(self) -> None:
        super().after_backward()
        for residuals in self._undecided():
            residuals.after_backward()

    def _undecided(self) -> list[Any]:
        buckets = chain.from_iterable(stepped.buckets for stepped in self._stepped)
        return [bucket.residuals for bucket in buckets if bucket.residuals.undecided]

    @override
    def _make_step(self, stepped: Stepped) -> None:
        servers = self._servers
        if servers is None or (self.decentralized and not stepped.pushed):
            return  # in step all count, also one without a gradient
        stepped.check_values()
        scale = self._own_scale(stepped)
        options = list(options_of(stepped.optimizer))
        metas = [stepped.meta(server) for server in range(servers.count)]
        steps = [stepped.counted(server, options, scale) for server in range(servers.count)]
        for bucket in stepped.buckets:
            bucket.residuals.after_step(stepped.bucket_of.keys(), True)
        stepped.drop_gradients()
        stepped.steps += 1
        if self.clip_norm is not None and not self.decentralized:
            norms = [(s, servers.ask(s, "norm", meta, [steps[s]], bulk=False)) for s, meta in enumerate(metas)]
            squares = [answer.meta["square"] for answer in servers.wait(norms, self._where)]
            clip = self._clips(math.sqrt(math.fsum(squares)))
            metas = [{**meta, "clip": clip} for meta in metas]
        stepped.asked = [(s, servers.ask(s, "step", meta, [steps[s]], bulk=False)) for s, meta in enumerate(metas)]
        stepped.asked += [(s, servers.ask(s, "pull", meta, into=stepped.wires[s])) for s, meta in enumerate(metas)]

    def _own_scale(self, stepped: Stepped) -> float:
        """What clips this rank's gradient, where it is stepped by itself."""
        if self.clip_norm is None or not self.decentralized:
            return 1.0
        return self._clips(float(torch.nn.utils.get_total_norm(stepped.gradients())))

    @override
    def after_step(self, parameters: Collection[Parameter] = (), stepped: Tensor | bool = True) -> None:
        if self._view is not None:
            self._view.check_left()
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
            stepped.write(self._servers.wait(asked, self._where)[self._servers.count :])
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
        if not replaced and not self._fresh and all(stepped.is_as_written() for stepped in self._stepped):
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

    @override
    def _fetch_state(self, stepped: Stepped, *_: Any) -> None:
        if self._servers is None or self._fresh or self._has_ended:
            return
        meta = {"fragment": stepped.number}
        asked = [(s, self._servers.ask(s, "state", meta)) for s in range(self._servers.count)]
        answers = self._servers.wait(asked, "for the optimizer's state")
        for shard, answer in zip(stepped.shards, answers, strict=True):
            [content] = answer.buffers
            shard.put_state(stepped.optimizer, torch.load(io.BytesIO(content), weights_only=True))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The step, from which codecs draw their seeds, and which part of gradients was stepped of late."""
        parts = dict(self._parts)
        for stepped in self._stepped:
            for bucket in stepped.buckets:
                parts |= bucket.residuals.parts()
        return {**super().state_dict(), "stepped": parts}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._parts = dict(state["stepped"])
        for stepped in self._stepped:
            for bucket in stepped.buckets:
                bucket.residuals.load_parts(self._parts)

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

"""What an algorithm has in common that steps in the place of ranks' optimizers: how it hears of gradients and steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.policy import split
from ringstrategy.algorithms.server.gathered import Gathered
from ringstrategy.algorithms.server.shards import check_optimizer
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.plan import capacity_of, plan_buckets
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.transport.agree import INDENT, compare_changes, compare_plans
from ringstrategy.transport.base import Peers
from ringstrategy.transport.trace import span

Of = TypeVar("Of", bound=Gathered)  # what there is of one optimizer


class Served(Algorithm, Generic[Of]):
    """Ranks compute gradients, and hand over those of each backward; each optimizer is stepped by something else.

    The optimizer that a rank was given steps nothing itself. Its hooks tell of each step, with the options that it then
    has, such as a schedule's learning rate. Its `state_dict` has the state of what steps in its place.

    Args:
        clip_norm: of the mean gradient over all parameters of an optimizer; None: do not.
        bucket_mb: see `Synchronous`.
    """

    regroups = False

    def __init__(self, clip_norm: float | None, bucket_mb: float) -> None:
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < math.inf):
            raise ValueError(f"clip_norm is a number > 0, or None, got {clip_norm!r}")
        self._capacity = capacity_of(bucket_mb)
        self.clip_norm, self.bucket_mb = clip_norm, bucket_mb
        self._peers: Peers | None = None
        self._parameters: dict[str, Parameter] = {}
        self._local_names: list[str] = []
        self._stepped: list[Of] = []
        self._nodes: dict[Parameter, tuple[Node, RemovableHandle]] = {}
        self._handles: list[RemovableHandle] = []
        self._fresh = True  # at the next batch what steps begins with what this rank has
        self._has_ended = False  # optimizers have the state themselves
        self._passes = False  # gradients of this backward are handed over
        self._divisor = 1.0  # of them, which are added up
        self._step = 0

    # What differs

    @property
    @abstractmethod
    def _shares(self) -> int:
        """Into how many parts parameters are cut, each with an optimizer."""

    def _codec_of(self, name: str, parameter: Parameter) -> Codec:
        """By which a parameter's gradient is handed over."""
        return Identity()

    def _feeds_back(self, codec: Codec) -> bool:
        """Whether what it loses is kept."""
        return False

    def _check(self, named: Mapping[str, Parameter]) -> None:
        """ValueError with the cure if the parameters of one more optimizer cannot be taken."""

    def _divided_by(self, divisor: float | None) -> float:
        """A backward begins: by what its gradients are divided, which are added up; see `Algorithm.before_backward`."""
        assert self._peers is not None
        return self._peers.size if divisor is None else divisor

    @abstractmethod
    def _take_over(self, optimizer: Optimizer, buckets: list[DenseBucket]) -> Of:
        """Step in the place of one more optimizer. All ranks have the same buckets."""

    @abstractmethod
    def _push(self, stepped: Of, place: int) -> None:
        """A packed bucket leaves. Called within backward too."""

    def _wait_for_pushes(self) -> None:
        """All gradients of a backward were pushed."""

    @abstractmethod
    def _make_step(self, stepped: Of) -> None:
        """What was pushed is a step. The gradients are still there, and must be dropped."""

    @abstractmethod
    def _fetch_state(self, stepped: Of, *_: Any) -> None:
        """The rank's optimizer has the whole state, as if it had stepped itself."""

    # From setup to close

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        assert self._peers is None, "close() first"
        if sparse:
            raise ValueError(
                f"parameter {min(sparse)} has sparse gradients, which {type(self).__name__} does not take: use "
                "sparse=False, or a strategy such as 'ring'"
            )
        self._peers, self._fresh, self._has_ended, self._step = peers, True, False, 0
        self._learn(parameters)
        compare_plans(peers, self.plan_text(peers.size, self._lines()))

    def _lines(self) -> Iterator[str]:
        return (f"{INDENT}{name}: {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items())

    def _learn(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters, self._local_names = split(parameters, None)

    @override
    def check(self, *, scaled_loss: bool, clips_by_norm: bool) -> None:
        if scaled_loss:
            raise ValueError(
                f"with a loss scaler each rank has a scale of its own, and {type(self).__name__} steps gradients of "
                "one: use precision='bf16-mixed' or 32 bits"
            )
        if clips_by_norm:
            raise ValueError(
                "gradients are clipped after they were handed over: leave out gradient_clip_val, and use "
                f"{type(self).__name__}(clip_norm=...), which clips the gradient that is stepped"
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
        if self._peers is None:
            return
        named = {name: parameter for name, parameter in self._parameters.items() if parameter in parameters}
        same = next((each for each in self._stepped if each.bucket_of.keys() == set(named.values())), None)
        if not named or (same is not None and same.optimizer is optimizer):
            return
        if optimizer is None:
            raise ValueError(
                f"{type(self).__name__} steps in the place of a torch.optim.Optimizer, and this loop announces none"
            )
        for stepped in self._stepped:
            if stepped.is_of(parameters):
                raise ValueError(
                    "two optimizers step the same parameter, or one has got other parameters since training began: "
                    "give each parameter to one optimizer, from the start, and freeze what is not to be trained"
                )
        check_optimizer(optimizer, self._shares)
        for name, parameter in named.items():
            if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
                raise ValueError(
                    f"parameter {name} of shape {tuple(parameter.shape)} has gaps in memory, with strides "
                    f"{parameter.stride()}, as a part of a larger tensor has: make it nn.Parameter(part.contiguous())"
                )
        self._check(named)
        planned = plan_buckets(
            named,
            frozenset(),
            self._codec_of,
            self._feeds_back,
            self._capacity,
            sum(len(stepped.buckets) for stepped in self._stepped),
        )
        buckets = [bucket for bucket in planned if isinstance(bucket, DenseBucket)]
        compare_plans(self._peers, "\n".join(bucket.describe() for bucket in buckets))
        stepped = self._take_over(optimizer, buckets)
        self._stepped.append(stepped)
        self._handles += [
            optimizer.register_step_pre_hook(partial(self._before_step, stepped)),
            optimizer.register_state_dict_pre_hook(partial(self._fetch_state, stepped)),
            optimizer.register_state_dict_post_hook(partial(self._drop_state, stepped)),
            optimizer.register_load_state_dict_post_hook(partial(self._loaded, stepped)),
        ]
        self.forget()

    @override
    def forget(self) -> None:
        self._fresh = True

    def close(self) -> None:
        """Remove the hooks. No collective. State for a checkpoint stays."""
        with ExitStack() as ends:
            for handle in (*self._handles, *(handle for _, handle in self._nodes.values())):
                ends.callback(handle.remove)
        self._peers, self._stepped, self._passes = None, [], False
        self._handles, self._nodes = [], {}

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
        self._divisor, self._passes = self._divided_by(divisor), sync
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

    def _on_gradient(self, stepped: Of, parameter: Parameter, *_: Any) -> None:
        if self._passes and parameter.requires_grad:
            place = stepped.ready(parameter)
            if place is not None:
                self._pack(stepped, place)

    def _pack(self, stepped: Of, place: int) -> None:
        assert self._peers is not None
        bucket = stepped.buckets[place]
        with span("pack", bucket=bucket.index):
            bucket.pack(self._divisor)
            bucket.fill()
        self._push(stepped, place)
        self._peers.stats.values_averaged += bucket.numel

    @override
    def after_backward(self) -> None:
        if self._peers is None:
            return
        if self._passes:
            for stepped in self._stepped:
                for place in stepped.rest():
                    self._pack(stepped, place)
            self._wait_for_pushes()
            self._step += 1
        self._passes = False
        for stepped in self._stepped:
            stepped.remember()

    @property
    def _where(self) -> str:
        return f"at step {self._step}"

    @override
    def before_step(self, parameters: Collection[Parameter]) -> None:
        named = {name: parameter for name, parameter in self._parameters.items() if parameter in parameters}
        if named and not any(stepped.bucket_of.keys() == set(named.values()) for stepped in self._stepped):
            raise RuntimeError(
                f"an optimizer steps {next(iter(named))}, and none with its parameters was there when training began, "
                "so this rank alone would step: give each optimizer all of its parameters from the start, and freeze "
                "what is not to be trained yet; in a loop of your own announce it by bind"
            )

    def _before_step(self, stepped: Of, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    def _leave(self, stepped: Of) -> None:
        """What was pushed is a step. The rank's optimizer is left without gradients."""
        if self._peers is None:
            return
        self.before_step({parameter for group in stepped.optimizer.param_groups for parameter in group["params"]})
        stepped.check(type(self).__name__)
        self._make_step(stepped)

    def _clips(self, norm: float) -> float:
        """The factor of a gradient of this norm, as torch's `clip_grad_norm_` has it."""
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))

    # State

    def _loaded(self, stepped: Of, *_: Any) -> None:
        """The rank's optimizer has got the state that is to be gone on with."""
        self.forget()

    def _drop_state(self, stepped: Of, *_: Any) -> None:
        """It is where the parameters are stepped, and takes no memory here."""
        if not self._fresh and not self._has_ended:
            for parameter in stepped.bucket_of:
                stepped.optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """The step, and which part of gradients was stepped of late, where errors are fed back."""
        return {"step": self._step, "buckets": {}, "stepped": {}}  # as `Synchronous`, which may go on from it

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self.forget()

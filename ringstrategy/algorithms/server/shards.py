"""An optimizer's parameters, cut into one fragment a server, and the optimizers that step these.

Each bucket is cut into as many parts as there are servers, on edges of codec blocks. So servers get equal shares of any
model, and each begins to receive with the first bucket.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.slot import Slot
from ringstrategy.collectives.base import cut
from ringstrategy.server.fragment import Fragment, Place

_BY_ELEMENT = {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
_OF_DEVICES = ("capturable", "fused")  # options that hold for the device of the workers' parameters


class Part(NamedTuple):
    """What of a bucket is on a server: [begin, end) of its buffer, which lies in the fragment from `offset`."""

    begin: int
    end: int
    offset: int


class Piece(NamedTuple):
    """What of a parameter is on a server: [begin, end) of its values, as they lie in memory."""

    parameter: Parameter
    begin: int
    end: int
    place: Place

    def of(self, whole: Tensor) -> Tensor:
        """What lies there in a tensor like the parameter, flat."""
        return whole.as_strided((whole.numel(),), (1,), whole.storage_offset())[self.begin : self.end]

    def lying_in(self, fragment: Tensor) -> Tensor:
        """The same of a whole fragment's values, flat."""
        return fragment[self.place.offset : self.place.offset + self.end - self.begin]


@dataclass
class Shard:
    """What one server has of an optimizer's parameters.

    Attributes:
        parts: by bucket.
        pieces: of parameters.
        numel: values, those that pad buckets to whole blocks included.
    """

    parts: list[Part] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    numel: int = 0

    def add(self, bucket: DenseBucket, begin: int, end: int) -> None:
        """A part of the next bucket."""
        for slot in bucket.slots:
            self._add_piece(slot, begin, end)
        self.parts.append(Part(begin, end, self.numel))
        self.numel += end - begin

    def _add_piece(self, slot: Slot, begin: int, end: int) -> None:
        first, numel = int(slot.view.storage_offset()), slot.view.numel()
        low, high = max(begin, first), min(end, first + numel)
        if low >= high:
            return
        whole = high - low == numel
        shape, stride = (slot.view.shape, slot.view.stride()) if whole else ((high - low,), (1,))
        place = Place(self.numel + low - begin, tuple(shape), tuple(map(int, stride)))
        self.pieces.append(Piece(slot.parameter, low - first, high - first, place))

    def fragment(self, dtype: torch.dtype, optimizer: Optimizer) -> Fragment:
        """Of the parameters' values now, with an optimizer like this one, and what it has of state for them."""
        values = torch.zeros(self.numel, dtype=dtype)
        for piece in self.pieces:
            piece.lying_in(values).copy_(piece.of(piece.parameter.detach()))
        return self.over(values, optimizer)

    def over(self, values: Tensor, optimizer: Optimizer, *, in_place: bool = False) -> Fragment:
        """Of these values, which lie as the pieces do, with an optimizer as in `fragment`; see `Fragment`."""
        places = [piece.place for piece in self.pieces]
        fragment = Fragment(values, lambda own: self._optimizer(optimizer, own), places, in_place=in_place)
        self._load_state(fragment, optimizer.state)
        return fragment

    def _optimizer(self, optimizer: Optimizer, pieces: Sequence[Parameter]) -> Optimizer:
        """With the same groups, though they may be empty here."""
        group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        groups: list[list[Parameter]] = [[] for _ in optimizer.param_groups]
        for piece, mine in zip(self.pieces, pieces, strict=True):
            groups[group_of[piece.parameter]].append(mine)
        return like(optimizer, groups)

    # The optimizer's state

    def _load_state(self, fragment: Fragment, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for piece, mine in zip(self.pieces, fragment.parameters, strict=True):
            for key, value in state.get(piece.parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.parameter.shape and value.dim():
                    part = torch.empty_like(mine, dtype=value.dtype).detach()
                    own = _dense_like(piece.parameter, value)
                    part.as_strided((part.numel(),), (1,)).copy_(piece.of(own))
                    value = part
                elif isinstance(value, Tensor):
                    value = value.detach().to("cpu", copy=True)
                fragment.optimizer.state[mine][key] = value

    def state_of(self, fragment: Fragment) -> list[dict[str, Any]]:
        """By piece: tensors as long as the piece are flat, as they lie in memory."""
        rows = []
        for mine in fragment.parameters:
            row = dict(fragment.optimizer.state.get(mine, {}))
            for key, value in row.items():
                if isinstance(value, Tensor) and value.shape == mine.shape and value.dim():
                    row[key] = _dense_like(mine, value).as_strided((value.numel(),), (1,))
            rows.append(row)
        return rows

    def put_state(self, optimizer: Optimizer, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what `state_of` gave into the state of an optimizer of the whole parameters."""
        for piece, row in zip(self.pieces, rows, strict=True):
            state, parameter = optimizer.state[piece.parameter], piece.parameter
            for key, value in row.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == (piece.end - piece.begin,):
                    if key not in state:
                        state[key] = torch.zeros_like(parameter, dtype=value.dtype).detach()
                    piece.of(state[key]).copy_(value)
                else:
                    state[key] = value


def shards_of(buckets: Sequence[DenseBucket], servers: int) -> list[Shard]:
    """A shard for each server."""
    shards = [Shard() for _ in range(servers)]
    for bucket in buckets:
        edges = cut(0, bucket.buffer.numel(), servers, bucket.codec.block)
        for place, (begin, end) in enumerate(edges):
            shards[(place + bucket.index) % servers].add(bucket, begin, end)  # in turn: the last part may be longer
    return shards


def slices_of(buckets: Sequence[DenseBucket], ranks: int, block: int) -> list[Shard]:
    """For each rank one run of all buckets, which lie one behind the other; edges are multiples of `block`."""
    shards = [Shard() for _ in range(ranks)]
    for shard, (begin, end) in zip(shards, cut(0, sum(b.buffer.numel() for b in buckets), ranks, block), strict=True):
        offset = 0
        for bucket in buckets:
            numel = bucket.buffer.numel()
            low, high = (min(max(edge - offset, 0), numel) for edge in (begin, end))
            shard.add(bucket, low, high)
            offset += numel
    return shards


def like(optimizer: Optimizer, groups: Sequence[list[Parameter]]) -> Optimizer:
    """One of the same class, with the same options, of other parameters on the CPU, and without state."""
    twin = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # of the class that a user wrote
        if name not in vars(twin) and name != "step":  # which schedulers wrap
            vars(twin)[name] = value
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        own = {**group, "params": parameters}
        if any(parameter.device.type != "cpu" for parameter in group["params"]):
            own |= {name: False for name in _OF_DEVICES if name in own}
        own["lr"] = float(own["lr"])
        twin.param_groups.append(own)
    return twin


def check_optimizer(optimizer: Optimizer, servers: int) -> None:
    """ValueError with the cure unless a server can step by it what it has of the parameters."""
    name = type(optimizer).__name__
    lists = (value if isinstance(value, list | tuple) else [value] for value in vars(optimizer).values())
    inner = next((each for held in lists for each in held if isinstance(each, Optimizer)), None)
    if inner is not None or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"a server cannot run {name} in place of the ranks, because it "
            + (f"wraps {type(inner).__name__}" if inner is not None else "evaluates the loss")
            + ": return one of torch.optim's from configure_optimizers, such as torch.optim.AdamW, or use 'ring'"
        )
    if "lr" not in optimizer.param_groups[0]:
        raise ValueError(f"{name} has no 'lr', by which a server steps: use one of torch.optim's")
    by_element = name in _BY_ELEMENT and type(optimizer).__module__.startswith("torch.optim")
    if servers > 1 and not by_element:
        raise ValueError(
            f"{name} may look at a whole parameter, and {servers} servers have parts of them: use "
            "ParameterServer(servers=1), or an optimizer that steps each element by itself, such as torch.optim.AdamW"
        )


def options_of(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Of each group what a schedule may change: the numbers among the options that its class has defaults for."""
    for group in optimizer.param_groups:
        named = {name: group[name] for name in optimizer.defaults if name in group and name not in _OF_DEVICES}
        yield {name: number for name, value in named.items() if (number := _number(value)) is not None}


def shown(value: Any) -> str:
    """An option, with as many digits as machines with different mathematics libraries agree in."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _number(value: Any) -> Any:
    """It, if `json` gives back the same; a tensor's own number; else None."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [_number(each) for each in value]
        return None if None in numbers else numbers
    return value if isinstance(value, bool | int | float) else None


def _dense_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value, as it lies in memory if it has the parameter's strides."""
    if value.stride() == parameter.stride() and value.device.type == "cpu":
        return value.detach()
    laid = torch.empty_like(parameter, dtype=value.dtype, device="cpu").detach()
    laid.copy_(value)
    return laid

"""Parameters in a row: flat vectors as they are exchanged, by dtype and codec, and by the optimizer that steps them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.parameters.outer import Outer
from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.transport.base import Waitable

Item = TypeVar("Item")


class Vector:
    """A flat vector that is exchanged as one.

    Attributes:
        correction: flat, in the dtype of sums; the exchange's result.
        memory: as long, in the dtype of sums; state that an algorithm keeps between exchanges.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.memory: dict[str, Tensor] = {}
        self.correction = torch.zeros(numel, dtype=sums_dtype(dtype), device=device)

    @cached_property
    def values(self) -> Tensor:
        """A copy of the values to mix, taken when an exchange begins; memory for it, at the first use."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    @classmethod
    def of(cls, values: Tensor) -> Vector:
        """One that has these values."""
        vector = Vector(values.numel(), values.dtype, values.device)
        vector.__dict__["values"] = values
        return vector


class Shared:
    """Shared values of parameters, and their outer optimizer.

    Args:
        names: of the parameters.
        parameters: the values begin as theirs.
        outer: None: parameters move by exactly what they are given.

    Attributes:
        values: flat, in the dtype of sums.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], outer: Outer | None) -> None:
        self.names = names
        self.values = row_of(parameters)
        self._parts = [Parameter(part, requires_grad=False) for part in cut_like(self.values, parameters)]
        self._optimizer = None if outer is None else outer(self._parts)

    @torch.no_grad()
    def step(self, progress: Tensor, *, plain: bool = False) -> None:
        """Step by the outer gradient -progress, flat, which may be used as scratch.

        Args:
            progress: by how much the ranks moved since the last step.
            plain: add it, without the optimizer.
        """
        if plain or self._optimizer is None:
            self.values.add_(progress)
            return
        for part, gradient in zip(self._parts, cut_like(progress.neg_(), self._parts), strict=True):
            part.grad = gradient
        self._optimizer.step()
        for part in self._parts:
            part.grad = None

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By parameter name: its values, and what the optimizer keeps for it. Tensors are views."""
        kept = {} if self._optimizer is None else self._optimizer.state
        return {
            name: {"values": part.detach(), "outer": dict(kept.get(part, {}))}
            for name, part in zip(self.names, self._parts, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> bool:
        """Take it back; False if it lacks a parameter."""
        if not all(name in state for name in self.names):
            return False
        for name, part in zip(self.names, self._parts, strict=True):
            part.copy_(state[name]["values"])
            if self._optimizer is not None and state[name]["outer"]:
                self._optimizer.state[part] = {
                    key: _like(value, part) if isinstance(value, Tensor) else value
                    for key, value in state[name]["outer"].items()
                }
        return True


class Flat(Vector):
    """Parameters of one dtype on one device that travel by one codec, and memory for all their values in a row.

    Attributes:
        shared: their values that have the same bits on all ranks, if an algorithm keeps such.
    """

    shared: Shared | None = None

    def __init__(self, named: Mapping[str, Parameter], dtype: torch.dtype, codec: Codec) -> None:
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.codec = codec
        numel = sum(parameter.numel() for parameter in self.parameters)
        super().__init__(numel, dtype, self.parameters[0].device)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat`, one a parameter."""
        return dict(zip(self.names, cut_like(flat, self.parameters), strict=True))

    def row(self) -> Tensor:
        """A copy of the parameters' values, in the dtype of sums."""
        return row_of(self.parameters)

    @torch.no_grad()
    def gather(self, into: Tensor | None = None) -> None:
        """Copy the parameters into `values`, or into another flat tensor."""
        torch._foreach_copy_(cut_like(self.values if into is None else into, self.parameters), self.parameters)

    @torch.no_grad()
    def gather_sum(self, other: Tensor, factor: float = 1.0, into: Tensor | None = None) -> None:
        """Write the parameters plus factor * other to `values`, or to another flat tensor; both of one dtype.

        On GPUs in two launches, however many parameters there are; on CPUs, of one dtype, in one pass over the memory.
        """
        values = self.values if into is None else into
        if values.device.type != "cpu" or self.parameters[0].dtype != values.dtype:
            self.gather(into=values)
            values.add_(other, alpha=factor)
            return
        rows = (cut_like(flat, self.parameters) for flat in (values, other))
        for parameter, value, change in zip(self.parameters, *rows, strict=True):
            torch.add(parameter, change, alpha=factor, out=value)

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Add to the parameters."""
        torch._foreach_add_(self.parameters, cut_like(flat, self.parameters))

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy into the parameters."""
        torch._foreach_copy_(self.parameters, cut_like(flat, self.parameters))


class Group:
    """The parameters that one optimizer steps, or a fragment of them, exchanged together.

    Args:
        parameters: by name.
        dtype: of the values to mix, for parameters of a dtype.
        codec: by which a parameter travels.

    Attributes:
        flats: by dtype, device and codec.
        place: which fragment of how many.
        others: further vectors that are mixed with them, by a name.
        steps: of the optimizer.
        turns: steps or epochs, whichever the interval counts.
        trains: was there a turn since the group was made?
        mixings: how many were applied.
        arrived: a correction is there, and waits for the step at which it is applied.
        seed: differs between groups.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        dtype: Callable[[torch.dtype], torch.dtype],
        codec: Callable[[str, Parameter], Codec],
    ) -> None:
        self.parameters = dict(parameters)
        self.place = (0, 1)
        kinds = by_kind(parameters.items(), lambda named: (*kind_of(named[1]), codec(*named)))
        flats = [Flat(dict(those), dtype(those[0][1].dtype), codec(*those[0])) for those in kinds]
        self.flats = [flat for flat in flats if flat.numel]
        self.others: dict[str, Vector] = {}
        self.steps = self.turns = self.mixings = 0
        self.trains = False
        self.under_way: Waitable | None = None
        self.arrived = False
        self.seed = zlib.crc32("\n".join(parameters).encode())

    @property
    def counts(self) -> dict[str, int]:
        """Steps, turns and mixings."""
        return {"steps": self.steps, "turns": self.turns, "mixings": self.mixings}

    @counts.setter
    def counts(self, counts: Mapping[str, int]) -> None:
        self.steps, self.turns, self.mixings = counts["steps"], counts["turns"], counts["mixings"]

    @property
    def vectors(self) -> list[Vector]:
        """All that is mixed."""
        return [*self.flats, *self.others.values()]

    @property
    def numel(self) -> int:
        """Values of parameters."""
        return sum(flat.numel for flat in self.flats)


# Tensors in a row


def by_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by dtype and device, in order."""
    return by_kind(tensors, kind_of)


def by_kind(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> Iterable[list[Item]]:
    """Group the items by what `kind` says of them, in order."""
    kinds: dict[Hashable, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return kinds.values()


def kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Its dtype and device."""
    return tensor.dtype, tensor.device


def cut_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as tensors of these shapes, one after the other."""
    runs = flat.split([tensor.numel() for tensor in like])
    return [run.view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


def in_flats(tensors: Sequence[Tensor], change_: Callable[[Tensor], None]) -> list[Tensor]:
    """Copy the tensors into one flat tensor of each dtype and device, and call `change_` with each of these.

    Returns, for each tensor, the view of a flat one that has its shape.
    """
    views: dict[int, Tensor] = {}
    for places in by_kind(range(len(tensors)), lambda place: kind_of(tensors[place])):
        alike = [tensors[place] for place in places]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        change_(flat)
        views |= zip(places, cut_like(flat, alike), strict=True)
    return [views[place] for place in range(len(tensors))]


def words_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, of any dtypes, as numbers of 32 bits: flat, float64."""
    runs = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    whole = torch.cat([*runs, runs[0].new_zeros(-sum(map(len, runs)) % 4)])
    return whole.view(torch.int32).double()


def cut_words(words: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of these dtypes and shapes whose `words_of` these are."""
    whole = words.to(torch.int32).view(torch.uint8)
    ends = list(accumulate(tensor.nbytes for tensor in like))
    runs = [whole[end - tensor.nbytes : end].clone() for end, tensor in zip(ends, like, strict=True)]
    return [run.view(tensor.dtype).view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


def row_of(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all their values, in the dtype of sums."""
    return torch.cat([tensor.detach().reshape(-1).to(sums_dtype(tensor.dtype)) for tensor in tensors])


def _like(value: Tensor, part: Tensor) -> Tensor:
    """A copy where the part lies; in its dtype, if it is a value for each of its elements."""
    alike = value.shape == part.shape and value.is_floating_point() and part.dim() > 0
    return value.to(part.device, part.dtype if alike else value.dtype, copy=True)

"""Flat vectors of parameters as they are exchanged: by dtype and codec, and by the optimizer that steps them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

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


class Flat(Vector):
    """Parameters of one dtype on one device that travel by one codec, and memory for all their values in a row."""

    def __init__(self, named: Mapping[str, Parameter], dtype: torch.dtype, codec: Codec) -> None:
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.codec = codec
        numel = sum(parameter.numel() for parameter in self.parameters)
        super().__init__(numel, dtype, self.parameters[0].device)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat`, one a parameter."""
        return dict(zip(self.names, cut_like(flat, self.parameters), strict=True))

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
        kinds = by_kind(parameters.items(), lambda named: (*_kind(named[1]), codec(*named)))
        flats = [Flat(dict(those), dtype(those[0][1].dtype), codec(*those[0])) for those in kinds]
        self.flats = [flat for flat in flats if flat.numel]
        self.others: dict[str, Vector] = {}
        self.steps = self.turns = self.mixings = 0
        self.trains = False
        self.under_way: Waitable | None = None
        self.arrived = False
        self.seed = zlib.crc32("\n".join(parameters).encode())

    @property
    def vectors(self) -> list[Vector]:
        """All that is mixed."""
        return [*self.flats, *self.others.values()]

    @property
    def numel(self) -> int:
        """Values of parameters."""
        return sum(flat.numel for flat in self.flats)


def by_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by dtype and device, in order."""
    return by_kind(tensors, _kind)


def by_kind(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> Iterable[list[Item]]:
    """Group the items by what `kind` says of them, in order."""
    kinds: dict[Hashable, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return kinds.values()


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def cut_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as tensors of these shapes, one after the other."""
    runs = flat.split([tensor.numel() for tensor in like])
    return [run.view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


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

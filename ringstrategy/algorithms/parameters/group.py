"""Flat vectors of parameters as they are mixed: by dtype, and by the optimizer that steps them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.collectives.base import sums_dtype
from ringstrategy.transport.base import Waitable

Item = TypeVar("Item")


class Vector:
    """A flat vector that is mixed as one.

    Attributes:
        values: flat; a copy of the values to mix, taken when the exchange begins.
        correction: as long, in the dtype of sums; the exchange's result, to be added.
        memory: as long, in the dtype of sums; state that an algorithm keeps between mixings.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.memory: dict[str, Tensor] = {}
        self.correction = torch.zeros(values.numel(), dtype=sums_dtype(values.dtype), device=values.device)


class Flat(Vector):
    """Parameters of one dtype on one device, and memory for all their values in a row."""

    def __init__(self, named: Mapping[str, Parameter], dtype: torch.dtype) -> None:
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        numel = sum(parameter.numel() for parameter in self.parameters)
        super().__init__(torch.empty(numel, dtype=dtype, device=self.parameters[0].device))

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat`, one a parameter."""
        return dict(zip(self.names, cut_like(flat, self.parameters), strict=True))

    @torch.no_grad()
    def gather(self, into: Tensor | None = None) -> None:
        """Copy the parameters into `values`, or into another flat tensor."""
        torch._foreach_copy_(cut_like(self.values if into is None else into, self.parameters), self.parameters)

    @torch.no_grad()
    def gather_sum(self, other: Tensor, factor: float = 1.0) -> None:
        """Write the parameters plus factor * other, a flat tensor of `values`' dtype, to `values`.

        On GPUs in two launches, however many parameters there are; on CPUs, of one dtype, in one pass over the memory.
        """
        if self.values.device.type != "cpu" or self.parameters[0].dtype != self.values.dtype:
            self.gather()
            self.values.add_(other, alpha=factor)
            return
        rows = (cut_like(flat, self.parameters) for flat in (self.values, other))
        for parameter, value, change in zip(self.parameters, *rows, strict=True):
            torch.add(parameter, change, alpha=factor, out=value)

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Add to the parameters."""
        torch._foreach_add_(self.parameters, cut_like(flat, self.parameters))


class Group:
    """The parameters that one optimizer steps, mixed together.

    Attributes:
        flats: by dtype and device.
        others: further vectors that are mixed with them, by a name.
        steps: of the optimizer.
        turns: steps or epochs, whichever the interval counts.
        mixings: how many were applied.
        arrived: a correction is there, and waits for the step at which it is applied.
        seed: differs between groups.
    """

    def __init__(self, parameters: Mapping[str, Parameter], dtype: Callable[[torch.dtype], torch.dtype]) -> None:
        self.parameters = dict(parameters)
        kinds = by_kind(parameters.items(), lambda named: named[1])
        flats = [Flat(dict(those), dtype(those[0][1].dtype)) for those in kinds]
        self.flats = [flat for flat in flats if flat.values.numel()]
        self.others: dict[str, Vector] = {}
        self.steps = self.turns = self.mixings = 0
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
        return sum(flat.values.numel() for flat in self.flats)


def by_kind(items: Iterable[Item], tensor: Callable[[Item], Tensor]) -> Iterable[list[Item]]:
    """Group the items by dtype and device of their tensors, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Item]] = {}
    for item in items:
        kinds.setdefault((tensor(item).dtype, tensor(item).device), []).append(item)
    return kinds.values()


def cut_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as tensors of these shapes, one after the other."""
    runs = flat.split([tensor.numel() for tensor in like])
    return [run.view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


def row_of(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all their values, in the dtype of sums."""
    return torch.cat([tensor.detach().reshape(-1).to(sums_dtype(tensor.dtype)) for tensor in tensors])

"""Flat vectors of parameters as they are exchanged: by dtype and codec, and by the optimizer that steps them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.parameters.outer import Shared
from ringstrategy.algorithms.parameters.rows import by_kind, cut_like, kind_of, row_of
from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.transport.base import Waitable


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

"""Values that a server steps as one, and the optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class Place(NamedTuple):
    """Where a parameter, or a part of one, lies in a fragment: `shape` and `stride` as of a tensor, from `offset`."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """The view of another flat tensor."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


class Fragment:
    """Flat values, or a copy of them, which an optimizer steps.

    Args:
        values: flat, of floating point, on the CPU.
        optimizer: makes the optimizer of these parameters, which are views of what is stepped.
        places: of the parameters; None: all values are one.
        in_place: step the values themselves, and no copy.

    Attributes:
        values: what is stepped.
        parameters: the views.
        optimizer: theirs.
    """

    def __init__(
        self,
        values: Tensor,
        optimizer: Callable[[list[Parameter]], Optimizer],
        places: Sequence[Place] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        self.values = values.detach() if in_place else values.detach().clone()
        self._places = [Place(0, tuple(values.shape), (1,))] if places is None else places
        self.parameters = [Parameter(place.of(self.values)) for place in self._places]
        self.optimizer = optimizer(self.parameters)

    @torch.no_grad()
    def step(
        self,
        gradient: Tensor,
        rate: float,
        options: Sequence[Mapping[str, Any]] | None,
        used: Collection[int] | None,
    ) -> None:
        """Step by a gradient.

        Args:
            gradient: as long as the values.
            rate: by what to multiply learning rates, for this step.
            options: what to write into the optimizer's groups, one after the other, such as the learning rate.
            used: places of the parameters that have a gradient; None: all.
        """
        for number, (place, parameter) in enumerate(zip(self._places, self.parameters, strict=True)):
            parameter.grad = place.of(gradient) if used is None or number in used else None
        groups = self.optimizer.param_groups
        for group, given in zip(groups, options or (), strict=False):
            group.update(given)
        kept = [group["lr"] for group in groups]
        for group, own in zip(groups, kept, strict=True):
            group["lr"] = own * rate
        self.optimizer.step()
        for group, own in zip(groups, kept, strict=True):
            group["lr"] = own  # not divided by the rate, which would round
        for parameter in self.parameters:
            parameter.grad = None

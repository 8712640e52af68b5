"""Many tensors as few flat ones: those of one dtype and device travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def in_flats(tensors: Sequence[Tensor], change_: Callable[[Tensor], None]) -> list[Tensor]:
    """Copy the tensors into one flat tensor of each dtype and device, and call `change_` with each of these.

    Returns, for each tensor, the view of a flat one that has its shape.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(place)
    views: dict[int, Tensor] = {}
    for places in alike.values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        change_(flat)
        parts = flat.split([tensors[place].numel() for place in places])
        views |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [views[place] for place in range(len(tensors))]

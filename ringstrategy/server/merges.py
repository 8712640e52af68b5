"""Several learners' pushes become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LEAST_AGREEMENT = 0.1

Merge = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


def mean(pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean, in their order: new memory, float32 or as they are.

    Args:
        pushes: of one shape.
        weights: at least 0, and not all 0.
    """
    total = sum(weights)
    merged = torch.zeros_like(pushes[0])
    for push, weight in zip(pushes, weights, strict=True):
        merged.add_(push, alpha=weight / total)
    return merged


def total_(pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum, in their order, whatever the weights are: in the memory of the first, so each only once."""
    del weights
    for push in pushes[1:]:
        pushes[0].add_(push)
    return pushes[0]


def radial_directional(pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of their lengths along the mean of their directions (Decoupled DiLoCo, arXiv 2604.21428).

    A mean of independent directions is shorter than each of them, by the root of their number; this one is not. Where
    directions cancel out, what is left of them is noise: if their mean has a length m below 0.1, the result is as long
    as m / 0.1 of the mean length. A push of zeros has no direction.

    Args:
        pushes: of one shape.
        weights: at least 0, and not all 0.
    """
    lengths = [float(torch.linalg.vector_norm(push, dtype=torch.float64)) for push in pushes]
    directions = [push / length if length else push for push, length in zip(pushes, lengths, strict=True)]
    direction = mean(directions, weights)
    agreement = float(torch.linalg.vector_norm(direction, dtype=torch.float64))
    length = sum(length * weight for length, weight in zip(lengths, weights, strict=True)) / sum(weights)
    return direction.mul_(length / max(agreement, _LEAST_AGREEMENT))

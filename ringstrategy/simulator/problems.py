"""Training problems with a known optimum, spread over many ranks, for the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ringstrategy.codecs.base import derive_seed

_L2 = 0.01


class Problem(Protocol):
    """The mean of `size` ranks' losses, in `dim` parameters."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def dim(self) -> int:
        """Parameters."""

    def gradient(self, values: Tensor, step: int) -> Tensor:
        """(size, dim): of each rank's own loss at its own row of `values`, with the noise of this step."""

    def loss(self, x: Tensor) -> float:
        """Of all ranks together at x (dim,), minus the least there is."""


@dataclass(frozen=True)
class Quadratic:
    """Rank i's loss is sum_k a[i, k] (x[k] - b[i, k])**2 / 2.

    Args:
        size: ranks.
        dim: parameters.
        unequal: 0: a and b are the same on all ranks. 1: each has an optimum of its own, as far from the others' as
            the start is from the mean's, and curvatures that differ by up to 90 %.
        noise: standard deviation of each gradient's noise.
    """

    size: int
    dim: int = 256
    unequal: float = 0.0
    noise: float = 0.1

    @cached_property
    def _curvatures(self) -> Tensor:
        spread = 2 * torch.rand(self.size, self.dim, generator=_generator(1)) - 1
        return torch.logspace(-1, 0, self.dim) * (1 + 0.9 * self.unequal * spread)

    @cached_property
    def _centres(self) -> Tensor:
        common = torch.randn(self.dim, generator=_generator(2))
        return common + self.unequal * torch.randn(self.size, self.dim, generator=_generator(3))

    @cached_property
    def _optimum(self) -> Tensor:
        curvatures = self._curvatures.double()
        return (curvatures * self._centres).sum(0) / curvatures.sum(0)

    def gradient(self, values: Tensor, step: int) -> Tensor:
        """See `Problem.gradient`."""
        noise = torch.randn(self.size, self.dim, generator=_generator(4, step))
        return (self._curvatures * (values - self._centres)).add_(noise, alpha=self.noise)

    def loss(self, x: Tensor) -> float:
        """See `Problem.loss`."""
        return float((self._curvatures.double().mean(0) * (x - self._optimum).square()).sum() / 2)


@dataclass(frozen=True)
class Logistic:
    """Rank i's loss is the mean over its samples of log(1 + exp(-y a.x)), plus 0.01 |x|**2 / 2.

    Without that penalty there might be no optimum.

    Args:
        size: ranks.
        dim: parameters.
        unequal: 0: a rank's labels y are 1 or -1 with equal chances. 1: each rank has one label alone.
        samples: of each rank.
        batch: samples that a stochastic gradient looks at.
    """

    size: int
    dim: int = 256
    unequal: float = 0.0
    samples: int = 32
    batch: int = 8

    @cached_property
    def _signed(self) -> Tensor:
        """(size, samples, dim): y a, where a is normally distributed around y times one direction, and about 4 long."""
        usual = torch.rand(self.size, 1, generator=_generator(1)).sub_(0.5).sign_()
        chance = torch.rand(self.size, self.samples, generator=_generator(2))
        labels = torch.where(chance < (1 + self.unequal) / 2, usual, -usual).unsqueeze(2)
        apart = torch.randn(self.dim, generator=_generator(3)) / math.sqrt(self.dim)
        features = torch.randn(self.size, self.samples, self.dim, generator=_generator(4))
        features = (features + labels * apart) * (4 / math.sqrt(self.dim))
        features[..., 0] = 1.0  # its parameter is what labels have in common
        return features * labels

    def gradient(self, values: Tensor, step: int) -> Tensor:
        """See `Problem.gradient`."""
        chosen = torch.randperm(self.samples, generator=_generator(5, step))[: self.batch]
        signed = self._signed[:, chosen]
        wrong = torch.sigmoid(-(signed @ values.unsqueeze(2)))
        return _L2 * values - (signed * wrong).mean(1)

    def loss(self, x: Tensor) -> float:
        """See `Problem.loss`."""
        return float(self._total(x.double()) - self._least)

    def _total(self, x: Tensor) -> Tensor:
        margins = self._signed.flatten(0, 1).double() @ x
        return torch.logaddexp(-margins, torch.zeros_like(margins)).mean() + _L2 / 2 * x.square().sum()

    @cached_property
    def _least(self) -> Tensor:
        """By Newton's method."""
        signed = self._signed.flatten(0, 1).double()
        x = torch.zeros(self.dim, dtype=torch.float64)
        for _ in range(20):
            wrong = torch.sigmoid(-(signed @ x))
            gradient = _L2 * x - signed.T @ wrong / len(signed)
            curvature = (signed * (wrong * (1 - wrong)).unsqueeze(1)).T @ signed / len(signed)
            x -= torch.linalg.solve(curvature + _L2 * torch.eye(self.dim, dtype=torch.float64), gradient)
        return self._total(x)


def _generator(*indices: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(0, *indices))

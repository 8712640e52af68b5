"""Levels that are best for normally distributed values, with the unbiased scale of EDEN (Vargaftik et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringstrategy.codecs.blocked import Blocked, check_bits, check_block, mean_magnitude
from ringstrategy.kernels.layout import GAUSSIAN_STEPS, LARGEST_STEP, SMALLEST_SCALE, Arithmetic
from ringstrategy.kernels.scratch import scratch

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format


@dataclass(frozen=True)
class Gaussian(Blocked):
    """Evenly spaced odd multiples of s, 2**bits of them, as far apart as is best for a normal distribution.

    Without a rotation real gradients are nothing like normal: meant for use inside `Rotated`. The scale makes the
    decoded block's projection on the true one right, so that under a fresh rotation a step the error averages out.

    Args:
        bits: 1 to 7. The relative error of one rounding of normal values is .60, .34, .19, .11, .06, .03, .02.
        block: values that share a scale, a multiple of 8.
    """

    bits: int = 4
    block: int = 256
    adds_exactly = True
    spacing, shift = 2, 1

    def __post_init__(self) -> None:
        check_bits(self.bits, 1, 7)
        check_block(self.block)

    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """The step; `quantize` makes it the scale."""
        step = mean_magnitude(blocks) * (GAUSSIAN_STEPS[self.bits] * math.sqrt(math.pi / 2))
        step = torch.where(step < SMALLEST_SCALE, 0.0, step)
        return (torch.where(step < LARGEST_STEP, step, torch.nan),)

    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """See `Blocked.quantize`."""
        step = headers[-1]
        inverse = torch.where(step == 0, 0.0, step.reciprocal())
        scaled, product = (scratch(name, tuple(blocks.shape)) for name in ("scaled", "product"))
        torch.mul(blocks, inverse[:, None], out=scaled)
        half = 1 << (self.bits - 1)
        torch.clamp(scaled, -half, half - 0.5, out=levels)
        levels.floor_()
        # levels stand half a step low
        along = torch.mul(levels, scaled, out=product).sum(1).mul_(2).add_(scaled.sum(1))
        scale = step * (torch.linalg.vector_norm(scaled, dim=1).square_() / along)
        scale = torch.where(step == 0, 0.0, scale).bfloat16()
        headers[-1].copy_(torch.where(step.isnan(), step, scale))

    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`."""
        return Arithmetic("gaussian", GAUSSIAN_STEPS[self.bits] * math.sqrt(math.pi / 2), too_large=LARGEST_STEP)

    def kernel_format(self) -> Format:
        """See `Blocked.kernel_format`."""
        from ringstrategy.kernels.triton.formats import gaussian

        return gaussian(self.bits, self.block)

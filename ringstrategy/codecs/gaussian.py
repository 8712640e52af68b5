"""Levels that are best for normally distributed values, with the unbiased scale of EDEN (Vargaftik et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.blocked import Blocked, check_bits, check_block, mean_magnitude
from ringstrategy.kernels.layout import GAUSSIAN_STEPS, LARGEST_STEP, Arithmetic


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

    def __post_init__(self) -> None:
        check_bits(self.bits, 1, 7)
        check_block(self.block)

    @cached_property
    @override
    def arithmetic(self) -> Arithmetic:
        factor = GAUSSIAN_STEPS[self.bits] * math.sqrt(math.pi / 2)
        bias = 1 - (1 << self.bits)
        return Arithmetic("gaussian", self.block, self.bits, factor, spacing=2, bias=bias, too_large=LARGEST_STEP)

    @override
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        how, half = self.arithmetic, 1 << (self.bits - 1)
        step = mean_magnitude(blocks) * how.factor
        tiny = step < how.smallest
        scaled = torch.where(tiny, 0.0, blocks * (1 / step))
        codes = (scaled + half).clamp(0, 2 * half - 1).to(torch.uint8)  # down to whole numbers
        along = (scaled * self.numbers(codes)).sum(1, keepdim=True)
        scale = (step * (scaled.square().sum(1, keepdim=True) / along)).bfloat16().float()
        return codes, torch.where(step < how.too_large, torch.where(tiny, 0.0, scale), torch.nan)

"""Whole numbers of 2 to 8 bits with a scale per block (QSGD, Alistarh et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.blocked import Blocked, bounding_scale, check_bits, check_block
from ringstrategy.codecs.noise import keys, noise
from ringstrategy.kernels.layout import Arithmetic


@dataclass(frozen=True)
class BlockInt(Blocked):
    """q = round(x / s) in `bits` bits; s = max|x| / (2**(bits-1) - 1) of its block, in bfloat16, rounded up.

    `bits`/8 bytes an element and 2 a block. An element is off by at most s/2 (nearest), or by less than s (stochastic).

    Args:
        bits: 2 to 8; fewer: fewer bytes, coarser.
        block: values that share a scale, a multiple of 8; smaller: closer, more bytes.
        rounding: "nearest", ties to even; or "stochastic": unbiased, as QSGD's, with a mean error
            of one rounding that is 1.4 times as large.
    """

    bits: int = 8
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    adds_exactly = True  # whole numbers below 2**7, times 8 significant bits

    def __post_init__(self) -> None:
        check_bits(self.bits, 2, 8)
        check_block(self.block)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is 'nearest' or 'stochastic', got {self.rounding!r}")

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`. Whole numbers around 0."""
        half, stochastic = 1 << (self.bits - 1), self.rounding == "stochastic"
        return Arithmetic(
            "int", self.block, self.bits, 1 / (half - 1), bias=-half, highest=half - 1, stochastic=stochastic
        )

    @override
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        how = self.arithmetic
        scale = bounding_scale(blocks, how)
        levels = blocks * (1 / scale)
        if self.rounding == "stochastic":
            levels = levels + noise(seed, place, blocks.numel()).view_as(blocks)
        levels = levels.round().clamp(-how.highest, how.highest)
        return (levels - how.bias).to(torch.uint8), scale

    @override
    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        return keys(seed, place, numel) if self.rounding == "stochastic" else None

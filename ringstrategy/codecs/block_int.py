"""Whole numbers of 2 to 8 bits with a scale per block (QSGD, Alistarh et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ringstrategy.codecs.blocked import Blocked, bounding_scale, check_bits, check_block
from ringstrategy.codecs.noise import add_noise_, keys
from ringstrategy.kernels.layout import LARGEST, Arithmetic

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format


@dataclass(frozen=True)
class BlockInt(Blocked):
    """q = round(x / s) in `bits` bits; s = max|x| / (2**(bits-1) - 1) of its block, in bfloat16, rounded up.

    `bits`/8 bytes an element and 2 a block. An element is off by at most s/2 (nearest), or by less than s (stochastic).

    Args:
        bits: 2 to 8; fewer: fewer bytes, coarser.
        block: values that share a scale, a multiple of 8; smaller: closer, more bytes.
        rounding: "nearest", ties to even; or "stochastic": unbiased, as QSGD's, with a mean error
            of one rounding that is 1.4 times as large.
        scale: "absmax": levels symmetric around 0. "minmax": 2**bits levels from the block's least to its greatest
            value, for values that lie to one side of 0; 6 bytes a block.
    """

    bits: int = 8
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale: Literal["absmax", "minmax"] = "absmax"

    def __post_init__(self) -> None:
        check_bits(self.bits, 2, 8)
        check_block(self.block)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.scale not in ("absmax", "minmax"):
            raise ValueError(f"scale is 'absmax' or 'minmax', got {self.scale!r}")

    @property
    def headers(self) -> tuple[torch.dtype, ...]:
        """The least value too, with minmax."""
        return (torch.bfloat16,) if self.scale == "absmax" else (torch.float32, torch.bfloat16)

    @property
    def shift(self) -> int:  # type: ignore[override]
        """With minmax the numbers count from 0 up."""
        return 0 if self.scale == "absmax" else 1 << (self.bits - 1)

    @property
    def adds_exactly(self) -> bool:  # type: ignore[override]
        """With absmax: whole numbers below 2**7, times 8 significant bits."""
        return self.scale == "absmax"

    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """See `Blocked.measure`."""
        least, greatest = blocks.amin(1), blocks.amax(1)
        largest = torch.maximum(greatest, -least)
        if self.scale == "absmax":
            return (bounding_scale(largest, self._highest),)
        spread = greatest - least
        scale = bounding_scale(spread, self._highest)
        return least + 0.0, torch.where(largest < LARGEST, scale, torch.nan)  # + 0.0: a least value of -0 is sent as 0

    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """See `Blocked.quantize`."""
        inverse = headers[-1].reciprocal()[:, None]
        if self.scale == "absmax":
            torch.mul(blocks, inverse, out=levels)
        else:
            torch.sub(blocks, headers[0][:, None], out=levels)
            levels.mul_(inverse)
        if self.rounding == "stochastic":
            add_noise_(levels, seed, place)
            levels.round_().clamp_(-self._highest if self.scale == "absmax" else 0, self._highest)
        else:
            levels.round_()
        if self.scale == "minmax":
            levels.sub_(1 << (self.bits - 1))

    @property
    def _highest(self) -> int:
        """The greatest whole number: of 2**bits - 1 around 0, or of 2**bits from 0 up."""
        return (1 << (self.bits - 1)) - 1 if self.scale == "absmax" else (1 << self.bits) - 1

    @property
    def level_of_zero(self) -> int:
        """The least level, with minmax."""
        return 0 if self.scale == "absmax" else -(1 << (self.bits - 1))

    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`."""
        return Arithmetic("int" if self.scale == "absmax" else "minmax", 1 / self._highest, self._highest)

    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        """See `Blocked.noise`."""
        return None if self.rounding == "nearest" else keys(seed, place, numel)

    def kernel_format(self) -> Format:
        """See `Blocked.kernel_format`."""
        from ringstrategy.kernels.triton.formats import block_int

        return block_int(self.bits, self.block, self.scale, self.rounding)

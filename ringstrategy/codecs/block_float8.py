"""8-bit floating point with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ringstrategy.codecs.blocked import Blocked, bounding_scale, check_block
from ringstrategy.kernels.layout import Arithmetic
from ringstrategy.kernels.scratch import scratch

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class BlockFloat8(Blocked):
    """code = float8(x / s), s = max|x| / the format's greatest value; 1 byte an element and 2 a block.

    Small values keep their relative precision, which whole numbers would lose: for blocks of very mixed magnitudes.

    Args:
        format: "e4m3": 4 significant bits over 18 powers of two (least 2**-9 to 448). "e5m2": 3 over 32.
        block: values that share a scale, a multiple of 8.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 256
    store_rounds = True

    def __post_init__(self) -> None:
        check_block(self.block)
        if self.format not in _DTYPES:
            raise ValueError(f"format is 'e4m3' or 'e5m2', got {self.format!r}")

    @property
    def bits(self) -> int:
        """Eight."""
        return 8

    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """See `Blocked.measure`."""
        largest = torch.maximum(blocks.amax(1), -blocks.amin(1))
        return (bounding_scale(largest, int(torch.finfo(_DTYPES[self.format]).max)),)

    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """See `Blocked.quantize`. Levels are float8 values here."""
        torch.mul(blocks, headers[-1].reciprocal()[:, None], out=levels)

    def store(self, levels: Tensor, codes: Tensor) -> None:
        """Round."""
        codes.view(_DTYPES[self.format]).copy_(levels)

    def load(self, codes: Tensor, numbers: Tensor) -> None:
        """The values of the codes, by way of float16, which torch widens fast."""
        bits = scratch("halves", tuple(codes.shape), torch.int16).copy_(codes.view(torch.int8))
        if self.format == "e5m2":
            numbers.copy_(bits.bitwise_left_shift_(8).view(torch.float16))
        else:
            # move sign, 4 exponent bits and 3 mantissa bits to their places in float16; its bias is 8 larger
            numbers.copy_(bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16))
            numbers.mul_(256.0)

    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`."""
        return Arithmetic(self.format, 1 / int(torch.finfo(_DTYPES[self.format]).max))

    def kernel_format(self) -> Format:
        """See `Blocked.kernel_format`."""
        from ringstrategy.kernels.triton.formats import block_float8

        return block_float8(self.format, self.block)

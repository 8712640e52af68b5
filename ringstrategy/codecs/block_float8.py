"""8-bit floating point with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.blocked import Blocked, bounding_scale, check_block
from ringstrategy.kernels.layout import Arithmetic

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

    def __post_init__(self) -> None:
        check_block(self.block)
        if self.format not in _DTYPES:
            raise ValueError(f"format is 'e4m3' or 'e5m2', got {self.format!r}")

    @cached_property
    @override
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self.format, self.block, 8, 1 / torch.finfo(_DTYPES[self.format]).max)

    @override
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        scale = bounding_scale(blocks, self.arithmetic)
        return (blocks * (1 / scale)).to(_DTYPES[self.format]).view(torch.uint8), scale

    def numbers(self, codes: Tensor) -> Tensor:
        """See `Blocked.numbers`. The two codes of e4m3 that are NaN, which no rank sends, count as 480 and -480."""
        numbers = codes.view(_DTYPES[self.format]).float()
        if self.format == "e4m3":
            return torch.where(numbers.isnan(), torch.where(codes < 0x80, 480.0, -480.0), numbers)
        return numbers

"""One bit an element: its sign, with the block's mean magnitude (Seide et al. 2014; Bernstein et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringstrategy.codecs.blocked import Blocked, check_block, mean_magnitude
from ringstrategy.kernels.layout import Arithmetic

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format


@dataclass(frozen=True)
class Sign(Blocked):
    """x becomes s if x >= 0, else -s, with s = mean|x| of its block: the nearest of that form; 1/8 byte an element.

    Without error feedback by default, as measured (see `TopK`).

    Args:
        block: values that share a scale, a multiple of 8.
    """

    block: int = 256
    adds_exactly = True
    spacing, shift = 2, 1

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def bits(self) -> int:
        """One."""
        return 1

    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """See `Blocked.measure`."""
        scale = mean_magnitude(blocks).bfloat16().float()
        return (scale + (scale - scale),)  # infinity becomes NaN

    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """See `Blocked.quantize`: levels are -1 and 0."""
        torch.clamp(blocks, -1.0, 0.5, out=levels)
        levels.floor_()

    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`."""
        return Arithmetic("sign", 1.0)

    def kernel_format(self) -> Format:
        """See `Blocked.kernel_format`."""
        from ringstrategy.kernels.triton.formats import sign

        return sign(self.block)

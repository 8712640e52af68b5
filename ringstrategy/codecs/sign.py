"""One bit an element: its sign, with the block's mean magnitude (Seide et al. 2014; Bernstein et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.blocked import Blocked, check_block, mean_magnitude
from ringstrategy.kernels.layout import Arithmetic


@dataclass(frozen=True)
class Sign(Blocked):
    """x becomes s if x >= 0, else -s, with s = mean|x| of its block: the nearest of that form; 1/8 byte an element.

    Without error feedback by default, as measured (see `TopK`).

    Args:
        block: values that share a scale, a multiple of 8.
    """

    block: int = 256
    adds_exactly = True

    def __post_init__(self) -> None:
        check_block(self.block)

    @cached_property
    @override
    def arithmetic(self) -> Arithmetic:
        return Arithmetic("sign", self.block, 1, 1.0, spacing=2, bias=-1)

    @override
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        scale = mean_magnitude(blocks).bfloat16().float()
        return (blocks >= 0).to(torch.uint8), torch.where(scale.isfinite(), scale, torch.nan)

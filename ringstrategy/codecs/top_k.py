"""The largest values of each block and where they stand (Aji and Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.sparse import check_k, choose, in_blocks, spread


@dataclass(frozen=True)
class TopK(Codec):
    """The k values of largest magnitude of each block, in bfloat16, with their places; the rest is lost this time.

    2 k bytes a block and 1 for each place (2 where block > 256). A sum of sparse blocks is less sparse, so each hop of
    a ring would lose again: `Direct` only. Without error feedback by default: with it a value waits until it is among
    the largest, the optimizer's momentum comes on top of that wait, and training learned far less
    (benchmarks/results/accuracy.md).

    Args:
        k: values that travel, of each block; more: closer, more bytes.
        block: values among which they are chosen.
    """

    k: int = 8
    block: int = 256
    hop_by_hop = False

    def __post_init__(self) -> None:
        check_k(self.k, self.block)

    @property
    def _place_dtype(self) -> torch.dtype:
        return torch.uint8 if self.block <= 256 else torch.int16

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return -(-numel // self.block) * self.k * (2 + self._place_dtype.itemsize)

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """Choose; a non-finite block sends k times NaN."""
        self.check_wire(wire, values)
        blocks = in_blocks(values, self.block)
        places = torch.topk(blocks.abs(), self.k, dim=1, sorted=False).indices
        kept, at = self._split(wire)
        kept.copy_(choose(blocks, places, lost))
        at.copy_(places)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Scatter; places outside a block (only a broken peer sends them) are taken modulo its length."""
        self.check_wire(wire, out)
        kept, at = self._split(wire)
        spread(kept, at.long() % self.block, self.block, out, add)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        blocks = wire.numel() // (self.k * (2 + self._place_dtype.itemsize))
        kept, at = wire.split([2 * self.k * blocks, wire.numel() - 2 * self.k * blocks])
        return kept.view(torch.bfloat16).view(blocks, self.k), at.view(self._place_dtype).view(blocks, self.k)

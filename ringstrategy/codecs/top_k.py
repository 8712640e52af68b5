"""The largest values of each block and where they stand (Aji and Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.sparse import check_k, in_blocks


@dataclass(frozen=True)
class TopK(Codec):
    """The k values of largest magnitude of each block, in bfloat16, with their places; the rest is lost this time.

    2 k bytes a block and 1 for each place (2 where block > 256). A sum of sparse blocks is less sparse, so each hop of
    a ring would lose again: `Direct` only.

    Args:
        k: values that travel, of each block; more: closer, more bytes.
        block: values among which they are chosen.
    """

    k: int = 8
    block: int = 256
    error_feedback = True
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
        chosen = blocks.gather(1, places).to(torch.bfloat16)
        broken = ~blocks.isfinite().all(1, keepdim=True) | ~chosen.isfinite().all(1, keepdim=True)
        chosen.masked_fill_(broken, torch.nan)
        kept, at = self._split(wire)
        kept.copy_(chosen)
        at.copy_(places)
        if lost is not None:
            rest = blocks.clone()
            rest.scatter_add_(1, places, -chosen.to(rest.dtype))
            rest = torch.where(broken, in_blocks(lost, self.block), rest)
            lost.copy_(rest.view(-1)[: lost.numel()])

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Scatter; places outside a block (only a broken peer sends them) are taken modulo its length."""
        self.check_wire(wire, out)
        kept, at = self._split(wire)
        blocks = out.new_zeros(len(kept), self.block)
        blocks.scatter_add_(1, at.long() % self.block, kept.to(out.dtype))
        blocks.masked_fill_(kept.isnan().any(1, keepdim=True), torch.nan)
        values = blocks.view(-1)[: out.numel()]
        out.add_(values) if add else out.copy_(values)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        blocks = wire.numel() // (self.k * (2 + self._place_dtype.itemsize))
        kept, at = wire.split([2 * self.k * blocks, wire.numel() - 2 * self.k * blocks])
        return kept.view(torch.bfloat16).view(blocks, self.k), at.view(self._place_dtype).view(blocks, self.k)

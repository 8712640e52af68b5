"""The largest values of each block and where they stand (Aji and Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec
from ringstrategy.kernels import operations
from ringstrategy.kernels.layout import SparseFormat


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
        k, block = self.k, self.block
        if type(block) is not int or not 1 <= block <= 1 << 15:
            raise ValueError(f"block is how many values k are chosen from: 1 to {1 << 15}, got {block!r}")
        if type(k) is not int or not 1 <= k <= block:
            raise ValueError(f"k is how many of a block's {block} values travel: 1 to {block}, got {k!r}")

    @property
    def _place_dtype(self) -> torch.dtype:
        return torch.uint8 if self.block <= 256 else torch.int16

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return -(-numel // self.block) * self.k * (2 + self._place_dtype.itemsize)

    @override
    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        self.check_wire(wire, values)
        operations.encode_sparse.on(values.device)(values, *self._split(wire), self._form, lost=lost)

    @override
    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check_wire(wire, out)
        operations.decode_sparse.on(out.device)(*self._split(wire), out, self._form, add=add)

    @override
    def warm_up(self, device: torch.device) -> None:
        operations.warm_up_sparse.on(device)(self._form)

    @property
    def _form(self) -> SparseFormat:
        return SparseFormat(self.k, self.block)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        blocks = wire.numel() // (self.k * (2 + self._place_dtype.itemsize))
        kept, at = wire.split([2 * self.k * blocks, wire.numel() - 2 * self.k * blocks])
        return kept.view(torch.bfloat16).view(blocks, self.k), at.view(self._place_dtype).view(blocks, self.k)

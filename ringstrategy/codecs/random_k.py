"""Some values of each block, the same ones on all ranks, others at each step (Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.sparse import check_k
from ringstrategy.kernels.engine import engine
from ringstrategy.kernels.layout import SparseFormat

_HEADER = 16
_SPREAD = 0x9E3779B1  # how far apart the numbers are from which neighbouring blocks draw


@dataclass(frozen=True)
class RandomK(Codec):
    """Every (block / k)-th value of each block, from a random start, in bfloat16; the rest is lost this time.

    2 k bytes a block: the places are not on the wire, only what they are made of. All ranks choose the same places, so
    their sum is as sparse as each of them. Without error feedback by default, as measured (see `TopK`).

    Args:
        k: values that travel, of each block; divides it.
        block: values among which they are chosen.
    """

    k: int = 8
    block: int = 256
    hop_by_hop = False
    shares_seed = True

    def __post_init__(self) -> None:
        check_k(self.k, self.block)
        if self.block % self.k:
            raise ValueError(f"RandomK takes every (block / k)-th value, so k must divide block; got {self}")

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return _HEADER + -(-numel // self.block) * self.k * 2

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """Choose by (seed, offset); see `Engine.encode_sparse`."""
        self.check_wire(wire, values)
        header, kept = self._split(wire)
        header[0].fill_(derive_seed(seed, 1) & 0x7FFFFFFF)  # by launches: a copy would wait for the device
        header[1].fill_(offset // self.block)
        engine(values.device).encode_sparse(values, kept, self._starts(header, len(kept)), self._form, lost=lost)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Engine.decode_sparse`."""
        self.check_wire(wire, out)
        header, kept = self._split(wire)
        engine(out.device).decode_sparse(kept, self._starts(header, len(kept)), out, self._form, add=add)

    def warm_up(self, device: torch.device) -> None:
        """See `Codec.warm_up`."""
        engine(device).warm_up_sparse(self._form)

    @property
    def _form(self) -> SparseFormat:
        return SparseFormat(self.k, self.block, strided=True)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        return wire[:_HEADER].view(torch.int64), wire[_HEADER:].view(torch.bfloat16).view(-1, self.k)

    def _starts(self, header: Tensor, blocks: int) -> Tensor:
        """The first place in each block, int64 (blocks, 1), in [0, block / k); made where the header lies."""
        # few operations: on a GPU each is a launch
        scaled = torch.arange(0, blocks * _SPREAD, _SPREAD, device=header.device).add_(header[1], alpha=_SPREAD)
        mixed = scaled.bitwise_xor_(header[0]).mul_(0x85EBCA77).bitwise_right_shift_(16).bitwise_and_(0xFFFFFF)
        return mixed.remainder_(self.block // self.k)[:, None]

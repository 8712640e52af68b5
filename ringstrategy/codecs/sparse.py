"""What TopK and RandomK share."""

from __future__ import annotations

import torch
from torch import Tensor


def in_blocks(values: Tensor, block: int) -> Tensor:
    """View the flat `values` as rows of `block`, or copy them into such, the last filled up with zeros."""
    if values.numel() % block == 0:
        return values.view(-1, block)
    padded = values.new_zeros(-(-values.numel() // block), block)
    padded.view(-1)[: values.numel()] = values
    return padded


def choose(blocks: Tensor, places: Tensor, lost: Tensor | None) -> Tensor:
    """The values of `blocks` at `places` (blocks, k), in bfloat16, and what is left over in the flat `lost`.

    A non-finite block gives k times NaN and leaves its part of `lost` as it was.
    """
    chosen = blocks.gather(1, places).to(torch.bfloat16)
    broken = ~blocks.isfinite().all(1, keepdim=True) | ~chosen.isfinite().all(1, keepdim=True)
    chosen.masked_fill_(broken, torch.nan)
    if lost is not None:
        rest = blocks.clone()
        rest.scatter_add_(1, places, -chosen.to(rest.dtype))
        rest = torch.where(broken, in_blocks(lost, blocks.shape[1]), rest)
        lost.copy_(rest.view(-1)[: lost.numel()])
    return chosen


def spread(kept: Tensor, places: Tensor, block: int, out: Tensor, add: bool) -> None:
    """Write (or add) `kept` (blocks, k) at `places` of the blocks of `out`; a block with a NaN becomes all NaN."""
    blocks = out.new_zeros(len(kept), block)
    blocks.scatter_add_(1, places, kept.to(out.dtype))
    blocks.masked_fill_(kept.isnan().any(1, keepdim=True), torch.nan)
    values = blocks.view(-1)[: out.numel()]
    out.add_(values) if add else out.copy_(values)


def check_k(k: int, block: int) -> None:
    """Raise unless k values can be chosen out of block."""
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= 1 << 15:
        raise ValueError(f"block is how many values k are chosen from: 1 to {1 << 15}, got {block!r}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= block:
        raise ValueError(f"k is how many of a block's {block} values travel: 1 to {block}, got {k!r}")

"""What TopK and RandomK share."""

from __future__ import annotations

from torch import Tensor


def in_blocks(values: Tensor, block: int) -> Tensor:
    """View the flat `values` as rows of `block`, or copy them into such, the last filled up with zeros."""
    if values.numel() % block == 0:
        return values.view(-1, block)
    padded = values.new_zeros(-(-values.numel() // block), block)
    padded.view(-1)[: values.numel()] = values
    return padded


def check_k(k: int, block: int) -> None:
    """Raise unless k values can be chosen out of block."""
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= 1 << 15:
        raise ValueError(f"block is how many values k are chosen from: 1 to {1 << 15}, got {block!r}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= block:
        raise ValueError(f"k is how many of a block's {block} values travel: 1 to {block}, got {k!r}")

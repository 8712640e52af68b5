"""What TopK and RandomK share."""

from __future__ import annotations


def check_k(k: int, block: int) -> None:
    """Raise unless k values can be chosen out of block."""
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= 1 << 15:
        raise ValueError(f"block is how many values k are chosen from: 1 to {1 << 15}, got {block!r}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= block:
        raise ValueError(f"k is how many of a block's {block} values travel: 1 to {block}, got {k!r}")

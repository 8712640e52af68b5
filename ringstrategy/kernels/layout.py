"""The wire format of block codecs (docs/wire-format.md), once for every engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# steps of the best uniform quantizers of 2**bits levels for a standard normal distribution (Max 1960)
GAUSSIAN_STEPS = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569}
LARGEST_STEP = 2.0**110  # of a Gaussian's; below it, all that is decoded is finite
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32, so that 1 / scale is finite
LARGEST = 1.984375 * 2.0**127  # below it, the largest code times a scale that was rounded up is finite
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}  # widths that fill bytes
ROTATED = 256  # values that are rotated together


class Arithmetic(NamedTuple):
    """How a codec finds a block's scale and its levels, for engines that are compiled."""

    kind: Literal["int", "minmax", "e4m3", "e5m2", "sign", "gaussian"]
    factor: float  # times the largest magnitude (of sign and gaussian the mean): the scale, before it is rounded
    highest: int = 0  # level of int and minmax
    smallest: float = SMALLEST_SCALE  # the least scale; of gaussian less is 0
    too_large: float = LARGEST  # from here on the block counts as not finite


class SparseFormat(NamedTuple):
    """Some values of each block, in bfloat16, and where they stand."""

    k: int
    block: int
    strided: bool  # every (block / k)-th value from a given place on; else the largest ones


class BlockFormat(Protocol):
    """What an engine asks of a codec with a scale a block: see `ringstrategy.codecs.blocked.Blocked`."""

    def __hash__(self) -> int:
        """Of its arguments."""

    @property
    def block(self) -> int:
        """Values that share headers, a multiple of 8."""

    @property
    def spacing(self) -> int:
        """A level's number is spacing * level + shift."""

    @property
    def shift(self) -> int:
        """See `spacing`."""

    @property
    def store_rounds(self) -> bool:
        """Does `store` keep less than `quantize` gave?"""

    @property
    def adds_exactly(self) -> bool:
        """Does it not matter whether a product is rounded before it is added?"""

    @property
    def bits(self) -> int:
        """Bits of a code, 1 to 8."""

    @property
    def headers(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a block's headers."""

    @property
    def level_of_zero(self) -> int:
        """The level that stands for 0."""

    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """The headers of a tile."""

    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """Fill the levels of a tile."""

    def store(self, levels: Tensor, codes: Tensor) -> None:
        """Levels to codes."""

    def load(self, codes: Tensor, numbers: Tensor) -> None:
        """Codes to numbers."""

    def arithmetic(self) -> Arithmetic:
        """As the compiled kernels know it."""

    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        """Of stochastic rounding; see `ringstrategy.codecs.noise.keys`."""

    def kernel_format(self) -> Any:
        """As the Triton kernels know it."""


@lru_cache(1024)
def parts(numel: int, block: int, bits: int, headers: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    """Bytes of each array of headers, then of all codes, in a message of `numel` values."""
    blocks, rest = -(-numel // block), numel % block
    return (*(blocks * dtype.itemsize for dtype in headers), (numel - rest + round_up(rest)) * bits // 8)


@lru_cache
def round_up(numel: int) -> int:
    """To whole bytes of codes of any width."""
    return -(-numel // 8) * 8

"""The format of block codecs (docs/wire-format.md) as data: the kernels of each device make their arithmetic of it."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

# steps of the best uniform quantizers of 2**bits levels for a standard normal distribution (Max 1960)
GAUSSIAN_STEPS = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569}
LARGEST_STEP = 2.0**110  # of a Gaussian's; below it, all that is decoded is finite
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32, so that 1 / scale is finite
LARGEST = 1.984375 * 2.0**127  # below it, the largest code times a scale that was rounded up is finite
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}  # widths that fill bytes
HEADER_BYTES = 2  # of a block: its scale, in bfloat16
ROTATED = 256  # values that are rotated together
Signs = tuple[int, ...]  # of these values: eight signed words; i keeps its sign if bit i % 32 of word i // 32 is 1


class Arithmetic(NamedTuple):
    """A block codec's format: its messages, and how a block becomes a scale and codes.

    A code stands for (spacing * code + bias) * scale; of e4m3 and e5m2 for the float of these bits, times the scale.
    """

    kind: Literal["int", "e4m3", "e5m2", "sign", "gaussian"]
    block: int  # values that share a scale, a multiple of 8
    bits: int  # of a code, 1 to 8
    factor: float  # times the block's largest or mean magnitude: its scale, before it is rounded
    spacing: int = 1
    bias: int = 0
    highest: int = 0  # level of int
    smallest: float = SMALLEST_SCALE  # the least scale; of gaussian less is 0
    too_large: float = LARGEST  # from here on the block counts as not finite
    stochastic: bool = False  # is noise added before rounding?

    @property
    def zero(self) -> int:
        """The code of a zero: the least whose number is not negative."""
        return -(self.bias // self.spacing)

    def nbytes(self, numel: int) -> int:
        """Of a message of `numel` values."""
        return HEADER_BYTES * -(-numel // self.block) + round_up(numel) * self.bits // 8


class Part(NamedTuple):
    """Values begin to end of a bucket, whole blocks unless they are its last ones, and their message (uint8)."""

    begin: int
    end: int
    wire: Tensor


class SparseFormat(NamedTuple):
    """The k largest values of each block, in bfloat16, and where they stand."""

    k: int
    block: int


class BlockFormat(Protocol):
    """What kernels ask of a codec with a scale a block: see `ringstrategy.codecs.blocked.Blocked`."""

    def __hash__(self) -> int:
        """Of its arguments."""

    @property
    def block(self) -> int:
        """Values that share a scale, a multiple of 8."""

    @property
    def arithmetic(self) -> Arithmetic:
        """Its format."""

    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        """Codes and scales, in torch."""

    def numbers(self, codes: Tensor) -> Tensor:
        """What codes stand for in units of the scale, in torch."""

    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        """Of stochastic rounding; see `ringstrategy.codecs.block_int.keys`."""


def round_up(numel: int) -> int:
    """To whole bytes of codes of any width."""
    return -(-numel // 8) * 8

"""What codecs with a scale a block share. Their format is in docs/wire-format.md, their arithmetic in an engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.kernels.engine import engine
from ringstrategy.kernels.layout import LARGEST, SMALLEST_SCALE, Arithmetic, parts
from ringstrategy.kernels.reference import pack, unpack
from ringstrategy.kernels.scratch import scratch

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format


class Blocked(Codec):
    """Each block of `block` values becomes its headers (the last of them a bfloat16 scale) and one code a value.

    A subclass turns a tile of blocks into float32 *levels*, whole numbers in [-2**(bits-1), 2**(bits-1)) unless it has
    a `store` and a `load` of its own. The receiver makes of each level the number spacing * level + shift, times the
    scale, plus the other header if there is one; all numbers fit in 8 bits, and of 8 bits the spacing is 1. On CUDA
    tensors the Triton kernels do all of it.
    """

    block: int
    needs_kernels = True
    spacing: int = 1
    shift: int = 0
    store_rounds: bool = False  # does `store` keep less than `quantize` gave?

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code, 1 to 8."""

    @property
    def headers(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a block's headers, the widest first and the scale last."""
        return (torch.bfloat16,)

    @abstractmethod
    def measure(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """The headers of a tile, float32 (blocks, length): for each one float32 tensor (blocks,), exact in its dtype.

        The scale is NaN for a non-finite block.
        """

    @abstractmethod
    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """Fill `levels`, float32 (blocks, length); may also mend the scale in place.

        Args:
            blocks: what was measured.
            headers: of these blocks.
            levels: to be written; may be left anything where the scale is NaN.
            seed: of this encode.
            place: of the first value in its bucket.
        """

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """This codec as the compiled kernels know it."""

    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        """What `ringstrategy.codecs.noise.keys` gives for stochastic rounding; None: to the nearest."""
        return None

    @abstractmethod
    def kernel_format(self) -> Format:
        """This codec as the Triton kernels know it."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return sum(parts(numel, self.block, self.bits, self.headers))

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """See `Codec.encode`."""
        self.check_wire(wire, values)
        engine(values.device).encode(values, (), wire, self, lost=lost, seed=seed, offset=offset)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        self.check_wire(wire, out)
        engine(out.device).decode(wire, out, self, add=add)

    def reduce(
        self,
        wires: Sequence[Tensor],
        values: Tensor,
        wire_out: Tensor,
        *,
        lost: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """See `Codec.reduce`."""
        for wire in (*wires, wire_out):
            self.check_wire(wire, values)
        engine(values.device).encode(values, wires, wire_out, self, lost=lost, seed=seed, offset=offset)

    def hop(
        self,
        arrived: Sequence[Tensor],
        values: Tensor,
        wire: Tensor,
        *,
        residual: Tensor | None = None,
        signs: Tensor | None = None,
        lost: Tensor | None = None,
        seed: int,
        own_seed: int,
        offset: int = 0,
    ) -> None:
        """See `Codec.hop`; with the `signs` of a rotation if this codec `fuses` it."""
        if not self.fuses(values):
            super().hop(
                arrived, values, wire, residual=residual, lost=lost, seed=seed, own_seed=own_seed, offset=offset
            )
            return
        for message in (*arrived, wire):
            self.check_wire(message, values)
        engine(values.device).encode(
            values, arrived, wire, self, residual=residual, signs=signs, lost=lost, seed=own_seed, offset=offset
        )

    def deliver(self, wire: Tensor, out: Tensor, *, signs: Tensor | None = None, seed: int) -> None:
        """See `Codec.deliver`; with the `signs` of a rotation if this codec `fuses` it."""
        del seed
        self.check_wire(wire, out)
        engine(out.device).decode(wire, out, self, signs=signs, add=False)

    def fuses(self, values: Tensor) -> bool:
        """Can such values be rotated, and a residual added, in the same pass as they are encoded or decoded?"""
        return engine(values.device).fuses(self, values.dtype)

    def warm_up(self, device: torch.device) -> None:
        """See `Codec.warm_up`."""
        engine(device).warm_up(self)

    def store(self, levels: Tensor, codes: Tensor) -> None:
        """Pack `levels` (blocks, length) into `codes`, uint8 (blocks, length * bits / 8)."""
        pack(levels, self.bits, codes)

    def load(self, codes: Tensor, numbers: Tensor) -> None:
        """Fill `numbers` with spacing * level + shift."""
        unpack(codes, self.bits, self.spacing, self.shift, numbers)

    @property
    def level_of_zero(self) -> int:
        """The level that stands for 0."""
        return 0


def bounding_scale(largest: Tensor, highest: int) -> Tensor:
    """largest / highest, rounded up to bfloat16, at least 2**-126; NaN where `largest` is not below LARGEST."""
    broken = None if float(largest.max()) < LARGEST else ~(largest < LARGEST)  # one look at all blocks is cheaper
    scale = (largest * (1 / highest)).clamp_(min=SMALLEST_SCALE)
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return scale if broken is None else scale.masked_fill_(broken, torch.nan)


def mean_magnitude(blocks: Tensor) -> Tensor:
    """mean|x| of each block of a tile."""
    return torch.abs(blocks, out=scratch("levels", tuple(blocks.shape))).mean(1)


def check_block(block: int) -> None:
    """Raise unless codes of any width fill whole bytes in it, and all that `Gaussian` decodes is finite."""
    if not isinstance(block, int) or isinstance(block, bool) or not 8 <= block <= 1 << 15 or block % 8:
        raise ValueError(f"block is how many values share a scale: a multiple of 8 from 8 to {1 << 15}, got {block!r}")


def check_bits(bits: int, lowest: int, highest: int) -> None:
    """Raise unless it is a whole number in [lowest, highest]."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not lowest <= bits <= highest:
        raise ValueError(f"bits is the width of a code: a whole number from {lowest} to {highest}, got {bits!r}")

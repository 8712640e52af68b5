"""What codecs with a scale a block share. Their format is in docs/wire-format.md, their arithmetic in kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec
from ringstrategy.kernels import operations
from ringstrategy.kernels.layout import Arithmetic, Signs

if TYPE_CHECKING:
    from ringstrategy.kernels.operations import Launches


class Blocked(Codec):
    """Each block of `block` values becomes a bfloat16 scale and one code a value.

    A subclass says which `Arithmetic` this is, of the kinds that kernels know, and writes it down in torch: how blocks
    are quantized, and what codes stand for. It overrides nothing else: collectives call `hop` and `deliver`, which
    kernels may do in one pass: on CUDA tensors those of Triton, on a CPU those of Numba where it works.
    """

    block: int
    needs_kernels = True

    @property
    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """This codec as kernels know it."""

    @abstractmethod
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of blocks, float32 (blocks, length).

        Args:
            blocks: of one length; they stay as they are.
            seed: of this encode.
            place: of the first value in its bucket.

        Returns:
            uint8 (blocks, length), anything where the scale is NaN; and float32 (blocks, 1), exact in bfloat16, NaN
            for a block that is not finite.
        """

    def numbers(self, codes: Tensor) -> Tensor:
        """What codes stand for in units of the scale: uint8 to float32."""
        how = self.arithmetic
        return codes.float() * how.spacing + how.bias

    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        """What `ringstrategy.codecs.block_int.keys` gives for stochastic rounding; None: to the nearest."""
        return None

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return self.arithmetic.nbytes(numel)

    @override
    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        self.check_wire(wire, values)
        operations.encode.on(values.device)(values, (), wire, self, lost=lost, seed=seed, offset=offset)

    @override
    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check_wire(wire, out)
        operations.decode.on(out.device)(wire, out, self, add=add)

    def hop(  # noqa: PLR0913
        self,
        arrived: Sequence[Tensor],
        values: Tensor,
        wire: Tensor,
        *,
        residual: Tensor | None = None,
        signs: Signs | None = None,
        lost: Tensor | None = None,
        seed: int,
        own_seed: int,
        offset: int = 0,
    ) -> None:
        """See `Codec.hop`; with the `signs` of a rotation if this codec `fuses` it."""
        if not self.fuses(values, rotated=signs is not None):
            super().hop(
                arrived, values, wire, residual=residual, lost=lost, seed=seed, own_seed=own_seed, offset=offset
            )
            return
        for message in (*arrived, wire):
            self.check_wire(message, values)
        operations.encode.on(values.device)(
            values, arrived, wire, self, residual=residual, signs=signs, lost=lost, seed=own_seed, offset=offset
        )

    def deliver(self, wire: Tensor, out: Tensor, *, signs: Signs | None = None, seed: int, add: bool = False) -> None:
        """See `Codec.deliver`; with the `signs` of a rotation if this codec `fuses` it."""
        if not self.fuses(out, rotated=signs is not None):
            super().deliver(wire, out, seed=seed, add=add)
            return
        self.check_wire(wire, out)
        operations.decode.on(out.device)(wire, out, self, signs=signs, add=add)

    def launches(self, values: Tensor, seed: int, *, signs: Signs | None = None) -> Launches | None:
        """See `Codec.launches`; with the `signs` of a rotation."""
        del seed
        fuses = self.fuses(values, rotated=signs is not None)
        return operations.launches.on(values.device)(self, signs) if fuses else None

    def fuses(self, values: Tensor, *, rotated: bool) -> bool:
        """Whether the pass that encodes or decodes such values can add a residual, and rotate if `rotated`."""
        return operations.fuses.on(values.device)(self, values, rotated=rotated)

    @override
    def warm_up(self, device: torch.device) -> None:
        operations.warm_up_blocks.on(device)(self)


def bounding_scale(blocks: Tensor, how: Arithmetic) -> Tensor:
    """max|x| of each block times the factor, rounded up to bfloat16, NaN if too large or NaN: (blocks, 1)."""
    largest = blocks.abs().amax(1, keepdim=True)
    scale = (largest * how.factor).clamp(min=how.smallest)
    up = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(largest < how.too_large, up, torch.nan)


def mean_magnitude(blocks: Tensor) -> Tensor:
    """mean|x| of each block: (blocks, 1)."""
    return blocks.abs().mean(1, keepdim=True)


def check_block(block: int) -> None:
    """Raise unless codes of any width fill whole bytes in it, and all that `Gaussian` decodes is finite."""
    if type(block) is not int or not 8 <= block <= 1 << 15 or block % 8:
        raise ValueError(f"block is how many values share a scale: a multiple of 8 from 8 to {1 << 15}, got {block!r}")


def check_bits(bits: int, lowest: int, highest: int) -> None:
    """Raise unless it is a whole number in [lowest, highest]."""
    if type(bits) is not int or not lowest <= bits <= highest:
        raise ValueError(f"bits is the width of a code: a whole number from {lowest} to {highest}, got {bits!r}")

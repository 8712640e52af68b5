"""What codecs with a scale a block share: layout, tiles, packing. The format is in docs/wire-format.md."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.scratch import scratch

if TYPE_CHECKING:
    from ringstrategy.kernels.formats import Format

TILE = 1 << 19  # values worked on at once: enough to hide the cost of a torch call, few enough for a core's cache
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32, so that 1 / scale is finite
LARGEST = 1.984375 * 2.0**127  # below it, the largest code times a scale that was rounded up is finite
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


class Blocked(Codec):
    """Each block of `block` values becomes its headers (the last of them a bfloat16 scale) and one code a value.

    A subclass turns a tile of blocks into float32 *levels*, whole numbers in [-2**(bits-1), 2**(bits-1)), and back. On
    CUDA tensors the Triton kernels do all of it.
    """

    block: int

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
        """The headers of all blocks, float32 (blocks, length): one float32 tensor (blocks,) each, exact in its dtype.

        The scale is NaN for a non-finite block.
        """

    @abstractmethod
    def quantize(self, blocks: Tensor, headers: tuple[Tensor, ...], levels: Tensor, seed: int, place: int) -> None:
        """Fill `levels`, float32 (blocks, length); may also mend the scale in place.

        Args:
            blocks: float32 (blocks, length): a tile of what was measured.
            headers: of these blocks.
            levels: to be written; may be left anything where the scale is NaN.
            seed: of this encode.
            place: of the first value in its bucket.
        """

    @abstractmethod
    def reconstruct_(self, levels: Tensor, headers: tuple[Tensor, ...]) -> None:
        """Turn `levels` into the values that the receiver decodes; headers are float32 (blocks, 1)."""

    @abstractmethod
    def kernel_format(self) -> Format:
        """This codec as the Triton kernels know it."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return sum(self._parts(numel))

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """See `Codec.encode`."""
        self.check_wire(wire, values)
        if values.device.type == "cuda":
            from ringstrategy.kernels.encode import encode

            encode(values, wire, self.kernel_format(), lost=lost, seed=seed, offset=offset)
            return
        heads, codes, tail_codes = self._split(wire, values.numel())
        whole = values.numel() // self.block
        split = whole * self.block
        if whole:
            shape = (whole, self.block)
            lost_blocks = None if lost is None else lost[:split].view(shape)
            self._encode_blocks(
                values[:split].view(shape), [head[:whole] for head in heads], codes, lost_blocks, seed, offset
            )
        rest = values.numel() - split
        if rest:
            tail, lost_tail = values[split:].view(1, rest), None if lost is None else lost[split:].view(1, rest)
            self._encode_blocks(tail, [head[whole:] for head in heads], tail_codes, lost_tail, seed, offset + split)

    def _encode_blocks(
        self, blocks: Tensor, heads: list[Tensor], codes: Tensor, lost: Tensor | None, seed: int, offset: int
    ) -> None:
        count, length = blocks.shape
        wide = blocks if blocks.dtype == torch.float32 else blocks.float()
        headers = self.measure(wide)
        broken = headers[-1].isnan()
        any_broken = bool(broken.any())
        if any_broken:  # the same bytes whatever the bits of the NaN, and whatever else the block holds
            for header in headers:
                header.masked_fill_(broken, torch.nan if header is headers[-1] else 0.0)
        step = max(1, TILE // length)
        whole = scratch("levels", (min(count, step), _round_up(length)))
        if whole.shape[1] > length:
            whole[:, length:] = self._level_of_zero
        for first, tile, codes_of_tile in zip(range(0, count, step), wide.split(step), codes.split(step), strict=True):
            last = first + len(tile)
            padded = whole[: len(tile)]
            levels = padded[:, :length]
            of_tile = tuple(header[first:last] for header in headers)
            self.quantize(tile, of_tile, levels, seed, offset + first * length)
            if any_broken:
                levels[broken[first:last]] = self._level_of_zero
            self.store(padded, codes_of_tile)
            if lost is None:
                continue
            self.reconstruct_(levels, tuple(header[:, None] for header in of_tile))
            if any_broken:
                kept = broken[first:last, None]
                lost[first:last] = torch.where(kept, lost[first:last], blocks[first:last] - levels)
            else:
                torch.sub(blocks[first:last], levels, out=lost[first:last])
        for head, header in zip(heads, headers, strict=True):
            if head.dtype == torch.bfloat16:  # exact; torch's own conversion gives NaN other bits on other processors
                head.view(torch.int16).copy_(header.view(torch.int32) >> 16)
            else:
                head.copy_(header)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        self.check_wire(wire, out)
        if out.device.type == "cuda":
            from ringstrategy.kernels.decode import decode

            decode(wire, out, self.kernel_format(), add=add)
            return
        heads, codes, tail_codes = self._split(wire, out.numel())
        whole = out.numel() // self.block
        split = whole * self.block
        if whole:
            self._decode_blocks([head[:whole] for head in heads], codes, out[:split].view(whole, self.block), add)
        if split < out.numel():
            self._decode_blocks([head[whole:] for head in heads], tail_codes, out[split:].view(1, -1), add)

    def _decode_blocks(self, heads: list[Tensor], codes: Tensor, out: Tensor, add: bool) -> None:
        length = out.shape[1]
        step = max(1, TILE // length)
        headers = [head.float()[:, None].split(step) for head in heads]
        in_place = not add and out.dtype == torch.float32 and _round_up(length) == length
        whole = scratch("levels", (min(len(out), step), _round_up(length)))
        for tile, codes_of_tile, *of_tile in zip(out.split(step), codes.split(step), *headers, strict=True):
            if in_place:
                self.load(codes_of_tile, tile)
                self.reconstruct_(tile, tuple(of_tile))
                continue
            padded = whole[: len(tile)]
            self.load(codes_of_tile, padded)
            levels = padded[:, :length]
            self.reconstruct_(levels, tuple(of_tile))
            tile.add_(levels) if add else tile.copy_(levels)

    def relay(
        self,
        wire_in: Tensor,
        values: Tensor,
        wire_out: Tensor,
        *,
        lost: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """See `Codec.relay`."""
        if values.device.type != "cuda":
            super().relay(wire_in, values, wire_out, lost=lost, seed=seed, offset=offset)
            return
        self.check_wire(wire_in, values)
        self.check_wire(wire_out, values)
        from ringstrategy.kernels.encode import relay

        relay(wire_in, values, wire_out, self.kernel_format(), lost=lost, seed=seed, offset=offset)

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
        if values.device.type != "cuda":
            super().reduce(wires, values, wire_out, lost=lost, seed=seed, offset=offset)
            return
        for wire in (*wires, wire_out):
            self.check_wire(wire, values)
        from ringstrategy.kernels.encode import reduce

        reduce(wires, values, wire_out, self.kernel_format(), lost=lost, seed=seed, offset=offset)

    def store(self, levels: Tensor, codes: Tensor) -> None:
        """Pack `levels` (blocks, length) into `codes`, uint8 (blocks, length * bits / 8)."""
        small = codes if self.bits == 8 else scratch("small", tuple(levels.shape), torch.uint8)
        small.view(torch.int8).copy_(levels)
        small.bitwise_xor_(128) if self.bits == 8 else small.add_(1 << (self.bits - 1))
        if self.bits < 8:
            for plane, shift, width in self._planes(codes, levels.shape[1]):
                part = small if len(_PLANES[self.bits]) == 1 else (small >> shift) & ((1 << width) - 1)
                _fold(part, width, plane)

    def load(self, codes: Tensor, levels: Tensor) -> None:
        """Undo `store`."""
        if self.bits == 8:
            small = torch.bitwise_xor(codes, 128, out=scratch("small", tuple(codes.shape), torch.uint8))
            levels.copy_(small.view(torch.int8))
            return
        half = 1 << (self.bits - 1)
        planes = self._planes(codes, levels.shape[1])
        if len(planes) == 1:
            part = _unfold(codes, self.bits).sub_(half).view(torch.int8)
            levels.view(part.shape[1], part.shape[0], -1).copy_(part.transpose(0, 1))
            return
        small = scratch("small", tuple(levels.shape), torch.uint8).zero_()
        for plane, shift, width in planes:
            part = _unfold(plane, width).transpose(0, 1)
            small.view(part.shape).add_(part, alpha=1 << shift)
        levels.copy_(small.sub_(half).view(torch.int8))

    def _planes(self, codes: Tensor, length: int) -> list[tuple[Tensor, int, int]]:
        """Each plane's columns of `codes`, its lowest bit and its width."""
        widths = _PLANES[self.bits]
        shifts = [0, *accumulate(widths)]
        return [
            (codes[:, shift * length // 8 : (shift + width) * length // 8], shift, width)
            for shift, width in zip(shifts, widths, strict=False)
        ]

    @property
    def _level_of_zero(self) -> int:
        return 0

    def _parts(self, numel: int) -> list[int]:
        """Bytes of each array of headers, then of the whole blocks' codes, then of the short block's."""
        blocks, rest = -(-numel // self.block), numel % self.block
        return [blocks * dtype.itemsize for dtype in self.headers] + [
            numel // self.block * self.block * self.bits // 8,
            _round_up(rest) * self.bits // 8,
        ]

    def _split(self, wire: Tensor, numel: int) -> tuple[list[Tensor], Tensor, Tensor]:
        *heads, codes, tail = wire.split(self._parts(numel))
        width = self.block * self.bits // 8
        return (
            [head.view(dtype) for head, dtype in zip(heads, self.headers, strict=True)],
            codes.view(-1, width),
            tail[None],
        )


def bounding_scale(largest: Tensor, highest: int) -> Tensor:
    """largest / highest, rounded up to bfloat16, at least 2**-126; NaN where `largest` is not below LARGEST."""
    bits = (largest * (1 / highest)).clamp(min=SMALLEST_SCALE).view(torch.int32)
    scale = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(largest < LARGEST, scale, torch.nan)


def mean_magnitude(blocks: Tensor) -> Tensor:
    """mean|x| of each block, tile by tile."""
    means = torch.empty(len(blocks), dtype=torch.float32)
    step = max(1, TILE // blocks.shape[1])
    for tile, out in zip(blocks.split(step), means.split(step), strict=True):
        torch.mean(torch.abs(tile, out=scratch("levels", tuple(tile.shape))), 1, out=out)
    return means


def check_block(block: int) -> None:
    """Raise unless codes of any width fill whole bytes in it."""
    if not isinstance(block, int) or isinstance(block, bool) or block < 8 or block % 8:
        raise ValueError(f"block is how many values share a scale: a multiple of 8, at least 8, got {block!r}")


def check_bits(bits: int, lowest: int, highest: int) -> None:
    """Raise unless it is a whole number in [lowest, highest]."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not lowest <= bits <= highest:
        raise ValueError(f"bits is the width of a code: a whole number from {lowest} to {highest}, got {bits!r}")


@lru_cache
def _round_up(numel: int) -> int:
    return -(-numel // 8) * 8


def _fold(part: Tensor, width: int, plane: Tensor) -> None:
    """Pack codes of `width` bits (blocks, length) into `plane` (blocks, length * width / 8), halving until it fits."""
    shift = 8
    while shift > width:
        shift //= 2
        half = part.shape[1] // 2
        out = plane if shift == width else None
        part = torch.add(part[:, :half], part[:, half:], alpha=1 << shift, out=out)


def _unfold(plane: Tensor, width: int) -> Tensor:
    """Undo `_fold`, into (8 / width, blocks, length * width / 8): the codes at each shift, blocks side by side."""
    shifts = _shifts(width)
    parts = scratch("parts", (len(shifts), *plane.shape), torch.uint8)
    return torch.bitwise_right_shift(plane, shifts, out=parts).bitwise_and_((1 << width) - 1)


@lru_cache
def _shifts(width: int) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1, 1)

"""What codecs with a scale a block share: layout, tiles, packing. The format is in docs/wire-format.md."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.scratch import scratch
from ringstrategy.kernels.layout import LARGEST, SMALLEST_SCALE

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.formats import Format

TILE = 1 << 19  # values worked on at once: enough to hide the cost of a torch call, few enough for a core's cache
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


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
    def kernel_format(self) -> Format:
        """This codec as the Triton kernels know it."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return sum(_parts(numel, self.block, self.bits, self.headers))

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """See `Codec.encode`."""
        self.check_wire(wire, values)
        if values.device.type == "cuda":
            from ringstrategy.kernels.triton.encode import encode

            encode(values, wire, self.kernel_format(), lost=lost, seed=seed, offset=offset)
            return
        self._encode(values, (), wire, lost, seed, offset)

    @torch.inference_mode()  # the many small calls then cost less
    def _encode(
        self, values: Tensor, wires: Sequence[Tensor], wire: Tensor, lost: Tensor | None, seed: int, offset: int
    ) -> None:
        """Encode `values` and then `wires`, added in that order: tile by tile, so that no sum leaves the cache."""
        heads, codes = self._split(wire, values.numel())
        summands = [self._open(summand, values.numel()) for summand in wires]
        for tile in self._tiles(values.numel()):
            blocks = tile.of(values)
            for summand in summands:
                blocks = self._add(blocks, summand, tile, scratch("sum", tile.shape, values.dtype))
            self._encode_tile(
                blocks,
                [head[tile.first : tile.last] for head in heads],
                self._codes_of(codes, tile),
                None if lost is None else tile.of(lost),
                seed,
                offset + tile.begin,
            )

    def _encode_tile(
        self, blocks: Tensor, heads: list[Tensor], codes: Tensor, lost: Tensor | None, seed: int, place: int
    ) -> None:
        wide = blocks if blocks.dtype == torch.float32 else blocks.float()
        headers = self.measure(wide)
        any_broken = math.isnan(headers[-1].max())
        if any_broken:  # the same bytes whatever the bits of the NaN, and whatever else the block holds
            broken = headers[-1].isnan()
            for header in headers:
                header.masked_fill_(broken, torch.nan if header is headers[-1] else 0.0)
        padded, levels = _levels(len(blocks), blocks.shape[1])
        if padded is not levels:
            padded[:, blocks.shape[1] :] = self._level_of_zero
        self.quantize(wide, headers, levels, seed, place)
        if any_broken:
            levels[broken] = self._level_of_zero
        self.store(padded, codes)
        for head, header in zip(heads, headers, strict=True):
            if head.dtype == torch.bfloat16:  # exact; torch's own conversion gives NaN other bits on other processors
                head.view(torch.int16).copy_(header.view(torch.int32) >> 16)
            else:
                head.copy_(header)
        if lost is None:
            return
        if self.store_rounds:
            self.load(codes, padded)
        if self.spacing != 1:
            levels.mul_(self.spacing)
        if self.shift:
            levels.add_(self.shift)
        self._scale_(levels, [header[:, None] for header in headers])
        if any_broken:
            lost.copy_(torch.where(broken[:, None], lost, blocks - levels))
        else:
            torch.sub(blocks, levels, out=lost)

    @torch.inference_mode()  # as `_encode`
    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        self.check_wire(wire, out)
        if out.device.type == "cuda":
            from ringstrategy.kernels.triton.decode import decode

            decode(wire, out, self.kernel_format(), add=add)
            return
        message = self._open(wire, out.numel())
        for tile in self._tiles(out.numel()):
            values = tile.of(out)
            if add:
                self._add(values, message, tile, values)
            elif out.dtype == torch.float32 and _round_up(tile.length) == tile.length:
                self._decode_tile(message, tile, values, values)
            else:
                padded, numbers = _levels(*tile.shape)
                self._decode_tile(message, tile, padded, numbers)
                values.copy_(numbers)

    def _decode_tile(self, message: _Message, tile: _Tile, padded: Tensor, numbers: Tensor) -> None:
        self.load(self._codes_of(message.codes, tile), padded)
        self._scale_(numbers, message.headers_of(tile))

    def _add(self, blocks: Tensor, message: _Message, tile: _Tile, out: Tensor) -> Tensor:
        """out = blocks + decoded."""
        padded, numbers = _levels(*tile.shape)
        headers = message.headers_of(tile)
        self.load(self._codes_of(message.codes, tile), padded)
        if self.adds_exactly and out.dtype == torch.float32:  # then it does not matter whether the product is rounded
            return torch.addcmul(blocks, numbers, headers[-1], out=out)
        self._scale_(numbers, headers)
        return torch.add(blocks, numbers, out=out)

    def _scale_(self, numbers: Tensor, headers: list[Tensor]) -> None:
        numbers.mul_(headers[-1])
        if len(headers) > 1:
            numbers.add_(headers[0])

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
        if values.device.type != "cuda":
            self._encode(values, wires, wire_out, lost, seed, offset)
            return
        from ringstrategy.kernels.triton.encode import reduce, relay

        if len(wires) == 1:  # needs no table of addresses
            relay(wires[0], values, wire_out, self.kernel_format(), lost=lost, seed=seed, offset=offset)
        else:
            reduce(wires, values, wire_out, self.kernel_format(), lost=lost, seed=seed, offset=offset)

    def store(self, levels: Tensor, codes: Tensor) -> None:
        """Pack `levels` (blocks, length) into `codes`, uint8 (blocks, length * bits / 8)."""
        if self.bits == 8:
            codes.view(torch.int8).copy_(levels)
            codes.bitwise_xor_(128)
            return
        small = scratch("small", tuple(levels.shape), torch.uint8)
        small.view(torch.int8).copy_(levels)
        half = 1 << (self.bits - 1)
        if len(_PLANES[self.bits]) == 1:
            _fold(small, self.bits, codes)
            codes.add_(sum(half << shift for shift in range(0, 8, self.bits)))
            return
        small.add_(half)
        for plane, shift, width in self._planes(codes, levels.shape[1]):
            _fold((small >> shift) & ((1 << width) - 1), width, plane)

    def load(self, codes: Tensor, numbers: Tensor) -> None:
        """Fill `numbers` with spacing * level + shift."""
        if self.bits == 8:
            small = codes
            if self._least:
                small = torch.bitwise_xor(codes, 128, out=scratch("small", tuple(codes.shape), torch.uint8))
                small = small.view(torch.int8)
            numbers.copy_(small)
            return
        planes = self._planes(codes, numbers.shape[1])
        if len(planes) == 1:
            small = self._number_(_unfold(codes, self.bits))
            for run, part in zip(numbers.view(small.shape[1], small.shape[0], -1).unbind(1), small, strict=True):
                run.copy_(part)
            return
        small = scratch("small", tuple(numbers.shape), torch.uint8).zero_()
        for plane, shift, width in planes:
            part = _unfold(plane, width).transpose(0, 1)
            small.view(part.shape).add_(part, alpha=1 << shift)
        numbers.copy_(self._number_(small))

    @property
    def _least(self) -> int:
        """The number of code 0."""
        return self.shift - (self.spacing << (self.bits - 1))

    def _number_(self, codes: Tensor) -> Tensor:
        """uint8 codes of less than 8 bits to their numbers, which fit in int8."""
        if self.spacing != 1:
            codes.mul_(self.spacing)
        if self._least:
            codes.add_(self._least & 0xFF)
        return codes.view(torch.int8)

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

    def _tiles(self, numel: int) -> Iterator[_Tile]:
        """Runs of blocks of one length."""
        whole, rest = divmod(numel, self.block)
        step = max(1, TILE // self.block)
        for first in range(0, whole, step):
            yield _Tile(first, min(first + step, whole), first * self.block, self.block)
        if rest:
            yield _Tile(whole, whole + 1, whole * self.block, rest)

    def _split(self, wire: Tensor, numel: int) -> tuple[list[Tensor], Tensor]:
        *heads, codes = torch.split_with_sizes(wire, _parts(numel, self.block, self.bits, self.headers))
        return [head.view(dtype) for head, dtype in zip(heads, self.headers, strict=True)], codes

    def _open(self, wire: Tensor, numel: int) -> _Message:
        heads, codes = self._split(wire, numel)
        return _Message([head.float()[:, None] for head in heads], codes)

    def _codes_of(self, codes: Tensor, tile: _Tile) -> Tensor:
        count, begin = tile.last - tile.first, tile.begin * self.bits // 8
        width = _round_up(tile.length) * self.bits // 8
        return codes[begin : begin + count * width].view(count, width)


class _Tile(NamedTuple):
    """Blocks of one length that are worked on together."""

    first: int
    last: int  # the block after them
    begin: int  # the place of their first value
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.length

    def of(self, values: Tensor) -> Tensor:
        count, length = self.shape
        return values[self.begin : self.begin + count * length].view(count, length)


class _Message(NamedTuple):
    """What arrived, its headers as float32 (blocks, 1)."""

    headers: list[Tensor]
    codes: Tensor

    def headers_of(self, tile: _Tile) -> list[Tensor]:
        return [header[tile.first : tile.last] for header in self.headers]


def _levels(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Memory for a tile, its rows of whole bytes' codes, and the part that holds values."""
    padded = scratch("levels", (count, _round_up(length)))
    return padded, padded if padded.shape[1] == length else padded[:, :length]


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


@lru_cache(1024)
def _parts(numel: int, block: int, bits: int, headers: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    """Bytes of each array of headers, then of all codes."""
    blocks, rest = -(-numel // block), numel % block
    return (*(blocks * dtype.itemsize for dtype in headers), (numel - rest + _round_up(rest)) * bits // 8)


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
    return torch.arange(0, 8, width, dtype=torch.uint8, device="cpu").view(-1, 1, 1)

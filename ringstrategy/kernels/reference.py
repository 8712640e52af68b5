"""The arithmetic of block codecs and of rotations in torch, on a CPU: tile by tile, so that no sum leaves the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ringstrategy.kernels.layout import PLANES, ROTATED, BlockFormat, parts, round_up
from ringstrategy.kernels.scratch import scratch

TILE = 1 << 19  # values worked on at once: enough to hide the cost of a torch call, few enough for a core's cache
_ROTATED_TILE = 1 << 18


@torch.inference_mode()  # the many small calls then cost less
def encode(
    values: Tensor,
    wires: Sequence[Tensor],
    wire: Tensor,
    form: BlockFormat,
    *,
    lost: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """See `Engine.encode`."""
    heads, codes = _split(wire, values.numel(), form)
    summands = [_open(summand, values.numel(), form) for summand in wires]
    for tile in _tiles(values.numel(), form.block):
        blocks = tile.of(values)
        for summand in summands:
            blocks = _add(form, blocks, summand, tile, scratch("sum", tile.shape, values.dtype))
        _encode_tile(
            form,
            blocks,
            [head[tile.first : tile.last] for head in heads],
            _codes_of(codes, tile, form.bits),
            None if lost is None else tile.of(lost),
            seed,
            offset + tile.begin,
        )


def _encode_tile(
    form: BlockFormat,
    blocks: Tensor,
    heads: list[Tensor],
    codes: Tensor,
    lost: Tensor | None,
    seed: int,
    place: int,
) -> None:
    wide = blocks if blocks.dtype == torch.float32 else blocks.float()
    headers = form.measure(wide)
    any_broken = math.isnan(headers[-1].max())
    if any_broken:  # the same bytes whatever the bits of the NaN, and whatever else the block holds
        broken = headers[-1].isnan()
        for header in headers:
            header.masked_fill_(broken, torch.nan if header is headers[-1] else 0.0)
    padded, levels = _levels(len(blocks), blocks.shape[1])
    if padded is not levels:
        padded[:, blocks.shape[1] :] = form.level_of_zero
    form.quantize(wide, headers, levels, seed, place)
    if any_broken:
        levels[broken] = form.level_of_zero
    form.store(padded, codes)
    for head, header in zip(heads, headers, strict=True):
        if head.dtype == torch.bfloat16:  # exact; torch's own conversion gives NaN other bits on other processors
            head.view(torch.int16).copy_(header.view(torch.int32) >> 16)
        else:
            head.copy_(header)
    if lost is None:
        return
    if form.store_rounds:
        form.load(codes, padded)
    if form.spacing != 1:
        levels.mul_(form.spacing)
    if form.shift:
        levels.add_(form.shift)
    _scale_(levels, [header[:, None] for header in headers])
    if any_broken:
        lost.copy_(torch.where(broken[:, None], lost, blocks - levels))
    else:
        torch.sub(blocks, levels, out=lost)


@torch.inference_mode()  # as `encode`
def decode(wire: Tensor, out: Tensor, form: BlockFormat, *, add: bool = False) -> None:
    """See `Engine.decode`."""
    message = _open(wire, out.numel(), form)
    for tile in _tiles(out.numel(), form.block):
        values = tile.of(out)
        if add:
            _add(form, values, message, tile, values)
        elif out.dtype == torch.float32 and round_up(tile.length) == tile.length:
            _decode_tile(form, message, tile, values, values)
        else:
            padded, numbers = _levels(*tile.shape)
            _decode_tile(form, message, tile, padded, numbers)
            values.copy_(numbers)


def _decode_tile(form: BlockFormat, message: _Message, tile: _Tile, padded: Tensor, numbers: Tensor) -> None:
    form.load(_codes_of(message.codes, tile, form.bits), padded)
    _scale_(numbers, message.headers_of(tile))


def _add(form: BlockFormat, blocks: Tensor, message: _Message, tile: _Tile, out: Tensor) -> Tensor:
    """out = blocks + decoded."""
    padded, numbers = _levels(*tile.shape)
    headers = message.headers_of(tile)
    form.load(_codes_of(message.codes, tile, form.bits), padded)
    if form.adds_exactly and out.dtype == torch.float32:  # then it does not matter whether the product is rounded
        return torch.addcmul(blocks, numbers, headers[-1], out=out)
    _scale_(numbers, headers)
    return torch.add(blocks, numbers, out=out)


def _scale_(numbers: Tensor, headers: list[Tensor]) -> None:
    numbers.mul_(headers[-1])
    if len(headers) > 1:
        numbers.add_(headers[0])


# Packing


def pack(levels: Tensor, bits: int, codes: Tensor) -> None:
    """Pack levels, float32 (blocks, length) in [-2**(bits-1), 2**(bits-1)), into uint8 (blocks, length * bits / 8)."""
    if bits == 8:
        codes.view(torch.int8).copy_(levels)
        codes.bitwise_xor_(128)
        return
    small = scratch("small", tuple(levels.shape), torch.uint8)
    small.view(torch.int8).copy_(levels)
    half = 1 << (bits - 1)
    if len(PLANES[bits]) == 1:
        _fold(small, bits, codes)
        codes.add_(sum(half << shift for shift in range(0, 8, bits)))
        return
    small.add_(half)
    for plane, shift, width in _planes(codes, bits, levels.shape[1]):
        _fold((small >> shift) & ((1 << width) - 1), width, plane)


def unpack(codes: Tensor, bits: int, spacing: int, shift: int, numbers: Tensor) -> None:
    """Undo `pack`: fill `numbers` with spacing * level + shift."""
    least = shift - (spacing << (bits - 1))  # the number of code 0
    if bits == 8:
        small = codes
        if least:
            small = torch.bitwise_xor(codes, 128, out=scratch("small", tuple(codes.shape), torch.uint8))
            small = small.view(torch.int8)
        numbers.copy_(small)
        return
    planes = _planes(codes, bits, numbers.shape[1])
    if len(planes) == 1:
        small = _number_(_unfold(codes, bits), spacing, least)
        for run, part in zip(numbers.view(small.shape[1], small.shape[0], -1).unbind(1), small, strict=True):
            run.copy_(part)
        return
    small = scratch("small", tuple(numbers.shape), torch.uint8).zero_()
    for plane, low, width in planes:
        part = _unfold(plane, width).transpose(0, 1)
        small.view(part.shape).add_(part, alpha=1 << low)
    numbers.copy_(_number_(small, spacing, least))


def _number_(codes: Tensor, spacing: int, least: int) -> Tensor:
    """uint8 codes of less than 8 bits to their numbers, which fit in int8."""
    if spacing != 1:
        codes.mul_(spacing)
    if least:
        codes.add_(least & 0xFF)
    return codes.view(torch.int8)


def _planes(codes: Tensor, bits: int, length: int) -> list[tuple[Tensor, int, int]]:
    """Each plane's columns of `codes`, its lowest bit and its width."""
    widths = PLANES[bits]
    shifts = [0, *accumulate(widths)]
    return [
        (codes[:, shift * length // 8 : (shift + width) * length // 8], shift, width)
        for shift, width in zip(shifts, widths, strict=False)
    ]


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


# Tiles


def _tiles(numel: int, block: int) -> Iterator[_Tile]:
    """Runs of blocks of one length."""
    whole, rest = divmod(numel, block)
    step = max(1, TILE // block)
    for first in range(0, whole, step):
        yield _Tile(first, min(first + step, whole), first * block, block)
    if rest:
        yield _Tile(whole, whole + 1, whole * block, rest)


def _split(wire: Tensor, numel: int, form: BlockFormat) -> tuple[list[Tensor], Tensor]:
    *heads, codes = torch.split_with_sizes(wire, parts(numel, form.block, form.bits, form.headers))
    return [head.view(dtype) for head, dtype in zip(heads, form.headers, strict=True)], codes


def _open(wire: Tensor, numel: int, form: BlockFormat) -> _Message:
    heads, codes = _split(wire, numel, form)
    return _Message([head.float()[:, None] for head in heads], codes)


def _codes_of(codes: Tensor, tile: _Tile, bits: int) -> Tensor:
    count, begin = tile.last - tile.first, tile.begin * bits // 8
    width = round_up(tile.length) * bits // 8
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
    padded = scratch("levels", (count, round_up(length)))
    return padded, padded if padded.shape[1] == length else padded[:, :length]


# Rotations


def rotate_(values: Tensor, signs: Tensor, *, inverse: bool = False) -> None:
    """See `Engine.rotate_`. The last numel % 256 values stay as they are."""
    flips = signs / 16
    whole = values.numel() // ROTATED * ROTATED
    for tile in values[:whole].view(-1, ROTATED).split(_ROTATED_TILE // ROTATED):
        if inverse:
            _hadamard(tile, tile)
            tile.mul_(flips)
        else:
            _hadamard(tile.mul_(flips), tile)


def _hadamard(source: Tensor, target: Tensor) -> None:
    """target = source H for rows of 256; may be the same tensor."""
    if not _products_are_float32():
        _butterflies(source, target)
        return
    matrix = _matrix(source.dtype)
    # H of 256 is the Kronecker product of H of 16 with itself
    half = torch.matmul(source.view(-1, 16, 16), matrix, out=scratch("rotated", (len(source), 16, 16), source.dtype))
    torch.matmul(matrix, half, out=target.view(-1, 16, 16))


def _products_are_float32() -> bool:
    """False if the user has allowed matrix products to round their factors to bfloat16 or TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's answer where the newer names, such as torch.backends.fp32_precision, were used
        return False


def _butterflies(source: Tensor, target: Tensor) -> None:
    """The same by additions alone."""
    target.copy_(source)
    run = 1
    while run < ROTATED:
        pairs = target.view(-1, ROTATED // (2 * run), 2, run)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first.add_(second)
        second.copy_(difference)
        run *= 2


@lru_cache
def _matrix(dtype: torch.dtype) -> Tensor:
    """Sylvester's Hadamard matrix of order 16."""
    matrix = torch.ones(1, 1, dtype=dtype, device="cpu")
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype, device="cpu")
    for _ in range(4):
        matrix = torch.kron(pair, matrix)
    return matrix

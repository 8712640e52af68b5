"""Bytes to values: unpack, scale and add one payload, or mix many, in one pass."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import LAUNCH, Format
from .tables import table
from .tiles import (
    code_pointer,
    header_pointers,
    load_codes,
    load_tiles,
    mask_runs,
    mask_tiles,
    shape_rows,
    store_tiles,
)


@triton.jit
def decode_tiles(wire, n, first, inside, span, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """What a message of `n` values says of the program's blocks, from block `first` on."""
    blocks = (n.to(tl.int64) + FORMAT.block - 1) // FORMAT.block
    there = tl.arange(0, FORMAT.rows)[:, None] < blocks - first
    scales, minima = header_pointers(wire, blocks, first, FORMAT)
    scale = (tl.load(scales, mask=there, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    minimum = tl.zeros_like(scale)
    if FORMAT.minima:
        minimum = tl.load(minima, mask=there, other=0.0)
    codes = load_codes(code_pointer(wire, blocks, first, FORMAT, ALIGN), inside, span, FORMAT)
    decoded = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        decoded = decoded + (FORMAT.dequantize(codes[t], scale, minimum, FORMAT),)
    return decoded


@triton.jit
def add_tiles(tiles, others):
    """Sum of two tuples of tiles."""
    total = ()
    for t in tl.static_range(len(tiles)):
        total = total + (tiles[t] + others[t],)
    return total


@triton.jit
def scale_tiles(tiles, factor):
    """Product of a tuple of tiles and what broadcasts to each."""
    scaled = ()
    for t in tl.static_range(len(tiles)):
        scaled = scaled + (tiles[t] * factor,)
    return scaled


@triton.jit(do_not_specialize=["n"])  # n == 1 would be a constant
def _decode_kernel(wire, values, out, n, scale, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """out = values + scale * decoded, or without `values` the product; each operation rounded.

    Reads bits/8 + headers/block (and 4 of `values`) and writes 4 bytes an element of float32.
    """
    first = tl.program_id(0).to(tl.int64) * FORMAT.rows
    if n - first * FORMAT.block >= FORMAT.rows * FORMAT.block:
        _decode_rows(wire, values, out, n, scale, first, FORMAT, ALIGN, True)
    else:
        _decode_rows(wire, values, out, n, scale, first, FORMAT, ALIGN, False)


@triton.jit
def _decode_rows(wire, values, out, n, scale, first, FORMAT: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    begin = first * FORMAT.block
    length, span = shape_rows(n - begin, FORMAT, WHOLE)
    inside = mask_runs(span, FORMAT, WHOLE)
    exists = mask_tiles(inside, length, span, FORMAT, WHOLE)
    tiles = scale_tiles(decode_tiles(wire, n, first, inside, span, FORMAT, ALIGN), scale)
    if values is not None:
        tiles = add_tiles(load_tiles(values + begin, exists, span, FORMAT), tiles)
    store_tiles(out + begin, tiles, exists, span, FORMAT)


@triton.jit(do_not_specialize=["n", "count"])
def _mix_kernel(values, wires, out, n, count, own, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """out = own * values + sum_k weight_k * decoded_k in the order of the payloads, each product and sum rounded.

    `wires` holds `count` addresses, then as many weights (bits of float32). Reads 4 + count * (bits/8 + headers/block)
    and writes 4 bytes an element of float32.
    """
    first = tl.program_id(0).to(tl.int64) * FORMAT.rows
    if n - first * FORMAT.block >= FORMAT.rows * FORMAT.block:
        _mix_rows(values, wires, out, n, count, own, first, FORMAT, ALIGN, True)
    else:
        _mix_rows(values, wires, out, n, count, own, first, FORMAT, ALIGN, False)


@triton.jit
def _mix_rows(values, wires, out, n, count, own, first, FORMAT: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    begin = first * FORMAT.block
    length, span = shape_rows(n - begin, FORMAT, WHOLE)
    inside = mask_runs(span, FORMAT, WHOLE)
    exists = mask_tiles(inside, length, span, FORMAT, WHOLE)
    tiles = scale_tiles(load_tiles(values + begin, exists, span, FORMAT), own)
    for k in range(count):
        wire = tl.multiple_of(tl.load(wires + k).to(tl.pointer_type(tl.uint8)), 16)
        weight = tl.load(wires + count + k).to(tl.int32).to(tl.float32, bitcast=True)
        tiles = add_tiles(tiles, scale_tiles(decode_tiles(wire, n, first, inside, span, FORMAT, ALIGN), weight))
    store_tiles(out + begin, tiles, exists, span, FORMAT)


def decode(wire: Tensor, out: Tensor, fmt: Format, *, add: bool = False, scale: float = 1.0) -> None:
    """Write `scale` times the values in `wire` to `out`, or with `add`, add them.

    Args:
        wire: uint8 (fmt.nbytes(n),), from a multiple of 16 bytes.
        out: float32, float16 or bfloat16 (n,); rounded once from float32.
        fmt: the codec.
        add: to what `out` holds.
        scale: rounded to float32; 1 changes no bit.
    """
    fmt.check(out, wire)
    n = out.numel()
    if n == 0:
        return
    with torch.cuda.device_of(out):
        _decode_kernel[fmt.grid(n)](wire, out if add else None, out, n, float(scale), fmt, fmt.align(n), **LAUNCH)


def mix(values: Tensor, wires: Sequence[Tensor], weights: Sequence[float], out: Tensor, fmt: Format) -> None:
    """Write `weights[0] * values + sum of weights[k + 1] * wires[k] decoded` to `out`, added in this order.

    Args:
        values: float32, float16 or bfloat16 (n,).
        wires: uint8 (fmt.nbytes(n),) each, from a multiple of 16 bytes.
        weights: one more than wires; rounded to float32.
        out: like `values`, or `values` itself; rounded once from float32.
        fmt: the codec.
    """
    fmt.check(values, *wires)
    fmt.check(out)
    assert (len(weights), out.numel()) == (len(wires) + 1, values.numel())
    n = values.numel()
    if n == 0:
        return
    bits = [struct.unpack("i", struct.pack("f", weight))[0] for weight in weights[1:]]
    with torch.cuda.device_of(values):
        sources = table([wire.data_ptr() for wire in wires] + bits, values.device)
        _mix_kernel[fmt.grid(n)](
            values, sources, out, n, len(wires), float(weights[0]), fmt, fmt.align(n), **LAUNCH
        )  # fmt: skip

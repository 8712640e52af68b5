"""Bytes to values: unpack one payload, and write or add it, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.layout import Part

from .formats import LAUNCH, Format
from .parts import launches, load_part
from .rotate import NO_SIGNS, rotate_tiles
from .tiles import (
    code_pointer,
    load_codes,
    load_tiles,
    mask_runs,
    mask_tiles,
    scale_pointers,
    shape_rows,
    store_tiles,
)


@triton.jit
def decode_tiles(wire, n, first, inside, span, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """What a message of `n` values says of the program's blocks, from block `first` on."""
    blocks = (n.to(tl.int64) + FORMAT.block - 1) // FORMAT.block
    there = tl.arange(0, FORMAT.rows)[:, None] < blocks - first
    scale = (tl.load(scale_pointers(wire, first, FORMAT), mask=there, other=0).to(tl.int32) << 16).to(
        tl.float32, bitcast=True
    )
    codes = load_codes(code_pointer(wire, blocks, first, FORMAT, ALIGN), inside, span, FORMAT)
    decoded = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        decoded = decoded + (FORMAT.dequantize(codes[t], scale, FORMAT),)
    return decoded


@triton.jit
def add_tiles(tiles, others):
    """Sum of two tuples of tiles."""
    total = ()
    for t in tl.static_range(len(tiles)):
        total = total + (tiles[t] + others[t],)
    return total


@triton.jit(do_not_specialize=["n", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def _decode_kernel(
    wire, values, out, n, s0, s1, s2, s3, s4, s5, s6, s7,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """out = values + R^-1 decoded, or only the latter without `values`; R as in `_encode_kernel`.

    `wire` is one message or those of several parts, as there. Reads bits/8 + 2/block (and 4 of `values`) and
    writes 4 bytes an element of float32.
    """
    signs = (s0, s1, s2, s3, s4, s5, s6, s7)
    first = tl.program_id(0).to(tl.int64) * FORMAT.rows
    if wire.dtype.element_ty == tl.int64:
        place, n, wire = load_part(wire)
        out += place * FORMAT.block
    begin = first * FORMAT.block
    length, span = shape_rows(n - begin, FORMAT, WHOLE)
    inside = mask_runs(n - begin, span, FORMAT, WHOLE)
    exists = mask_tiles(inside, length, span, FORMAT, WHOLE)
    tiles = decode_tiles(wire, n, first, inside, span, FORMAT, ALIGN)
    if signs[0] is not None:
        tiles = rotate_tiles(tiles, length, signs, True, FORMAT, WHOLE)
    if values is not None:
        tiles = add_tiles(load_tiles(values + begin, exists, span, FORMAT), tiles)
    store_tiles(out + begin, tiles, exists, span, FORMAT)


def decode(wire: Tensor, out: Tensor, fmt: Format, *, signs: Sequence[int] | None = None, add: bool = False) -> None:
    """Write the values in `wire`, rotated back if there are `signs`, to `out`, or with `add`, add them: one launch.

    Args:
        wire: uint8 (fmt.form.nbytes(n),), from a multiple of 16 bytes.
        out: float32, float16 or bfloat16 (n,); rounded once from float32.
        fmt: the codec; one that `rotates` if there are signs.
        signs: as those of `encode`.
        add: to what `out` holds.
    """
    fmt.check(out, wire)
    if signs is not None:
        fmt.check_rotation(out)
    n = out.numel()
    if n == 0:
        return
    with torch.cuda.device_of(out):
        _decode_kernel[fmt.grid(n)](
            wire, out if add else None, out, n, *(signs or NO_SIGNS), fmt, fmt.align(n), n % fmt.block == 0, **LAUNCH
        )


def decode_parts(parts: Sequence[Part], out: Tensor, fmt: Format, *, signs: Sequence[int] | None = None) -> None:
    """`decode` for several parts of a bucket `out`, float32 (n,), in one launch, or two: see `encode_parts`."""
    assert out.dtype == torch.float32
    for part in parts:
        fmt.check_part(out, *part)
    if signs is not None:
        fmt.check_rotation(out)
    with torch.cuda.device_of(out):
        for grid, messages, align, whole in launches(parts, fmt, out.device):
            _decode_kernel[grid](messages, None, out, 0, *(signs or NO_SIGNS), fmt, align, whole, **LAUNCH)

"""Values to bytes: scale, quantize, pack and keep what was lost in one pass, after adding any number of payloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode import decode_tiles
from .formats import LAUNCH, Format
from .tables import table
from .tiles import (
    code_pointer,
    header_pointers,
    load_tiles,
    mask_runs,
    mask_tiles,
    shape_rows,
    store_codes,
    store_tiles,
)


@triton.jit(do_not_specialize=["n", "count", "seed", "place"])  # n == 1 would be a constant
def _encode_kernel(values, payloads, wire, lost, n, count, seed, place, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """x = values + payloads decoded; wire = headers and codes of x; lost = x - decoded wire.

    `payloads` is None, one message (uint8) or the addresses of `count` messages (int64), added in this order, each sum
    rounded to the dtype of `values`. Reads 4 + payloads * (bits/8 + headers/block), writes 4 (lost) + bits/8 +
    headers/block bytes an element of float32.
    """
    first = tl.program_id(0).to(tl.int64) * FORMAT.rows
    if n - first * FORMAT.block >= FORMAT.rows * FORMAT.block:
        _encode_rows(values, payloads, wire, lost, n, count, seed, place, first, FORMAT, ALIGN, True)
    else:
        _encode_rows(values, payloads, wire, lost, n, count, seed, place, first, FORMAT, ALIGN, False)


@triton.jit
def _encode_rows(
    values, payloads, wire, lost, n, count, seed, place, first,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    begin = first * FORMAT.block
    blocks = (n.to(tl.int64) + FORMAT.block - 1) // FORMAT.block
    length, span = shape_rows(n - begin, FORMAT, WHOLE)
    inside = mask_runs(span, FORMAT, WHOLE)
    exists = mask_tiles(inside, length, span, FORMAT, WHOLE)
    tiles = load_tiles(values + begin, exists, span, FORMAT)
    if payloads is not None:
        if payloads.dtype.element_ty == tl.uint8:
            decoded = decode_tiles(payloads, n, first, inside, span, FORMAT, ALIGN)
            tiles = _add_rounded(tiles, decoded, exists, values.dtype.element_ty)
        else:
            for k in range(count):
                payload = tl.multiple_of(tl.load(payloads + k).to(tl.pointer_type(tl.uint8)), 16)
                decoded = decode_tiles(payload, n, first, inside, span, FORMAT, ALIGN)
                tiles = _add_rounded(tiles, decoded, exists, values.dtype.element_ty)

    row = tl.arange(0, FORMAT.rows)[:, None]
    codes, scale, minimum = FORMAT.quantize(tiles, exists, length, seed, place + first + row, FORMAT)
    finite = scale == scale
    sent = ()
    rest = ()
    kept = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        code = tl.where(finite & exists[t], codes[t], FORMAT.form.zero)
        sent = sent + (code,)
        rest = rest + (tiles[t] - FORMAT.dequantize(code, scale, minimum, FORMAT),)
        kept = kept + (finite & exists[t],)
    there = row < blocks - first
    scales, minima = header_pointers(wire, blocks, first, FORMAT)
    tl.store(scales, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.uint16), mask=there)
    if FORMAT.form.has_minima:
        tl.store(minima, minimum, mask=there)
    store_codes(code_pointer(wire, blocks, first, FORMAT, ALIGN), sent, inside, span, FORMAT)
    if lost is not None:
        store_tiles(lost + begin, rest, kept, span, FORMAT)


@triton.jit
def _add_rounded(tiles, decoded, exists, DTYPE: tl.constexpr):
    # what does not exist stays zero, whatever arrived in its place
    total = ()
    for t in tl.static_range(len(tiles)):
        total = total + (tl.where(exists[t], (tiles[t] + decoded[t]).to(DTYPE).to(tl.float32), 0.0),)
    return total


def encode(
    values: Tensor, wire: Tensor, fmt: Format, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
) -> None:
    """Write `values` to `wire`, and `values - decoded` to `lost`, except where a block is not finite.

    Args:
        values: float32, float16 or bfloat16 (n,).
        wire: uint8 (fmt.form.nbytes(n),), from a multiple of 16 bytes.
        fmt: the codec.
        lost: like `values`, or `values` itself.
        seed: of stochastic rounding.
        offset: place of the first value in its bucket, whole blocks from the start; stochastic rounding depends on it.
    """
    _launch(values, None, 0, wire, fmt, lost, seed, offset)


def relay(
    wire_in: Tensor,
    values: Tensor,
    wire_out: Tensor,
    fmt: Format,
    *,
    lost: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """One hop of a ring: encode `values + decoded wire_in` into `wire_out`; `values` stay as they are. See `encode`.

    The bytes are those of `decode(wire_in, values, add=True)` and then `encode`. `wire_out` may be `wire_in`.
    """
    fmt.check(values, wire_in)
    _launch(values, wire_in, 1, wire_out, fmt, lost, seed, offset)


def reduce(
    wires: Sequence[Tensor],
    values: Tensor,
    wire_out: Tensor,
    fmt: Format,
    *,
    lost: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """The owner's hop of `Direct`: encode the sum of `values` and then `wires`, in that order. See `relay`."""
    fmt.check(values, *wires)
    with torch.cuda.device_of(values):
        sources = table([wire.data_ptr() for wire in wires], values.device) if wires else None
    _launch(values, sources, len(wires), wire_out, fmt, lost, seed, offset)


def _launch(
    values: Tensor,
    payloads: Tensor | None,
    count: int,
    wire: Tensor,
    fmt: Format,
    lost: Tensor | None,
    seed: int,
    offset: int,
) -> None:
    fmt.check(values, wire)
    assert offset % fmt.block == 0, f"offset {offset} is not at the edge of a block of {fmt.block}"
    if lost is not None:
        fmt.check(lost)
        assert (lost.numel(), lost.dtype) == (values.numel(), values.dtype)
    n = values.numel()
    if n == 0:
        return
    with torch.cuda.device_of(values):
        _encode_kernel[fmt.grid(n)](
            values, payloads, wire, lost, n, count, seed, offset // fmt.block, fmt, fmt.align(n), **LAUNCH
        )

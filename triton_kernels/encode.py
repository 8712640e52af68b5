"""Values to bytes in one pass: residual, rotation, payloads added, scale, codes, and what was lost, rotated back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.layout import Part

from .buckets import Source, gather_tiles
from .decode import add_tiles, decode_tiles
from .formats import LAUNCH, Format
from .parts import launches, load_part
from .rotate import NO_SIGNS, rotate_tiles
from .tables import table
from .tiles import (
    code_pointer,
    load_tiles,
    mask_runs,
    mask_tiles,
    scale_pointers,
    shape_rows,
    store_codes,
    store_tiles,
)


@triton.jit(
    do_not_specialize=["n", "count", "seed", "place", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "tensors"]
)
def _encode_kernel(
    values, residual, payloads, wire, lost, n, count, seed, place, s0, s1, s2, s3, s4, s5, s6, s7,
    edges, kinds, tensors, scale, FORMAT: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x = R (values + residual) + payloads decoded; wire = scales and codes of x; lost = R^-1 (x - decoded wire).

    R is the rotation of each 256 by the signs s0 to s7, or nothing if these are None. `payloads` is None, one message
    (uint8) or the addresses of `count` messages (int64), added in this order, each sum rounded to the dtype of
    `values`. `wire` is one message (uint8), or for each of several parts where it begins, in blocks, its values, and
    the address of its message (int64): then the other pointers are to the whole bucket, and n and place count for
    nothing. WHOLE: no message ends with a short block. `values` may also be the addresses (int64) of the `tensors` with
    these edges and kinds, which are read where they lie, times `scale`. From a block that is not finite, lost =
    residual. Reads 4 (of such tensors 2 or 4) + residual (0, 2 or 4) + payloads * (bits/8 + 2/block), writes lost
    (0, 2 or 4) + bits/8 + 2/block bytes an element of float32.
    """  # what changes from call to call is not specialized: 1 would be a constant, and compiled for
    signs = (s0, s1, s2, s3, s4, s5, s6, s7)
    source = (edges, kinds, tensors, scale)
    first = tl.program_id(0).to(tl.int64) * FORMAT.rows
    if wire.dtype.element_ty == tl.int64:
        place, n, wire = load_part(wire)
        if edges is None:
            values += place * FORMAT.block
        if residual is not None:
            residual += place * FORMAT.block
        if lost is not None:
            lost += place * FORMAT.block
    begin = first * FORMAT.block
    blocks = (n.to(tl.int64) + FORMAT.block - 1) // FORMAT.block
    length, span = shape_rows(n - begin, FORMAT, WHOLE)
    inside = mask_runs(n - begin, span, FORMAT, WHOLE)
    exists = mask_tiles(inside, length, span, FORMAT, WHOLE)
    DTYPE: tl.constexpr = values.dtype.element_ty if source[0] is None else tl.float32
    if source[0] is None:
        tiles = load_tiles(values + begin, exists, span, FORMAT)
    else:
        tiles = gather_tiles(values, source, (place + first) * FORMAT.block, exists, span, FORMAT)
    if residual is not None:
        tiles = add_tiles(tiles, load_tiles(residual + begin, exists, span, FORMAT))
    if signs[0] is not None:
        tiles = rotate_tiles(tiles, length, signs, False, FORMAT, WHOLE)
    if payloads is not None:
        if payloads.dtype.element_ty == tl.uint8:
            decoded = decode_tiles(payloads, n, first, inside, span, FORMAT, ALIGN)
            tiles = _add_rounded(tiles, decoded, exists, DTYPE)
        else:
            for k in range(count):
                payload = tl.multiple_of(tl.load(payloads + k).to(tl.pointer_type(tl.uint8)), 16)
                decoded = decode_tiles(payload, n, first, inside, span, FORMAT, ALIGN)
                tiles = _add_rounded(tiles, decoded, exists, DTYPE)

    row = tl.arange(0, FORMAT.rows)[:, None]
    codes, scale = FORMAT.quantize(tiles, length, seed, place + first + row, FORMAT)
    finite = scale == scale
    sent = ()
    rest = ()
    found = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        code = tl.where(finite & exists[t], codes[t], FORMAT.form.zero)
        sent = sent + (code,)
        rest = rest + (tiles[t] - FORMAT.dequantize(code, scale, FORMAT),)
        found = found + (finite & exists[t],)
    there = row < blocks - first
    scales = scale_pointers(wire, first, FORMAT)
    tl.store(scales, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.uint16), mask=there)
    store_codes(code_pointer(wire, blocks, first, FORMAT, ALIGN), sent, inside, span, FORMAT)
    if lost is not None:
        if signs[0] is not None:
            rest = rotate_tiles(rest, length, signs, True, FORMAT, WHOLE)
        if residual is not None:
            broken = ()
            for t in tl.static_range(TILES):
                broken = broken + (exists[t] & ~finite,)
            store_tiles(lost + begin, load_tiles(residual + begin, broken, span, FORMAT), broken, span, FORMAT)
        store_tiles(lost + begin, rest, found, span, FORMAT)


@triton.jit
def _add_rounded(tiles, decoded, exists, DTYPE: tl.constexpr):
    # what does not exist stays zero, whatever arrived in its place
    total = ()
    for t in tl.static_range(len(tiles)):
        total = total + (tl.where(exists[t], (tiles[t] + decoded[t]).to(DTYPE).to(tl.float32), 0.0),)
    return total


def encode(
    values: Tensor,
    wires: Sequence[Tensor],
    wire: Tensor,
    fmt: Format,
    *,
    residual: Tensor | None = None,
    signs: Sequence[int] | None = None,
    lost: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Write the sum of `values` and then `wires`, in that order, to `wire`, and what that loses to `lost`: one launch.

    The bytes are those of adding the residual, rotating, decoding each of the wires with `add=True`, and encoding. From
    a block that is not finite, `lost` gets the residual; without one it stays as it was there.

    Args:
        values: float32, float16 or bfloat16 (n,); stay as they are. Float32 if there is a residual or a rotation.
        wires: messages of n values, from multiples of 16 bytes.
        wire: uint8 (fmt.form.nbytes(n),), from a multiple of 16 bytes; none of `wires`.
        fmt: the codec; one that `rotates` if there are signs.
        residual: float32, float16 or bfloat16 (n,), added to the values first.
        signs: of a rotation of both; see `rotate_`. With them n is a multiple of the block, or less than 256 above one.
        lost: float32, float16 or bfloat16 (n,), rotated back and rounded once; may be the values or the residual.
        seed: of stochastic rounding.
        offset: place of the first value in its bucket, whole blocks from the start; stochastic rounding depends on it.
    """
    fmt.check(values, *wires, wire)
    assert offset % fmt.block == 0, f"offset {offset} is not at the edge of a block of {fmt.block}"
    n = values.numel()
    if residual is not None:
        fmt.check(residual)
        assert (residual.numel(), values.dtype) == (n, torch.float32)
    if signs is not None:
        fmt.check_rotation(values)
    if lost is not None:
        fmt.check(lost)
        assert lost.numel() == n
    if n == 0:
        return
    with torch.cuda.device_of(values):
        payloads = None
        if len(wires) == 1:  # needs no table
            payloads = wires[0]
        elif wires:
            payloads = table([arrived.data_ptr() for arrived in wires], values.device)
        _encode_kernel[fmt.grid(n)](
            values, residual, payloads, wire, lost, n, len(wires), seed, offset // fmt.block,
            *(signs or NO_SIGNS), None, None, 0, None, fmt, fmt.align(n), n % fmt.block == 0, **LAUNCH,
        )  # fmt: skip


def encode_parts(
    values: Tensor,
    parts: Sequence[Part],
    wires: Sequence[Tensor],
    fmt: Format,
    *,
    source: Source | None = None,
    residual: Tensor | None = None,
    signs: Sequence[int] | None = None,
    lost: Tensor | None = None,
    seed: int = 0,
) -> None:
    """`encode` for several parts of a bucket in one launch; in two if codes do not begin at equal multiples of bytes.

    Args:
        values: float32 (n,), the whole bucket. With a `source` they are neither read nor written.
        parts: from multiples of the block.
        wires: messages of the only part, if there is one. Those are added in their order.
        fmt: the codec.
        source: what the values are instead.
        residual: float32, float16 or bfloat16 (n,).
        signs: see `encode`; a short block is at the end of the bucket.
        lost: float32, float16 or bfloat16 (n,), rotated back and rounded once; may be the residual.
        seed: of stochastic rounding.
    """
    assert values.dtype == torch.float32
    assert len(parts) == 1 or not wires
    assert source is None or source.places.numel == values.numel()
    for part in parts:
        fmt.check_part(values, *part, *wires)
    for whole in (residual, lost):
        if whole is not None:
            fmt.check(whole)
            assert whole.numel() == values.numel()
    if signs is not None:
        fmt.check_rotation(values)
    with torch.cuda.device_of(values):
        payloads = table([arrived.data_ptr() for arrived in wires], values.device) if wires else None
        flat, edges, kinds, tensors, scale = values, None, None, 0, None
        if source is not None:
            flat, edges, kinds = source.addresses, source.places.edges, source.places.kinds
            tensors, scale = len(source.places.numels), source.scale
        for grid, messages, align, whole in launches(parts, fmt, values.device):
            _encode_kernel[grid](
                flat, residual, payloads, messages, lost, 0, len(wires), seed, 0,
                *(signs or NO_SIGNS), edges, kinds, tensors, scale, fmt, align, whole, **LAUNCH,
            )  # fmt: skip

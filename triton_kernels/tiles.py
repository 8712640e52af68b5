"""How a message and a program's blocks are laid out, in memory and in registers (docs/wire-format.md).

A program works on `rows` blocks. Each block is cut into `tiles` runs; run t of all rows is one tensor (rows, width) in
a tuple. The codes that share a byte lie a whole number of runs apart, so they have the same place in different tensors,
and packing moves nothing between threads; the bytes of a block are runs of the same span. A block of `length` values
(only the last of a message is short) has runs of `span = length / tiles`, `length` rounded up to a multiple of 8.
`FORMAT` is a `formats.Format`. Pointers to values are to the program's first one.
"""

import triton
import triton.language as tl


@triton.jit
def shape_rows(left, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Values in each row and the span of its runs, both (rows, 1), or numbers where all blocks are WHOLE."""
    if WHOLE:
        length: tl.constexpr = FORMAT.block
        span: tl.constexpr = FORMAT.block // FORMAT.tiles
    else:
        begin = tl.arange(0, FORMAT.rows)[:, None] * FORMAT.block
        length = tl.minimum(tl.maximum(left - begin, 0), FORMAT.block).to(tl.int32)
        span = (length + 7) // 8 * (8 // FORMAT.tiles)
    return length, span


@triton.jit
def mask_runs(left, span, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Which columns (rows, width) lie in a run; if blocks are WHOLE and runs as wide as tiles, all of a row or none."""
    column = tl.arange(0, FORMAT.width)[None, :]
    if WHOLE:
        inside = tl.broadcast_to(tl.arange(0, FORMAT.rows)[:, None] * FORMAT.block < left, [FORMAT.rows, FORMAT.width])
        if FORMAT.width * FORMAT.tiles != FORMAT.block:
            inside &= column < span
    else:
        inside = tl.broadcast_to(column < span, [FORMAT.rows, FORMAT.width])
    return inside


@triton.jit
def mask_tiles(inside, length, span, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Which values of each tile exist."""
    exists = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        if WHOLE:
            exists = exists + (inside,)
        else:
            exists = exists + (inside & (t * span + tl.arange(0, FORMAT.width)[None, :] < length),)
    return exists


@triton.jit
def load_tiles(values, exists, span, FORMAT: tl.constexpr):
    """The tiles of `values` as float32; zeros where nothing exists."""
    at = tl.arange(0, FORMAT.rows)[:, None] * FORMAT.block + tl.arange(0, FORMAT.width)[None, :]
    tiles = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        tiles = tiles + (tl.load(values + (at + t * span), mask=exists[t], other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def store_tiles(values, tiles, exists, span, FORMAT: tl.constexpr):
    """Undo `load_tiles`, rounding to the dtype that `values` points to."""
    at = tl.arange(0, FORMAT.rows)[:, None] * FORMAT.block + tl.arange(0, FORMAT.width)[None, :]
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        tl.store(values + (at + t * span), tiles[t].to(values.dtype.element_ty), mask=exists[t])


@triton.jit
def scale_pointers(wire, first, FORMAT: tl.constexpr):
    """Where the scales (as uint16) from block `first` on lie in a message; (rows, 1)."""
    return wire.to(tl.pointer_type(tl.uint16)) + (first + tl.arange(0, FORMAT.rows)[:, None])


@triton.jit
def code_pointer(wire, blocks, first, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """Where the codes from block `first` on lie: at a multiple of ALIGN bytes."""
    scales = blocks * 2  # bytes
    return tl.multiple_of(wire + (scales + first * (FORMAT.block * FORMAT.bits // 8)), ALIGN)


@triton.jit
def store_codes(target, codes, inside, span, FORMAT: tl.constexpr):
    """Pack int32 `codes` into planes of 8, 4, 2 and 1 bits, the widest first, and store them: bits/8 bytes a value."""
    if FORMAT.bits & 8:
        _store_plane(target, codes, inside, span, 8, 0, FORMAT)
    if FORMAT.bits & 4:
        _store_plane(target, codes, inside, span, 4, 0, FORMAT)
    if FORMAT.bits & 2:
        _store_plane(target, codes, inside, span, 2, FORMAT.bits & 4, FORMAT)
    if FORMAT.bits & 1:
        _store_plane(target, codes, inside, span, 1, FORMAT.bits & 6, FORMAT)


@triton.jit
def _store_plane(target, codes, inside, span, PLANE: tl.constexpr, BELOW: tl.constexpr, FORMAT: tl.constexpr):
    # BELOW: the plane's lowest bit, and how many bits of each code the planes before it hold
    RUNS: tl.constexpr = FORMAT.tiles * PLANE // 8
    row = tl.arange(0, FORMAT.rows)[:, None] * (FORMAT.block * FORMAT.bits // 8)
    at = row + tl.arange(0, FORMAT.width)[None, :]
    for run in tl.static_range(RUNS):
        packed = (codes[run] >> BELOW) & ((1 << PLANE) - 1)
        for k in tl.static_range(1, 8 // PLANE):
            packed |= ((codes[run + k * RUNS] >> BELOW) & ((1 << PLANE) - 1)) << (k * PLANE)
        tl.store(target + (at + (FORMAT.tiles * BELOW // 8 + run) * span), packed.to(tl.uint8), mask=inside)


@triton.jit
def load_codes(source, inside, span, FORMAT: tl.constexpr):
    """Undo `store_codes`."""
    row = tl.arange(0, FORMAT.rows)[:, None] * (FORMAT.block * FORMAT.bits // 8)
    at = row + tl.arange(0, FORMAT.width)[None, :]
    packed = ()
    RUNS: tl.constexpr = FORMAT.tiles * FORMAT.bits // 8
    for run in tl.static_range(RUNS):
        packed = packed + (tl.load(source + (at + run * span), mask=inside, other=0).to(tl.int32),)
    codes = ()
    TILES: tl.constexpr = FORMAT.tiles
    for t in tl.static_range(TILES):
        code = tl.full([FORMAT.rows, FORMAT.width], 0, tl.int32)
        if FORMAT.bits & 8:
            code |= packed[t]
        if FORMAT.bits & 4:
            code |= _plane_bits(packed, t, 4, 0, FORMAT.tiles)
        if FORMAT.bits & 2:
            code |= _plane_bits(packed, t, 2, FORMAT.bits & 4, FORMAT.tiles)
        if FORMAT.bits & 1:
            code |= _plane_bits(packed, t, 1, FORMAT.bits & 6, FORMAT.tiles)
        codes = codes + (code,)
    return codes


@triton.jit
def _plane_bits(packed, t: tl.constexpr, PLANE: tl.constexpr, BELOW: tl.constexpr, TILES: tl.constexpr):
    RUNS: tl.constexpr = TILES * PLANE // 8
    return ((packed[TILES * BELOW // 8 + t % RUNS] >> (t // RUNS * PLANE)) & ((1 << PLANE) - 1)) << BELOW

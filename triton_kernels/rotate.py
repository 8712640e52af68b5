"""The seeded rotation of each 256 values: signs and an orthonormal Hadamard transform, in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.layout import ROTATED

from .formats import LAUNCH

NO_SIGNS = (None,) * 8  # to a kernel: do not rotate
_ROWS = 8  # rotations of a program


@triton.jit
def hadamard(x, STAGES: tl.constexpr):
    """Butterflies over the distances 1, 2, 4, ... in each row of x, as many as there are stages, in place."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, [ROWS * WIDTH // (2 << stage), 2, 1 << stage]), (0, 2, 1))
        one, other = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), [ROWS, WIDTH])
    return x


@triton.jit
def flips(signs, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """The signs / 16 of WIDTH values from place FIRST on: float32 (1, WIDTH). `signs`: eight int32."""
    at = tl.arange(0, WIDTH)[None, :]
    word = tl.zeros([1, WIDTH], tl.int32) + signs[FIRST // 32 % 8]
    WORDS: tl.constexpr = 8 if WIDTH >= 256 else WIDTH // 32
    for k in tl.static_range(1, WORDS):
        word = tl.where(at // 32 % 8 == k, signs[(FIRST // 32 + k) % 8], word)
    return tl.where(((word >> (at % 32)) & 1) != 0, 0.0625, -0.0625)


@triton.jit
def rotate_tiles(tiles, length, signs, INVERSE: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """H (x * sign / 16) for each 256 values x of the whole blocks, or inversely (H x) * sign / 16; see tiles.py.

    Distances within a tile come first, then those between tiles: in the order of the reference, so with its bits.
    """
    TILES: tl.constexpr = FORMAT.tiles
    turned = ()
    for t in tl.static_range(TILES):
        x = tiles[t] if INVERSE else tiles[t] * flips(signs, t * FORMAT.width, FORMAT.width)
        turned = turned + (hadamard(x, FORMAT.stages),)
    STAGES: tl.constexpr = 8 - FORMAT.stages
    for stage in tl.static_range(STAGES):
        mixed = ()
        for t in tl.static_range(TILES):
            if (t >> stage) & 1:
                mixed = mixed + (turned[t - (1 << stage)] - turned[t],)
            else:
                mixed = mixed + (turned[t] + turned[t + (1 << stage)],)
        turned = mixed
    done = ()
    for t in tl.static_range(TILES):
        x = turned[t] * flips(signs, t * FORMAT.width, FORMAT.width) if INVERSE else turned[t]
        if not WHOLE:
            x = tl.where(length == FORMAT.block, x, tiles[t])
        done = done + (x,)
    return done


@triton.jit(do_not_specialize=["n", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def _rotate_kernel(values, n, s0, s1, s2, s3, s4, s5, s6, s7, ROWS: tl.constexpr, INVERSE: tl.constexpr):
    """y = H (x * sign / 16) in place for each whole 256 values; reads 4, writes 4 bytes an element of float32."""
    signs = (s0, s1, s2, s3, s4, s5, s6, s7)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 256)[None, :]
    whole = row < n // 256 - first
    place = values + first * 256 + (row * 256 + column)
    x = tl.load(place, mask=whole, other=0.0).to(tl.float32)
    x = hadamard(x, 8) * flips(signs, 0, 256) if INVERSE else hadamard(x * flips(signs, 0, 256), 8)
    tl.store(place, x.to(values.dtype.element_ty), mask=whole)


def rotate_(values: Tensor, signs: Sequence[int], *, inverse: bool = False) -> None:
    """Rotate each 256 values in place, or back; the last `n % 256` stay as they are. With the bits of the reference.

    Args:
        values: float32, float16 or bfloat16 (n,); computed in float32.
        signs: see `ringstrategy.kernels.layout.Signs`; arguments of the launch, so no copy to the device.
        inverse: rotate back.
    """
    assert values.is_contiguous(), f"values must be flat, got strides {values.stride()}"
    rows = values.numel() // ROTATED
    if rows == 0:
        return
    with torch.cuda.device_of(values):
        _rotate_kernel[(-(-rows // _ROWS),)](values, values.numel(), *signs, _ROWS, inverse, **LAUNCH)

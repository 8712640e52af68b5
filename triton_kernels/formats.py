"""What a blocked codec is to the kernels: its layout, and how values become codes and codes values (wire-format.md).

Each codec is a pair of helpers. `quantize(tiles, length, seed, place, FORMAT)` gives int32 codes and the scale: NaN for
a non-finite block, whose codes may then be anything. `dequantize(code, scale, FORMAT)` gives what the receiver decodes.
`tiles` is a tuple of (rows, width), see tiles.py; `place` is that of each block among the bucket's; scales are float32
(rows, 1), exact in bfloat16.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.layout import HEADER_BYTES, ROTATED, Arithmetic

# A block lies in the registers of one program; compilers before 3.6 abort at some of 8192 values.
_RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
LARGEST_BLOCK = 8192 if _RECENT else 4096
GATHERS = _RECENT  # those compilers also fail at an encode that reads scattered tensors
# 128 threads; each operation rounds, as in torch
LAUNCH: dict[str, Any] = {"num_warps": 4 if torch.version.hip is None else 2, "enable_fp_fusion": False}
_TILE = 512  # values of a tile, 16 bytes of float32 a thread


def _bits(number: float) -> int:
    """Of a positive float32, as an integer."""
    return int(struct.unpack("i", struct.pack("f", number))[0])


_NAN = tl.constexpr(0x7FC00000)
_INFINITY = tl.constexpr(0x7F800000)
_TO_INTEGER = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding it rounds, halves to even, and the low bits hold the integer
_INTEGER_ZERO = tl.constexpr(0x4B400000)  # its bits


@dataclass(frozen=True)
class Format:
    """A codec as one constant of the kernels; see `of`.

    Args:
        form: the description that all engines share.
        quantize: a triton function; see above.
        dequantize: another.
    """

    form: Arithmetic
    quantize: Any
    dequantize: Any

    def __post_init__(self) -> None:
        if self.block % 8 or not 8 <= self.block <= LARGEST_BLOCK:
            raise ValueError(
                f"on CUDA tensors a block has 8 to {LARGEST_BLOCK} values, a multiple of 8, not {self.block}: "
                "choose such a block, or keep the tensors on the CPU"
            )

    def __hash__(self) -> int:
        """Kept, because each launch looks its kernel up by it."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.form, self.quantize, self.dequantize))

    @cached_property
    def block(self) -> int:
        """Values that share a scale."""
        return self.form.block

    @cached_property
    def bits(self) -> int:
        """Of a code."""
        return self.form.bits

    @cached_property
    def smallest_bits(self) -> int:
        """The least scale, as an integer."""
        return _bits(self.form.smallest)

    @cached_property
    def too_large_bits(self) -> int:
        """What counts as not finite, as an integer."""
        return _bits(self.form.too_large)

    @cached_property
    def tiles(self) -> int:
        """Runs of a block: as many as codes of the narrowest plane share a byte, and enough loads in flight."""
        return max(4, 8 // (self.bits & -self.bits))

    @cached_property
    def width(self) -> int:
        """Columns of a tile: a run, up to a power of two."""
        return 1 << (self.block // self.tiles - 1).bit_length()

    @cached_property
    def rows(self) -> int:
        """Blocks of a program."""
        return max(1, _TILE // self.width)

    @cached_property
    def rotates(self) -> bool:
        """Can whole blocks be rotated in tiles? Then 256 values are whole tiles, or a tile is so many times 256."""
        return self.block % ROTATED == 0 and self.block & (self.block - 1) == 0

    @cached_property
    def stages(self) -> int:
        """Of a rotation's 8 stages, those within a tile."""
        return min(self.width, ROTATED).bit_length() - 1

    @cached_property
    def cache_key(self) -> str:
        """What triton's cache of compiled kernels knows it by; without this, mended helpers would find old kernels."""
        return f"{self} {self.quantize.cache_key} {self.dequantize.cache_key}"

    def grid(self, numel: int) -> tuple[int]:
        """Programs for `numel` values."""
        return (-(-numel // (self.rows * self.block)),)

    def align(self, numel: int) -> int:
        """What the places of a program's codes in a message of `numel` values are multiples of, in bytes, up to 16."""
        headers = HEADER_BYTES * -(-numel // self.block)
        return math.gcd(headers, self.rows * self.block * self.bits // 8, 16)

    def check(self, values: Tensor, *wires: Tensor) -> None:
        """Assert what the kernels rely on."""
        assert values.is_contiguous(), f"values must be flat, got strides {values.stride()}"
        nbytes = self.form.nbytes(values.numel()) if wires else 0
        for wire in wires:
            assert wire.dtype == torch.uint8, f"a message is uint8, not {wire.dtype}"
            assert wire.is_contiguous(), f"a message must be flat, got strides {wire.stride()}"
            assert wire.numel() == nbytes, f"{wire.numel()} bytes for {values.numel()} values, not {nbytes}"
            assert wire.data_ptr() % 16 == 0, "a message starts at a multiple of 16 bytes"
            assert wire.device == values.device, f"values are on {values.device}, a wire is on {wire.device}"

    def check_part(self, whole: Tensor, begin: int, end: int, *wires: Tensor) -> None:
        """Assert it of the messages of a part."""
        assert begin % self.block == 0, f"a part begins at {begin}, not at the edge of a block of {self.block}"
        assert end % self.block == 0 or end == whole.numel(), f"a part ends at {end}, within a block of {self.block}"
        self.check(whole[begin:end], *wires)

    def check_rotation(self, values: Tensor) -> None:
        """Assert that these values can be rotated in the pass that encodes or decodes them."""
        assert self.rotates, f"a block of {self.block} values is not rotated in this pass"
        assert values.dtype == torch.float32, f"only float32 is rotated in this pass, not {values.dtype}"
        assert values.numel() % self.block < ROTATED, "a rotation would lie in a short block"


@lru_cache
def of(form: Arithmetic) -> Format:
    """A codec for the kernels. Raises a ValueError if its blocks are too large for them."""
    return Format(form, *_FUNCTIONS[form.kind])


@triton.jit
def bits_of(x):
    """Float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Int32 as float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def largest_magnitude(tiles):
    """Max |x| of each row as the bits of a float32: above those of every number if there is a NaN."""
    largest = bits_of(tiles[0]) & 0x7FFFFFFF
    for t in tl.static_range(1, len(tiles)):
        largest = tl.maximum(largest, bits_of(tiles[t]) & 0x7FFFFFFF)
    return tl.max(largest, 1)[:, None]


@triton.jit
def bounding_scale(largest, FORMAT: tl.constexpr):
    """`largest` (bits of a float32) * factor, rounded up to bfloat16, at least the smallest; NaN where too large."""
    up = (tl.maximum(bits_of(float_of(largest) * FORMAT.form.factor), FORMAT.smallest_bits) + 0xFFFF) & -0x10000
    return float_of(tl.where(largest < FORMAT.too_large_bits, up, _NAN))


@triton.jit
def nearest_scale(x):
    """Float32 rounded to the nearest bfloat16, ties to even; NaN where that is not finite."""
    bits = bits_of(x)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    finite = ((bits & 0x7FFFFFFF) < _INFINITY) & ((near & 0x7FFFFFFF) < _INFINITY)
    return float_of(tl.where(finite, near, _NAN))


@triton.jit
def sum_rows(tiles):
    """Sum of each row (ROWS, 1): run on run, then across."""
    total = tiles[0]
    for t in tl.static_range(1, len(tiles)):
        total += tiles[t]
    return tl.sum(total, 1)[:, None]


@triton.jit
def mean_magnitude(tiles, length):
    """Mean |x| of each row's `length` values."""
    magnitudes = ()
    for t in tl.static_range(len(tiles)):
        magnitudes = magnitudes + (tl.abs(tiles[t]),)
    return tl.div_rn(sum_rows(magnitudes), tl.maximum(length, 1).to(tl.float32))


@triton.jit
def rounded(tiles, seed, place, STOCHASTIC: tl.constexpr):
    """rint(v), or rint(v + r) with r uniform in [-1/2, 1/2), as int32; |v| < 2^22.

    r is a function of (seed, place of the block, run, column): Philox 4x32, one call for four runs. `place` is int64
    (ROWS, 1).
    """
    whole = ()
    for first in tl.static_range(0, len(tiles), 4):
        if STOCHASTIC:
            column = tl.arange(0, tiles[0].shape[1])[None, :] + tl.zeros(tiles[0].shape, tl.int32)
            low, high = place.to(tl.int32) + column * 0, (place >> 32).to(tl.int32) + column * 0
            noise = tl.philox(seed, column, low, high, column * 0 + first)
        for k in tl.static_range(4):
            v = tiles[first + k]
            if STOCHASTIC:
                v += (noise[k] >> 8).to(tl.float32) * 2.0**-24 - 0.5
            whole = whole + (bits_of(v + _TO_INTEGER) - _INTEGER_ZERO,)
    return whole


@triton.jit
def _number(code, FORMAT: tl.constexpr):
    """What a code stands for in units of the scale."""
    return (FORMAT.form.spacing * code + FORMAT.form.bias).to(tl.float32)


@triton.jit
def _from_number(code, scale, FORMAT: tl.constexpr):
    return _number(code, FORMAT) * scale


@triton.jit
def _to_absmax(
    tiles, length, seed, place, FORMAT: tl.constexpr
):  # u = clamp(rint(x * (1/s)), -Q, Q) + 2^(bits-1), s = bounding(max|x| / Q)
    scale = bounding_scale(largest_magnitude(tiles), FORMAT)
    levels = rounded(_scaled(tiles, tl.div_rn(1.0, scale)), seed, place, FORMAT.form.stochastic)
    codes = ()
    for t in tl.static_range(len(tiles)):
        level = levels[t]
        if FORMAT.form.stochastic:  # rounding to nearest stays within
            level = tl.minimum(tl.maximum(level, -FORMAT.form.highest), FORMAT.form.highest)
        codes = codes + (level - FORMAT.form.bias,)
    return codes, scale


@triton.jit
def _to_e4m3(tiles, length, seed, place, FORMAT: tl.constexpr):
    return _to_float8(tiles, FORMAT, 4, 3)


@triton.jit
def _to_e5m2(tiles, length, seed, place, FORMAT: tl.constexpr):
    return _to_float8(tiles, FORMAT, 5, 2)


@triton.jit
def _to_float8(tiles, FORMAT: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    # integer arithmetic, ties to even: GPUs before sm_89 have no instruction for e4m3
    scale = bounding_scale(largest_magnitude(tiles), FORMAT)
    DROPPED: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = 127 - ((1 << (EXPONENT - 1)) - 1)
    # adding this power of two leaves a subnormal's code in the low bits
    ALIGN: tl.constexpr = (REBIAS + 1 + DROPPED) << 23
    scaled = _scaled(tiles, tl.div_rn(1.0, scale))
    codes = ()
    for t in tl.static_range(len(tiles)):
        bits = bits_of(scaled[t])
        magnitude = bits & 0x7FFFFFFF
        half = (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
        normal = ((magnitude + half) >> DROPPED) - (REBIAS << MANTISSA)
        subnormal = bits_of(float_of(magnitude) + float_of(tl.full(magnitude.shape, ALIGN, tl.int32))) - ALIGN
        code = tl.where(magnitude < ((REBIAS + 1) << 23), subnormal, normal)
        codes = codes + (code | ((bits >> 24) & 0x80),)
    return codes, scale


@triton.jit
def _from_e4m3(code, scale, FORMAT: tl.constexpr):
    # move exponent and mantissa to their places in float32 (bias 120 larger); 0x7F is never sent, and counts as 480
    return float_of(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * 2.0**120 * scale


@triton.jit
def _from_e5m2(code, scale, FORMAT: tl.constexpr):
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale  # a float16's upper half


@triton.jit
def _to_sign(tiles, length, seed, place, FORMAT: tl.constexpr):  # u = x >= 0, s = mean |x|
    scale = nearest_scale(mean_magnitude(tiles, length))
    codes = ()
    for t in tl.static_range(len(tiles)):
        codes = codes + ((tiles[t] >= 0).to(tl.int32),)
    return codes, scale


@triton.jit
def _from_sign(code, scale, FORMAT: tl.constexpr):
    return tl.where(code != 0, scale, -scale)


@triton.jit
def _to_gaussian(
    tiles, length, seed, place, FORMAT: tl.constexpr
):  # u = floor(clamp(v + 2^(bits-1))), v = x / d, d = step * mean |x|, s = d * (sum v^2 / sum v l), l = 2u + 1 - 2^bits
    distance = mean_magnitude(tiles, length) * FORMAT.form.factor
    tiny = distance < FORMAT.form.smallest
    inverse = tl.div_rn(1.0, tl.where(tiny, 1.0, distance))
    v = _scaled(tiles, tl.where(tiny, 0.0, inverse))
    codes = ()
    squares = ()
    products = ()
    for t in tl.static_range(len(tiles)):
        code = tl.minimum(tl.maximum(v[t] + FORMAT.form.zero, 0.0), (1 << FORMAT.bits) - 1.0).to(tl.int32)
        codes = codes + (code,)
        squares = squares + (v[t] * v[t],)
        products = products + (v[t] * _number(code, FORMAT),)
    projection = tl.div_rn(sum_rows(squares), sum_rows(products))
    scale = tl.where(tiny, 0.0, nearest_scale(distance * projection))
    return codes, tl.where(distance < FORMAT.form.too_large, scale, float("nan"))


@triton.jit
def _scaled(tiles, factor):
    scaled = ()
    for t in tl.static_range(len(tiles)):
        scaled = scaled + (tiles[t] * factor,)
    return scaled


_FUNCTIONS = {
    "int": (_to_absmax, _from_number),
    "e4m3": (_to_e4m3, _from_e4m3),
    "e5m2": (_to_e5m2, _from_e5m2),
    "sign": (_to_sign, _from_sign),
    "gaussian": (_to_gaussian, _from_number),
}

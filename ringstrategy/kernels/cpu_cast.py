"""What rounding to 16 bits loses, on a CPU: one pass, compiled by Numba.

Torch does the rounding itself, as fast as it copies.
"""

from __future__ import annotations

import numpy as np

from ringstrategy.kernels.jit import inline, kernel, real

_LEAST_NORMAL = np.float32(2.0**-14)  # of float16
_INFINITE = np.int32(31 << 23)  # the exponent of float16's infinity, where it stands in a float32
_REBIAS = np.int32(112 << 23)  # from float16's exponent to float32's


@inline
def of_float16(bits):
    """The value of a float16."""
    moved = np.int32((np.int32(bits) & 0x7FFF) << 13)
    normal = real(np.int32(moved + _REBIAS))
    subnormal = real(np.int32(moved + _REBIAS + (1 << 23))) - _LEAST_NORMAL
    magnitude = subnormal if moved < 1 << 23 else normal if moved < _INFINITE else np.float32(np.inf)
    return -magnitude if bits < 0 else magnitude


@inline
def of_bfloat16(bits):
    """The value of a bfloat16."""
    return real(np.int32(np.int32(bits) << 16))


@kernel()
def lose_float16(values, rounded, lost, first, last):
    """Write `values - rounded`, where that is finite, to [first, last) of `lost`; `rounded`: int16, bits."""
    for i in range(first, last):
        rest = values[i] - of_float16(rounded[i])
        lost[i] = rest if abs(rest) < np.float32(np.inf) else lost[i]


@kernel()
def lose_bfloat16(values, rounded, lost, first, last):
    """See `lose_float16`."""
    for i in range(first, last):
        rest = values[i] - of_bfloat16(rounded[i])
        lost[i] = rest if abs(rest) < np.float32(np.inf) else lost[i]

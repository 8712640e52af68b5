"""Element by element on a CPU: one pass over the memory each, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from ringstrategy.kernels.jit import inline, kernel, pointer, real

_LEAST_NORMAL = np.float32(2.0**-14)  # of float16
_INFINITE = np.int32(31 << 23)  # the exponent of float16's infinity, where it stands in a float32
_REBIAS = np.int32(112 << 23)  # from float16's exponent to float32's
_U = np.uint64
_RUN = _U(1 << 10)  # values of the sum that stay in the nearest cache while neighbour after neighbour is added


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


@inline
def _wide(value, dtype):
    if dtype == "float16":
        return of_float16(value)
    if dtype == "bfloat16":
        return of_bfloat16(value)
    return np.float32(value)


def mixing(dtype: str) -> Callable[..., None]:
    """The kernel for values of this dtype: float32, or int16 for the bits of float16 or bfloat16."""

    @kernel(dtype)
    def mix(own, theirs, weights, out, first, last):
        """Write the sum of weight * (theirs - own), added in that order, to [first, last) of `out`.

        For k neighbours and float32 it reads 4 + 4 k bytes a value, and writes 4. `theirs`: addresses, uint64.
        """
        for begin in range(first, last, _RUN):
            end = min(begin + _RUN, last)
            for i in range(begin, end):
                out[i] = np.float32(0)
            for k in range(_U(len(theirs))):
                values = numba.carray(pointer(theirs[k]), (own.nbytes,), np.uint8).view(own.dtype)
                for i in range(begin, end):
                    out[i] += weights[k] * (_wide(values[i], dtype) - _wide(own[i], dtype))

    return mix


@kernel()
def nesterov(values, gradients, momenta, lr, momentum, first, last):
    """Step [first, last). Reads 12 bytes a value and writes 8; in torch it is seven passes. All are float32.

    Numba does not fuse a product and a sum, so these are the bits of the reference on every processor.
    """
    for i in range(first, last):
        kept = momenta[i] * momentum + gradients[i]
        momenta[i] = kept
        values[i] -= np.float32(kept * momentum + gradients[i]) * lr

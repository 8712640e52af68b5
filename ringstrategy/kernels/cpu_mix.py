"""What neighbours' values make of a rank's own, on a CPU: one pass over all of them, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from ringstrategy.kernels.cpu_cast import of_bfloat16, of_float16
from ringstrategy.kernels.jit import inline, kernel, pointer

_U = np.uint64
_RUN = _U(1 << 10)  # values of the sum that stay in the nearest cache while neighbour after neighbour is added


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

"""How Numba compiles the kernels for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic


def inline(function: Callable[..., Any]) -> Any:
    """Compiled as a part of the kernels that call it.

    It stands in the same file as they do: what Numba keeps on disk is as old as that file.
    """
    return numba.njit(forceinline=True, error_model="numpy")(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept on disk where a folder can be written to."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's
        return numba.njit(nogil=True, error_model="numpy")(function)


def _to_real(typing, bits):
    """The float32 of these bits, int32 or uint32."""
    del typing

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(bits), generate


real: Any = intrinsic(_to_real)


def _to_lowest(typing, mask):
    """The place of the lowest bit that is set in a uint64; 64 if none is."""
    del typing

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.types.uint64(mask), generate


lowest: Any = intrinsic(_to_lowest)

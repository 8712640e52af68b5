"""The seeded rotation of each 256 values: signs and an orthonormal Hadamard transform, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import LAUNCH

LENGTH = 256
ROWS = 8  # rotations of a program


@triton.jit
def _four_stages(x, ROWS: tl.constexpr):
    # butterflies over the 4 high bits of the place in a row, from the lowest of them up; these bits become the low
    # ones, so two calls are the whole transform and leave the order as it was
    x = tl.permute(tl.reshape(x, [ROWS, 16, 16]), (0, 2, 1))
    x = tl.reshape(x, [ROWS * 16, 2, 2, 2, 2])
    for _ in tl.static_range(4):
        first, second = tl.split(x)
        x = tl.permute(tl.join(first + second, first - second), (0, 4, 1, 2, 3))
    return tl.reshape(x, [ROWS, 256])


@triton.jit
def hadamard(x, ROWS: tl.constexpr):
    """H x for each row of x, (ROWS, 256): stages over distances 16, 32, 64, 128, then 1, 2, 4, 8."""
    return _four_stages(_four_stages(x, ROWS), ROWS)


@triton.jit
def rotated(x, signs, ROWS: tl.constexpr, INVERSE: tl.constexpr):
    """H (x * signs / 16), or inversely (H x) * signs / 16."""
    flips = tl.load(signs + tl.arange(0, 256))[None, :] * 0.0625
    return hadamard(x, ROWS) * flips if INVERSE else hadamard(x * flips, ROWS)


@triton.jit
def _rotate_kernel(values, signs, n, ROWS: tl.constexpr, INVERSE: tl.constexpr):
    """y = H (x * sign / 16) in place for each whole 256 values; reads 4, writes 4 bytes an element of float32."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 256)[None, :]
    whole = row < n // 256 - first
    place = values + first * 256 + (row * 256 + column)
    x = tl.load(place, mask=whole, other=0.0).to(tl.float32)
    tl.store(place, rotated(x, signs, ROWS, INVERSE).to(values.dtype.element_ty), mask=whole)


def rotate_(values: Tensor, signs: Tensor, *, inverse: bool = False) -> None:
    """Rotate each 256 values in place, or back; the last `n % 256` stay as they are.

    Rotating decoded values back gives the same bits on any machine wherever 256 of them add up exactly in float32.

    Args:
        values: float32, float16 or bfloat16 (n,); computed in float32.
        signs: float32 (256,), each 1 or -1, on the device of `values`.
        inverse: rotate back.
    """
    assert values.is_contiguous(), f"values must be flat, got strides {values.stride()}"
    check_signs(signs, values.device)
    rows = values.numel() // LENGTH
    if rows == 0:
        return
    with torch.cuda.device_of(values):
        _rotate_kernel[(-(-rows // ROWS),)](values, signs, values.numel(), ROWS, inverse, **LAUNCH)


def check_signs(signs: Tensor, device: torch.device) -> None:
    """Assert what the kernels rely on."""
    assert (signs.shape, signs.dtype, signs.device) == ((LENGTH,), torch.float32, device), f"signs: {signs}"
    assert signs.is_contiguous()

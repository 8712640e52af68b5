"""Gram-Schmidt over the factors of PowerSGD, one program a matrix."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels import reference

from .formats import LAUNCH, bits_of, float_of

_WIDTH = 1024  # values of a column that a program holds at once


@triton.jit
def _dot(one, other, length, WIDTH: tl.constexpr):
    # in one order on every GPU: each place adds up its own, then the places of a row are added
    at = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, length, WIDTH):
        inside = begin + at < length
        total += tl.load(one + begin + at, mask=inside, other=0.0) * tl.load(other + begin + at, mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _divide_(column, divisor, length, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    for begin in range(0, length, WIDTH):
        inside = begin + at < length
        x = tl.load(column + begin + at, mask=inside, other=0.0)
        tl.store(column + begin + at, tl.div_rn(x, divisor), mask=inside)
    tl.debug_barrier()  # other threads may read it next


@triton.jit
def _largest(column, length, WIDTH: tl.constexpr):
    # as bits of a float32, where a NaN is above all numbers
    at = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, length, WIDTH):
        x = tl.load(column + begin + at, mask=begin + at < length, other=0.0)
        largest = tl.maximum(largest, bits_of(x) & 0x7FFFFFFF)
    return float_of(tl.max(largest, 0))


@triton.jit(do_not_specialize=["runs"])
def _orthonormalise_kernel(columns, runs, dependent, RANK: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """Each column less its parts along those before it, over its norm; a program owns one matrix, (RANK, runs * RUN).

    Moves 24 bytes a value, and with R columns 20 for each of the R (R - 1) / 2 pairs and 12 for each but the first.
    """
    length = runs * RUN
    first = columns + tl.program_id(0).to(tl.int64) * RANK * length
    for place in range(RANK):
        column = first + place * length
        largest = _largest(column, length, WIDTH)
        _divide_(column, tl.where(largest == 0, 1.0, largest), length, WIDTH)
        norm = tl.sqrt_rn(_dot(column, column, length, WIDTH))
        _divide_(column, tl.where(norm == 0, 1.0, norm), length, WIDTH)
    at = tl.arange(0, WIDTH)
    for place in range(1, RANK):
        before = first + (place - 1) * length
        for later in range(place, RANK):
            column = first + later * length
            along = _dot(column, before, length, WIDTH)
            for begin in range(0, length, WIDTH):
                inside = begin + at < length
                x = tl.load(column + begin + at, mask=inside, other=0.0)
                x -= along * tl.load(before + begin + at, mask=inside, other=0.0)
                tl.store(column + begin + at, x, mask=inside)
            tl.debug_barrier()
        column = first + place * length
        norm = tl.sqrt_rn(_dot(column, column, length, WIDTH))
        if norm < dependent:
            for begin in range(0, length, WIDTH):
                tl.store(column + begin + at, tl.zeros([WIDTH], tl.float32), mask=begin + at < length)
            tl.debug_barrier()
        else:
            _divide_(column, norm, length, WIDTH)


def orthonormalise_(columns: Tensor) -> None:
    """See `reference.orthonormalise_`: of float32, with the same bits on all GPUs of one type."""
    if columns.dtype != torch.float32:
        reference.orthonormalise_(columns)
        return
    assert columns.is_contiguous()
    matrices, rank, length = columns.shape
    if columns.numel():
        with torch.cuda.device_of(columns):
            run = math.gcd(length, 4)  # values that a thread reads at once
            _orthonormalise_kernel[(matrices,)](
                columns, length // run, reference.DEPENDENT, rank, _WIDTH, run, **LAUNCH
            )

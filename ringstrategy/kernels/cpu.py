"""The arithmetic of block codecs on a CPU: one pass a block, compiled by Numba for the processor at hand.

The bytes are the reference's, but for scales that are a sum (`Sign`, `Gaussian`): the order of addition decides their
last bit. Every loop over values is one that LLVM can vectorize, with AVX-512 as without. So indices are unsigned (one
that might be negative would need a branch), no slices are made (each would be counted), whole numbers come from adding
1.5 * 2**23, and the largest magnitude is a maximum of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

KINDS = ("int", "minmax", "e4m3", "e5m2", "sign", "gaussian")  # how a block is measured and rounded
_MINMAX, _E4M3, _E5M2, _SIGN, _GAUSSIAN = range(1, 6)

_U = np.uint64
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to a whole number, ties to even
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NAN = np.uint16(0x7FC0)  # as bfloat16
_LANES = _U(64)  # partial sums: several vectors of them, for each waits for its own last addition
_ROTATED = _U(256)


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always", error_model="numpy")(function)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept on disk where a folder can be written to."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's
        return numba.njit(nogil=True, error_model="numpy")(function)


@_inline
def _width(bits, low):
    """Of the plane of codes that begins at this bit."""
    left = bits - low
    return _U(8) if left == _U(8) else _U(4) if left >= _U(4) else _U(2) if left >= _U(2) else _U(1)


@_inline
def _unpack(codes, first, length, bits, small):
    """The codes of one block in planes: `length` of them, a multiple of 8."""
    low = _U(0)
    while low < bits:
        width = _width(bits, low)
        run, mask, plane = length * width // _U(8), np.uint8((_U(1) << width) - _U(1)), first + low * length // _U(8)
        for part in range(_U(8) // width):
            shift, at = np.uint8(part * width), part * run
            if low == _U(0):
                for j in range(run):
                    small[at + j] = (codes[plane + j] >> shift) & mask
            else:
                for j in range(run):
                    small[at + j] |= ((codes[plane + j] >> shift) & mask) << np.uint8(low)
        low += width


@_inline
def _pack(small, length, bits, codes, first):
    """Undo `_unpack`."""
    low = _U(0)
    while low < bits:
        width = _width(bits, low)
        run, mask, plane = length * width // _U(8), np.uint8((_U(1) << width) - _U(1)), first + low * length // _U(8)
        for j in range(run):
            codes[plane + j] = (small[j] >> np.uint8(low)) & mask
        for part in range(_U(1), _U(8) // width):
            shift, at = np.uint8(part * width), part * run
            for j in range(run):
                codes[plane + j] |= ((small[at + j] >> np.uint8(low)) & mask) << shift
        low += width


@_inline
def _spread(codes, first, width, padded, spacing, bias, scale, least, has_least, add, out, begin, length):
    """Write the values of codes in one plane to `out`, or add them to it."""
    run, mask = padded * width // _U(8), np.uint8((_U(1) << width) - _U(1))
    for part in range(_U(8) // width):
        shift, at = np.uint8(part * width), part * run
        count = _U(0) if at >= length else min(run, length - at)
        at += begin
        if has_least:
            if add:
                for j in range(count):
                    out[at + j] += (np.float32((codes[first + j] >> shift) & mask) * spacing + bias) * scale + least
            else:
                for j in range(count):
                    out[at + j] = (np.float32((codes[first + j] >> shift) & mask) * spacing + bias) * scale + least
        elif add:
            for j in range(count):
                out[at + j] += (np.float32((codes[first + j] >> shift) & mask) * spacing + bias) * scale
        else:
            for j in range(count):
                out[at + j] = (np.float32((codes[first + j] >> shift) & mask) * spacing + bias) * scale


@_inline
def _decode(codes, first, bits, spacing, bias, table, scale, least, has_least, small, add, out, begin, length):
    """Write the values of one block's codes to `out`, or add them to it."""
    padded = (length + _U(7)) // _U(8) * _U(8)
    if len(table):
        if add:
            for i in range(length):
                out[begin + i] += table[codes[first + i]] * scale
        else:
            for i in range(length):
                out[begin + i] = table[codes[first + i]] * scale
    elif _width(bits, _U(0)) == bits:
        _spread(codes, first, bits, padded, spacing, bias, scale, least, has_least, add, out, begin, length)
    else:
        _unpack(codes, first, padded, bits, small)
        _spread(small, _U(0), _U(8), padded, spacing, bias, scale, least, has_least, add, out, begin, length)


@_kernel
def decode(codes, scales, leasts, out, add, block, bits, spacing, bias, table):
    """Write the values of a message to `out`, float32, or add them to it.

    `scales`: bfloat16 as uint16, one a block; `leasts`: float32, one a block or none; `table`: the number of each code,
    or empty: spacing * code + bias. `block` and `bits` are uint64.
    """
    small, word = np.empty(block, np.uint8), np.empty(1, np.uint32)
    real, has_least, numel = word.view(np.float32), len(leasts) > 0, _U(len(out))
    for b in range(_U(len(scales))):
        begin = b * block
        word[0] = np.uint32(scales[b]) << np.uint32(16)
        least = leasts[b] if has_least else np.float32(0)
        first, length = begin * bits // _U(8), min(block, numel - begin)
        _decode(codes, first, bits, spacing, bias, table, real[0], least, has_least, small, add, out, begin, length)


@_inline
def _rounded(value, word, real):
    """The bits of a float32 rounded to bfloat16: to the nearest, ties to even."""
    real[0] = value
    bits = word[0]
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_inline
def _rounded_up(value, word, real):
    """The bits of a positive float32 rounded up to bfloat16."""
    real[0] = value
    return np.uint16((word[0] + np.uint32(0xFFFF)) >> np.uint32(16))


@_inline
def _sum(values, length, lanes):
    """In an order that can be vectorized, and is the same on every machine."""
    for j in range(_LANES):
        lanes[j] = np.float32(0)
    whole = length // _LANES * _LANES
    for i in range(_U(0), whole, _LANES):
        for j in range(_LANES):
            lanes[j] += values[i + j]
    for j in range(length - whole):
        lanes[j] += values[whole + j]
    left = _LANES // _U(2)
    while left > _U(0):
        for j in range(left):
            lanes[j] += lanes[left + j]
        left //= _U(2)
    return lanes[0]


@_inline
def _add_noise(levels, length, hashes, xors, odds, place):
    """See `ringstrategy.codecs.noise`; `xors` and `odds` are those of each period, counted from the first value's."""
    begin, periodic = _U(0), _U(len(hashes))
    while begin < length:
        period = (place + begin) // periodic
        inside = place + begin - period * periodic
        count, xor, odd = min(length - begin, periodic - inside), xors[period], odds[period]
        for i in range(count):
            word = np.int32(np.int32(hashes[inside + i] ^ xor) * odd)
            levels[begin + i] += np.float32(word) * np.float32(2.0**-32)
        begin += count


@_inline
def _to_float8(value, bits, exponents):
    """The code of a float32 that is in range, ties to even; `bits` are its own. `exponents`: 4 (e4m3) or 5 (e5m2)."""
    magnitude = np.int32(bits & _MAGNITUDE)
    if exponents == 4:
        normal = np.int32((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - np.int32(120 << 3)
        small = np.int32((abs(value) * np.float32(512.0) + _ROUND) - _ROUND)
        code = normal if magnitude >= 121 << 23 else small
    else:
        normal = np.int32((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - np.int32(112 << 2)
        small = np.int32((abs(value) * np.float32(65536.0) + _ROUND) - _ROUND)
        code = normal if magnitude >= 113 << 23 else small
    return np.uint8(code | ((bits >> 24) & 0x80))


@_kernel
def encode(
    values,
    codes,
    scales,
    leasts,
    received,
    received_codes,
    received_scales,
    received_leasts,
    lost,
    kind,
    block,
    bits,
    spacing,
    bias,
    table,
    highest,
    factor,
    smallest,
    too_large,
    noise,
    hashes,
    xors,
    odds,
    place,
):
    """Write `values` (and with `received` those of a message, added) as a message, and to `lost` what that loses.

    As for `decode`, and: `lost` may be empty; `highest`: the greatest level; `factor`: of the largest or mean magnitude
    in the scale; the scale is at least `smallest`, and NaN from `too_large` on; `noise`: round at random.
    """
    x, levels, scaled = np.empty(block, np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
    keys, small = np.empty(block, np.int32), np.empty(block, np.uint8)
    lanes, word = np.empty(_LANES, np.float32), np.empty(1, np.uint32)
    x_bits, level_bits, real = x.view(np.int32), levels.view(np.int32), word.view(np.float32)
    has_least, has_lost, has_table = len(leasts) > 0, len(lost) > 0, len(table) > 0
    numel, half = _U(len(values)), np.float32(_U(1) << (bits - _U(1)))
    code_of_zero = np.uint8(0) if kind in (_MINMAX, _E4M3, _E5M2) else np.uint8(_U(1) << (bits - _U(1)))
    for b in range(_U(len(scales))):
        begin = b * block
        first, length = begin * bits // _U(8), min(block, numel - begin)
        padded = (length + _U(7)) // _U(8) * _U(8)
        for i in range(length):
            x[i] = values[begin + i]
        if received:
            word[0] = np.uint32(received_scales[b]) << np.uint32(16)
            least = received_leasts[b] if has_least else np.float32(0)
            scale, begin_ = real[0], _U(0)
            _decode(
                received_codes,
                first,
                bits,
                spacing,
                bias,
                table,
                scale,
                least,
                has_least,
                small,
                True,
                x,
                begin_,
                length,
            )

        # measure
        most = np.int32(0)
        for i in range(length):
            most = max(most, np.int32(x_bits[i] & _MAGNITUDE))  # of what is not finite, more than of all else
        word[0] = np.uint32(most)
        largest = real[0]
        header, least, step = _NAN, np.float32(0), np.float32(0)
        if kind <= _E5M2:
            spread = largest
            if kind == _MINMAX and largest < too_large:
                for i in range(length):
                    keys[i] = x_bits[i] ^ ((x_bits[i] >> 31) & _MAGNITUDE)  # whole numbers that sort as the values
                low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
                for i in range(length):
                    low = min(low, keys[i])
                    high = max(high, keys[i])
                word[0] = np.uint32(low ^ ((low >> 31) & _MAGNITUDE))
                least = real[0] + np.float32(0)  # -0 is sent as 0
                word[0] = np.uint32(high ^ ((high >> 31) & _MAGNITUDE))
                spread = real[0] - least
            if largest < too_large and spread < too_large:
                header = _rounded_up(max(spread * factor, smallest), word, real)
        else:
            for i in range(length):
                levels[i] = abs(x[i])
            step = _sum(levels, length, lanes) / np.float32(length) * factor
            if kind == _SIGN:
                header = _rounded(step, word, real)
            elif step < too_large:
                step = step if step >= smallest else np.float32(0)
                header = np.uint16(0)
        if header >= np.uint16(0x7F80):  # it or a value is not finite: the same bytes whatever else the block holds
            scales[b] = _NAN
            if has_least:
                leasts[b] = np.float32(0)
            for i in range(padded):
                small[i] = code_of_zero
            _pack(small, padded, bits, codes, first)
            continue

        # round
        if kind == _GAUSSIAN:
            inverse = np.float32(1) / step if step > 0 else np.float32(0)
            for i in range(length):
                scaled[i] = x[i] * inverse
            for i in range(length):
                y = min(max(scaled[i], -half), half - np.float32(0.5))
                down = np.float32(np.int32(y))
                levels[i] = down - np.float32(down > y)
            for i in range(length):
                small[i] = np.uint8(np.int32(levels[i] + half))
                levels[i] = levels[i] * scaled[i]
            # levels stand half a step low
            along = _sum(levels, length, lanes) * np.float32(2) + _sum(scaled, length, lanes)
            for i in range(length):
                scaled[i] = scaled[i] * scaled[i]
            norm = np.sqrt(_sum(scaled, length, lanes))
            header = _rounded(step * (norm * norm / along), word, real) if step > 0 else np.uint16(0)
        word[0] = np.uint32(header) << np.uint32(16)
        scale = real[0]
        scales[b] = header
        if has_least:
            leasts[b] = least
        if kind <= _E5M2:
            inverse = np.float32(1) / scale
            if kind in (_E4M3, _E5M2):
                for i in range(length):
                    levels[i] = x[i] * inverse
                if kind == _E4M3:
                    for i in range(length):
                        small[i] = _to_float8(levels[i], level_bits[i], 4)
                else:
                    for i in range(length):
                        small[i] = _to_float8(levels[i], level_bits[i], 5)
            elif noise:
                if kind == _MINMAX:
                    for i in range(length):
                        levels[i] = (x[i] - least) * inverse
                else:
                    for i in range(length):
                        levels[i] = x[i] * inverse
                _add_noise(levels, length, hashes, xors, odds, place + begin)
                lowest, up = (np.float32(0), np.float32(0)) if kind == _MINMAX else (-highest, half)
                for i in range(length):
                    small[i] = np.uint8(np.int32(min(max((levels[i] + _ROUND) - _ROUND, lowest), highest) + up))
            elif kind == _MINMAX:
                for i in range(length):
                    small[i] = np.uint8(np.int32(((x[i] - least) * inverse + _ROUND) - _ROUND))
            else:
                for i in range(length):
                    small[i] = np.uint8(np.int32(((x[i] * inverse + _ROUND) - _ROUND) + half))
        elif kind == _SIGN:
            for i in range(length):
                small[i] = np.uint8(x[i] >= np.float32(0))
        for i in range(length, padded):
            small[i] = code_of_zero
        _pack(small, padded, bits, codes, first)
        if has_lost:
            if has_table:
                for i in range(length):
                    lost[begin + i] = x[i] - table[small[i]] * scale
            elif has_least:
                for i in range(length):
                    lost[begin + i] = x[i] - ((np.float32(small[i]) * spacing + bias) * scale + least)
            else:
                for i in range(length):
                    lost[begin + i] = x[i] - (np.float32(small[i]) * spacing + bias) * scale


@_kernel
def rotate(values, flips, inverse):
    """See `Engine.rotate_`; `flips`: the signs / 16."""
    one, other, half = np.empty(_ROTATED, np.float32), np.empty(_ROTATED, np.float32), _ROTATED // _U(2)
    for begin in range(_U(0), _U(len(values)) // _ROTATED * _ROTATED, _ROTATED):
        if inverse:
            for i in range(_ROTATED):
                one[i] = values[begin + i]
        else:
            for i in range(_ROTATED):
                one[i] = values[begin + i] * flips[i]
        for _ in range(4):  # eight equal stages: what is half a row apart comes to lie side by side
            for i in range(half):
                other[_U(2) * i] = one[i] + one[i + half]
                other[_U(2) * i + _U(1)] = one[i] - one[i + half]
            for i in range(half):
                one[_U(2) * i] = other[i] + other[i + half]
                one[_U(2) * i + _U(1)] = other[i] - other[i + half]
        if inverse:
            for i in range(_ROTATED):
                values[begin + i] = one[i] * flips[i]
        else:
            for i in range(_ROTATED):
                values[begin + i] = one[i]


def compile_all() -> None:
    """Compile each kernel for the types that it is called with, or read what was compiled before from the disk."""
    reals, bytes_, words = np.zeros(256, np.float32), np.zeros(256, np.uint8), np.zeros(1, np.uint16)
    real, none, keys = np.float32(1), np.zeros(0, np.float32), np.zeros(0, np.int32)
    message, block, bits = (bytes_, words, none), _U(256), _U(8)
    decode(*message, reals, False, block, bits, real, real, none)
    how = (0, block, bits, real, real, none, real, real, real, real)
    encode(reals, *message, False, *message, none, *how, False, keys, keys, keys, _U(0))
    rotate(reals, reals, False)

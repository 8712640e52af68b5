"""The arithmetic of block codecs on a CPU: one pass a block, compiled by Numba for the processor at hand.

The bytes are the reference's, but for scales that are a sum (`Sign`, `Gaussian`): the order of addition decides their
last bit. Every loop over values is one that LLVM can vectorize, with AVX-512 as without: it runs over slices from their
beginning (an index that might be negative would need a branch), whole numbers come from adding 1.5 * 2**23, and the
largest magnitude is a maximum of integers. Helpers are inlined, or each slice that they get would be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

KINDS = ("int", "minmax", "e4m3", "e5m2", "sign", "gaussian")  # how a block is measured and rounded
_MINMAX, _E4M3, _E5M2, _SIGN, _GAUSSIAN = range(1, 6)

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to a whole number, ties to even
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NAN = np.uint16(0x7FC0)  # as bfloat16
_LANES = 16  # partial sums
_ROTATED = 256


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always", error_model="numpy")(function)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept on disk where a folder can be written to."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's
        return numba.njit(nogil=True, error_model="numpy")(function)


@_inline
def _unpack(codes, bits, small):
    """The codes of one block in planes, as many as `small` has places, a multiple of 8."""
    length, low = len(small), 0
    while low < bits:
        width = 4 if bits - low >= 4 else 2 if bits - low >= 2 else 1
        run, mask = length * width // 8, np.uint8((1 << width) - 1)
        plane = codes[low * length // 8 : low * length // 8 + run]
        for part in range(8 // width):
            shift, out = np.uint8(part * width), small[part * run : part * run + run]
            if low == 0:
                for j in range(len(out)):
                    out[j] = (plane[j] >> shift) & mask
            else:
                for j in range(len(out)):
                    out[j] |= ((plane[j] >> shift) & mask) << np.uint8(low)
        low += width


@_inline
def _pack(small, bits, codes):
    """Undo `_unpack`; one plane too."""
    length, low = len(small), 0
    while low < bits:
        width = 8 if bits == 8 else 4 if bits - low >= 4 else 2 if bits - low >= 2 else 1
        run, mask = length * width // 8, np.uint8((1 << width) - 1)
        plane = codes[low * length // 8 : low * length // 8 + run]
        for part in range(8 // width):
            shift, code = np.uint8(part * width), small[part * run : part * run + run]
            if part == 0:
                for j in range(len(code)):
                    plane[j] = (code[j] >> np.uint8(low)) & mask
            else:
                for j in range(len(code)):
                    plane[j] |= ((code[j] >> np.uint8(low)) & mask) << shift
        low += width


@_inline
def _decode(codes, bits, spacing, bias, table, scale, least, has_least, small, padded, add, out):
    """Write the values of one block's codes to `out`, or add them to it."""
    if len(table):
        if add:
            for i in range(len(out)):
                out[i] += table[codes[i]] * scale
        else:
            for i in range(len(out)):
                out[i] = table[codes[i]] * scale
        return
    one_plane = bits == 8 or bits == 4 or bits == 2 or bits == 1
    width, source = np.int64(8), small
    if one_plane:
        width, source = np.int64(bits), codes
    else:
        _unpack(codes, bits, small)
    run, mask = padded * width // 8, np.uint8((1 << width) - 1)
    for part in range(8 // width):
        shift, some = np.uint8(part * width), out[part * run : part * run + run]
        if has_least:
            if add:
                for j in range(len(some)):
                    some[j] += (np.float32((source[j] >> shift) & mask) * spacing + bias) * scale + least
            else:
                for j in range(len(some)):
                    some[j] = (np.float32((source[j] >> shift) & mask) * spacing + bias) * scale + least
        elif add:
            for j in range(len(some)):
                some[j] += (np.float32((source[j] >> shift) & mask) * spacing + bias) * scale
        else:
            for j in range(len(some)):
                some[j] = (np.float32((source[j] >> shift) & mask) * spacing + bias) * scale


@_kernel
def decode(codes, scales, leasts, out, add, block, bits, spacing, bias, table):
    """Write the values of a message to `out`, float32, or add them to it.

    `scales`: bfloat16 as uint16, one a block; `leasts`: float32, one a block or none; `table`: the number of each code,
    or empty: spacing * code + bias.
    """
    small = np.empty(block, np.uint8)
    word = np.empty(1, np.uint32)
    real = word.view(np.float32)
    has_least = len(leasts) > 0
    for b in range(len(scales)):
        target = out[b * block : b * block + block]
        padded = (len(target) + 7) // 8 * 8
        first = b * block * bits // 8
        message = codes[first : first + padded * bits // 8]
        word[0] = np.uint32(scales[b]) << np.uint32(16)
        least = leasts[b] if has_least else np.float32(0)
        _decode(message, bits, spacing, bias, table, real[0], least, has_least, small[:padded], padded, add, target)


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
def _sum(values, lanes):
    """In an order that can be vectorized, and is the same on every machine."""
    for j in range(_LANES):
        lanes[j] = np.float32(0)
    whole = len(values) // _LANES * _LANES
    for i in range(0, whole, _LANES):
        run = values[i : i + _LANES]
        for j in range(_LANES):
            lanes[j] += run[j]
    rest = values[whole:]
    for j in range(len(rest)):
        lanes[j] += rest[j]
    total = np.float32(0)
    for j in range(_LANES):
        total += lanes[j]
    return total


@_inline
def _add_noise(levels, hashes, xors, odds, place):
    """See `ringstrategy.codecs.noise`; `xors` and `odds` are those of each period, counted from the first value's."""
    begin = 0
    while begin < len(levels):
        period = (place + begin) // len(hashes)
        inside = place + begin - period * len(hashes)
        some = levels[begin : begin + len(hashes) - inside]
        known, xor, odd = hashes[inside : inside + len(some)], xors[period], odds[period]
        for i in range(len(some)):
            some[i] += np.float32(np.int32(np.int32(known[i] ^ xor) * odd)) * np.float32(2.0**-32)
        begin += len(some)


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
    real = word.view(np.float32)
    has_least, half = len(leasts) > 0, np.float32(1 << (bits - 1))
    code_of_zero = np.uint8(0) if kind in (_MINMAX, _E4M3, _E5M2) else np.uint8(1 << (bits - 1))
    for b in range(len(scales)):
        xs = values[b * block : b * block + block]
        length = len(xs)
        padded = (length + 7) // 8 * 8
        first = b * block * bits // 8
        message = codes[first : first + padded * bits // 8]
        if received:
            word[0] = np.uint32(received_scales[b]) << np.uint32(16)
            least = received_leasts[b] if has_least else np.float32(0)
            arrived, total = received_codes[first : first + padded * bits // 8], x[:length]
            for i in range(len(total)):
                total[i] = xs[i]
            _decode(arrived, bits, spacing, bias, table, real[0], least, has_least, small[:padded], padded, True, total)
            xs = total
        ls, x_bits = levels[:length], xs.view(np.int32)

        # measure
        most = np.int32(0)
        for i in range(len(x_bits)):
            most = max(most, np.int32(x_bits[i] & _MAGNITUDE))  # of what is not finite, more than of all else
        word[0] = np.uint32(most)
        largest = real[0]
        header, least, step = _NAN, np.float32(0), np.float32(0)
        if kind <= _E5M2:
            spread = largest
            if kind == _MINMAX and largest < too_large:
                ks = keys[:length]
                for i in range(len(ks)):
                    ks[i] = x_bits[i] ^ ((x_bits[i] >> 31) & _MAGNITUDE)  # whole numbers that sort as the values
                low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
                for i in range(len(ks)):
                    low = min(low, ks[i])
                    high = max(high, ks[i])
                word[0] = np.uint32(low ^ ((low >> 31) & _MAGNITUDE))
                least = real[0] + np.float32(0)  # -0 is sent as 0
                word[0] = np.uint32(high ^ ((high >> 31) & _MAGNITUDE))
                spread = real[0] - least
            if largest < too_large and spread < too_large:
                header = _rounded_up(max(spread * factor, smallest), word, real)
        else:
            for i in range(len(ls)):
                ls[i] = abs(xs[i])
            step = _sum(ls, lanes) / np.float32(length) * factor
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
            _pack(small[:padded], bits, message)
            continue

        # round
        cs = small[:length]
        if kind == _GAUSSIAN:
            inverse = np.float32(1) / step if step > 0 else np.float32(0)
            ys = scaled[:length]
            for i in range(len(ys)):
                ys[i] = xs[i] * inverse
            for i in range(len(ys)):
                y = min(max(ys[i], -half), half - np.float32(0.5))
                down = np.int32(y)
                ls[i] = np.float32(down) - np.float32(np.float32(down) > y)
            for i in range(len(ys)):
                cs[i] = np.uint8(np.int32(ls[i] + half))
                ls[i] = ls[i] * ys[i]
            along = _sum(ls, lanes) * np.float32(2) + _sum(ys, lanes)  # levels stand half a step low
            for i in range(len(ys)):
                ys[i] = ys[i] * ys[i]
            norm = np.sqrt(_sum(ys, lanes))
            header = _rounded(step * (norm * norm / along), word, real) if step > 0 else np.uint16(0)
        word[0] = np.uint32(header) << np.uint32(16)
        scale = real[0]
        scales[b] = header
        if has_least:
            leasts[b] = least
        if kind <= _E5M2:
            inverse = np.float32(1) / scale
            if kind == _MINMAX:
                for i in range(len(ls)):
                    ls[i] = (xs[i] - least) * inverse
            else:
                for i in range(len(ls)):
                    ls[i] = xs[i] * inverse
            if kind in (_E4M3, _E5M2):
                y_bits = ls.view(np.int32)
                if kind == _E5M2:
                    for i in range(len(ls)):
                        cs[i] = _to_float8(ls[i], y_bits[i], 5)
                else:
                    for i in range(len(ls)):
                        cs[i] = _to_float8(ls[i], y_bits[i], 4)
            else:
                if noise:
                    _add_noise(ls, hashes, xors, odds, place + b * block)
                    lowest = np.float32(0) if kind == _MINMAX else -highest
                    for i in range(len(ls)):
                        ls[i] = min(max((ls[i] + _ROUND) - _ROUND, lowest), highest)
                else:
                    for i in range(len(ls)):
                        ls[i] = (ls[i] + _ROUND) - _ROUND
                up = np.float32(0) if kind == _MINMAX else half
                for i in range(len(ls)):
                    cs[i] = np.uint8(np.int32(ls[i] + up))
        elif kind == _SIGN:
            for i in range(len(cs)):
                cs[i] = np.uint8(xs[i] >= np.float32(0))
        for i in range(length, padded):
            small[i] = code_of_zero
        _pack(small[:padded], bits, message)
        if len(lost):
            out = lost[b * block : b * block + block]
            if len(table):
                for i in range(len(out)):
                    out[i] = xs[i] - table[cs[i]] * scale
            elif has_least:
                for i in range(len(out)):
                    out[i] = xs[i] - ((np.float32(cs[i]) * spacing + bias) * scale + least)
            else:
                for i in range(len(out)):
                    out[i] = xs[i] - (np.float32(cs[i]) * spacing + bias) * scale


@_kernel
def rotate(values, flips, inverse):
    """See `Engine.rotate_`; `flips`: the signs / 16."""
    one, other = np.empty(_ROTATED, np.float32), np.empty(_ROTATED, np.float32)
    for begin in range(0, len(values) // _ROTATED * _ROTATED, _ROTATED):
        row = values[begin : begin + _ROTATED]
        if inverse:
            for i in range(_ROTATED):
                one[i] = row[i]
        else:
            for i in range(_ROTATED):
                one[i] = row[i] * flips[i]
        for _ in range(4):  # eight equal stages: what is half a row apart comes to lie side by side
            for i in range(_ROTATED // 2):
                other[2 * i] = one[i] + one[i + _ROTATED // 2]
                other[2 * i + 1] = one[i] - one[i + _ROTATED // 2]
            for i in range(_ROTATED // 2):
                one[2 * i] = other[i] + other[i + _ROTATED // 2]
                one[2 * i + 1] = other[i] - other[i + _ROTATED // 2]
        if inverse:
            for i in range(_ROTATED):
                row[i] = one[i] * flips[i]
        else:
            for i in range(_ROTATED):
                row[i] = one[i]


def compile_all() -> None:
    """Compile each kernel for the types that it is called with, or read what was compiled before from the disk."""
    reals, bytes_, words = np.zeros(_ROTATED, np.float32), np.zeros(_ROTATED, np.uint8), np.zeros(1, np.uint16)
    real, none, keys = np.float32(1), np.zeros(0, np.float32), np.zeros(0, np.int32)
    message = bytes_, words, none
    decode(*message, reals, False, _ROTATED, 8, real, real, none)
    how = (0, _ROTATED, 8, real, real, none, real, real, real, real)
    encode(reals, *message, False, *message, none, *how, False, keys, keys, keys, 0)
    rotate(reals, reals, False)

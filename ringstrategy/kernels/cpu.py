"""The arithmetic of block codecs on a CPU: one pass a block, compiled by Numba for the codec and processor at hand.

The bytes are the reference's, but for scales that are a sum (`Sign`, `Gaussian`): the order of addition decides their
last bit. Every loop over values is one that LLVM can vectorize, with AVX-512 as without. So what a codec is, is known
when its kernels are compiled (each shift is then a constant), indices are unsigned (one that might be negative would
need a branch), no slices are made (each would be counted), integers that become floats are narrow, whole numbers come
from adding 1.5 * 2**23, and the largest magnitude is a maximum of integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from ringstrategy.kernels.jit import Kernels, pointer
from ringstrategy.kernels.jit import inline as _inline
from ringstrategy.kernels.jit import kernel as _kernel
from ringstrategy.kernels.layout import ROTATED, Arithmetic

KINDS = ("int", "e4m3", "e5m2", "sign", "gaussian")  # how a block is measured and rounded
_E4M3, _E5M2, _SIGN, _GAUSSIAN = range(1, 5)

_U = np.uint64
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to a whole number, ties to even
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NAN = np.uint16(0x7FC0)  # as bfloat16
_LANES = _U(64)  # partial sums: several vectors of them, for each waits for its own last addition
_ROTATED = _U(ROTATED)
_VECTOR = 16  # float32 values of an instruction, before LLVM splits it to the processor's width


@_inline
def _width(bits, low):
    """Of the plane of codes that begins at this bit."""
    left = bits - low
    return _U(8) if left == _U(8) else _U(4) if left >= _U(4) else _U(2) if left >= _U(2) else _U(1)


@_inline
def _runs(width):
    """Codes of this width in a byte."""
    return _U(1) if width == _U(8) else _U(2) if width == _U(4) else _U(4) if width == _U(2) else _U(8)


@_inline
def _unpack(codes, first, length, bits, small):
    """The codes of one block in planes: `length` of them, a multiple of 8."""
    low = _U(0)
    while low < bits:
        width = _width(bits, low)
        run, mask, plane = length * width // _U(8), np.uint8((_U(1) << width) - _U(1)), first + low * length // _U(8)
        for part in range(_runs(width)):
            shift, at = part * width, part * run
            if low == _U(0):
                for j in range(run):
                    small[at + j] = (codes[plane + j] >> (shift & _U(7))) & mask
            else:
                for j in range(run):
                    small[at + j] |= ((codes[plane + j] >> (shift & _U(7))) & mask) << (low & _U(7))
        low += width


@_inline
def _pack(small, length, bits, codes, first):
    """Undo `_unpack`."""
    low = _U(0)
    while low < bits:
        width = _width(bits, low)
        run, mask, plane = length * width // _U(8), np.uint8((_U(1) << width) - _U(1)), first + low * length // _U(8)
        for j in range(run):
            codes[plane + j] = (small[j] >> (low & _U(7))) & mask
        for part in range(_U(1), _runs(width)):
            shift, at = part * width, part * run
            for j in range(run):
                codes[plane + j] |= ((small[at + j] >> (low & _U(7))) & mask) << (shift & _U(7))
        low += width


@_inline
def _spread(codes, first, width, padded, spacing, bias, scale, add, out, begin, length):
    """Write the values of codes in one plane to `out`, or add them to it."""
    run, mask, unit = padded * width // _U(8), np.uint8((_U(1) << width) - _U(1)), spacing
    for part in range(_runs(width)):
        at = part * run
        count = _U(0) if at >= length else min(run, length - at)
        at += begin
        for j in range(count):
            value = (np.float32(np.int32(codes[first + j] & mask)) * unit + bias) * scale
            out[at + j] = out[at + j] + value if add else value
        mask = np.uint8(mask << width)  # the code is masked where it stands, and its unit is the smaller: no shift
        unit *= np.float32(1) / np.float32(_U(1) << width)


@_inline
def _decode(codes, first, bits, spacing, bias, table, scale, small, add, out, begin, length):
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
        _spread(codes, first, bits, padded, spacing, bias, scale, add, out, begin, length)
    else:
        _unpack(codes, first, padded, bits, small)
        _spread(small, _U(0), _U(8), padded, spacing, bias, scale, add, out, begin, length)


def _hadamard(flips_last):
    """A function that multiplies 256 values of an array by Sylvester's matrix and by `flips`, in place.

    Eight stages of additions in registers, written as instructions of 16 lanes: LLVM splits them to the processor's
    width, but finds no such shuffles itself. The strides ascend, as the reference's do, so that all bits are the same.
    """

    def turn(typing, values, begin, flips):
        del typing

        def generate(context, builder, signature, arguments):
            vector = ir.VectorType(ir.FloatType(), _VECTOR)

            def rows_of(argument, begin):  # of a contiguous float32 array
                data = context.make_array(signature.args[argument])(context, builder, arguments[argument]).data
                places = (builder.add(begin, begin.type(at)) for at in range(0, ROTATED, _VECTOR))
                return [builder.bitcast(builder.gep(data, [place]), vector.as_pointer()) for place in places]

            def flipped(rows):
                signs = [builder.load(place, align=4) for place in rows_of(2, arguments[1].type(0))]
                return [builder.fmul(row, each) for row, each in zip(rows, signs, strict=True)]

            def within(stride, row):  # each lane's partner plus itself, or minus if it is the upper one
                partners = ir.Constant(ir.VectorType(ir.IntType(32), _VECTOR), [i ^ stride for i in range(_VECTOR)])
                own = ir.Constant(vector, [-1.0 if i & stride else 1.0 for i in range(_VECTOR)])
                exact = ("contract",)  # as is this product: it may be one instruction with the sum
                return builder.fadd(
                    builder.shuffle_vector(row, row, partners), builder.fmul(row, own, flags=exact), flags=exact
                )

            def between(step, rows, i):
                return (builder.fsub if i & step else builder.fadd)(rows[i & ~step], rows[i | step])

            places = rows_of(0, arguments[1])
            rows = [builder.load(place, align=4) for place in places]
            rows = rows if flips_last else flipped(rows)
            for stride in (1, 2, 4, 8):
                rows = [within(stride, row) for row in rows]
            for step in (1, 2, 4, 8):
                rows = [between(step, rows, i) for i in range(len(rows))]
            rows = flipped(rows) if flips_last else rows
            for row, place in zip(rows, places, strict=True):
                builder.store(row, place, align=4)
            return context.get_dummy_value()

        return numba.types.void(values, begin, flips), generate

    return intrinsic(turn)


_turn: Any = _hadamard(flips_last=False)
_turn_back: Any = _hadamard(flips_last=True)


@_inline
def _scale(message, at, word, real):
    """A bfloat16 in a message."""
    word[0] = (np.uint32(message[at]) << np.uint32(16)) | (np.uint32(message[at + _U(1)]) << np.uint32(24))
    return real[0]


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
def _fold(lanes, left):
    """Add the upper half of the lanes to the lower; of a constant length, so a few vector instructions."""
    for j in range(left):
        lanes[j] += lanes[left + j]


@_inline
def _total(lanes):
    _fold(lanes, _U(32))
    _fold(lanes, _U(16))
    _fold(lanes, _U(8))
    _fold(lanes, _U(4))
    _fold(lanes, _U(2))
    return lanes[0] + lanes[1]


@_inline
def _sum_of_magnitudes(values, length, lanes):
    """In an order that can be vectorized, and is the same on every machine."""
    for j in range(_LANES):
        lanes[j] = np.float32(0)
    whole = length // _LANES * _LANES
    for i in range(_U(0), whole, _LANES):
        for j in range(_LANES):
            lanes[j] += abs(values[i + j])
    for j in range(length - whole):
        lanes[j] += abs(values[whole + j])
    return _total(lanes)


@_inline
def _to_gaussian(values, length, inverse, half, small, lanes, more):
    """The codes of a block, the product of what they stand for and the values, and that of the values with themselves;
    all in units of the step.
    """
    for j in range(_LANES):
        lanes[j] = np.float32(0)
        more[j] = np.float32(0)
    highest, lowest = half + half - np.float32(1), np.float32(1) - half - half
    whole = length // _LANES * _LANES
    for i in range(_U(0), whole, _LANES):
        for j in range(_LANES):
            value = values[i + j] * inverse
            code = np.int32(min(max(value + half, np.float32(0)), highest))
            small[i + j] = np.uint8(code)
            lanes[j] += (np.float32(code) * np.float32(2) + lowest) * value
            more[j] += value * value
    for j in range(length - whole):
        value = values[whole + j] * inverse
        code = np.int32(min(max(value + half, np.float32(0)), highest))
        small[whole + j] = np.uint8(code)
        lanes[j] += (np.float32(code) * np.float32(2) + lowest) * value
        more[j] += value * value
    return _total(lanes), _total(more)


@_inline
def _add_noise(levels, length, hashes, xors, odds, place):
    """See `codecs.block_int`; `xors` and `odds` are those of each period, counted from the first value's."""
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


@_kernel()
def rotate(values, flips, inverse):
    """See `reference.rotate_`; `flips`: the signs / 16."""
    for begin in range(_U(0), _U(len(values)) // _ROTATED * _ROTATED, _ROTATED):
        if inverse:
            _turn_back(values, begin, flips)
        else:
            _turn(values, begin, flips)


@cache
def kernels(how: Arithmetic, numbers: tuple[float, ...]) -> Kernels:
    """The kernels of a format. `numbers`: what its codes stand for in units of the scale, if they are floats."""
    kind, block, bits, stochastic = KINDS.index(how.kind), _U(how.block), _U(how.bits), how.stochastic
    spacing, bias, highest = np.float32(how.spacing), np.float32(how.bias), np.float32(how.highest)
    factor, smallest, too_large = np.float32(how.factor), np.float32(how.smallest), np.float32(how.too_large)
    table = np.array(numbers, np.float32)
    half = np.float32(_U(1) << (bits - _U(1)))
    code_of_zero = np.uint8(0) if kind in (_E4M3, _E5M2) else np.uint8(half)

    @_kernel(how, numbers)
    def decode(message, out, add, flips, first, last):
        """Write the values of the blocks [first, last) of a message to their places in `out`, or add them to it.

        The message: bfloat16 scales, then codes. `flips`: the signs / 16 of a rotation by which values are turned
        back, or empty.
        """
        small, word, x = np.empty(block, np.uint8), np.empty(1, np.uint32), np.empty(block, np.float32)
        real, numel, nothing = word.view(np.float32), _U(len(out)), _U(0)
        codes = (numel + block - _U(1)) // block * _U(2)  # behind the scales
        for b in range(first, last):
            begin = b * block
            scale = _scale(message, _U(2) * b, word, real)
            at, length = codes + begin * bits // _U(8), min(block, numel - begin)
            if add and len(flips):
                _decode(message, at, bits, spacing, bias, table, scale, small, False, x, nothing, length)
                for each in range(length // _ROTATED):
                    _turn_back(x, each * _ROTATED, flips)
                for i in range(length):
                    out[begin + i] += x[i]
                continue
            _decode(message, at, bits, spacing, bias, table, scale, small, add, out, begin, length)
            if len(flips):
                for each in range(length // _ROTATED):
                    _turn_back(out, begin + each * _ROTATED, flips)

    @_kernel(how, numbers)
    def encode(values, residual, flips, received, message, lost, first, last, hashes, xors, odds, place):
        """Write the blocks [first, last) of a message: `values` + `residual`, turned by `flips`, + what was `received`;
        and to `lost` what that loses.

        `received`: the addresses of messages, uint64. `residual`, `flips`, `received` and `lost`, which is turned back,
        may be empty, and `residual` and `lost` one array. From a block that is not finite `lost` gets the `residual`.
        `hashes`, `xors`, `odds`, `place`: of the noise, or empty.
        """
        x, levels = np.empty(block, np.float32), np.empty(block, np.float32)
        small = np.empty(block, np.uint8)
        lanes, more, word = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32), np.empty(1, np.uint32)
        x_bits, level_bits, real = x.view(np.int32), levels.view(np.int32), word.view(np.float32)
        numel, nothing = _U(len(values)), _U(0)
        codes = (numel + block - _U(1)) // block * _U(2)  # behind the scales
        for b in range(first, last):
            begin = b * block
            at, length = codes + begin * bits // _U(8), min(block, numel - begin)
            padded = (length + _U(7)) // _U(8) * _U(8)
            if len(residual):
                for i in range(length):
                    x[i] = values[begin + i] + residual[begin + i]
            else:
                for i in range(length):
                    x[i] = values[begin + i]
            if len(flips):
                for each in range(length // _ROTATED):
                    _turn(x, each * _ROTATED, flips)
            for address in received:
                arrived = numba.carray(pointer(address), (codes + (numel + _U(7)) // _U(8) * bits,), np.uint8)
                scale = _scale(arrived, _U(2) * b, word, real)
                _decode(arrived, at, bits, spacing, bias, table, scale, small, True, x, nothing, length)

            # measure
            most = np.int32(0)
            for i in range(length):
                most = max(most, np.int32(x_bits[i] & _MAGNITUDE))  # of what is not finite, more than of all else
            word[0] = np.uint32(most)
            largest = real[0]
            header, step = _NAN, np.float32(0)
            if kind <= _E5M2:
                if largest < too_large:
                    header = _rounded_up(max(largest * factor, smallest), word, real)
            else:
                step = _sum_of_magnitudes(x, length, lanes) / np.float32(length) * factor
                if kind == _SIGN:
                    header = _rounded(step, word, real)
                elif step < too_large:
                    step = step if step >= smallest else np.float32(0)
                    header = np.uint16(0)
            if header >= np.uint16(0x7F80):  # it or a value is not finite: the same bytes whatever else the block holds
                message[_U(2) * b] = np.uint8(_NAN & np.uint16(0xFF))
                message[_U(2) * b + _U(1)] = np.uint8(_NAN >> np.uint16(8))
                for i in range(padded):
                    small[i] = code_of_zero
                _pack(small, padded, bits, message, at)
                if len(residual) and len(lost):
                    for i in range(length):
                        lost[begin + i] = residual[begin + i]
                continue

            # round
            if kind == _GAUSSIAN:
                inverse = np.float32(1) / step if step > 0 else np.float32(0)
                along, norm = _to_gaussian(x, length, inverse, half, small, lanes, more)
                header = _rounded(step * (norm / along), word, real) if step > 0 else np.uint16(0)
            word[0] = np.uint32(header) << np.uint32(16)
            scale = real[0]
            message[_U(2) * b] = np.uint8(header & np.uint16(0xFF))
            message[_U(2) * b + _U(1)] = np.uint8(header >> np.uint16(8))
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
                elif stochastic:
                    for i in range(length):
                        levels[i] = x[i] * inverse
                    _add_noise(levels, length, hashes, xors, odds, place + begin)
                    for i in range(length):
                        small[i] = np.uint8(np.int32(min(max((levels[i] + _ROUND) - _ROUND, -highest), highest) + half))
                else:
                    for i in range(length):
                        small[i] = np.uint8(np.int32(((x[i] * inverse + _ROUND) - _ROUND) + half))
            elif kind == _SIGN:
                for i in range(length):
                    small[i] = np.uint8(x[i] >= np.float32(0))
            for i in range(length, padded):
                small[i] = code_of_zero
            _pack(small, padded, bits, message, at)
            if len(lost):
                if len(table):
                    for i in range(length):
                        x[i] -= table[small[i]] * scale
                else:
                    for i in range(length):
                        x[i] -= (np.float32(small[i]) * spacing + bias) * scale
                if len(flips):
                    for each in range(length // _ROTATED):
                        _turn_back(x, each * _ROTATED, flips)
                for i in range(length):
                    lost[begin + i] = x[i]

    return Kernels(encode, decode)

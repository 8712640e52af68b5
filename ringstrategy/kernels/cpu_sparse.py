"""The arithmetic of `TopK` on a CPU: one pass a block, compiled by Numba for k, block and processor.

The bytes are the reference's (`ringstrategy.kernels.sparse`). Magnitudes are compared as the whole numbers that their
bits are. The rules of `ringstrategy.kernels.cpu` for loops that LLVM can vectorize hold here too.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ringstrategy.kernels.jit import Kernels, inline, kernel, lowest, real
from ringstrategy.kernels.layout import SparseFormat

_U = np.uint64
_MAGNITUDE = np.int32(0x7FFFFFFF)
_TOO_LARGE = np.int32(0x7F7F8000)  # from here on a magnitude is infinite as bfloat16
_NAN = np.int16(0x7FC0)  # as bfloat16
_WORD = _U(64)


@inline
def _count(keys, padded, least):
    """How many keys are not below `least`."""
    count = np.int32(0)
    for i in range(padded):
        count = np.int32(count + np.int32(keys[i] >= least))
    return count


@inline
def _threshold(keys, padded, most, k):
    """A key that k keys reach or exceed; and how many of those that equal it are among the k.

    `most` is the largest key. The steps down from it grow until k keys are above, then it is a search by halves.
    """
    low, high, above, step = np.int32(0), np.int32(most + 1), np.int32(0), np.int32(1 << 22)
    reached = False  # do k keys reach `low`, as far as was counted?
    while np.int32(high - low) > np.int32(1):
        if reached or np.int32(high - low) <= step:
            middle = np.int32(low + (np.int32(high - low) >> 1))
        else:
            middle = np.int32(high - step)
            step = np.int32(min(step << 1, 1 << 29))
        count = _count(keys, padded, middle)
        if count == k:
            return middle, k
        if count > k:
            low, reached = middle, True
        else:
            high, above = middle, count
    return low, np.int32(k - above)


@cache
def kernels(form: SparseFormat) -> Kernels:
    """The kernels of a format."""
    k, block, count = _U(form.k), _U(form.block), np.int32(form.k)
    words = (block + _WORD - _U(1)) // _WORD
    padding = words * _WORD
    lift = _U(-(1 << 15) % form.block)  # makes of an int16 plus 2**15 what it is modulo the block

    @kernel(form)
    def encode(values, kept, places, lost, first, last):
        """Write the blocks [first, last) of a message, and to `lost`, which may be empty, what that loses.

        `values` are the bits of float32 (n,), int32; `kept` of bfloat16 (blocks * k,), int16. `places`: where the kept
        values stand, (blocks * k,), uint8 or int16, to be written.
        """
        x, keys = np.zeros(padding, np.int32), np.full(padding, -1, np.int32)
        at, numel = np.empty(k, np.uint64), _U(len(values))
        for b in range(first, last):
            begin = b * block
            length = min(block, numel - begin)
            for i in range(length):
                x[i] = values[begin + i]
            for i in range(length, block):
                x[i] = np.int32(0)
            most = np.int32(0)
            for i in range(block):
                key = np.int32(x[i] & _MAGNITUDE)
                keys[i] = key
                most = max(most, key)

            if most >= _TOO_LARGE:  # and it would be among the chosen
                for j in range(k):
                    kept[b * k + j] = _NAN
                    places[b * k + j] = j
                continue

            # choose
            least, equal = _threshold(keys, padding, most, count)
            found = _U(0)
            for word in range(words):
                mask, base = _U(0), word * _WORD
                for i in range(_WORD):
                    mask |= _U(keys[base + i] >= least) << i
                while mask and found < k:
                    i = base + lowest(mask)
                    mask &= mask - _U(1)
                    if keys[i] == least:
                        if equal == 0:
                            continue
                        equal = np.int32(equal - 1)
                    at[found] = i
                    found += _U(1)
            for j in range(k):
                places[b * k + j] = at[j]

            # round
            if len(lost):
                for i in range(length):
                    lost[begin + i] = real(x[i])
            for j in range(k):
                bits = np.int32(x[at[j]])
                rounded = np.int32(np.int32(bits + np.int32(0x7FFF) + ((bits >> 16) & 1)) >> 16)
                kept[b * k + j] = np.int16(rounded)
                if len(lost) and at[j] < length:
                    lost[begin + at[j]] -= real(np.int32(rounded << 16))

    @kernel(form)
    def decode(kept, places, out, add, first, last):
        """Write the values of the blocks [first, last) of a message to `out`, or add them to it. See `encode`.

        A place outside the block, which only a broken peer sends, is taken modulo its length.
        """
        x, at, numel = np.zeros(block, np.float32), np.empty(k, np.uint64), _U(len(out))
        for b in range(first, last):
            begin = b * block
            length = min(block, numel - begin)
            broken = False
            for j in range(k):
                at[j] = ((_U(places[b * k + j]) ^ _U(0x8000)) + lift) % block
                value = real(np.int32(np.int32(kept[b * k + j]) << 16))
                broken |= value != value
                x[at[j]] += value
            if broken:
                for i in range(length):
                    out[begin + i] = np.float32(np.nan)
            elif add:
                for i in range(length):
                    out[begin + i] += x[i]
            else:
                for i in range(length):
                    out[begin + i] = x[i]
            for j in range(k):
                x[at[j]] = np.float32(0)

    return Kernels(encode, decode)

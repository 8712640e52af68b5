"""Gather scattered tensors into one flat bucket and scatter them back, each in one launch, cast and scaled."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import LAUNCH
from .tables import table
from .tiles import load_tiles

_SPAN = 2048  # elements of the bucket that a program works on
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Places:
    """Which tensor each element of a bucket belongs to; made once, for as long as the bucket has these tensors.

    Args:
        numels: elements of each tensor, in the order of the bucket.
        dtypes: float32, float16 or bfloat16 each.
        device: of the bucket and the tensors.
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        assert len(numels) == len(dtypes)
        self.numels, self.dtypes = list(numels), list(dtypes)
        edges = [0, *accumulate(numels)]
        self.numel = edges[-1]
        self.programs = -(-self.numel // _SPAN)
        begins = [_SPAN * program for program in range(self.programs)]
        first = [bisect_right(edges, begin) - 1 for begin in begins]
        last = [bisect_left(edges, min(begin + _SPAN, self.numel)) for begin in begins]
        self.edges = torch.tensor(edges, device=device)
        self.kinds = torch.tensor([_KINDS[dtype] for dtype in dtypes], dtype=torch.int32, device=device)
        self.ranges = torch.tensor([first, last], dtype=torch.int32, device=device)

    def addresses(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Where the tensors lie, 0 for None."""
        assert len(tensors) == len(self.numels), f"{len(tensors)} tensors for {len(self.numels)} places"
        for tensor, numel, dtype in zip(tensors, self.numels, self.dtypes, strict=True):
            if tensor is not None:
                assert (tensor.numel(), tensor.dtype, tensor.device) == (numel, dtype, self.edges.device)
                assert _is_dense(tensor), f"strides {tensor.stride()} leave gaps: copy the tensor first"
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def pack(self, tensors: Sequence[Tensor | None], flat: Tensor, *, scale: float = 1.0) -> None:
        """Write `tensors * scale` to `flat`, in one launch.

        Args:
            tensors: dense, elements taken in the order of memory; None: zeros.
            flat: float32 (numel,).
            scale: rounded to float32.
        """
        self._check(flat)
        if self.numel == 0:
            return
        with torch.cuda.device_of(flat):
            addresses = table(self.addresses(tensors), self.edges.device)
            _pack_kernel[(self.programs,)](
                addresses, self.edges, self.kinds, self.ranges, flat, self.numel, float(scale), _SPAN, **LAUNCH
            )

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> None:
        """Write `flat` (left as it is) to the tensors that are not None, in one launch. See `pack`."""
        self._check(flat)
        if self.numel == 0:
            return
        with torch.cuda.device_of(flat):
            addresses = table(self.addresses(tensors), self.edges.device)
            _unpack_kernel[(self.programs,)](
                addresses, self.edges, self.kinds, self.ranges, flat, self.numel, _SPAN, **LAUNCH
            )

    def source(self, tensors: Sequence[Tensor | None], addresses: Sequence[int], scale: float) -> Source:
        """What kernels on the current stream read instead of a bucket: tensors at these `addresses`, times `scale`."""
        return Source(self, tensors, table(addresses, self.edges.device), scale)

    def _check(self, flat: Tensor) -> None:
        assert (flat.shape, flat.dtype, flat.device) == ((self.numel,), torch.float32, self.edges.device)
        assert flat.is_contiguous()


class Source(NamedTuple):
    """The values of a bucket where they lie: `tensors` at `addresses`, int64 on the device, times `scale`."""

    places: Places
    tensors: Sequence[Tensor | None]  # kept
    addresses: Tensor
    scale: float


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@triton.jit
def _place(addresses, edges, kinds, i, begin, SPAN: tl.constexpr):
    # the address at which the program's first element lies or would lie in tensor i; and whether that is a multiple of
    # 16 bytes and all of the program's elements are in the tensor
    itemsize = tl.where(tl.load(kinds + i) == 0, 4, 2)
    start, stop = tl.load(edges + i), tl.load(edges + i + 1)
    address = tl.load(addresses + i)
    place = address + (begin - start) * itemsize
    return address, place, start - begin, stop - begin, (place % 16 == 0) & (start <= begin) & (stop >= begin + SPAN)


@triton.jit
def _read(x, place, start, stop, whole, DTYPE: tl.constexpr, SPAN: tl.constexpr):
    at = tl.arange(0, SPAN)
    if whole:
        x = tl.load(tl.multiple_of(place.to(tl.pointer_type(DTYPE)), 16) + at).to(tl.float32)
    else:
        mine = (at >= start) & (at < stop)
        x = tl.where(mine, tl.load(place.to(tl.pointer_type(DTYPE)) + at, mask=mine, other=0.0).to(tl.float32), x)
    return x


@triton.jit
def _write(x, place, start, stop, whole, DTYPE: tl.constexpr, SPAN: tl.constexpr):
    at = tl.arange(0, SPAN)
    if whole:
        tl.store(tl.multiple_of(place.to(tl.pointer_type(DTYPE)), 16) + at, x.to(DTYPE))
    else:
        tl.store(place.to(tl.pointer_type(DTYPE)) + at, x.to(DTYPE), mask=(at >= start) & (at < stop))


@triton.jit
def gather_tiles(addresses, source, begin, exists, span, FORMAT: tl.constexpr):
    """Tensors * scale as `tiles.load_tiles`, of the program that begins at place `begin` of the bucket.

    `source`: the tensors' edges and kinds, how many they are, and the scale.
    """
    edges, kinds, tensors, scale = source
    SPAN: tl.constexpr = FORMAT.rows * FORMAT.block
    TILES: tl.constexpr = FORMAT.tiles
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles = tiles + (tl.full([FORMAT.rows, FORMAT.width], 0.0, tl.float32),)
    for i in range(_holder(edges, tensors, begin), _holder(edges, tensors, begin + SPAN - 1) + 1):
        address, place, start, stop, whole = _place(addresses, edges, kinds, i, begin, SPAN)
        if address != 0:
            kind = tl.load(kinds + i)
            if kind == 0:
                tiles = _read_tiles(tiles, place, start, stop, whole, exists, span, tl.float32, FORMAT)
            elif kind == 1:
                tiles = _read_tiles(tiles, place, start, stop, whole, exists, span, tl.float16, FORMAT)
            else:
                tiles = _read_tiles(tiles, place, start, stop, whole, exists, span, tl.bfloat16, FORMAT)
    scaled = ()
    for t in tl.static_range(TILES):
        scaled = scaled + (tiles[t] * scale,)
    return scaled


@triton.jit
def _holder(edges, tensors, place):
    # the tensor that an element of the bucket belongs to, by bisection
    low = tl.full([], 0, tl.int32)
    high = tensors
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(edges + middle) <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _read_tiles(
    tiles, place, start, stop, whole, exists, span, DTYPE: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    if whole:
        tiles = load_tiles(tl.multiple_of(place.to(tl.pointer_type(DTYPE)), 16), exists, span, FORMAT)
    else:
        at = tl.arange(0, FORMAT.rows)[:, None] * FORMAT.block + tl.arange(0, FORMAT.width)[None, :]
        mine = ()
        for t in tl.static_range(len(tiles)):
            mine = mine + (exists[t] & (at + t * span >= start) & (at + t * span < stop),)
        found = load_tiles(place.to(tl.pointer_type(DTYPE)), mine, span, FORMAT)
        both = ()
        for t in tl.static_range(len(tiles)):
            both = both + (tl.where(mine[t], found[t], tiles[t]),)
        tiles = both
    return tiles


@triton.jit
def _pack_kernel(addresses, edges, kinds, ranges, flat, n, scale, SPAN: tl.constexpr):
    """flat = tensors * scale.

    A program owns SPAN elements of the bucket and walks over the tensors that they belong to. Reads 2 or 4, writes 4
    bytes an element.
    """
    program = tl.program_id(0)
    begin = program.to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    x = tl.zeros([SPAN], tl.float32)
    for i in range(tl.load(ranges + program), tl.load(ranges + tl.num_programs(0) + program)):
        address, place, start, stop, whole = _place(addresses, edges, kinds, i, begin, SPAN)
        if address != 0:
            kind = tl.load(kinds + i)
            if kind == 0:
                x = _read(x, place, start, stop, whole, tl.float32, SPAN)
            elif kind == 1:
                x = _read(x, place, start, stop, whole, tl.float16, SPAN)
            else:
                x = _read(x, place, start, stop, whole, tl.bfloat16, SPAN)
    x *= scale
    left = n - begin
    if left >= SPAN:
        tl.store(flat + begin + at, x)
    else:
        tl.store(flat + begin + at, x, mask=at < left)


@triton.jit
def _unpack_kernel(addresses, edges, kinds, ranges, flat, n, SPAN: tl.constexpr):
    """tensors = flat, rounded to their dtypes.

    Reads 4, writes 2 or 4 bytes an element; see `_pack_kernel`.
    """
    program = tl.program_id(0)
    begin = program.to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    left = n - begin
    x = tl.load(flat + begin + at) if left >= SPAN else tl.load(flat + begin + at, mask=at < left, other=0.0)
    for i in range(tl.load(ranges + program), tl.load(ranges + tl.num_programs(0) + program)):
        address, place, start, stop, whole = _place(addresses, edges, kinds, i, begin, SPAN)
        if address != 0:
            kind = tl.load(kinds + i)
            if kind == 0:
                _write(x, place, start, stop, whole, tl.float32, SPAN)
            elif kind == 1:
                _write(x, place, start, stop, whole, tl.float16, SPAN)
            else:
                _write(x, place, start, stop, whole, tl.bfloat16, SPAN)

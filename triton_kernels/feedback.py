"""How much of each mean an optimizer stepped, and residuals that go only so far: all tensors of a bucket at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.feedback import FADES
from ringstrategy.kernels.sample import PLACES, places

from .formats import LAUNCH
from .tables import stream_of, table, uploaded

_SPAN = 2048  # elements of the residuals that a program works on
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


@triton.jit
def _sampled(tensors, offsets, slot, PLACES: tl.constexpr):
    # float64, 0 for what is not there or not finite
    address, kind = tl.load(tensors + 2 * slot), tl.load(tensors + 2 * slot + 1)
    at = tl.where(kind < 0, -1, tl.load(offsets + slot * PLACES + tl.arange(0, PLACES)))
    there = at >= 0
    if kind == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=there, other=0.0).to(tl.float64)
    elif kind == 1:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=there, other=0.0).to(tl.float64)
    elif kind == 2:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=there, other=0.0).to(tl.float64)
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float64)) + at, mask=there, other=0.0)
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _sample_kernel(tensors, offsets, samples, PLACES: tl.constexpr):
    """samples = tensors at their offsets; a program for each tensor. Reads 8 and a sector, writes 8 bytes a sample."""
    slot = tl.program_id(0)
    tl.store(samples + slot * PLACES + tl.arange(0, PLACES), _sampled(tensors, offsets, slot, PLACES))


@triton.jit
def _compare_kernel(tensors, offsets, then, sums, PLACES: tl.constexpr):
    """sums = <now, then>, <then, then> of each tensor. Reads 16 bytes and a sector a sample; see `_sample_kernel`."""
    slot = tl.program_id(0)
    now = _sampled(tensors, offsets, slot, PLACES)
    known = tl.load(then + slot * PLACES + tl.arange(0, PLACES))
    tl.store(sums + 2 * slot, tl.sum(now * known, 0))
    tl.store(sums + 2 * slot + 1, tl.sum(known * known, 0))


@triton.jit(do_not_specialize=["count"])
def _part_kernel(tensors, sums, late, scale, stepped, parts, count, FADES: tl.constexpr, TENSORS: tl.constexpr):
    """parts = <now, then> / <then, then>, relative to the largest of late: see `stepped_parts`. One program."""
    at = tl.arange(0, TENSORS)
    there = at < count
    there = tl.load(tensors + 2 * at + 1, mask=there, other=-1) >= 0
    both = tl.load(sums + 2 * at, mask=there, other=0.0)
    norm = tl.load(sums + 2 * at + 1, mask=there, other=0.0)
    if scale is not None:
        both *= tl.load(scale).to(tl.float64)
    total, along = tl.sum(norm, 0), tl.sum(both, 0)
    of_all = tl.where(total == 0, 1.0, along / tl.where(total == 0, 1.0, total))
    part = tl.where(norm == 0, of_all, both / tl.where(norm == 0, 1.0, norm))
    part = tl.where(part > 0, part, 0.0)
    if late is None:
        part = tl.where(part < 1, part, 1.0)
    else:
        if stepped is not None:
            part = tl.where(tl.load(stepped).to(tl.int32) != 0, part, 0.0)
        before = tl.load(late + at, mask=there, other=0.0)
        faded = before * FADES
        tl.store(late + at, tl.where(part > faded, part, faded), mask=there & (part > 0))
        largest = tl.where(part > before, part, before)
        part = part / tl.where(largest == 0, 1.0, largest)
    tl.store(parts + at, tl.where(there, part, 1.0), mask=at < count)


@triton.jit
def _go_kernel(now, before, edges, ranges, parts, SPAN: tl.constexpr):
    """now = before + part * (now - before), exact at 0 and 1.

    A program owns SPAN elements and walks over the tensors that they belong to. Moves nothing where part is 1, 8 bytes
    an element of float32 where it is 0, else 12.
    """
    program = tl.program_id(0)
    begin = program.to(tl.int64) * SPAN
    for i in range(tl.load(ranges + program), tl.load(ranges + tl.num_programs(0) + program)):
        part = tl.load(parts + i)
        if part != 1:
            start, stop = tl.load(edges + i), tl.load(edges + i + 1)
            if (start <= begin) & (stop >= begin + SPAN):
                _go_span(now + begin, before + begin, part, 0, SPAN, True, SPAN)
            else:
                _go_span(now + begin, before + begin, part, start - begin, stop - begin, False, SPAN)


@triton.jit
def _go_span(now, before, part, start, stop, WHOLE: tl.constexpr, SPAN: tl.constexpr):
    at = tl.arange(0, SPAN)
    mine = tl.full([SPAN], True, tl.int1) if WHOLE else (at >= start) & (at < stop)
    y = tl.load(before + at, mask=mine, other=0.0)
    if part != 0:
        WIDE: tl.constexpr = tl.float64 if now.dtype.element_ty == tl.float64 else tl.float32
        after, back, weight = tl.load(now + at, mask=mine, other=0.0).to(WIDE), y.to(WIDE), part.to(WIDE)
        way = after - back
        y = tl.where(weight < 0.5, back + weight * way, after - way * (1 - weight)).to(now.dtype.element_ty)
    tl.store(now + at, y, mask=mine)


def sample(tensors: Sequence[Tensor | None]) -> Tensor:
    """See `ringstrategy.kernels.feedback.sample`."""
    device = next(tensor.device for tensor in tensors if tensor is not None)
    samples = torch.empty(len(tensors), PLACES, dtype=torch.float64, device=device)
    with torch.cuda.device_of(samples):
        _sample_kernel[(len(tensors),)](_places(tensors, device), _offsets(tensors, device), samples, PLACES, **LAUNCH)
    return samples


def stepped_parts(
    then: Tensor, tensors: Sequence[Tensor | None], late: Tensor | None, scale: Tensor | None, stepped: Tensor | bool
) -> Tensor:
    """See `ringstrategy.kernels.feedback.stepped_parts`."""
    count, device = len(tensors), then.device
    sums, parts = torch.empty_like(then[:, :2]), torch.empty_like(then[:, 0])
    with torch.cuda.device_of(then):
        lie = _places(tensors, device)
        _compare_kernel[(count,)](lie, _offsets(tensors, device), then, sums, PLACES, **LAUNCH)
        unknown = stepped.view(torch.uint8) if isinstance(stepped, Tensor) else None
        _part_kernel[(1,)](
            lie, sums, late, scale, unknown, parts, count, FADES, triton.next_power_of_2(count), **LAUNCH
        )  # fmt: skip
    return parts


def go_(now: Tensor, before: Tensor, edges: Sequence[int], parts: Tensor) -> None:
    """See `ringstrategy.kernels.feedback.go_`."""
    assert (now.dtype, now.shape) == (before.dtype, before.shape)
    with torch.cuda.device_of(now):
        bounds, ranges = _spans(tuple(edges), now.device, stream_of(now.device))
        if programs := ranges.numel() // 2:
            _go_kernel[(programs,)](now, before, bounds, ranges, parts, _SPAN, **LAUNCH)


def _places(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Where each lies, and its dtype, -1 for None: int64 (tensors, 2)."""
    numbers: list[int] = []
    for tensor in tensors:
        numbers += (0, -1) if tensor is None else (tensor.data_ptr(), _KINDS[tensor.dtype])
    return table(numbers, device)


def _offsets(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Where the sampled values lie in each tensor's memory, -1 where there are fewer: int64 (tensors, PLACES)."""
    layouts = tuple(None if tensor is None else (tensor.shape, tensor.stride()) for tensor in tensors)
    return _offsets_of(layouts, device, stream_of(device))


@lru_cache(4096)
def _offsets_of(
    layouts: tuple[tuple[torch.Size, tuple[int, ...]] | None, ...], device: torch.device, stream: int
) -> Tensor:
    offsets = torch.full((len(layouts), PLACES), -1, device="cpu")
    for row, layout in zip(offsets, layouts, strict=True):
        if layout is None:
            continue
        shape, strides = layout
        numel = shape.numel()
        rest = torch.arange(numel, device="cpu") if numel <= PLACES else places(numel, torch.device("cpu"))
        at = torch.zeros_like(rest)
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            at += rest % length * stride
            rest = rest // length
        row[: len(at)] = at
    return uploaded(offsets, device)


@lru_cache(4096)
def _spans(edges: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """The edges; and of each program the first tensor of its elements, and behind them the one after the last."""
    begins = range(0, edges[-1], _SPAN)
    first = [bisect_right(edges, begin) - 1 for begin in begins]
    behind = [bisect_left(edges, min(begin + _SPAN, edges[-1])) for begin in begins]
    ranges = torch.tensor([first, behind], dtype=torch.int32, device="cpu")
    return uploaded(torch.tensor(edges, device="cpu"), device), uploaded(ranges, device)

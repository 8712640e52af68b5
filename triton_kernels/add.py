"""The values of several ranks added to a rank's own, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels import reference

from .formats import LAUNCH
from .tables import table

_SPAN = 2048  # values of a program


@triton.jit(do_not_specialize=["n", "count"])
def _add_kernel(out, parts, n, count, SPAN: tl.constexpr, ALIGN: tl.constexpr):
    """out = ((out + part 0) + part 1) + ..., where `parts` are addresses; moves 4 (count + 2) bytes a float32."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    if n - begin >= SPAN:
        _add_run(out, parts, begin, n, count, SPAN, ALIGN, True)
    else:
        _add_run(out, parts, begin, n, count, SPAN, ALIGN, False)


@triton.jit
def _add_run(out, parts, begin, n, count, SPAN: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, SPAN)
    inside = None if WHOLE else begin + at < n
    total = tl.load(out + begin + at, mask=inside)
    for k in range(count):
        part = tl.multiple_of(tl.load(parts + k).to(tl.pointer_type(tl.float32)), ALIGN)
        total += tl.load(part + begin + at, mask=inside)
    tl.store(out + begin + at, total, mask=inside)


def add_(out: Tensor, parts: Sequence[Tensor]) -> None:
    """See `reference.add_`: several parts of float32, which share no memory with `out`, in one launch."""
    if out.dtype != torch.float32 or len(parts) < 2:
        reference.add_(out, parts)
        return
    for each in (out, *parts):
        assert each.is_contiguous()
        assert (each.dtype, each.shape) == (out.dtype, out.shape)
    n, addresses = out.numel(), [part.data_ptr() for part in parts]
    if n == 0:
        return
    aligned = all(address % 16 == 0 for address in addresses)
    with torch.cuda.device_of(out):
        _add_kernel[(-(-n // _SPAN),)](
            out, table(addresses, out.device), n, len(parts), _SPAN, 16 if aligned else 4, **LAUNCH
        )

"""Several parts of a bucket, each with a message of its own, in one launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringstrategy.kernels.layout import Part

from .formats import Format
from .tables import table


class _Launch(NamedTuple):
    grid: tuple[int, int]  # programs for the longest part, parts
    messages: Tensor  # int64 (parts * 3,): where a part begins, in blocks; its values; the address of its message
    align: int  # see `Format.align`
    whole: bool  # no part ends with a short block


def tables_of(parts: Sequence[Part], fmt: Format, device: torch.device) -> Iterator[_Launch]:
    """One for the parts whose codes begin at the largest multiples of bytes, and one for the others."""
    aligned = [(fmt.align(part.end - part.begin), part) for part in parts if part.end > part.begin]
    best = max((align for align, _ in aligned), default=0)
    for chosen in ([each for each in aligned if each[0] == best], [each for each in aligned if each[0] < best]):
        if chosen:
            rows = [(part.begin // fmt.block, part.end - part.begin, part.wire.data_ptr()) for _, part in chosen]
            messages = table([number for row in rows for number in row], device)
            programs = max(fmt.grid(numel)[0] for _, numel, _ in rows)
            whole = all(numel % fmt.block == 0 for _, numel, _ in rows)
            yield _Launch((programs, len(rows)), messages, math.gcd(*(align for align, _ in chosen)), whole)


@triton.jit
def load_part(messages):
    """Of a program's part: where it begins, in blocks; its values; its message."""
    row = messages + 3 * tl.program_id(1)
    return tl.load(row), tl.load(row + 1), tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.uint8)), 16)

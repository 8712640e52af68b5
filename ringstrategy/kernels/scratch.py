"""Memory that each thread keeps for tiles: fresh pages would cost more than the arithmetic on them."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class _Held(threading.local):
    def __init__(self) -> None:
        self.memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}


_held = _Held()
_MOST_VIEWS = 256  # enough for buckets whose last tiles differ in length


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor of `shape` on the CPU, the same memory at each call with this name from this thread."""
    view = _held.views.get((name, dtype, shape))
    if view is not None:
        return view
    numel = math.prod(shape)
    memory = _held.memory.get((name, dtype))
    with torch.inference_mode(False):  # it outlives the caller's mode
        if memory is None or memory.numel() < numel:
            memory = _held.memory[name, dtype] = torch.empty(numel, dtype=dtype, device="cpu")
            _held.views.clear()  # they would keep the memory that was too small
        elif len(_held.views) >= _MOST_VIEWS:
            _held.views.clear()
        view = _held.views[name, dtype, shape] = memory[:numel].view(shape)
    return view

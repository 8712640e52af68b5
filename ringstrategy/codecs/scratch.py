"""Memory that each thread keeps for tiles: fresh pages would cost more than the arithmetic on them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_held = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor of `shape` on the CPU, the same memory at each call with this name from this thread."""
    tensors: dict[str, Tensor] = _held.__dict__.setdefault("tensors", {})
    numel = 1
    for size in shape:
        numel *= size
    held = tensors.get(name)
    if held is None or held.numel() < numel:
        with torch.inference_mode(False):  # it outlives the caller's mode
            held = tensors[name] = torch.empty(numel, dtype=dtype)
    return held[:numel].view(shape)

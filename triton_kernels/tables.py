"""Small tables of integers on the device, such as where tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def table(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, without waiting for it. Kept: buffers mostly lie where they lay a step ago."""
    if _captures(device):
        return _captured(numbers, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _table(tuple(numbers), device, stream)


@lru_cache(maxsize=1024)
def _table(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    # one for each stream: another might read it before it is there
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _captures(device: torch.device) -> bool:
    """Is a CUDA graph being captured?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _captured(numbers: Sequence[int], device: torch.device) -> Tensor:
    # in the graph's own memory, so not kept; and no copy, which a replay would repeat from memory that is gone by then
    made = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for place, number in zip(made, numbers, strict=True):
        place.fill_(number)
    return made

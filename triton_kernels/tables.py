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
    return _table(tuple(numbers), device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """The current one. What is kept on a device is kept for each: another might read it before it is there."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, without waiting for it."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@lru_cache(maxsize=8192)  # more than a step asks for, or it would keep nothing
def _table(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return uploaded(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _captured(numbers: Sequence[int], device: torch.device) -> Tensor:
    # in the graph's own memory, so not kept; and no copy, which a replay would repeat from memory that is gone by then
    made = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for place, number in zip(made, numbers, strict=True):
        place.fill_(number)
    return made

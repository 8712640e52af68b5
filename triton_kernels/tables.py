"""Small tables of integers on the device, such as where tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def table(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, without waiting for it. Kept: buffers mostly lie where they lay a step ago."""
    if device.type != "cuda":
        return _table(tuple(numbers), device, 0)
    # what is made within a CUDA graph lies in memory of that graph, and is not there before it runs
    make = _table.__wrapped__ if torch.cuda.is_current_stream_capturing() else _table
    return make(tuple(numbers), device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=1024)
def _table(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    # one for each stream: another might read it before it is there
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)

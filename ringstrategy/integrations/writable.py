"""The memory of users' tensors, for threads of ours that put results into it."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that any thread may write to, as the backends of torch do in C++.

    Autograd sees no change: the graph, `requires_grad` and the version of `tensor` stay. `tensor` may be a leaf that
    requires a gradient, or have been made in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        memory = memory.conj() if tensor.is_conj() else memory
        return torch._neg_view(memory) if tensor.is_neg() else memory

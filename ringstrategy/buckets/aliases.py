"""Does anybody else hold a tensor's memory? Then nobody may write to it behind their back."""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter


def references(tensor: Tensor) -> int:
    """How many tensors, arrays and storages lie in the memory of `tensor`; it is one of them, and this call another."""
    # torch has no public name for it; a test fails if this one goes
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def gradient_is_held(parameter: Parameter, known: int = 0) -> bool:
    """Does anything but the parameter refer to its gradient or its memory? Not to be asked within that one's hooks.

    `known`: references to the gradient that do not count.
    """
    objects, memory = _counts_alone()
    return _counts(parameter) != (objects + known, memory)


def gradient_is_kept(parameter: Parameter) -> bool:
    """Whether anything but the parameter refers to its gradient itself, whatever lies in the same memory."""
    return _counts(parameter)[0] != _counts_alone()[0]


def _counts(parameter: Parameter) -> tuple[int, int]:
    grad = parameter.grad
    assert grad is not None
    return sys.getrefcount(grad), references(grad)


@cache
def _counts_alone() -> tuple[int, int]:
    # measured, since versions of Python and of torch differ by what they count of their own
    parameter = Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _counts(parameter)

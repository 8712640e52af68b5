"""A parameter's place in a bucket.

Gradients move into the buffer only while nobody else holds their memory. Who keeps a gradient (`kept = p.grad`, a view
of it) sees what torch DDP would show: the buffer then leaves that memory to the holder and takes new, and a gradient
whose own memory is held gets the mean by a copy.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass
class Slot:
    """A parameter's place in a bucket; `view` has the parameter's shape and strides."""

    name: str
    parameter: Parameter
    view: Tensor
    gone: bool = False  # from the model

    @property
    def trains(self) -> bool:
        """Whether its gradient travels."""
        return self.parameter.requires_grad and not self.gone

    def like_view(self, whole: Tensor) -> Tensor:
        """What lies in another buffer where the view lies in its own."""
        return whole.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())

    def release(self) -> None:
        """Give a gradient that lives in the buffer memory of its own, before the buffer is used for something else."""
        if self.holds_gradient():
            self.parameter.grad = self.view.clone()

    def is_left(self) -> bool:
        """Its gradient does not travel, and somebody keeps it: the bucket must leave that memory to them."""
        return not self.trains and gradient_is_kept(self.parameter)

    def take_gradient(self, known: int = 0) -> bool:
        """Make the gradient a view of the buffer. False if its dtype differs, or something else holds its memory.

        `known`: see `gradient_is_held`.
        """
        if self.holds_gradient():
            return True
        grad = self.parameter.grad
        movable = grad is not None and not grad.is_sparse and grad.dtype == self.view.dtype
        del grad
        if not movable or gradient_is_held(self.parameter, known):
            return False
        self.parameter.grad = self.view.detach()  # a new tensor, so that `references` counts its holders
        return True

    def holds_gradient(self) -> bool:
        """Whether the parameter's gradient lives in the buffer."""
        grad = self.parameter.grad
        return (
            grad is not None
            and not grad.is_sparse
            and grad.numel() > 0  # all empty tensors have the same address
            and grad.dtype == self.view.dtype
            and grad.data_ptr() == self.view.data_ptr()
            and grad.stride() == self.view.stride()
        )


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

"""One optimizer's parameters on a rank, and which of their gradients were handed over to what steps in its place."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.buckets.dense import DenseBucket


class Gathered:
    """Gradients of each backward, bucket by bucket. Abstract: a subclass knows where they go.

    Args:
        number: of the optimizer.
        optimizer: of this rank, which steps nothing.
        buckets: of its parameters.

    Attributes:
        bucket_of: a parameter's place in them.
        dtype: in which all gradients can be summed.
        pushed: buckets of the last backward whose gradients were handed over.
    """

    def __init__(self, number: int, optimizer: Optimizer, buckets: Sequence[DenseBucket]) -> None:
        self.number, self.optimizer, self.buckets = number, optimizer, buckets
        self.bucket_of = {slot.parameter: place for place, bucket in enumerate(buckets) for slot in bucket.slots}
        self.dtype = buckets[0].buffer.dtype
        for bucket in buckets:
            self.dtype = torch.promote_types(self.dtype, bucket.buffer.dtype)
        self.pushed: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Parameter]] = {}
        self._sent: dict[Parameter, tuple[int, int]] = {}  # identity and version of gradients

    def begin_backward(self) -> None:
        """Gradients are to be pushed, in the place of those that were pushed before."""
        self.pushed = set()
        self._sent = {}
        self._waiting = {
            place: {slot.parameter for slot in bucket.slots if slot.trains} for place, bucket in enumerate(self.buckets)
        }

    def ready(self, parameter: Parameter) -> int | None:
        """A gradient is complete; returns the bucket that is full with it. RuntimeError if it was pushed already."""
        place = self.bucket_of[parameter]
        with self._lock:
            if place in self.pushed:
                raise RuntimeError(
                    "a gradient grew after it was pushed: one parameter is used in several reentrant checkpoints; use "
                    "torch.utils.checkpoint(..., use_reentrant=False)"
                )
            self._waiting[place].discard(parameter)
            if self._waiting[place]:
                return None
            self.pushed.add(place)
            return place

    def rest(self) -> Iterator[int]:
        """Buckets that are not full and have gradients."""
        for place, bucket in enumerate(self.buckets):
            if place not in self.pushed and any(
                slot.trains and slot.parameter.grad is not None for slot in bucket.slots
            ):
                self.pushed.add(place)
                yield place

    def remember(self) -> None:
        """Gradients are as they were pushed."""
        self._sent = {
            slot.parameter: (id(slot.parameter.grad), slot.parameter.grad._version)
            for place in self.pushed
            for slot in self.buckets[place].slots
            if slot.parameter.grad is not None
        }

    def check(self, whose: str) -> None:
        """RuntimeError with the cure unless all gradients are as they were pushed, to an algorithm of this name."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                gradient = slot.parameter.grad
                if not slot.trains or (gradient is None and slot.parameter not in self._sent):
                    continue
                if gradient is None:
                    raise RuntimeError(
                        f"the gradient of {slot.name} was removed after it was handed over, and would be stepped all "
                        "the same: leave out the step, freeze the parameter (requires_grad_(False)) before its "
                        "backward, or use a strategy that steps on each rank, such as 'ring'"
                    )
                if slot.parameter not in self._sent:
                    raise RuntimeError(
                        f"the gradient of {slot.name} was not handed over, because it only accumulated, or because a "
                        "backward that the strategy does not know of made it: do the last backward before a step "
                        "outside of block_backward_sync(), and by self.manual_backward(loss)"
                    )
                if self._sent[slot.parameter] != (id(gradient), gradient._version):
                    raise RuntimeError(
                        f"the gradient of {slot.name} was changed after it was handed over, so the change would be "
                        f"lost: clip by {whose}(clip_norm=...), scale the loss instead of gradients, or use a strategy "
                        "that steps on each rank, such as 'ring'"
                    )

    def gradients(self) -> list[Tensor]:
        """Those that were pushed."""
        there = [parameter.grad for parameter in self._sent]
        return [gradient for gradient in there if gradient is not None]

    def drop_gradients(self) -> None:
        """So that the optimizer of this rank has nothing to step."""
        for parameter in self.bucket_of:
            parameter.grad = None
        self._sent, self.pushed = {}, set()

    def is_of(self, parameters: Collection[Parameter]) -> bool:
        """Whether these are its parameters."""
        return not self.bucket_of.keys().isdisjoint(parameters)

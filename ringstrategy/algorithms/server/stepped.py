"""One optimizer's parameters on a rank: which gradients have left for the servers, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ringstrategy.algorithms.server.shards import shards_of
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.requests import Answer

Ask = Callable[..., Future[Answer]]


class Stepped:
    """Parameters that servers step in the place of an optimizer.

    Args:
        number: of the optimizer.
        optimizer: of this rank, which steps nothing.
        buckets: of its parameters.
        servers: how many.
        codec: by which values come.

    Attributes:
        steps: that this rank has pushed.
        bases: the version that came last from each server.
        asked: while a step is under way.
    """

    def __init__(
        self, number: int, optimizer: Optimizer, buckets: Sequence[DenseBucket], servers: int, codec: Codec
    ) -> None:
        self.number, self.optimizer, self.buckets = number, optimizer, buckets
        self.shards = shards_of(buckets, servers)
        self.bucket_of = {slot.parameter: place for place, bucket in enumerate(buckets) for slot in bucket.slots}
        self.dtype = buckets[0].buffer.dtype
        for bucket in buckets:
            self.dtype = torch.promote_types(self.dtype, bucket.buffer.dtype)
        self.begin()
        self._codec = codec
        sizes = [shard.numel for shard in self.shards]
        self._values = [torch.empty(numel, dtype=self.dtype) for numel in sizes]
        raws = [codec.raw(values) for values in self._values]
        self.wires = [
            torch.empty(codec.nbytes(numel, self.dtype), dtype=torch.uint8) if raw is None else raw
            for raw, numel in zip(raws, sizes, strict=True)
        ]
        self._encodes = any(raw is None for raw in raws)
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Parameter]] = {}
        self._sent: dict[Parameter, tuple[int, int]] = {}  # identity and version of gradients

    def begin(self) -> None:
        """Nothing was pushed yet."""
        self.steps, self.bases = 0, [0] * len(self.shards)
        self.pushed: set[int] = set()
        self.asked: list[tuple[int, Future[Answer]]] = []

    # Gradients

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

    def push(self, place: int, ask: Ask, seed: int, rank: int) -> list[tuple[int, Future[Answer]]]:
        """Encode what a bucket has gathered, with error feedback, and push its parts."""
        bucket = self.buckets[place]
        codec, given, lost = bucket.codec, bucket.residuals.given, bucket.residuals.lost
        asked = []
        for server, shard in enumerate(self.shards):
            begin, end, _ = shard.parts[place]
            if begin == end:
                continue
            values = bucket.buffer[begin:end]
            wire = codec.raw(values)
            if wire is None:
                wire = torch.empty(codec.nbytes(end - begin, values.dtype), dtype=torch.uint8, device=values.device)
                codec.hop(
                    (),
                    values,
                    wire,
                    residual=None if given is None else given[begin:end],
                    lost=None if lost is None else lost[begin:end],
                    seed=seed,
                    own_seed=derive_seed(seed, rank),
                    offset=begin,
                )
            meta = {"fragment": self.number, "bucket": place, "seed": seed}
            asked.append((server, ask(server, "push", meta, [wire.cpu()])))
        return asked

    def remember(self) -> None:
        """Gradients are as they were pushed."""
        self._sent = {
            slot.parameter: (id(slot.parameter.grad), slot.parameter.grad._version)
            for place in self.pushed
            for slot in self.buckets[place].slots
            if slot.parameter.grad is not None
        }

    def check(self) -> None:
        """RuntimeError with the cure unless all gradients are as they were pushed."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                gradient = slot.parameter.grad
                if gradient is None or not slot.trains:
                    continue
                if slot.parameter not in self._sent:
                    raise RuntimeError(
                        f"the gradient of {slot.name} did not leave for the servers, because it only accumulated, or "
                        "because a backward that the strategy does not know of made it: do the last backward before a "
                        "step outside of block_backward_sync(), and by self.manual_backward(loss)"
                    )
                if self._sent[slot.parameter] != (id(gradient), gradient._version):
                    raise RuntimeError(
                        f"the gradient of {slot.name} was changed after it had left for the servers, so the change "
                        "would be lost: clip by ParameterServer(clip_norm=...), scale the loss instead of gradients, "
                        "or use a strategy that steps on each rank, such as 'ring'"
                    )

    def used(self, server: int) -> list[int] | None:
        """Which pieces on a server have a gradient of this rank; None: all."""
        pieces = self.shards[server].pieces
        used = [number for number, piece in enumerate(pieces) if piece.parameter in self._sent]
        return None if len(used) == len(pieces) else used

    def gradients(self) -> list[Tensor]:
        """Those that were pushed."""
        there = [parameter.grad for parameter in self._sent]
        return [gradient for gradient in there if gradient is not None]

    def drop_gradients(self) -> None:
        """So that the optimizer of this rank has nothing to step."""
        for parameter in self.bucket_of:
            parameter.grad = None
        self._sent, self.pushed = {}, set()

    # Values

    @torch.no_grad()
    def write(self, answers: Sequence[Answer]) -> None:
        """What has come of all servers are the parameters."""
        for server, answer in enumerate(answers):
            self.bases[server] = answer.meta["version"]
            values = self._values[server]
            if self._encodes:
                self._codec.deliver(self.wires[server], values, seed=self.bases[server])
            pieces = self.shards[server].pieces
            targets = [piece.of(piece.parameter.detach()) for piece in pieces]
            lengths = [piece.end - piece.begin for piece in pieces]
            begins = [piece.place.offset for piece in pieces]
            sources = [values[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
            torch._foreach_copy_(targets, sources)

    # Checks

    def is_of(self, parameters: Collection[Parameter]) -> bool:
        """Whether these are its parameters."""
        return not self.bucket_of.keys().isdisjoint(parameters)

    def described(self) -> list[str]:
        """Lines that must be the same on all ranks."""
        return [bucket.describe() for bucket in self.buckets]


def step_meta(stepped: Stepped, server: int, options: Sequence[Mapping[str, Any]], scale: float) -> dict[str, Any]:
    """What counts the pushes of a step."""
    return {
        "fragment": stepped.number,
        "base": stepped.bases[server],
        "step": {
            "number": stepped.steps,
            "buckets": sorted(stepped.pushed),
            "scale": scale,
            "used": stepped.used(server),
            "options": list(options),
        },
    }

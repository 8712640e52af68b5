"""One optimizer's parameters on a rank: which gradients have left for the servers, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ringstrategy.algorithms.server.gathered import Gathered
from ringstrategy.algorithms.server.shards import shards_of
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.kernels.sample import same, sample
from ringstrategy.requests import Answer


class Stepped(Gathered):
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
        super().__init__(number, optimizer, buckets)
        self.shards = shards_of(buckets, servers)
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

    def begin(self) -> None:
        """Nothing was pushed yet."""
        self.steps, self.bases = 0, [0] * len(self.shards)
        self.pushed = set()
        self.asked: list[tuple[int, Future[Answer]]] = []
        self.remember_values()

    # Gradients

    def encoded(self, place: int, seed: int, rank: int) -> Iterator[tuple[int, Tensor]]:
        """What a bucket has gathered, with error feedback: each server's part, the next rank's first."""
        bucket = self.buckets[place]
        codec, given, lost = bucket.codec, bucket.residuals.given, bucket.residuals.lost
        servers = range(len(self.shards))
        for server in (*servers[rank + 1 :], *servers[: rank + 1]):
            begin, end, _ = self.shards[server].parts[place]
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
            yield server, wire.cpu()

    def used(self, server: int) -> list[int] | None:
        """Which pieces on a server have a gradient of this rank; None: all."""
        pieces = self.shards[server].pieces
        used = [number for number, piece in enumerate(pieces) if piece.parameter in self._sent]
        return None if len(used) == len(pieces) else used

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
            torch._foreach_copy_(targets, [piece.lying_in(values) for piece in pieces])
        self.remember_values()

    def remember_values(self) -> None:
        """The parameters are what the servers have."""
        self._written = [sample(parameter.detach()) for parameter in self.bucket_of]

    def is_as_written(self) -> bool:
        """Whether nobody has written into the parameters since."""
        return all(
            same(sample(parameter.detach()), seen)
            for parameter, seen in zip(self.bucket_of, self._written, strict=True)
        )

    def check_values(self) -> None:
        """RuntimeError with the cure unless the parameters are what the servers have."""
        if not self.is_as_written():
            raise RuntimeError(
                "this rank has written into parameters that servers keep, by clamping, pruning or loading them, and "
                "would lose that with the next step: do it before training, or in the optimizer's step, or use a "
                "strategy that steps on each rank, such as 'ring'"
            )

    # What counts a step

    def meta(self, server: int) -> dict[str, Any]:
        """In which version its gradient was computed."""
        return {"fragment": self.number, "base": self.bases[server]}

    def counted(self, server: int, options: Sequence[Mapping[str, Any]], scale: float) -> bytes:
        """JSON, of any length: the pushes that make a step, and how it is made."""
        step = {
            "number": self.steps,
            "buckets": sorted(self.pushed),
            "scale": scale,
            "used": self.used(server),
            "options": list(options),
        }
        return json.dumps(step).encode()

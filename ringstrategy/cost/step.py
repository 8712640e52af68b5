"""Seconds that a training step takes: a backward that fills buckets, and one thread that exchanges them in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import Parameter

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective
from ringstrategy.cost.model import Cost, Machines, exchange_cost

_ROUNDS = 4  # of the fixed point: how long the backward takes depends on how much is exchanged beside it


class Planned(Protocol):
    """What is predicted: see `AllReduce`."""

    @property
    def collective(self) -> Collective:
        """By which each bucket is summed."""

    def plan(self, parameters: Mapping[str, Parameter], sparse: frozenset[str], first_index: int) -> list[Bucket]:
        """The buckets that training would have."""


@dataclass(frozen=True)
class Profile:
    """What a step computes, exchanges aside, in seconds.

    Attributes:
        rest: forward, optimizer and everything else outside the backward.
        backward: alone; gradients complete in it at a constant rate.
    """

    rest: float
    backward: float


@dataclass(frozen=True)
class Prediction:
    """Of one step.

    Attributes:
        seconds: from step to step.
        communication: the exchanges alone.
        bytes_sent: by the rank that sends most.
        bytes_across: by all ranks of a host to other hosts.
    """

    seconds: float
    communication: float
    bytes_sent: int
    bytes_across: int


def predict(
    algorithm: Planned, parameters: Mapping[str, Parameter], machines: Machines, profile: Profile
) -> Prediction:
    """Seconds of a step with `algorithm` (not set up). Its plan of buckets is made and thrown away.

    Sparse gradients, and the few bytes by which ranks agree at each step, are left out.
    """
    buckets = _buckets(algorithm, parameters)
    total = sum(bucket.numel for bucket in buckets)
    # of the gradients, when each bucket is full
    parts = [filled / total for filled in accumulate(bucket.numel for bucket in buckets)]
    known: dict[tuple[object, ...], Cost] = {}

    def cost_of(bucket: DenseBucket, beside_computing: bool) -> Cost:
        feedback = bucket.residuals.lost is not None
        key = (bucket.codec, bucket.buffer.numel(), bucket.buffer.dtype, feedback, beside_computing)
        if key not in known:
            known[key] = exchange_cost(
                machines,
                algorithm.collective,
                bucket.codec,
                bucket.buffer.numel(),
                bucket.buffer.dtype,
                feedback=feedback,
                beside_computing=beside_computing,
            )
        return known[key]

    packing = sum(machines.pack.seconds(bucket.numel) for bucket in buckets)
    backward, end = profile.backward + packing, 0.0
    for _ in range(_ROUNDS):
        now = busy = 0.0
        for bucket, part in zip(buckets, parts, strict=True):
            now = max(now, part * backward)
            alone, beside = cost_of(bucket, False), cost_of(bucket, True)
            hidden = min(1.0, max(0.0, backward - now) / beside.seconds) if beside.seconds else 0.0
            busy += hidden * beside.busy
            now += hidden * beside.seconds + (1 - hidden) * alone.seconds
        backward, end = profile.backward + packing + machines.crowding * busy, now
    costs = [cost_of(bucket, False) for bucket in buckets]
    return Prediction(
        seconds=profile.rest + max(backward, end),
        communication=sum(cost.seconds for cost in costs),
        bytes_sent=sum(cost.bytes_sent for cost in costs),
        bytes_across=sum(cost.bytes_across for cost in costs),
    )


@dataclass(frozen=True)
class Apart:
    """Ranks that train alone, and average their parameters now and then: see `LocalSGD`.

    Attributes:
        interval: steps from one exchange of a parameter to the next.
        late: steps that hide an exchange; 0: ranks wait.
        fragments: exchanges in an interval, each of as many values.
    """

    collective: Collective
    codec: Codec
    feedback: bool
    interval: int
    late: int
    fragments: int


def predict_apart(apart: Apart, numel: int, machines: Machines, profile: Profile) -> Prediction:
    """A step of ranks that average `numel` parameters of float32 every so many steps."""
    cost = exchange_cost(
        machines,
        apart.collective,
        apart.codec,
        -(-numel // apart.fragments),
        feedback=apart.feedback,
        beside_computing=apart.late > 0,
    )
    share = apart.fragments / apart.interval  # of an exchange in each step
    alone = profile.rest + profile.backward
    computing = alone + (machines.crowding * cost.busy * share if apart.late else 0.0)
    waiting = share * max(0.0, cost.seconds - apart.late * computing)
    return Prediction(
        seconds=max(computing + waiting, share * cost.seconds),  # one thread exchanges all fragments
        communication=share * cost.seconds,
        bytes_sent=round(share * cost.bytes_sent),
        bytes_across=round(share * cost.bytes_across),
    )


@dataclass(frozen=True)
class Served:
    """Servers that step what ranks push: see `ParameterServer`.

    Attributes:
        servers: how many; the first ranks.
        codec: of gradients.
        pull: of parameters.
        bucket: values that are pushed together.
    """

    servers: int
    codec: Codec
    feedback: bool
    pull: Codec
    bucket: int


def predict_served(served: Served, numel: int, machines: Machines, profile: Profile) -> Prediction:
    """A step in which ranks push gradients of `numel` values of float32 while they compute, and then pull parameters.

    The busiest link counts: that of a host with many servers, or with many ranks. The servers' optimizers take as long
    as the ranks' would. Ranks that do not wait for each other take as long too, since they share the same links.
    """
    size, across = len(machines.hosts), len(set(machines.hosts)) > 1
    places = machines.hosts if across else tuple(map(str, range(size)))
    link = machines.across if across else machines.inside
    ranks, serving = Counter(places), Counter(places[: served.servers])

    def leaving(up: float, down: float) -> list[float]:
        """Bytes that leave each place, if each rank sends `up` to the servers, and gets `down` from them."""
        kept = {place: serving[place] / served.servers for place in ranks}
        return [each * (1 - kept[place]) * up + (size - each) * kept[place] * down for place, each in ranks.items()]

    def phase(up: float, down: float, work: float) -> tuple[float, float]:
        """Seconds, and those in which a rank is busy."""
        most = max(*leaving(up, down), *leaving(down, up))  # what arrives mirrors what leaves
        busy = work + machines.post * served.servers + machines.transport * most
        return (link.alpha + max(most * link.beta, busy), busy) if size > 1 else (0.0, 0.0)

    push, pull = machines.codecs[served.codec, served.feedback], machines.codecs[served.pull, False]
    up, down = (codec.nbytes(numel, torch.float32) for codec in (served.codec, served.pull))
    count = -(-numel // served.bucket)
    each, share = numel // count, 1 / served.servers
    adding = size * push.add.seconds(round(each * share))
    bucket, busy = phase(up / count, 0.0, push.encode.seconds(each) + adding)
    back, _ = phase(0.0, down, pull.encode.seconds(round(numel * share)) + pull.decode.seconds(numel))
    backward = profile.backward + machines.pack.seconds(numel) + machines.crowding * busy * count
    end = 0.0
    for place in range(count):
        end = max(end, (place + 1) / count * backward) + bucket
    return Prediction(
        seconds=profile.rest + max(backward, end) + back,
        communication=bucket * count + back,
        bytes_sent=round(up * (1 - share) + down * share * (size - 1)),
        bytes_across=round(max(leaving(up, down))) if across else 0,
    )


def _buckets(algorithm: Planned, parameters: Mapping[str, Parameter]) -> list[DenseBucket]:
    """The buckets that `algorithm` would make, without memory."""
    ghosts = {
        name: Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for name, parameter in parameters.items()
    }
    return [bucket for bucket in algorithm.plan(ghosts, frozenset(), 0) if isinstance(bucket, DenseBucket)]

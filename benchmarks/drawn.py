"""Algorithms and optimizers that random trainings draw from, and how far means may be from the exact ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from ringstrategy import (
    AllReduce,
    BlockFloat8,
    BlockInt,
    Cast,
    Choco,
    Codec,
    Direct,
    Gaussian,
    Gossip,
    Native,
    PowerSGD,
    PushSum,
    Ring,
    Rotated,
    Sign,
    SmallExact,
    TopK,
)
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.topologies import Complete, Exponential, OnePeerExponential, RandomMatching, RingGraph, Star

BOUNDS: dict[Codec, float] = {  # of a mean's worst element, in the largest element of all that went in
    Cast("float16"): 2e-3,
    Cast("bfloat16"): 2e-2,
    BlockInt(8): 0.03,
    BlockInt(4, 16): 0.5,
    BlockInt(2, 16): 2.5,
    BlockInt(4, 64, rounding="stochastic"): 0.8,
    BlockFloat8(): 0.3,
    Sign(): 2.5,
    Rotated(Gaussian(4)): 1.0,
    Rotated(Sign()): 2.5,
    TopK(2, 16): 1.2,
}
OTHERS = 2.0  # the bound of PowerSGD
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.05),
    "momentum": partial(optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(optim.Adam, lr=0.01),
    "adamw": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": partial(optim.Adagrad, lr=0.02),
}


def _buckets(rng: random.Random) -> tuple[float, bool]:
    return rng.choice((1e-4, 1e-3, 25.0)), rng.random() < 0.3


def lossless(rng: random.Random) -> Algorithm:
    """An all-reduce whose mean is exact but for rounding."""
    bucket_mb, finds = _buckets(rng)
    collective = rng.choice((Ring(), Ring(1), Ring(3), Direct(1), Direct(3), Native()))
    return AllReduce(None, collective, False, bucket_mb, finds)


def lossy(rng: random.Random) -> Algorithm:
    """An all-reduce with a codec, or PowerSGD."""
    bucket_mb, finds = _buckets(rng)
    if rng.random() < 0.2:
        return PowerSGD(rng.choice((1, 2, 3)), bucket_mb=bucket_mb, find_unused_parameters=finds)
    codec = rng.choice(list(BOUNDS))
    policy: Any = SmallExact(codec, below=rng.choice((8, 40))) if rng.random() < 0.3 else codec
    collective = Ring(rng.choice((1, 2, 3))) if codec.hop_by_hop and rng.random() < 0.5 else Direct()
    feedback = rng.random() < 0.5
    dtype = rng.choice((None, None, torch.bfloat16)) if feedback else None
    return AllReduce(policy, collective, feedback, bucket_mb, finds, residual_dtype=dtype)


def gossip(rng: random.Random) -> Algorithm:
    """One that averages parameters."""
    interval = rng.choice((1, 1, 2, 3))
    overlap = rng.choice((False, True, min(interval, 2)))
    mixed = rng.choice((RingGraph(), Complete(), Star(), OnePeerExponential(), RandomMatching()))
    static = rng.choice((RingGraph(), Complete(), Star()))
    choice = rng.choice(("gossip", "unequal", "push sum", "choco"))
    if choice == "gossip":
        return Gossip(mixed, rng.choice((None, Cast("bf16"))), interval, overlap)
    if choice == "unequal":
        return Gossip(static, None, interval, bool(overlap), unequal_data=True)
    if choice == "push sum":
        return PushSum(rng.choice((Exponential(), OnePeerExponential())), interval=interval, overlap=overlap)
    return Choco(static, rng.choice((None, BlockInt(4, block=16), Cast("bf16"))), interval=interval)

"""The one table of registered names, and their registration with Lightning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from ringstrategy.algorithms import Algorithm, AllReduce, Auto, Choco, Gossip, PowerSGD, PushSum
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Gaussian, Rotated, TopK
from ringstrategy.collectives import Direct
from ringstrategy.strategy import RingStrategy
from ringstrategy.topologies import OnePeerExponential

STRATEGIES: dict[str, Callable[[], Algorithm]] = {
    "ring": lambda: AllReduce(),
    "ring_fp16": lambda: AllReduce(Cast("float16")),
    "ring_bf16": lambda: AllReduce(Cast("bfloat16")),
    "ring_fp8": lambda: AllReduce(BlockFloat8()),
    "ring_int8": lambda: AllReduce(BlockInt(8)),
    "ring_int4": lambda: AllReduce(Rotated(Gaussian(4)), Direct()),
    "ring_int2": lambda: AllReduce(Rotated(Gaussian(2)), Direct()),
    "ring_sign": lambda: AllReduce(Rotated(Gaussian(1)), Direct()),
    "ring_topk": lambda: AllReduce(TopK(), Direct()),
    "ring_powersgd": lambda: PowerSGD(collective=Direct()),
    "ring_auto": lambda: Auto(),
    "gossip": lambda: Gossip(),
    "gossip_exponential": lambda: Gossip(OnePeerExponential()),
    "gossip_int8": lambda: Choco(codec=BlockInt(8)),
    "push_sum": lambda: PushSum(),
}
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register() -> None:
    """Make every name known to `lightning.pytorch.Trainer`; again is harmless."""
    for name, algorithm in STRATEGIES.items():
        for suffix, start_method in START_METHODS.items():
            StrategyRegistry.register(
                name + suffix,
                RingStrategy,
                description=f"{algorithm()}, processes started by {start_method}",
                override=True,
                algorithm=algorithm(),
                start_method=start_method,
            )
            other = sys.modules.get("pytorch_lightning.strategies")
            if other is not None:
                other.StrategyRegistry.register(name + suffix, _wrong_lightning, override=True)


def _wrong_lightning(**_: Any) -> Any:
    raise TypeError(
        "ringstrategy is for the package `lightning`; this Trainer is from `pytorch_lightning`, a second copy of it "
        "with other classes: use `from lightning.pytorch import Trainer` (and LightningModule, callbacks, ...)"
    )

"""The one table of names: `Trainer(strategy="ring_int8")` and every other door mean these algorithms by them."""

from __future__ import annotations

from collections.abc import Callable

from ringstrategy.algorithms.auto import Auto
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.gradients.powersgd import PowerSGD
from ringstrategy.algorithms.parameters.choco import Choco
from ringstrategy.algorithms.parameters.gossip import Gossip
from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.algorithms.parameters.push_sum import PushSum
from ringstrategy.algorithms.policy import SmallExact
from ringstrategy.algorithms.server.central_storage import CentralStorage
from ringstrategy.algorithms.server.parameter_server import ParameterServer
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Gaussian, Rotated, TopK
from ringstrategy.collectives import Direct
from ringstrategy.topologies import OnePeerExponential


def _streaming(bits: int) -> LocalSGD:
    """Streaming DiLoCo, whose outer gradients travel in so many bits."""
    return LocalSGD(
        interval=16,
        outer=Nesterov(0.4, 0.8),
        codec=SmallExact(Rotated(Gaussian(bits))),
        collective=Direct(),
        error_feedback=True,
        fragments=4,
        overlap=1,
    )


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
    "local_sgd": lambda: LocalSGD(),
    "diloco": lambda: LocalSGD(interval=32, outer=Nesterov(0.4, 0.8)),
    "diloco_int4": lambda: _streaming(4),
    "diloco_sign": lambda: _streaming(1),
    "parameter_server": lambda: ParameterServer(),
    "parameter_server_async": lambda: ParameterServer(mode="async"),
    "central_storage": lambda: CentralStorage(),
}

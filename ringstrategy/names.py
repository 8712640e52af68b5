"""The one table of names: `Trainer(strategy="ring_int8")` and every other door mean these algorithms by them."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch

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
from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Rotated, TopK
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


def named(name: str) -> Algorithm:
    """The algorithm of this name. ValueError if nobody has it."""
    if name in STRATEGIES:
        return STRATEGIES[name]()
    close = difflib.get_close_matches(name, STRATEGIES, 1)
    raise ValueError(
        f"{name!r} is none of our names"
        + (f", did you mean {close[0]!r}? They are " if close else ": ")
        + f"{', '.join(STRATEGIES)}. Or pass an Algorithm such as ringstrategy.AllReduce()"
    )


def describe(name: str) -> str:
    """The code that a name stands for, without arguments that are the defaults: to be copied and changed.

    `describe("ring_int4")` is `RingStrategy(AllReduce(Rotated(Gaussian(4)), Direct()))`. ValueError if
    nobody has the name.
    """
    if not isinstance(name, str):
        raise TypeError(f"describe takes a name such as 'ring_int4', got {name!r}")
    return f"RingStrategy({as_code(named(name))})"


def as_code(part: Any) -> str:
    """`AllReduce(BlockInt(8), Direct())`: arguments that are not the default, and of a codec always the first one."""
    if isinstance(part, str | torch.dtype):
        return json.dumps(str(part).removeprefix("torch."))
    kind = type(part)
    if not kind.__module__.startswith("ringstrategy."):
        return repr(part)
    arguments = inspect.signature(kind).parameters
    usual = {name: each.default for name, each in arguments.items()}
    if inspect.Parameter.empty not in usual.values():
        default = kind()
        usual = {name: getattr(default, name, None) for name in arguments}
    written: list[str] = []
    for place, (name, plain) in enumerate(usual.items()):
        value, positional = getattr(part, name, None), arguments[name].kind is not inspect.Parameter.KEYWORD_ONLY
        if repr(value) != repr(plain) or (place == 0 and isinstance(part, Codec)):
            code = as_code(value)
            written.append(code if positional and place == len(written) else f"{name}={code}")
    return f"{kind.__name__}({', '.join(written)})"

"""What `RingStrategy` says of arguments that it does not take."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce

_FROM_DDP = {
    "ddp_comm_hook": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "ddp_comm_state": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "ddp_comm_wrapper": "here a codec does that, RingStrategy(AllReduce(codec=...))",
    "bucket_cap_mb": "here it is RingStrategy(AllReduce(bucket_mb=...))",
    "gradient_as_bucket_view": "leave it out, gradients always are views of the buckets",
    "static_graph": "leave it out, nothing here depends on the graph",
    "model_averaging_period": "here it is RingStrategy(Gossip(interval=...))",
}


def check(algorithm: object, timeout: object, broadcast_buffers: object) -> None:
    """TypeError or ValueError with the cure."""
    if algorithm is not None and not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm is an Algorithm such as ringstrategy.AllReduce(), got {algorithm!r}"
            + ("; a codec or a collective goes into it: AllReduce(codec=..., collective=...)" if algorithm else "")
        )
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta such as timedelta(seconds=60), got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    if not isinstance(broadcast_buffers, bool):
        raise TypeError(f"broadcast_buffers is True or False, got {broadcast_buffers!r}")


def about(unknown: Iterable[str], init: Callable[..., None]) -> str:
    """What to write instead of arguments that `init` of `RingStrategy` does not take."""
    own = [name for name in inspect.signature(init).parameters if name not in ("self", "unknown")]
    inner = [name for name in inspect.signature(AllReduce.__init__).parameters if name != "self"]
    hints = []
    for name in unknown:
        if name in inner:
            hints.append(f"{name!r} belongs to the algorithm: RingStrategy(AllReduce({name}=...))")
        elif name in _FROM_DDP:
            hints.append(f"{name!r} is torch DDP's: {_FROM_DDP[name]}")
        else:
            close = difflib.get_close_matches(name, own, 1)
            hints.append(f"{name!r} is unknown" + (f", did you mean {close[0]!r}?" if close else ""))
    return f"RingStrategy: {'; '.join(hints)}. It takes {', '.join(own)}"

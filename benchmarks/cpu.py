"""Where a rank's CPU seconds go: forward and optimizer, backward, packing, encode, decode, and what moves the bytes."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ringstrategy.buckets.base import Bucket
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.codecs.base import Codec

PARTS = ("forward, optimizer", "backward", "packing", "encode", "decode", "gloo")
_OF_CODECS = {"encode": "encode", "reduce": "encode", "hop": "encode", "decode": "decode", "deliver": "decode"}
_spent: defaultdict[str, float] = defaultdict(float)  # by part, in this process
_inside = threading.local()


def seconds() -> dict[str, float]:
    """So far, of this process: `packing`, `encode`, `decode`, `main` of the calling thread, `all` of all threads.

    What a codec does on further threads of its own is only in `all`.
    """
    _count_everywhere()
    return {**_spent, "main": time.thread_time(), "all": time.process_time()}


def parts(begin: dict[str, float], end: dict[str, float], backward: float) -> dict[str, float]:
    """What was spent between, by `PARTS`.

    Args:
        begin: of `seconds`, as `end`; both from the training thread.
        end: later.
        backward: of the training thread, spent in backward passes, packing included.
    """
    spent = {name: value - begin.get(name, 0.0) for name, value in end.items()}
    packing, encode, decode = (spent.get(part, 0.0) for part in ("packing", "encode", "decode"))
    return {
        "forward, optimizer": spent["main"] - backward,
        "backward": backward - packing,
        "packing": packing,
        "encode": encode,
        "decode": decode,
        "gloo": spent["all"] - spent["main"] - encode - decode,
    }


@functools.cache
def _count_everywhere() -> None:
    """From now on."""
    for codec in _subclasses(Codec):
        for name, part in _OF_CODECS.items():
            _count(codec, name, part)
    for name in ("pack", "unpack"):
        _count(Bucket, name, "packing")
    _count(DenseBucket, "take_gradients", "packing")


def _subclasses(family: type[Any]) -> Iterator[type[Any]]:
    yield family
    for child in family.__subclasses__():
        yield from _subclasses(child)


def _count(owner: type[Any], name: str, part: str) -> None:
    """What the outermost of such calls spend."""
    own: Callable[..., Any] | None = vars(owner).get(name)
    if own is None or getattr(own, "__isabstractmethod__", False):
        return

    @functools.wraps(own)
    def counted(*given: Any, **named: Any) -> Any:
        if getattr(_inside, "any", False):
            return own(*given, **named)
        _inside.any, begin = True, time.thread_time()
        try:
            return own(*given, **named)
        finally:
            _inside.any = False
            _spent[part] += time.thread_time() - begin

    setattr(owner, name, counted)

"""Compile the kernels of all named strategies for this CPU: `python -m ringstrategy.app.compile`.

Training compiles what it needs by itself, once a host. Run this where nobody should wait for it: in the build of an
image, before tests, before a first training. What is on disk already is not compiled again.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from ringstrategy.algorithms.policy import SmallExact
from ringstrategy.codecs import BlockInt, Codec, Sign
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import operations
from ringstrategy.names import STRATEGIES

_CPU = torch.device("cpu")
_PROCESSES = 2


def codecs() -> list[Codec]:
    """Those of all names, and the two that pages recommend beside them."""
    found: dict[Codec, None] = {BlockInt(4): None, Sign(): None}
    for make in STRATEGIES.values():
        codec = getattr(make(), "codec", None)
        for each in codec.codecs if isinstance(codec, SmallExact) else (codec,):
            if isinstance(each, Codec):
                found[each] = None
    return list(found)


def kernels() -> list[Callable[[], object]]:
    """A call for each, which compiles it or reads it from disk."""
    makes: list[Callable[[], object]] = [partial(codec.warm_up, _CPU) for codec in codecs()]
    makes += [
        partial(operations.warm_up_mix.on(_CPU), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    rotate_ = partial(operations.rotate_.on(_CPU), torch.zeros(256), signs(0))
    return [*makes, operations.warm_up_nesterov.on(_CPU), rotate_]


def _make(make: Callable[[], object]) -> None:
    make()  # kernels stay in their process


def main() -> None:
    """Compile all, in two processes."""
    begin = time.monotonic()
    count = min(_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as processes:
        for made in [processes.submit(_make, make) for make in kernels()]:
            made.result()
    print(f"kernels for this CPU are on disk ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()

"""On how many cores of a CPU kernels run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch

_WORTHWHILE = 1 << 16  # values of each thread: several times the work that handing it over is
_threads = 1
_users = 0
_counting = threading.Lock()


def free_cores(ranks: int) -> int:
    """Cores for one of so many ranks of this host, less those that torch computes on; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // ranks - torch.get_num_threads())


def begin_threads(count: int) -> None:
    """`use_threads`, until `end_threads`: who else exchanges in this process goes on with these."""
    global _users
    with _counting:
        _users += 1
    use_threads(count)


def end_threads() -> None:
    """The last that ends leaves no thread."""
    global _users
    with _counting:
        _users = max(0, _users - 1)
        if _users == 0:
            use_threads(1)


def use_threads(count: int) -> None:
    """Run long pieces of work on so many cores at once, whoever calls in this process; the bytes are the same.

    With 1 no further thread is left, unless several exchange.
    """
    global _threads
    _threads = count
    if count == 1 and _users <= 1 and _pool.cache_info().currsize:
        _pool().shutdown()
        _pool.cache_clear()


def in_parts(block: int, numel: int, work: Callable[[int, int], None]) -> None:
    """Do the work for all blocks of so many values, a run [first, last) of them on each thread."""
    blocks = -(-numel // block)
    parts = max(1, min(_threads, numel // _WORTHWHILE))
    edges = [blocks * part // parts for part in range(parts + 1)]
    under_way = [_pool().submit(work, edges[part], edges[part + 1]) for part in range(1, parts)]
    try:
        work(edges[0], edges[1])
    finally:
        wait(under_way)
    for part in under_way:
        part.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ringstrategy-codec")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not follow

"""Where the ranks of one attempt meet: a store in which nothing is left of an earlier attempt."""

from __future__ import annotations

import json
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ringstrategy.errors import PlanMismatchError
from ringstrategy.failure.board import has_agent_store
from ringstrategy.failure.store import Clock, poll_seconds
from ringstrategy.transport.exposure import store_at_address

_PREFIX = "ringstrategy/rendezvous"
_QUIET_SECONDS = 60.0  # of waiting before rank 0 says for whom


def store_of_attempt(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store that MASTER_ADDR and MASTER_PORT lead to, with a prefix that only this attempt's ranks know.

    torchrun keeps one store for all attempts (`--max-restarts`), and in it the addresses of processes that have ended:
    ranks that look for each other there connect to them. No number of the attempt will do, because torchrun counts
    restarts on each host by itself. So rank 0 draws a name, and offers it to the ranks whose words of greeting it has
    read; a rank takes only an offer that repeats its own, which no earlier attempt can have known.

    Every rank calls it, before `dist.init_process_group(store=...)`, and returns when all are there.

    Args:
        rank: of this process.
        size: how many ranks there are.
        timeout: how long to wait for the last rank.

    Raises:
        TimeoutError: it names the ranks that did not come.
    """
    end = time.monotonic() + timeout.total_seconds()
    store = None if has_agent_store() else store_at_address(rank, size, timeout)
    if store is None:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore(f"{_PREFIX}/{_meet(store, rank, size, end)}", store)


def _meet(store: dist.Store, rank: int, size: int, end: float, clock: Clock = time) -> str:
    """The name of the attempt, once all ranks know it; `end` is a time of the clock."""
    greeting = uuid.uuid4().hex
    poll = poll_seconds(size)
    if rank == 0:
        name = greeting
        others = {other: f"{_PREFIX}/greeting/{other}" for other in range(1, size)}
        taken = {other: f"{_PREFIX}/{name}/taken/{other}" for other in others}
        read: dict[str, str] = {}
        patience = clock.monotonic() + _QUIET_SECONDS
        while True:
            here = {str(other): _read(store, key) for other, key in others.items()}
            # by the rank that has greeted last, and not by one that has ended since
            missing = [o for o, key in taken.items() if not here[str(o)] or _read(store, key) != here[str(o)]]
            if not missing:
                break
            if here != read:
                read = here
                store.set(f"{_PREFIX}/offer", json.dumps({"name": name, "to": read}))
            if clock.monotonic() > patience:
                patience = end
                warnings.warn(
                    f"ranks {missing} have not come yet: is every process started, with the same strategy?",
                    stacklevel=2,
                )
            _wait_a_little(clock, poll, end, f"ranks {missing} did not come")
        store.set(f"{_PREFIX}/{name}/complete", "")
        return name

    store.set(f"{_PREFIX}/greeting/{rank}", greeting)
    name = ""
    while not (name and store.check([f"{_PREFIX}/{name}/complete"])):
        offer = json.loads(_read(store, f"{_PREFIX}/offer") or '{"to": {}}')
        if offer["to"].get(str(rank)) == greeting and offer["name"] != name:  # a new one, if rank 0 starts again
            name = offer["name"]
            store.set(f"{_PREFIX}/{name}/taken/{rank}", greeting)
        _wait_a_little(
            clock, poll, end, "another rank did not come: see what rank 0 says" if name else "rank 0 did not come"
        )
    return name


def _read(store: dist.Store, key: str) -> str:
    """Empty if nobody has written it."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _wait_a_little(clock: Clock, seconds: float, end: float, missing: str) -> None:
    if clock.monotonic() > end:
        raise TimeoutError(f"{missing} in time: is every process started, with the same strategy?")
    clock.sleep(seconds)


def announce(rank: int) -> int:
    """Before a barrier: announce that this rank trains with a RingStrategy; returns the number of the run."""
    base = dist.distributed_c10d._get_default_store()
    run = base.add(f"ringstrategy/runs/{rank}", 1)
    base.add(f"ringstrategy/run/{run}/{rank}", 1)  # waits for the server, as `set` does not
    return int(run)


def first_of_run(run: int) -> Callable[[str, str], str]:
    """As `BoundedStore.first`, before there is one: in the run of this number."""
    base = dist.distributed_c10d._get_default_store()
    return lambda key, value: base.compare_set(f"ringstrategy/run/{run}/{key}", "", value).decode()


def check_all_announced(run: int, size: int) -> None:
    """After that barrier: raise a PlanMismatchError unless all ranks have announced themselves."""
    base = dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(size) if not base.check([f"ringstrategy/run/{run}/{rank}"])]
    if others:
        raise PlanMismatchError(
            f"rank {', '.join(map(str, others))} does not train with a RingStrategy of this version (but with another "
            "strategy, such as 'ddp'?): give every rank the same Trainer(strategy=...)"
        )

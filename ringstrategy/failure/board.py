"""What the ranks of one set of peers write for each other in the rendezvous store, and which rank has failed first."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from ringstrategy.failure.reach import host_of
from ringstrategy.failure.store import BoundedStore, Clock

GRACE_SECONDS = 3.0  # how long a silent rank, or the first that lost a connection, is given to write to the store
BROKEN = "lost touch"  # the exit reason of a rank of which a connection broke
POLL_SECONDS = 0.02
_GENERATION = "ringstrategy/generation"


def has_agent_store() -> bool:
    """Is the store torchrun's, in the process of its agent? It outlives rank 0, and serves every attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Failure(NamedTuple):
    """The rank that failed first (-1: nobody knows which), and why."""

    rank: int
    cause: str

    @classmethod
    def read(cls, written: str) -> Failure:
        """From the text in the store."""
        rank, cause = written.split(" ", 1)
        return cls(int(rank), cause)


class Board:
    """One rank's view of the store. Calls of `store` raise a RuntimeError if the store is lost or silent.

    Args:
        store: reachable by all ranks, with a prefix of its own for each set of peers.
        rank: this rank.
        size: how many there are.
        store_host: the name or address of the store's machine; may be empty.
        ranks: by which errors name them, and of which rank 0 has the store; None: 0 to size - 1.
        clock: by which this rank waits.
        name: of this set of peers, the same on all of its ranks.

    Attributes:
        store: calls to it take GRACE_SECONDS at most.
        store_rank: the rank whose process has the store; -1: none of them.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        store_host: str = "",
        ranks: Sequence[int] | None = None,
        clock: Clock = time,
        name: str = "",
    ) -> None:
        self.store, self.store_host = BoundedStore(store, GRACE_SECONDS), store_host
        self.rank, self.size, self.name, self.clock = rank, size, name, clock
        self.ranks = range(size) if ranks is None else ranks
        self.store_rank = self.ranks.index(0) if 0 in self.ranks and not has_agent_store() else -1
        self.others = [other for other in range(size) if other != rank]

    @classmethod
    def create(cls, rank: int, size: int, ranks: Sequence[int] | None = None) -> Board:
        """A new one in the default store. All of these ranks call this equally often, also after failures.

        Args:
            rank: this one, among them.
            size: how many.
            ranks: of the default process group, in order; None: all.
        """
        base = dist.distributed_c10d._get_default_store()
        which = "" if ranks is None else f"/{','.join(map(str, ranks))}"
        # counted in the store, so that it is the same on all ranks of this store
        generation = base.add(f"{_GENERATION}{which}/{rank}", 1)
        # over a connection of its own: on the default one nobody is heard while torch waits for a rank
        own = dist.PrefixStore(f"ringstrategy{which}/{generation}", base.clone())  # type: ignore[attr-defined]
        name = f"{'all' if ranks is None else which[1:]} {generation}"
        return cls(own, rank, size, host_of(base), ranks, name=name)

    def publish(self, rank: int, cause: str) -> Failure:
        """Write that a rank has failed, unless another failure is written already; returns the first one."""
        return Failure.read(self.store.first("lost", f"{rank} {cause}"))

    def published(self) -> Failure | None:
        """The failure that was written first."""
        written = self.store.read("lost")
        return None if written is None else Failure.read(written)

    def exit_reason(self, rank: int) -> str | None:
        """Why that rank has left, in its own words; None if it has not left in good order."""
        return self.store.read(f"left/{rank}")

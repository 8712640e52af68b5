"""What a transport offers: `post` starts sends and receives, `submit` runs an exchange beside the training thread."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringstrategy.failure.detector import FailureDetector
from ringstrategy.transport import trace
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import Task

FEW = 16  # ranks of which each may send to each at once: NCCL keeps memory for each such pair


class Handle(Protocol):
    """Sends and receives under way."""

    def wait(self) -> None:
        """Return when the sent tensors may be changed and the received ones read."""


class Waitable(Protocol):
    """What `submit` returns."""

    def wait(self) -> None:
        """Return when the task is done (over NCCL: when it is queued and the current stream will wait for it).

        It raises the task's error.
        """


class Done:
    """What to wait for where all is done already."""

    def wait(self) -> None:
        """At once."""


class Word(NamedTuple):
    """What the ranks of an exchange must agree on.

    Attributes:
        said: lines of the form "name: value" where something has a name.
        details: returns a longer text for the error message, if what was said differs.
    """

    said: str
    details: Callable[[], str]

    @property
    def digest(self) -> bytes:
        """SHA-256 of what was said."""
        return hashlib.sha256(self.said.encode()).digest()


class TransportError(RuntimeError):
    """A transfer failed; `peer` is the rank at the other end, None if all were."""

    def __init__(self, peer: int | None, error: BaseException) -> None:
        self.peer, self.error = peer, error
        super().__init__(str(error))


class Peers(ABC):
    """The ranks that average together, as one of them sees them.

    Attributes:
        rank: this one, 0 <= rank < size.
        size: how many.
        stats: bytes are counted here, where they are handed to the transport.
        control: peers for small host-side messages (itself, unless the data go over NCCL).
        hosts: for each rank which host it is on: equal where ranks share one. By default each has its own.
        queues: is what is posted only queued, for a device that works it off in order? Then each call costs the
            processor more than the wire gains by many short ones.
    """

    queues: bool = False

    def __init__(self, rank: int, size: int, stats: Stats | None = None, hosts: tuple[str, ...] | None = None) -> None:
        self.rank, self.size = rank, size
        self.stats = Stats() if stats is None else stats
        self.hosts = tuple(map(str, range(size))) if hosts is None else hosts
        assert len(self.hosts) == size
        self._scratch: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def control(self) -> Peers:
        """Where small messages on host memory go."""
        return self

    @property
    def detector(self) -> FailureDetector | None:
        """What this rank knows of failures; None where no rank can be lost."""
        return None

    def pairs(self) -> list[tuple[int, int]]:
        """At each distance to whom and from whom, nearest first: so everyone sends to everyone, nobody to one twice."""
        return [((self.rank + d) % self.size, (self.rank - d) % self.size) for d in range(1, self.size)]

    @abstractmethod
    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Start sending and receiving flat uint8 tensors, keyed by the other rank; several posts may be in flight.

        Every rank posts one static schedule: the i-th send from a to b meets the i-th receive at b from a.
        """

    def all_to_all(self, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> Handle:
        """`post` to and from everyone at once, by rank. Empty messages, as to this rank itself, are not sent.

        All ranks call it.
        """
        sends, recvs = (
            {rank: tensor for rank, tensor in enumerate(tensors) if tensor.numel()} for tensors in (leaving, arriving)
        )
        return self.post(sends, recvs)

    def only_with(self, word: Word, *, tagged: bool, where: str) -> Waitable | None:
        """Tasks that are submitted from now on exchange messages only with ranks that said the same word.

        It sends nothing. Messages of ranks that differ never meet, so those ranks wait until they find out why: a
        PlanMismatchError on all of them. None: they do meet, because the exchanges are not `tagged` or this transport
        cannot do it.
        """
        del word, tagged, where
        return None

    def expect(self, source: int, arriving: Tensor) -> None:
        """The next receive from `source` that is not expected yet will be posted with exactly this memory.

        Where a receive may wait for a message of which nobody knows when it leaves, it begins now: a message that is
        expected lands at once, while any other waits until both ends have asked for it.
        """

    def swap(self, target: int, leaving: Tensor, source: int, arriving: Tensor) -> Handle:
        """`post` one send and one receive. Empty messages are not sent, because both ends know their size."""
        return self.post({target: leaving} if leaving.numel() else {}, {source: arriving} if arriving.numel() else {})

    @abstractmethod
    def all_reduce_(self, values: Tensor) -> None:
        """Sum over all peers in place, by the backend's own algorithm."""

    @abstractmethod
    def submit(self, task: Task, where: str) -> Waitable:
        """Run `task` beside the training thread, after all tasks submitted before. `where` goes into its errors."""

    def backlog(self) -> int:
        """How many submitted tasks have not ended, on the device too; 0 where that is not known."""
        return 0

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Wait for all, and count how long the training thread waited."""
        begin = time.perf_counter()
        with trace.span("wait for exchanges"):
            for ticket in tickets:
                ticket.wait()
        self.stats.wait(time.perf_counter() - begin)

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """A flat uint8 tensor of at least `nbytes`, the same memory at each call: no allocation in the steady state."""
        held = self._scratch.get((name, device))
        if held is None or held.numel() < nbytes:
            held = self._scratch[name, device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held

    def forget_scratch(self) -> None:
        """Give that memory back, while nothing is under way."""
        self._scratch.clear()

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Name the lost peer behind a transport's `error`."""
        return error

    def abort(self, cause: str | None) -> None:
        """Tell the other ranks why they must stop, and disconnect. No collective.

        Args:
            cause: an error on this rank; None if this rank goes on without a lost one.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads and connections. Idempotent, never a collective."""

"""Check the store while the training thread waits in a collective of torch; Lightning calls some by itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from ringstrategy.failure import progress
from ringstrategy.failure.board import Board

_SECONDS = 1.0
_COLLECTIVES = "torch.distributed.distributed_c10d"
_EXCHANGES = "ringstrategy.transport."
_TRAINER = ".trainer.trainer"
_OURS = {"contextlib", "ringstrategy", "torch"}
_LIBRARIES = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}
_SAME_CALLS = "call a collective (sync_dist=True, a metric's compute, a barrier) on all ranks or on none"


class CollectiveWatchdog:
    """A thread that watches the thread that creates it, until `close`.

    Args:
        listen: called once a second, wherever the watched thread is, with what it waits in: a collective of the default
            group, or an exchange. None: neither.
        look: called once a second while the watched thread is in a collective; True if it waits in vain.
        break_off: ends that collective with an error.
    """

    def __init__(
        self, listen: Callable[[Wait | None], None], look: Callable[[], bool], break_off: Callable[[], None]
    ) -> None:
        self._listen, self._look, self._break_off = listen, look, break_off
        self._watched = threading.get_ident()
        self._announced: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ringstrategy-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, what: str) -> Generator[None, None, None]:
        """Within, the watched thread may wait in a collective that is in no Python frame: in `what`, for messages."""
        self._announced = what
        try:
            yield
        finally:
            self._announced = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_SECONDS)

    def _loop(self) -> None:
        waits = False
        while not self._closed.wait(_SECONDS):
            waited, waits = waits, self._in_a_collective()
            with contextlib.suppress(RuntimeError):  # the store is gone: what is waited for has a timeout of its own
                self._listen(self._waits_in())
                if waited and waits and self._look():
                    self._break_off()
                    return

    def _in_a_collective(self) -> bool:
        if self._announced is not None:
            return True
        return any(_module(frame) == _COLLECTIVES for frame in self._stack())

    def _waits_in(self) -> Wait | None:
        stack = list(self._stack())
        if any(_module(frame).startswith(_EXCHANGES) for frame in stack):
            return Wait("", "an exchange")
        within = [place for place, frame in enumerate(stack) if _module(frame) == _COLLECTIVES]
        if not within:
            return Wait("broadcast", self._announced) if self._announced else None
        called = stack[within[-1]]
        if called.f_locals.get("group") not in (None, dist.group.WORLD):
            return None  # of which not all ranks are
        name = called.f_code.co_name
        callers = [frame for frame in stack[within[-1] :] if _module(frame).partition(".")[0] not in _OURS]
        for frame in callers:
            if _module(frame).endswith(_TRAINER):
                break  # Lightning calls it by itself
            if _module(frame).partition(".")[0] not in _LIBRARIES:
                return Wait(name, f"{name}() at {_line(frame)}")
        return Wait(name, self._announced or f"{name}() at {_line((callers or [called])[0])}")

    def _stack(self) -> Iterator[FrameType]:
        """Of the watched thread, innermost first."""
        frame: FrameType | None = sys._current_frames().get(self._watched)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Wait(NamedTuple):
    """What the training thread of a rank waits in.

    Attributes:
        collective: of torch, on the default group; empty: an exchange of this package.
        where: words for messages.
    """

    collective: str
    where: str


class _Waiting(NamedTuple):
    """A rank's wait, how many collectives of the default group it has called, and how many exchanges it has begun."""

    collective: str
    where: str
    called: int
    exchanges: int

    def misses(self, other: _Waiting) -> bool:
        """Whether the other rank will never come to this collective."""
        if not self.collective:
            return False
        if other.collective:
            return self.called == other.called and self.collective != other.collective
        return self.called > other.called and self.exchanges < other.exchanges


class Waits:
    """Compares what all ranks wait in. One thread may use it."""

    def __init__(self, board: Board, how_far: progress.Progress) -> None:
        self._board, self._progress = board, how_far
        self._waiting: _Waiting | None = None  # the training thread
        self._since = 0.0
        self._has_written = False
        self._seen: tuple[list[str | None], float] | None = None  # the waits of all ranks, and since when they are so

    def compare(self, wait: Wait | None, called: int) -> None:
        """If all ranks wait, and one of them in a collective to which another will not come: publish that.

        Call it once a second. RuntimeError if the store is lost or silent.

        Args:
            wait: of the training thread; None: it does not wait.
            called: how many collectives of the default group it has called.
        """
        mine = None if wait is None else _Waiting(*wait, called, self._progress.exchanges)
        now, key = self._board.clock.monotonic(), f"waits/{self._board.rank}"
        if mine != self._waiting:
            self._waiting, self._since = mine, now
            if self._has_written:
                self._has_written = False
                self._board.store.forget(key)
        elif mine is not None and now > self._since + progress.DOUBT_SECONDS / 2:
            if not self._has_written:
                self._board.store.set(key, "\t".join(map(str, mine)))
                self._has_written = True
            if self._board.rank == 0:
                self._compare_all(now)

    def _compare_all(self, now: float) -> None:
        written = self._board.store.read_all([f"waits/{rank}" for rank in range(self._board.size)])
        if self._seen is None or self._seen[0] != written:
            self._seen = written, now
        if now < self._seen[1] + progress.DOUBT_SECONDS / 4:
            return
        cells = [text.split("\t") for text in written if text is not None]
        waiting = [_Waiting(collective, where, int(called), int(begun)) for collective, where, called, begun in cells]
        if len(waiting) < len(written):
            return  # one may only be late
        missed = [[other for other, its in enumerate(waiting) if mine.misses(its)] for mine in waiting]
        # of two ranks, the one in a call of the user
        alone = max(range(len(missed)), key=lambda rank: (len(missed[rank]), "() at " in waiting[rank].where))
        if missed[alone]:
            other = missed[alone][0]
            there = f"rank {self._board.ranks[other]} in {waiting[other].where}"
            self._board.publish(alone, f"it waits in {waiting[alone].where}, and {there}: {_SAME_CALLS}")

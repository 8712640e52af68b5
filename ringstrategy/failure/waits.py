"""What each rank's training thread waits in: a rank alone in a collective of the user would wait forever."""

from __future__ import annotations

from typing import NamedTuple

from ringstrategy.failure import progress
from ringstrategy.failure.board import Board

_SAME_CALLS = "call a collective (sync_dist=True, a metric's compute, a barrier) on all ranks or on none"


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

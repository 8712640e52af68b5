"""How far each rank is. Ranks that wait for each other at different places would wait forever.

One rank validates while another trains on one more batch, say. So a rank that waits outside training writes its place
to the store, and a rank that waits in training compares.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator
from typing import NamedTuple

from ringstrategy.failure.board import GRACE_SECONDS, Board

DOUBT_SECONDS = 30.0  # of waiting between two batches, after which no other rank is expected there
_REMEMBERED = 100  # places outside training; ranks differ by few of them, for they meet at each
_BETWEEN = "its next batch"
_CHANGE = "parameters that its model got or lost"
_CURE = "If ranks have different numbers of batches, pass uneven='join' to the algorithm"
_SAME_BATCHES = f"do all ranks have the same number of batches? {_CURE}"
_SAME_STEPS = f"do all ranks have the same number of batches, and step equally often? {_CURE}"
_SKIPPED = ", having skipped batch"
_SAME_SKIPS = "skip a batch on all ranks or on none (in Lightning, on_train_batch_start returned -1 there)"
_SAME_MODEL = "give all ranks the same layers, at the same time"
_END = "the end of its training"


def has_ended(exit_reason: str | None) -> bool:
    """Whether a rank that left with this reason has trained to its end."""
    return exit_reason is not None and exit_reason.startswith(_END)


class Place(NamedTuple):
    """Where a rank waits, and after how many batches and exchanges."""

    what: str
    batches: int
    exchanges: int

    def __str__(self) -> str:
        return f"{self.what} after {self.batches} batches and {self.exchanges} exchanges"

    def written(self, rank: int, count: int) -> str:
        """Text for the store."""
        return f"{rank} {count} {self.batches} {self.exchanges} {self.what}"

    @classmethod
    def read(cls, written: str) -> tuple[int, int, Place]:
        """The rank, how often it has been outside training, and its place."""
        rank, count, batches, exchanges, what = written.split(" ", 4)
        return int(rank), int(count), cls(what, int(batches), int(exchanges))


class Progress:
    """How far this rank is. Any thread may call any method; the training thread says where the rank is."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._me = f"rank {board.ranks[board.rank]}"
        self._lock = threading.RLock()  # of all that follows
        self._batches = self._exchanges = 0  # begun
        self._skipped = ""  # the last batch that was begun, in words
        self._outside = 0  # how often this rank was outside training
        self._milestones: deque[Place] = deque(maxlen=_REMEMBERED)  # the last of these places
        self._place: Place | None = None  # where this rank is, unless within a batch
        self._doubted_at: float | None = None  # since when another rank seems to wait elsewhere
        self._asked_at = 0.0  # last

    @property
    def exchanges(self) -> int:
        """How many have begun."""
        with self._lock:
            return self._exchanges

    def begin_batch(self) -> None:
        """This rank trains on the next batch."""
        with self._lock:
            self._batches, self._place, self._doubted_at = self._batches + 1, None, None
            self._skipped = ""

    def end_batch(self, *, skipped: bool = False) -> None:
        """All that the batch had to exchange has begun; nothing, if the user has skipped it."""
        with self._lock:
            self._skipped = f"{_SKIPPED} {self._batches}" if skipped else ""
            what = f"{_BETWEEN}{self._skipped}"
            self._place, self._doubted_at = Place(what, self._batches, self._exchanges), None

    def begin_exchange(self) -> None:
        """This rank takes part in the next exchange: of a backward's gradients, or a mixing of parameters."""
        with self._lock:
            self._exchanges += 1

    def leave_training(self, what: str) -> None:
        """This rank went on to `what`, such as its validation; all ranks do, after as many batches and exchanges."""
        with self._lock:
            what = f"{what}{self._skipped}"
            self._place, self._doubted_at = Place(what, self._batches, self._exchanges), None
            self._milestones.append(self._place)
            self._outside += 1

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Within, all ranks compare the parameters that joined or left the model; at the beginning of a batch."""
        return self.elsewhere(_CHANGE)

    @contextlib.contextmanager
    def elsewhere(self, what: str) -> Generator[None, None, None]:
        """Within, this rank is at `what`, as after `leave_training`; then it trains on."""
        self.leave_training(what)
        try:
            yield
        finally:
            with self._lock:
                self._place = None

    def exit_reason(self) -> str:
        """For a rank that leaves because its training has ended."""
        return f"{_END} after {self._batches} batches{self._skipped}"

    def stopped_with(self, reason: str) -> str:
        """What another rank's exit reason means for this one."""
        if not has_ended(reason):
            return f"it stopped with {reason}"
        at = f"at batch {self._batches}" if self._place is None else f"before batch {self._batches + 1}"
        cure = _SAME_SKIPS if _SKIPPED in reason else _SAME_BATCHES
        return f"it stopped with {reason}, and {self._me} is {at}: {cure}"

    def compare(self) -> bool:
        """Publish another rank that waits where this one will not come, and return True; else write this rank's place.

        RuntimeError if the store is lost or silent.
        """
        # Two notes, because ranks may look in step: what is written last is all that the others ever read, and a rank
        # between two batches must not hide one that went on to something else.
        store = self._board.store
        notes = {key: store.read(key) for key in ("elsewhere", "between")}
        for written in notes.values():
            if written is None:
                continue
            rank, count, theirs = Place.read(written)
            with self._lock:
                differs = self._misses(count, theirs)
            if differs is not None:
                cure = _SAME_SKIPS if _SKIPPED in theirs.what else _SAME_STEPS
                advice = "" if differs.endswith(_SAME_MODEL) else f": {cure}"
                self._board.publish(rank, f"it went on to {theirs}, and {differs}{advice}")
                return True
        with self._lock:
            place, milestones = self._place, self._outside
        if place is not None:
            key = "between" if place.what.startswith(_BETWEEN) else "elsewhere"
            mine = place.written(self._board.rank, milestones)
            if notes[key] != mine:  # else the next one's turn
                store.set(key, mine)
        return False

    def _misses(self, count: int, theirs: Place) -> str | None:
        """Where this rank is, if that cannot fit the place of the other rank; else None.

        The other rank has been outside training `count` times, the present one included.
        """
        here = f"{self._me} is at batch {self._batches}, in exchange {self._exchanges}"
        if theirs.what.startswith(_BETWEEN):
            # after as many batches or more, the other rank had begun fewer exchanges
            return here if self._batches <= theirs.batches and self._exchanges > theirs.exchanges else None
        if count <= self._outside:
            if self._outside - count >= len(self._milestones):
                return None  # long ago
            mine = self._milestones[count - 1 - self._outside]
            return None if mine == theirs else f"{self._me} went on to {mine}"
        if theirs.what == _CHANGE and self._batches == theirs.batches:
            return f"the model of {self._me}, at the same batch, did not change: {_SAME_MODEL}"
        if self._batches > theirs.batches or self._exchanges > theirs.exchanges:
            return here
        if self._place is None or (self._batches, self._exchanges) != theirs[1:]:
            return None
        # Both are equally far. This rank waits for its next batch, or in a collective of the user, which may take long.
        now = self._board.clock.monotonic()
        if self._doubted_at is None or now > self._asked_at + GRACE_SECONDS:
            self._doubted_at = now  # it did not wait all the time
        self._asked_at = now
        doubted = now > self._doubted_at + DOUBT_SECONDS
        return f"{self._me} waits for batch {self._batches + 1}" if doubted else None

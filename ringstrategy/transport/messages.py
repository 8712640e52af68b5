"""What this rank sends and receives, described so that two ranks that differ about a message find out which one.

Every message has a number among those from its sender to its receiver, a length, and a place in training. All three are
in its tag, so a message of another length, or one too many, never meets a receive: both ranks wait. A rank that waits
writes to the store which messages it has begun, and compares the one that it waits for with the other rank's. What a
message is never changes, so a slow rank or an old note accuses nobody.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from ringstrategy.errors import PlanMismatchError
from ringstrategy.failure.board import GRACE_SECONDS, POLL_SECONDS, Board
from ringstrategy.failure.progress import Progress


class Message(NamedTuple):
    """One message, as the sender or the receiver understands it.

    Attributes:
        sender: its rank.
        receiver: its rank.
        control: is it one of the small messages that cannot meet values?
        number: among those of its kind from this sender to this receiver, from 0.
        nbytes: its length.
        where: the place in training.
    """

    sender: int
    receiver: int
    control: bool
    number: int
    nbytes: int
    where: str

    def other(self, rank: int) -> int:
        """The rank at the other end."""
        return self.receiver if rank == self.sender else self.sender

    def digest(self, said: str) -> int:
        """32 bits of `said`, the number, the length and the place: the same in every process."""
        return crc32(f"{said} {self.number} {self.nbytes} {self.where}".encode())


class Messages:
    """The messages of one rank. One thread begins and ends them; any other may look.

    Attributes:
        where: the place in training of the messages that begin now.
        awaited: the message that the thread waits for.
    """

    def __init__(self) -> None:
        self.where = "outside training"
        self.awaited: Message | None = None
        self._begun: dict[tuple[int, int, bool], int] = defaultdict(int)
        self._under_way: dict[Message, None] = {}  # a set in order, copied in one step

    def begin(self, sender: int, receiver: int, control: bool, nbytes: int) -> Message:
        """The next message from `sender` to `receiver`."""
        kind = sender, receiver, control
        message = Message(*kind, self._begun[kind], nbytes, self.where)
        self._begun[kind] += 1
        self._under_way[message] = None
        return message

    def end(self, message: Message) -> None:
        """It has left, or arrived."""
        del self._under_way[message]

    def written(self) -> str:
        """All that are under way, for the store."""
        return json.dumps(list(self._under_way))


def difference(awaited: Message, rank: int, written: str) -> str | None:
    """How the other rank understands the message that this rank waits for; None if in the same way, or not begun.

    Args:
        awaited: the message.
        rank: this rank.
        written: by the other rank.
    """
    for one in json.loads(written):
        theirs = Message(*one)
        if theirs[:4] == awaited[:4] and theirs != awaited:
            sent, expected = (awaited, theirs) if rank == awaited.sender else (theirs, awaited)
            return (
                f"rank {sent.sender} sends {sent.nbytes} bytes {sent.where}, as message {sent.number} to rank "
                f"{sent.receiver}, which expects {expected.nbytes} bytes {expected.where}"
            )
    return None


def misfit(text: str) -> PlanMismatchError:
    """The error for `text`, a difference."""
    return PlanMismatchError(
        f"the ranks differ, so nothing can be averaged: {text}. Run the same code with the same versions and strategy "
        "arguments on every rank"
    )


class Mismatches:
    """What this rank and the others say. One thread at a time may use it. A lost or silent store is no error here."""

    def __init__(self, board: Board, progress: Progress) -> None:
        self._board, self._progress = board, progress
        self._digest_at: str | None = None  # key of the digest that was written last
        self._begun: str | None = None  # messages, as written last

    def differing(self, digest: str, details: Callable[[], str]) -> dict[int, str]:
        """The texts of the ranks that have come to this exchange and waited, if they do not say the same; else none.

        Call it now and then while waiting in an exchange of which all ranks must say the same `digest`. A rank that
        has not come yet is only late.
        """
        board, store = self._board, self._board.store
        try:
            place = f"word/{self._progress.exchanges}"
            earlier, self._digest_at = self._digest_at, place
            if earlier not in (None, place):
                store.forget(earlier)
            differs = f"{place}/differs"
            if store.first(place, digest) == digest and not store.has([differs]):
                return {}
            keys = [f"{place}/{rank}" for rank in range(board.size)]
            store.set(differs, "1")
            store.set(keys[board.rank], details())
            deadline = board.clock.monotonic() + GRACE_SECONDS
            while True:  # they look once a second
                texts = store.read_all(keys)
                if None not in texts or board.clock.monotonic() > deadline:
                    break
                board.clock.sleep(POLL_SECONDS)
        except RuntimeError:
            return {}
        known = {rank: text for rank, text in enumerate(texts) if text is not None}
        return known if len(set(known.values())) > 1 else {}

    def compare_messages(self, begun: str, peer: int) -> str | None:
        """Write which messages this rank has begun; returns what `peer` wrote, None if it has not waited.

        Call it now and then while waiting for a message.
        """
        with contextlib.suppress(RuntimeError):
            if begun != self._begun:
                self._board.store.set(f"begun/{self._board.rank}", begun)
                self._begun = begun
            return self._board.store.read(f"begun/{peer}")
        return None

    def publish(self, text: str) -> str:
        """Tell all ranks that two differ about a message; returns the text that a rank published first."""
        with contextlib.suppress(RuntimeError):
            return self._board.store.first("misfit", text)
        return text

    def published(self) -> str | None:
        """The text that a rank has published."""
        with contextlib.suppress(RuntimeError):
            return self._board.store.read("misfit")
        return None

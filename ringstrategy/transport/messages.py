"""What this rank sends and receives, described so that two ranks that differ about a message find out which one.

Every message has a number among those from its sender to its receiver, a length, and a place in training. All three are
in its tag, so a message of another length, or one too many, never meets a receive: both ranks wait. A rank that waits
writes to the store which messages it has begun, and compares the one that it waits for with the other rank's. What a
message is never changes, so a slow rank or an old note accuses nobody.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import NamedTuple
from zlib import crc32

from ringstrategy.errors import PlanMismatchError


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

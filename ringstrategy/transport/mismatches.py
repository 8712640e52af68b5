"""While a rank waits for another, compare through the store what both say of the exchange, and of its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ringstrategy.failure.board import GRACE_SECONDS, POLL_SECONDS, Board
from ringstrategy.failure.progress import Progress


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

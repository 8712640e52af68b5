"""Failed ranks wait for each other, such as for a checkpoint that one saves and all load, but never for the dead."""

from __future__ import annotations

import contextlib

from ringstrategy.failure.board import GRACE_SECONDS, POLL_SECONDS, Board
from ringstrategy.failure.hosts import Hosts

_PATIENCE_SECONDS = 60.0  # for failed ranks that may still save a checkpoint


class FailureBarrier:
    """A barrier over the store, for ranks whose connections are gone."""

    def __init__(self, board: Board, hosts: Hosts) -> None:
        self._board, self._hosts = board, hosts
        self._waits, self._is_over = 0, False

    def wait(self) -> None:
        """Wait for the other ranks to fail and come here too.

        Ranks that left without a reason are waited for briefly, unless their processes live on this host; others as
        long as saving a checkpoint may take.
        """
        self._waits += 1
        if self._is_over:
            return
        clock, missing = self._board.clock, self._board.others
        with contextlib.suppress(RuntimeError):
            self._board.store.set(f"met/{self._waits}/{self._board.rank}", "")
            begin = clock.monotonic()
            while missing:
                waited = clock.monotonic() - begin
                missing = [rank for rank in missing if self._is_awaited(rank, waited)]
                clock.sleep(POLL_SECONDS)
            return
        self._is_over = True

    def _is_awaited(self, rank: int, waited: float) -> bool:
        if self._board.store.has_any([f"met/{self._waits}/{rank}", f"gone/{rank}"]):
            return False
        alive = self._board.exit_reason(rank) is not None or self._hosts.lives(rank)
        patience = _PATIENCE_SECONDS if alive else GRACE_SECONDS
        if waited > patience:
            self._is_over = True
        return waited <= patience

    def leave(self) -> None:
        """This rank comes to no such barrier any more."""
        with contextlib.suppress(RuntimeError):
            self._board.store.set(f"gone/{self._board.rank}", "")

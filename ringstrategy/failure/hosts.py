"""The hosts of all ranks: their names, their addresses, and whether this rank can reach them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from ringstrategy.failure.board import Board, Failure
from ringstrategy.failure.reach import address_of, address_towards, unreachable
from ringstrategy.failure.store import poll_seconds


class Hosts:
    """The host of each rank, once `exchange` has returned.

    Attributes:
        names: of the hosts, by rank.
        silent: ranks whose hosts could not be reached when `cut_off` last looked.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.names = ["unknown"] * board.size
        self.silent: set[int] = set()
        self._card = ""  # of this host
        self._addresses = [""] * board.size  # from here; empty: not known

    def exchange(
        self,
        card: str,
        timeout: timedelta,
        watch: Callable[[], None],
        stopped_with: Callable[[str], str],
    ) -> list[str] | Failure:
        """The cards of all ranks, or the rank that will not come. RuntimeError if the store is lost or silent.

        Args:
            card: one line that tells this host from others; its first word is the host name.
            timeout: how long the last rank may take.
            watch: called meanwhile; it raises a RuntimeError if a connection broke.
            stopped_with: words for the exit reason of a rank.
        """
        board, store = self._board, self._board.store
        store.set(f"address/{board.rank}", address_towards(board.store_host) if board.store_host else "")
        self._card = card
        store.set(f"process/{board.rank}", f"{os.getpid()} {card}")
        store.set(f"host/{board.rank}", card)
        missing = self._await_cards(timeout, watch, stopped_with)
        if missing is not None:
            return missing
        cards, self._addresses = (
            [said or "" for said in store.read_all([f"{what}/{rank}" for rank in range(board.size)])]
            for what in ("host", "address")
        )
        self.names = [card.partition(" ")[0] for card in cards]
        if board.rank != board.store_rank >= 0 and board.store_host:
            # its own name may lead rank 0 to 127.0.1.1
            self._addresses[board.store_rank] = address_of(board.store_host)
        return cards

    def _await_cards(
        self, timeout: timedelta, watch: Callable[[], None], stopped_with: Callable[[str], str]
    ) -> Failure | None:
        """Wait until all cards are there. Returns the rank that will not come, if one will not, and why."""
        board, store = self._board, self._board.store
        deadline, broken = board.clock.monotonic() + timeout.total_seconds(), ""
        while not store.has([f"host/{rank}" for rank in range(board.size)]):
            missing = [rank for rank in range(board.size) if not store.has([f"host/{rank}"])]
            for rank in missing:
                reason = board.exit_reason(rank)
                if reason is not None:
                    return Failure(rank, stopped_with(reason))
            if missing and (broken or board.clock.monotonic() > deadline):
                late = "it did not come to set up in time. Does its process live, and has it begun to train?"
                return Failure(missing[0], broken or late)
            try:
                watch()
            except RuntimeError as error:  # look for exit reasons once more
                broken = f"it has not come to set up; this rank saw: {str(error).splitlines()[0][:300]}"
                continue
            board.clock.sleep(poll_seconds(board.size))
        return None

    def named(self, rank: int) -> str:
        """The rank and its host, for messages."""
        return f"rank {self._board.ranks[rank]} (host {self.names[rank]})"

    def cut_off(self) -> Failure | None:
        """A rank whose network is down, and how that shows; None if this rank reaches the hosts of all ranks.

        It is this rank if it reaches none of several other hosts.
        """
        here = self._board.rank
        others = {address for address in self._addresses if address} - {self._addresses[here]}
        lost = unreachable(others)
        self.silent = {rank for rank, address in enumerate(self._addresses) if address in lost}
        if not lost:
            return None
        if lost == others and len(others) > 1:
            hosts = ", ".join(sorted(others))
            return Failure(here, f"it can reach no other host ({hosts}): is the network of its host up?")
        rank = min(self.silent)
        which = "either host" if lost == others else "its host"
        where = f"at {self._addresses[rank]} from {self.named(here)}"
        return Failure(rank, f"its host cannot be reached {where}: is the network of {which} up?")

    def lives(self, rank: int) -> bool:
        """Is its process known to live? Nobody knows of another host."""
        pid, _, card = (self._board.store.read(f"process/{rank}") or "").partition(" ")
        if not pid or card != self._card:
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

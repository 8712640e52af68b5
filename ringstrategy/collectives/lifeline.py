"""Find out which rank was lost, and tell every survivor, through the rendezvous store.

A transport only says "the connection to my neighbour closed", and the neighbour may have closed it because *its*
neighbour died. So whoever leaves in good order writes why, before its sockets close; a peer whose connection closes
without a word is the one that died. The first to know publishes its rank. All who notice disconnect, so that ranks
that are no neighbours of the lost one notice too; those that wait for something else look into the store meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time

import torch.distributed as dist

from ringstrategy.errors import PeerLostError

GRACE_SECONDS = 3.0  # how long a silent peer, or the first witness, is given to write to the store
_POLL_SECONDS = 0.02
_WITNESS = "lost touch"


class Lifeline:
    """One rank's line to the store.

    Args:
        store: reachable by all ranks, with a prefix of its own for each set of peers.
        rank: this rank.
        hosts: the host name of each rank.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: list[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        self._left = False
        self._heard_at: float | None = None
        self._hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def leave(self, cause: str) -> None:
        """Write why this rank goes, once. Call it before its connections close."""
        if not self._left:
            self._left = True
            with contextlib.suppress(RuntimeError):  # the store is gone with its host: the others see for themselves
                self._store.set(f"left/{self._rank}", cause)

    def witness(self) -> None:
        """Leave because a connection of this rank's broke. Call it before its other connections close."""
        self.leave(_WITNESS)

    def fail(self, cause: str) -> None:
        """Leave because of an error of this rank's own, and have all the others stop."""
        if not self._left:
            self.leave(cause)
            with contextlib.suppress(RuntimeError):
                self._publish(self._rank, f"it stopped with {cause}")

    def outlast(self) -> None:
        """Note that this rank knows why; if the store ends with this process, wait a little for the others' notes."""
        deadline = time.monotonic() + GRACE_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(f"knows/{self._rank}", "")
            lost = int(self._store.get("lost").split()[0]) if self._store.check(["lost"]) else self._rank
            others = [f"knows/{rank}" for rank in range(len(self._hosts)) if rank not in (self._rank, lost)]
            while self._hosts_store and others and time.monotonic() < deadline and not self._store.check(others):
                time.sleep(_POLL_SECONDS)

    def news(self, where: str) -> PeerLostError | None:
        """The error to raise if some other rank has published a loss; not before this one had time to see it itself."""
        try:
            if not self._store.check(["lost"]):
                return None
            self._heard_at = self._heard_at or time.monotonic()
            if time.monotonic() < self._heard_at + GRACE_SECONDS / 2:
                return None
            rank, cause = self._store.get("lost").decode().split(" ", 1)
        except RuntimeError as error:
            return self.explain(error, None, where)
        self.witness()
        self.outlast()
        return PeerLostError(int(rank), self._hosts[int(rank)], where, f"{cause}, says another rank")

    def explain(self, error: BaseException, peer: int | None, where: str) -> PeerLostError:
        """The error to raise for `error`, seen while talking to `peer` (None: to everybody)."""
        self.witness()
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        try:
            rank, cause = self._culprit(peer, timed_out)
            self.outlast()
        except RuntimeError:
            hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            rank = 0 if hosts_store else -1 if peer is None else peer
            cause = "the rendezvous store on its host went away" if hosts_store else "the rendezvous store went away"
        host = self._hosts[rank] if rank >= 0 else "?"
        advice = (
            ""
            if cause.startswith("it stopped with")
            else " (if it is alive: is the network up, and do GLOO_SOCKET_IFNAME and the host names lead to it?)"
        )
        return PeerLostError(rank, host, where, f"{cause}{advice}; this rank saw: {str(error).splitlines()[0][:300]}")

    def _culprit(self, peer: int | None, timed_out: bool) -> tuple[int, str]:
        """Evidence in falling order: a published name, the peer's own last words, the peer's silence."""
        deadline = time.monotonic() + GRACE_SECONDS
        silence = "it stayed silent beyond the timeout" if timed_out else "its connection closed without a word"
        while True:
            if self._store.check(["lost"]):
                rank, cause = self._store.get("lost").decode().split(" ", 1)
                return int(rank), cause
            late = time.monotonic() > deadline
            if peer is not None:
                words = self._last_words(peer)
                if words is None and (late or not timed_out):
                    return self._publish(peer, silence)
                if words not in (None, _WITNESS):
                    return self._publish(peer, f"it stopped with {words}")
            if late:
                return self._by_roll_call(silence)
            time.sleep(_POLL_SECONDS)

    def _by_roll_call(self, silence: str) -> tuple[int, str]:
        words = {rank: self._last_words(rank) for rank in range(len(self._hosts))}
        for rank, said in words.items():
            if said not in (None, _WITNESS):
                return self._publish(rank, f"it stopped with {said}")
        silent = [rank for rank, said in words.items() if said is None]
        if len(silent) == 1:
            return self._publish(silent[0], silence)
        return -1, f"ranks {silent} have not answered" if silent else "all ranks are alive, but a connection broke"

    def _last_words(self, rank: int) -> str | None:
        key = f"left/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _publish(self, rank: int, cause: str) -> tuple[int, str]:
        said = self._store.compare_set("lost", "", f"{rank} {cause}").decode()  # the first to write wins
        published, cause = said.split(" ", 1)
        return int(published), cause

"""Find out which rank was lost, and tell every survivor, through the rendezvous store.

A transport only reports that the connection to a neighbour closed, and the neighbour may have closed it because *its*
neighbour died. So a rank that leaves in good order writes the reason to the store before its sockets close. If a
connection closes without a reason, the rank at its other end is the one that died. The first rank to know publishes
this. Every rank that notices disconnects, so that ranks further away notice too. Ranks that wait for something else
check the store meanwhile.

The store may be lost or frozen with its host, so no call waits for it longer than a few seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from ringstrategy.errors import PeerLostError
from ringstrategy.failure.barrier import FailureBarrier
from ringstrategy.failure.board import BROKEN, GRACE_SECONDS, POLL_SECONDS, Board, Failure
from ringstrategy.failure.hosts import Hosts
from ringstrategy.failure.progress import Progress
from ringstrategy.failure.store import StoreSilentError
from ringstrategy.failure.watchdog import Waits

_GREETING_SECONDS = 20.0  # for the store while ranks start, when their machines are busy and nobody waits for a step
_ALIVE = ("it stopped with", "it went on to", "it waits in")  # causes of a rank that can still listen


class FailureDetector:
    """What one rank knows of failures. Any thread may call any method.

    A waiting training thread calls `check`, and so do the thread that queues exchanges over NCCL, which waits for
    gloo's, and the watchdog. A communication thread calls `explain` for what broke.

    Args:
        board: of this rank.

    Attributes:
        board: what ranks have written.
        hosts: of all ranks.
        progress: of this rank.
        waits: of all ranks.
        barrier: for failed ranks.
    """

    def __init__(self, board: Board) -> None:
        self.board, self.hosts, self.progress = board, Hosts(board), Progress(board)
        self.waits, self.barrier = Waits(board, self.progress), FailureBarrier(board, self.hosts)
        # Of all that follows. It is held while the store is asked only where `leave` writes, for GRACE_SECONDS at most.
        self._lock = threading.RLock()
        self._left = False
        self._heard: tuple[Failure, float] | None = None  # what was published, and since when this rank knows
        self._knows_since: float | None = None  # why all ranks stop

    def exchange_hosts(self, card: str, timeout: timedelta, watch: Callable[[], None]) -> list[str]:
        """Exchange `card` with all ranks. PeerLostError if a rank has left, or does not come in time.

        Args:
            card: one line that tells this host from others; its first word is the host name.
            timeout: how long the last rank may take.
            watch: called meanwhile; it raises a RuntimeError if a connection broke.
        """
        where, store = "while setting up", self.board.store
        store.limit = _GREETING_SECONDS
        try:
            cards = self.hosts.exchange(card, timeout, watch, self.progress.stopped_with)
            if isinstance(cards, Failure):
                failure = self.board.publish(*cards)
                self.report_broken_connection()
                self._know()
                raise PeerLostError(self.board.ranks[failure.rank], "unknown", where, failure.cause)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise self.explain(error, None, where) from error
        finally:
            store.limit = GRACE_SECONDS
        return cards

    # Leaving

    def leave(self, reason: str | None = None) -> None:
        """Write why this rank leaves, once. Call it before its connections close, in each thread that closes some.

        Args:
            reason: None: training has ended.
        """
        with self._lock:  # a second thread goes on when the reason of the first is in the store
            if not self._left:
                self._left = True
                with contextlib.suppress(RuntimeError):  # the store is gone with its host: the others see it themselves
                    reason = self.progress.exit_reason() if reason is None else reason
                    self.board.store.set(f"left/{self.board.rank}", reason)

    def report_broken_connection(self, error: BaseException | None = None, peers: Sequence[int] = ()) -> None:
        """Leave because a connection of this rank broke. Call it before its other connections close.

        Args:
            error: of that connection.
            peers: that may be at its other end. The first report names one, because other connections break later.
        """
        self.leave(BROKEN)
        if error is not None and peers:
            how = "stayed silent beyond the timeout" if _timed_out(error) else "broke"
            with contextlib.suppress(RuntimeError):
                here = self.hosts.named(self.board.rank)
                self.board.store.first("broke", f"{peers[0]} its connection to {here} {how}")

    def fail(self, reason: str) -> None:
        """Leave because of an error on this rank, and make all other ranks stop."""
        with self._lock:
            leaves = not self._left
            self.leave(reason)
        if leaves:
            with contextlib.suppress(RuntimeError):
                self.board.publish(self.board.rank, f"it stopped with {reason}")
        self._know()

    def _know(self) -> None:
        """Write that this rank knows why all stop: the process with the store waits for it no longer."""
        with self._lock:
            self._knows_since = self._knows_since or self.board.clock.monotonic()
        with contextlib.suppress(RuntimeError):
            self.board.store.set(f"knows/{self.board.rank}", "")

    def linger(self) -> None:
        """If this process ends after a failure, and the store with it: wait until the other ranks know why all stop.

        Also for the lost one: it may live, and notice late that its connections broke. GRACE_SECONDS at most from when
        this rank knew; not for ranks whose hosts cannot be reached.
        """
        board = self.board
        if self._knows_since is None or board.rank != board.store_rank:
            return
        missing = [rank for rank in board.others if rank not in self.hosts.silent]
        with contextlib.suppress(RuntimeError):
            while board.clock.monotonic() < self._knows_since + GRACE_SECONDS:
                missing = [rank for rank in missing if not board.store.has_any([f"knows/{rank}", f"gone/{rank}"])]
                if not missing:
                    return
                board.clock.sleep(POLL_SECONDS)

    # Failures of other ranks

    def check(self, where: str) -> PeerLostError | None:
        """The error to raise if another rank has published a failure, or waits where this one will not come.

        Call it now and then while waiting. A failure is reported only after this rank had time to see it itself.
        """
        try:
            self.poll()
            if self._heard is None:
                return self.explain(RuntimeError("no end of waiting"), None, where) if self.progress.compare() else None
            failure, heard_at = self._heard
            if self.board.clock.monotonic() < heard_at + GRACE_SECONDS / 2:
                return None
        except StoreSilentError:
            return None  # it may only be slow: what is waited for has a timeout of its own
        except RuntimeError as error:
            return self.explain(error, None, where)
        self.report_broken_connection()
        rank, cause = failure
        return PeerLostError(self.board.ranks[rank], self.hosts.names[rank], where, f"{cause}, says another rank")

    def poll(self) -> None:
        """Remember a published failure: the store may be gone with its host when this rank looks again.

        RuntimeError if the store is lost or silent.
        """
        if self._heard is None:
            published = self.board.published()
            if published is not None:
                with self._lock:
                    self._heard = self._heard or (published, self.board.clock.monotonic())
                self._know()

    def explain(self, error: BaseException, peer: int | None, where: str, closed: Sequence[int] = ()) -> PeerLostError:
        """The error to raise for `error`, which came while communicating with `peer` (None: with all ranks).

        Args:
            error: of the transport.
            peer: at the other end.
            where: this rank is.
            closed: the ranks whose connections to this one are closed, by them.
        """
        self.report_broken_connection(error, closed if peer is None else [peer])
        try:
            rank, cause = self._find_failed_rank(peer, _timed_out(error), closed)
            self._know()
        except RuntimeError as failure:
            rank, cause = self._without_store(peer, silent=isinstance(failure, StoreSilentError))
        global_rank, host = (self.board.ranks[rank], self.hosts.names[rank]) if rank >= 0 else (rank, "?")
        advice = (
            ""
            if cause.startswith(_ALIVE) or cause.endswith("?")  # it asks already
            else " (if it is alive: is the network up, and do GLOO_SOCKET_IFNAME and the host names lead to it?)"
        )
        saw = f"{cause}{advice}; this rank saw: {str(error).splitlines()[0][:300]}"
        return PeerLostError(global_rank, host, where, saw)

    def _without_store(self, peer: int | None, *, silent: bool) -> Failure:
        if self._heard is not None:
            return self._heard[0]
        rank = self.board.store_rank if self.board.store_rank >= 0 or peer is None else peer
        store = f"the rendezvous store{' on its host' if rank == self.board.store_rank >= 0 else ''}"
        cause = f"{store} does not answer any more" if silent else f"the connection to {store} closed"
        cause += "" if peer in (None, rank) else f", after the connection to {self.hosts.named(peer)} failed"
        return self.hosts.cut_off() or Failure(rank, cause)

    def _find_failed_rank(self, peer: int | None, timed_out: bool, closed: Sequence[int]) -> Failure:
        """Evidence in falling order: a published failure, exit reasons, a connection closed without any, silence."""
        board = self.board
        deadline = board.clock.monotonic() + GRACE_SECONDS
        no_word = f"its connection to {self.hosts.named(board.rank)} closed without a word"
        silence = "it stayed silent beyond the timeout" if timed_out else no_word
        while True:
            published = board.published()
            if published is not None:
                return published
            late = board.clock.monotonic() > deadline
            for rank in closed:
                reason = board.exit_reason(rank)
                if reason is None:
                    return self._accuse(rank, no_word)
                if reason != BROKEN:
                    return self._publish_exit(rank, reason)
            if peer is not None:
                reason = board.exit_reason(peer)
                if reason is None and (late or not timed_out):
                    return self._accuse(peer, silence)
                if reason not in (None, BROKEN):
                    return self._publish_exit(peer, reason)
            if late:
                return self._by_roll_call(silence)
            board.clock.sleep(POLL_SECONDS)

    def _by_roll_call(self, silence: str) -> Failure:
        reasons = {rank: self.board.exit_reason(rank) for rank in range(self.board.size)}
        for rank, reason in reasons.items():
            if reason not in (None, BROKEN):
                return self._publish_exit(rank, reason)
        silent = [rank for rank, reason in reasons.items() if reason is None]
        cut_off = self.hosts.cut_off() if silent else None
        if cut_off is not None:
            return self.board.publish(*cut_off)
        if len(silent) == 1:
            return self.board.publish(silent[0], silence)
        if silent:
            return Failure(-1, f"ranks {silent} have not answered")
        broke = self.board.store.read("broke")
        if broke is None:
            return Failure(-1, "all ranks are alive, but a connection broke")
        rank, cause = Failure.read(broke)
        return self.board.publish(rank, f"{cause}, and both ranks live: did a firewall or a router end it?")

    def _accuse(self, rank: int, cause: str) -> Failure:
        """Publish a rank that has not written why it left: a host that cannot be reached explains it better."""
        return self.board.publish(*(self.hosts.cut_off() or (rank, cause)))

    def _publish_exit(self, rank: int, reason: str) -> Failure:
        return self.board.publish(rank, self.progress.stopped_with(reason))


def _timed_out(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()

"""Find out which rank was lost, and tell every survivor, through the rendezvous store.

A transport only reports that the connection to a neighbour closed, and the neighbour may have closed it because *its*
neighbour died. So a rank that leaves in good order writes the reason to the store before its sockets close. If a
connection closes without a reason, the peer at its other end is the one that died. The first rank to know publishes
this. Every rank that notices disconnects, so that ranks further away notice too. Ranks that wait for something else
check the store meanwhile.

Ranks may wait for each other at different places (one validates while the other trains on one more batch), and would
wait forever. So a rank that waits outside training writes its place to the store, and a rank that waits in training
compares. The store may be lost or frozen with its host, so no call waits for it longer than a few seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.transport.reach import address_of, address_towards, host_of, unreachable
from ringstrategy.transport.rendezvous import has_agent_store
from ringstrategy.transport.store import BoundedStore, Clock, StoreSilentError, poll_seconds

DOUBT_SECONDS = 30.0  # of waiting between two batches, after which no other rank is expected there
GRACE_SECONDS = 3.0  # how long a silent peer, or the first witness, is given to write to the store
_GREETING_SECONDS = 20.0  # the same while ranks start, when their machines are busy and nobody waits for a step
_PATIENCE_SECONDS = 60.0  # a failed rank waits so long for other failed ranks, which may still save a checkpoint
_POLL_SECONDS = 0.02
_REMEMBERED = 100  # places outside training; ranks differ by few of them, for they meet at each
_WITNESS = "lost touch"
_GENERATION = "ringstrategy/generation"
_BETWEEN = "its next batch"
_CHANGE = "parameters that its model got or lost"
_CURE = "If ranks have different numbers of batches, pass uneven='join' to the algorithm"
_SAME_BATCHES = f"do all ranks have the same number of batches? {_CURE}"
_SAME_STEPS = f"do all ranks have the same number of batches, and step equally often? {_CURE}"
_SKIPPED = ", having skipped batch"
_SAME_SKIPS = "skip a batch on all ranks or on none (in Lightning, on_train_batch_start returned -1 there)"
_SAME_MODEL = "give all ranks the same layers, at the same time"
_SAME_CALLS = "call a collective (sync_dist=True, a metric's compute, a barrier) on all ranks or on none"
_ALIVE = ("it stopped with", "it went on to", "it waits in")  # causes of a rank that can still listen
_LAST_WORDS = "the end of its training"


class _Place(NamedTuple):
    """Where a rank waits, and after how many batches and exchanges."""

    what: str
    batches: int
    exchanges: int

    def __str__(self) -> str:
        return f"{self.what} after {self.batches} batches and {self.exchanges} exchanges"

    def written(self, rank: int, count: int) -> str:
        return f"{rank} {count} {self.batches} {self.exchanges} {self.what}"

    @classmethod
    def read(cls, said: str) -> tuple[int, int, _Place]:
        """The rank, and how often it has been outside training."""
        rank, count, batches, exchanges, what = said.split(" ", 4)
        return int(rank), int(count), cls(what, int(batches), int(exchanges))


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
        """Will the other rank never come to this collective?"""
        if not self.collective:
            return False
        if other.collective:
            return self.called == other.called and self.collective != other.collective
        return self.called > other.called and self.exchanges < other.exchanges


class Lifeline:
    """One rank's line to the store. Any thread may call any method.

    The training thread says where this rank is. It looks for news while it waits for an exchange, and so do the thread
    that queues exchanges over NCCL, which waits for gloo's, and the watch. A communication thread explains what broke.

    Args:
        store: reachable by all ranks, with a prefix of its own for each set of peers.
        rank: this rank.
        size: how many there are.
        store_host: the name or address of the store's machine, by which this rank finds its own address; may be empty.
        ranks: by which errors name them, and of which rank 0 has the store; None: 0 to size - 1.
        clock: by which this rank waits.

    Attributes:
        name: of this set of peers, the same on all of its ranks.
        hosts: the host name of each rank, once it is known.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        store_host: str = "",
        ranks: Sequence[int] | None = None,
        clock: Clock = time,
    ) -> None:
        self._clock = clock
        self._store, self._rank, self._store_host = BoundedStore(store, GRACE_SECONDS), rank, store_host
        self._ranks = range(size) if ranks is None else ranks
        self.name = ""
        self.hosts = ["unknown"] * size
        self._card = ""  # of this rank's host
        self._addresses = [""] * size  # of the hosts, from here; empty: not known
        self._unreachable: set[int] = set()  # ranks, when this one last looked
        # Of all that follows. It is held while the store is asked only where `leave` writes, for GRACE_SECONDS at most.
        self._lock = threading.RLock()
        self._left = False
        self._heard: tuple[str, float] | None = None  # what was published, and since when this rank knows
        self._knows_since: float | None = None  # why all ranks stop
        self._store_rank = self._ranks.index(0) if 0 in self._ranks and not has_agent_store() else -1
        self._batches = self._exchanges = 0  # begun
        self._skipped = ""  # the last batch that was begun, in words
        self._outside = 0  # how often this rank was outside training
        self._milestones: deque[_Place] = deque(maxlen=_REMEMBERED)  # the last of these places
        self._place: _Place | None = None  # where this rank is, unless within a batch
        self._doubted_at: float | None = None  # since when another rank seems to wait elsewhere
        self._asked_at = 0.0  # last
        self._word_at: str | None = None  # key of what was said last
        self._waiting: _Waiting | None = None  # the training thread
        self._waiting_since = 0.0
        self._has_said_wait = False
        self._waits: tuple[list[str | None], float] | None = None  # of all ranks, and since when this rank knows them
        self._begun: str | None = None  # messages, as written last
        self._meetings, self._meet_no_more = 0, False

    @classmethod
    def cast(cls, rank: int, size: int, ranks: Sequence[int] | None = None) -> Lifeline:
        """A new lifeline. All of these ranks call this equally often, also after failures.

        Args:
            rank: this one, among them.
            size: how many.
            ranks: of the default process group, in order; None: all.
        """
        base = dist.distributed_c10d._get_default_store()
        which = "" if ranks is None else f"/{','.join(map(str, ranks))}"
        # counted in the store, so that it is the same on all ranks of this store
        generation = base.add(f"{_GENERATION}{which}/{rank}", 1)
        # over a connection of its own: on the default one nobody is heard while torch waits for a rank
        own = dist.PrefixStore(f"ringstrategy{which}/{generation}", base.clone())  # type: ignore[attr-defined]
        lifeline = cls(own, rank, size, host_of(base), ranks)
        lifeline.name = f"{'all' if ranks is None else which[1:]} {generation}"
        return lifeline

    # Meeting

    def greet(self, card: str, timeout: timedelta, watch: Callable[[], None]) -> list[str]:
        """Exchange `card` with all ranks. PeerLostError if a rank has left, or does not come in time.

        Args:
            card: one line; its first word is the host name.
            timeout: how long the last rank may take.
            watch: called meanwhile; it raises a RuntimeError if a connection broke.
        """
        where = "while setting up"
        self._store.limit = _GREETING_SECONDS
        try:
            self._store.set(f"address/{self._rank}", address_towards(self._store_host) if self._store_host else "")
            self._card = card
            self._store.set(f"process/{self._rank}", f"{os.getpid()} {card}")
            self._store.set(f"host/{self._rank}", card)
            missing, cause = self._await_cards(self._clock.monotonic() + timeout.total_seconds(), watch)
            if missing is not None:
                missing, cause = self._publish(missing, cause)
                self.witness()
                self._know()
                raise PeerLostError(self._ranks[missing], "unknown", where, cause)
            cards, self._addresses = (
                [said or "" for said in self._store.read_all([f"{what}/{rank}" for rank in range(len(self.hosts))])]
                for what in ("host", "address")
            )
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise self.explain(error, None, where) from error
        finally:
            self._store.limit = GRACE_SECONDS
        self.hosts = [card.partition(" ")[0] for card in cards]
        if self._rank != self._store_rank >= 0 and self._store_host:
            # its own name may lead rank 0 to 127.0.1.1
            self._addresses[self._store_rank] = address_of(self._store_host)
        return cards

    def _await_cards(self, deadline: float, watch: Callable[[], None]) -> tuple[int | None, str]:
        """Wait until all cards are there. Returns the rank that will not come, if one will not, and why."""
        size, broken = len(self.hosts), ""
        while not self._store.has([f"host/{rank}" for rank in range(size)]):
            missing = [rank for rank in range(size) if not self._store.has([f"host/{rank}"])]
            for rank in missing:
                words = self._last_words(rank)
                if words is not None:
                    return rank, self._stopped_with(words)
            if missing and (broken or self._clock.monotonic() > deadline):
                late = "it did not come to set up in time. Does its process live, and has it begun to train?"
                return missing[0], broken or late
            try:
                watch()
            except RuntimeError as error:  # look for last words once more
                broken = f"it has not come to set up; this rank saw: {str(error).splitlines()[0][:300]}"
                continue
            self._clock.sleep(poll_seconds(size))
        return None, ""

    def first(self, key: str, value: str) -> str:
        """Write to the store unless there is a value already; returns the value in the store."""
        return self._store.first(key, value)

    # What all ranks are to do

    def ask(self, key: str) -> None:
        """Ask rank 0 to tell all ranks. RuntimeError if the store is lost or silent."""
        self._store.set(key, "")

    def is_asked(self, key: str) -> bool:
        """Has a rank asked for it? RuntimeError as for `ask`."""
        return self._store.has([key])

    def take_back(self, key: str) -> None:
        """It is done."""
        with contextlib.suppress(RuntimeError):
            self._store.forget(key)

    # Leaving

    def leave(self, cause: str | None = None) -> None:
        """Write why this rank leaves, once. Call it before its connections close, in each thread that closes some.

        Args:
            cause: None: training has ended.
        """
        with self._lock:  # whoever comes second goes on when the first one's words are there
            if not self._left:
                self._left = True
                cause = f"{_LAST_WORDS} after {self._batches} batches{self._skipped}" if cause is None else cause
                with contextlib.suppress(
                    RuntimeError
                ):  # the store is gone with its host: the others see for themselves
                    self._store.set(f"left/{self._rank}", cause)

    def witness(self, error: BaseException | None = None, peers: Sequence[int] = ()) -> None:
        """Leave because a connection of this rank broke. Call it before its other connections close.

        Args:
            error: of that connection.
            peers: that may be at its other end. The first witness names one, because other connections break later.
        """
        self.leave(_WITNESS)
        if error is not None and peers:
            how = "stayed silent beyond the timeout" if _timed_out(error) else "broke"
            with contextlib.suppress(RuntimeError):
                self._store.first("broke", f"{peers[0]} its connection to {self._named(self._rank)} {how}")

    def fail(self, cause: str) -> None:
        """Leave because of an error on this rank, and make all other ranks stop."""
        with self._lock:
            leaves = not self._left
            self.leave(cause)
        if leaves:
            with contextlib.suppress(RuntimeError):
                self._publish(self._rank, f"it stopped with {cause}")
        self._know()

    def _know(self) -> None:
        """Write that this rank knows why all stop: the process with the store waits for it no longer."""
        with self._lock:
            self._knows_since = self._knows_since or self._clock.monotonic()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"knows/{self._rank}", "")

    def linger(self) -> None:
        """If this process ends after a failure, and the store with it: wait until the other ranks know why all stop.

        Also for the lost one: it may live, and notice late that its connections broke. GRACE_SECONDS at most from when
        this rank knew; not for ranks whose hosts cannot be reached.
        """
        if self._knows_since is None or self._rank != self._store_rank:
            return
        missing = [rank for rank in range(len(self.hosts)) if rank not in (self._rank, *self._unreachable)]
        with contextlib.suppress(RuntimeError):
            while self._clock.monotonic() < self._knows_since + GRACE_SECONDS:
                missing = [rank for rank in missing if not self._has_any(f"knows/{rank}", f"gone/{rank}")]
                if not missing:
                    return
                self._clock.sleep(_POLL_SECONDS)

    def gather(self) -> None:
        """After a failure, wait for the other failed ranks, as a barrier would; never for dead ranks.

        Ranks that left without a reason are waited for briefly, unless their processes live on this host; others as
        long as saving a checkpoint may take.
        """
        self._meetings += 1
        if self._meet_no_more:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"met/{self._meetings}/{self._rank}", "")
            begin = self._clock.monotonic()
            missing = [rank for rank in range(len(self.hosts)) if rank != self._rank]
            while missing:
                waited = self._clock.monotonic() - begin
                missing = [rank for rank in missing if self._is_waited_for(rank, waited)]
                self._clock.sleep(_POLL_SECONDS)
            return
        self._meet_no_more = True

    def _is_waited_for(self, rank: int, waited: float) -> bool:
        if self._has_any(f"met/{self._meetings}/{rank}", f"gone/{rank}"):
            return False
        patience = _PATIENCE_SECONDS if self._last_words(rank) is not None or self._lives(rank) else GRACE_SECONDS
        if waited > patience:
            self._meet_no_more = True
        return waited <= patience

    def _lives(self, rank: int) -> bool:
        """Is its process known to live? Nobody knows of another host."""
        pid, _, card = (self._store.read(f"process/{rank}") or "").partition(" ")
        if not pid or card != self._card:
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def _has_any(self, *keys: str) -> bool:
        return any(self._store.has([key]) for key in keys)

    def go(self) -> None:
        """This rank takes part in no `gather` any more."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"gone/{self._rank}", "")

    # Where ranks are

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
            self._place, self._doubted_at = _Place(what, self._batches, self._exchanges), None

    def begin_exchange(self) -> None:
        """This rank takes part in the next exchange: of a backward's gradients, or a mixing of parameters."""
        with self._lock:
            self._exchanges += 1

    def leave_training(self, what: str) -> None:
        """This rank went on to `what`, such as its validation; all ranks do, after as many batches and exchanges."""
        with self._lock:
            what = f"{what}{self._skipped}"
            self._place, self._doubted_at = _Place(what, self._batches, self._exchanges), None
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

    def news(self, where: str) -> PeerLostError | None:
        """The error to raise if another rank has published a loss, or waits where this one will not come.

        Call it now and then while waiting. A published loss is reported only after this rank had time to see it itself.
        """
        try:
            self.listen()
            if self._heard is None:
                return self._compare_places(where)
            published, heard_at = self._heard
            if self._clock.monotonic() < heard_at + GRACE_SECONDS / 2:
                return None
        except StoreSilentError:
            return None  # it may only be slow: what is waited for has a timeout of its own
        except RuntimeError as error:
            return self.explain(error, None, where)
        rank, cause = _lost(published)
        self.witness()
        return PeerLostError(self._ranks[rank], self.hosts[rank], where, f"{cause}, says another rank")

    def listen(self) -> None:
        """Remember a published loss: the store may be gone with its host when this rank looks again.

        RuntimeError if the store is lost or silent.
        """
        if self._heard is None:
            published = self._store.read("lost")
            if published is not None:
                with self._lock:
                    self._heard = self._heard or (published, self._clock.monotonic())
                self._know()

    def _compare_places(self, where: str) -> PeerLostError | None:
        # Two notes, because ranks may look in step: what is written last is all that the others ever read, and a rank
        # between two batches must not hide one that went on to something else.
        notes = {key: self._store.read(key) for key in ("elsewhere", "between")}
        for said in notes.values():
            if said is None:
                continue
            rank, count, theirs = _Place.read(said)
            with self._lock:
                differs = self._misses(count, theirs)
            if differs is not None:
                cure = _SAME_SKIPS if _SKIPPED in theirs.what else _SAME_STEPS
                advice = "" if differs.endswith(_SAME_MODEL) else f": {cure}"
                self._publish(rank, f"it went on to {theirs}, and {differs}{advice}")
                return self.explain(RuntimeError("no end of waiting"), None, where)
        with self._lock:
            place, milestones = self._place, self._outside
        if place is not None:
            key = "between" if place.what.startswith(_BETWEEN) else "elsewhere"
            mine = place.written(self._rank, milestones)
            if notes[key] != mine:  # else the next one's turn
                self._store.set(key, mine)
        return None

    def _misses(self, count: int, theirs: _Place) -> str | None:
        """Where this rank is, if that cannot fit the place of the other rank; else None.

        The other rank has been outside training `count` times, the present one included.
        """
        here = f"rank {self._ranks[self._rank]} is at batch {self._batches}, in exchange {self._exchanges}"
        if theirs.what.startswith(_BETWEEN):
            # after as many batches or more, the other rank had begun fewer exchanges
            return here if self._batches <= theirs.batches and self._exchanges > theirs.exchanges else None
        if count <= self._outside:
            if self._outside - count >= len(self._milestones):
                return None  # long ago
            mine = self._milestones[count - 1 - self._outside]
            return None if mine == theirs else f"rank {self._ranks[self._rank]} went on to {mine}"
        if theirs.what == _CHANGE and self._batches == theirs.batches:
            return f"the model of rank {self._ranks[self._rank]}, at the same batch, did not change: {_SAME_MODEL}"
        if self._batches > theirs.batches or self._exchanges > theirs.exchanges:
            return here
        if self._place is None or (self._batches, self._exchanges) != theirs[1:]:
            return None
        # Both are equally far. This rank waits for its next batch, or in a collective of the user, which may take long.
        now = self._clock.monotonic()
        if self._doubted_at is None or now > self._asked_at + GRACE_SECONDS:
            self._doubted_at = now  # it did not wait all the time
        self._asked_at = now
        return (
            f"rank {self._ranks[self._rank]} waits for batch {self._batches + 1}"
            if now > self._doubted_at + DOUBT_SECONDS
            else None
        )

    def waits(self, wait: Wait | None, called: int) -> None:
        """If all ranks wait, and one of them in a collective to which another will not come: publish that.

        Call it once a second, in one thread. RuntimeError if the store is lost or silent.

        Args:
            wait: of the training thread; None: it does not wait.
            called: how many collectives of the default group it has called.
        """
        mine = None if wait is None else _Waiting(*wait, called, self._exchanges)
        now = self._clock.monotonic()
        if mine != self._waiting:
            self._waiting, self._waiting_since = mine, now
            if self._has_said_wait:
                self._has_said_wait = False
                self._store.forget(f"waits/{self._rank}")
        elif mine is not None and now > self._waiting_since + DOUBT_SECONDS / 2:
            if not self._has_said_wait:
                self._store.set(f"waits/{self._rank}", "\t".join(map(str, mine)))
                self._has_said_wait = True
            if self._rank == 0:
                self._compare_waits(now)

    def _compare_waits(self, now: float) -> None:
        said = self._store.read_all([f"waits/{rank}" for rank in range(len(self.hosts))])
        if self._waits is None or self._waits[0] != said:
            self._waits = said, now
        if now < self._waits[1] + DOUBT_SECONDS / 4:
            return
        cells = [text.split("\t") for text in said if text is not None]
        waiting = [_Waiting(collective, where, int(called), int(begun)) for collective, where, called, begun in cells]
        if len(waiting) < len(said):
            return  # one may only be late
        missed = [[other for other, its in enumerate(waiting) if mine.misses(its)] for mine in waiting]
        # of two ranks, the one in a call of the user
        alone = max(range(len(missed)), key=lambda rank: (len(missed[rank]), "() at " in waiting[rank].where))
        if missed[alone]:
            other = missed[alone][0]
            what = f"it waits in {waiting[alone].where}, and rank {self._ranks[other]} in {waiting[other].where}"
            self._publish(alone, f"{what}: {_SAME_CALLS}")

    # What ranks say

    def differing(self, digest: str, details: Callable[[], str]) -> dict[int, str]:
        """The texts of the ranks that have come to this exchange and waited, if they do not say the same; else none.

        Call it now and then while waiting in an exchange of which all ranks must say the same `digest`. A rank that
        has not come yet is only late.
        """
        try:
            with self._lock:
                place = f"word/{self._exchanges}"
                earlier, self._word_at = self._word_at, place
            if earlier not in (None, place):
                self._store.forget(earlier)
            differs = f"{place}/differs"
            if self._store.first(place, digest) == digest and not self._store.has([differs]):
                return {}
            keys = [f"{place}/{rank}" for rank in range(len(self.hosts))]
            self._store.set(differs, "1")
            self._store.set(keys[self._rank], details())
            deadline = self._clock.monotonic() + GRACE_SECONDS
            while True:  # they look once a second
                texts = self._store.read_all(keys)
                if None not in texts or self._clock.monotonic() > deadline:
                    break
                self._clock.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store is silent, or went away with its host: then that is the error
            return {}
        known = {rank: text for rank, text in enumerate(texts) if text is not None}
        return known if len(set(known.values())) > 1 else {}

    def compare_messages(self, begun: str, peer: int) -> str | None:
        """Write which messages this rank has begun; returns what `peer` wrote, None if it has not waited.

        Call it now and then while waiting for a message.
        """
        try:
            if begun != self._begun:
                self._store.set(f"begun/{self._rank}", begun)
                self._begun = begun
            return self._store.read(f"begun/{peer}")
        except RuntimeError:  # as in `differing`
            return None

    def tell_misfit(self, text: str) -> str:
        """Tell all ranks that two differ about a message; returns the text that a rank told first."""
        with contextlib.suppress(RuntimeError):
            return self._store.first("misfit", text)
        return text

    def misfit(self) -> str | None:
        """What a rank has told by `tell_misfit`."""
        with contextlib.suppress(RuntimeError):
            return self._store.read("misfit")
        return None

    # Which rank was lost

    def explain(self, error: BaseException, peer: int | None, where: str, closed: Sequence[int] = ()) -> PeerLostError:
        """The error to raise for `error`, which came while communicating with `peer` (None: with all ranks).

        Args:
            error: of the transport.
            peer: at the other end.
            where: this rank is.
            closed: the ranks whose connections to this one are closed, by them.
        """
        self.witness(error, closed if peer is None else [peer])
        try:
            rank, cause = self._culprit(peer, _timed_out(error), closed)
            self._know()
        except RuntimeError as failure:
            silent = isinstance(failure, StoreSilentError)
            rank = self._store_rank if self._store_rank >= 0 or peer is None else peer
            store = f"the rendezvous store{' on its host' if rank == self._store_rank >= 0 else ''}"
            cause = f"{store} does not answer any more" if silent else f"the connection to {store} closed"
            cause += "" if peer in (None, rank) else f", after the connection to {self._named(peer)} failed"
            rank, cause = _lost(self._heard[0]) if self._heard is not None else self._cut_off() or (rank, cause)
        rank, host = (self._ranks[rank], self.hosts[rank]) if rank >= 0 else (rank, "?")
        advice = (
            ""
            if cause.startswith(_ALIVE) or cause.endswith("?")  # it asks already
            else " (if it is alive: is the network up, and do GLOO_SOCKET_IFNAME and the host names lead to it?)"
        )
        return PeerLostError(rank, host, where, f"{cause}{advice}; this rank saw: {str(error).splitlines()[0][:300]}")

    def _culprit(self, peer: int | None, timed_out: bool, closed: Sequence[int]) -> tuple[int, str]:
        """Evidence in falling order: a published name, last words, a connection closed without any, silence."""
        deadline = self._clock.monotonic() + GRACE_SECONDS
        no_word = f"its connection to {self._named(self._rank)} closed without a word"
        silence = "it stayed silent beyond the timeout" if timed_out else no_word
        while True:
            published = self._store.read("lost")
            if published is not None:
                return _lost(published)
            late = self._clock.monotonic() > deadline
            for rank in closed:
                words = self._last_words(rank)
                if words != _WITNESS:
                    return (
                        self._accuse(rank, no_word) if words is None else self._publish(rank, self._stopped_with(words))
                    )
            if peer is not None:
                words = self._last_words(peer)
                if words is None and (late or not timed_out):
                    return self._accuse(peer, silence)
                if words not in (None, _WITNESS):
                    return self._publish(peer, self._stopped_with(words))
            if late:
                return self._by_roll_call(silence)
            self._clock.sleep(_POLL_SECONDS)

    def _by_roll_call(self, silence: str) -> tuple[int, str]:
        words = {rank: self._last_words(rank) for rank in range(len(self.hosts))}
        for rank, said in words.items():
            if said not in (None, _WITNESS):
                return self._publish(rank, self._stopped_with(said))
        silent = [rank for rank, said in words.items() if said is None]
        cut_off = self._cut_off() if silent else None
        if cut_off is not None:
            return self._publish(*cut_off)
        if len(silent) == 1:
            return self._publish(silent[0], silence)
        if silent:
            return -1, f"ranks {silent} have not answered"
        broke = self._store.read("broke")
        if broke is None:
            return -1, "all ranks are alive, but a connection broke"
        rank, cause = _lost(broke)
        return self._publish(rank, f"{cause}, and both ranks live: did a firewall or a router end it?")

    def _accuse(self, rank: int, cause: str) -> tuple[int, str]:
        """Publish that a rank is lost that has not written why: a host that cannot be reached explains it better."""
        return self._publish(*(self._cut_off() or (rank, cause)))

    def _cut_off(self) -> tuple[int, str] | None:
        """A rank whose network is down, and how that shows; None if this rank reaches the hosts of all ranks.

        It is this rank if it reaches none of several other hosts.
        """
        others = {address for address in self._addresses if address} - {self._addresses[self._rank]}
        lost = unreachable(others)
        self._unreachable = {rank for rank, address in enumerate(self._addresses) if address in lost}
        if not lost:
            return None
        if lost == others and len(others) > 1:
            hosts = ", ".join(sorted(others))
            return self._rank, f"it can reach no other host ({hosts}): is the network of its host up?"
        rank, here = min(self._unreachable), self._named(self._rank)
        which = "either host" if lost == others else "its host"
        return rank, f"its host cannot be reached at {self._addresses[rank]} from {here}: is the network of {which} up?"

    def _named(self, rank: int) -> str:
        return f"rank {self._ranks[rank]} (host {self.hosts[rank]})"

    def _stopped_with(self, words: str) -> str:
        if not words.startswith(_LAST_WORDS):
            return f"it stopped with {words}"
        at = f"at batch {self._batches}" if self._place is None else f"before batch {self._batches + 1}"
        cure = _SAME_SKIPS if _SKIPPED in words else _SAME_BATCHES
        return f"it stopped with {words}, and rank {self._ranks[self._rank]} is {at}: {cure}"

    def _last_words(self, rank: int) -> str | None:
        return self._store.read(f"left/{rank}")

    def _publish(self, rank: int, cause: str) -> tuple[int, str]:
        return _lost(self._store.first("lost", f"{rank} {cause}"))


def _timed_out(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _lost(published: str) -> tuple[int, str]:
    """The rank and the cause."""
    rank, cause = published.split(" ", 1)
    return int(rank), cause


def announce(rank: int) -> int:
    """Before a barrier: announce that this rank trains with a RingStrategy; returns the number of the run."""
    base = dist.distributed_c10d._get_default_store()
    run = base.add(f"ringstrategy/runs/{rank}", 1)
    base.add(f"ringstrategy/run/{run}/{rank}", 1)  # waits for the server, as `set` does not
    return int(run)


def first_of_run(run: int) -> Callable[[str, str], str]:
    """As `Lifeline.first`, before there is one: in the run of this number."""
    base = dist.distributed_c10d._get_default_store()
    return lambda key, value: base.compare_set(f"ringstrategy/run/{run}/{key}", "", value).decode()


def check_all_announced(run: int, size: int) -> None:
    """After that barrier: raise a PlanMismatchError unless all ranks have announced themselves."""
    base = dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(size) if not base.check([f"ringstrategy/run/{run}/{rank}"])]
    if others:
        raise PlanMismatchError(
            f"rank {', '.join(map(str, others))} does not train with a RingStrategy of this version (but with another "
            "strategy, such as 'ddp'?): give every rank the same Trainer(strategy=...)"
        )

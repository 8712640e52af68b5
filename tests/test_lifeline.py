"""A rank's lifeline in several threads at once: every order of their steps is forced, and none may accuse anybody."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from ringstrategy.errors import PeerLostError
from ringstrategy.transport.lifeline import GRACE_SECONDS, Lifeline

pytestmark = pytest.mark.timeout(120)
LIMIT = 20.0
BLOCKED = 0.05  # seconds after which a thread waits for a lock


def ranks() -> tuple[dist.Store, list[Lifeline]]:
    store = dist.HashStore()
    return store, [Lifeline(store, rank, 2) for rank in range(2)]


class Interleaved:
    """Calls `step`, and somewhere within it `other` in a thread; `again` while there are further places.

    The thread has ended when the step goes on, unless it waits for a lock that the step holds.
    """

    def __init__(self) -> None:
        self.places = 0
        self.again = True

    def run(self, step: Callable[[], object], other: Callable[[], object], *, opcodes: bool) -> None:
        left, errors, threads = self.places, list[BaseException](), list[threading.Thread]()

        def beside() -> None:
            try:
                other()
            except BaseException as error:
                errors.append(error)

        def at(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if not isinstance(frame.f_locals.get("self"), Lifeline):
                return None
            frame.f_trace_opcodes = opcodes
            if event == ("opcode" if opcodes else "line"):
                if not left and not threads:
                    threads.append(threading.Thread(target=beside))
                    threads[0].start()
                    threads[0].join(BLOCKED)
                left -= 1
            return at

        tracing = sys.gettrace()
        sys.settrace(at)
        try:
            step()
        finally:
            sys.settrace(tracing)
        self.again = bool(threads)
        self.places += self.again
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        for error in errors:
            raise error


def trains(rank: Lifeline) -> None:
    rank.begin_batch()
    rank.begin_exchange()
    rank.end_batch()


def exchanges(rank: Lifeline) -> None:
    rank.begin_batch()
    rank.begin_exchange()


MOVES: list[Callable[[Lifeline], None]] = [
    Lifeline.begin_batch,
    exchanges,
    trains,
    lambda rank: rank.leave_training("its validation"),
]


@pytest.mark.parametrize("looks_within", [False, True], ids=["a look within a move", "a move within a look"])
@pytest.mark.parametrize("other_first", [False, True], ids=["alone", "behind"])
@pytest.mark.parametrize("move", MOVES)
def test_ranks_that_do_the_same_are_never_accused(
    move: Callable[[Lifeline], None], other_first: bool, looks_within: bool
) -> None:
    interleaved = Interleaved()
    while interleaved.again:
        store, (mine, theirs) = ranks()
        for rank in (mine, theirs):
            trains(rank)
            rank.leave_training("its validation")
            trains(rank)
        if other_first:
            move(theirs)
            assert theirs.news("here") is None
        found: list[object] = []

        def look(rank: Lifeline = mine, found: list[object] = found) -> None:
            found.append(rank.news("here"))

        def go_on(rank: Lifeline = mine) -> None:
            move(rank)

        step, other = (look, go_on) if looks_within else (go_on, look)
        interleaved.run(step, other, opcodes=not looks_within)
        if not other_first:
            move(theirs)
        found += [rank.news("here") for rank in (theirs, mine, theirs)]
        assert found.count(None) == len(found), found
        assert not store.check(["lost"])
    assert interleaved.places > 8


class SlowToWrite:
    """A store in which the last words of a rank arrive late."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.begun, self.arrive = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        if key.startswith("left/"):
            self.begun.set()
            assert self.arrive.wait(LIMIT)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("second", [Lifeline.witness, Lifeline.leave, lambda rank: rank.fail("an error")])
def test_no_thread_disconnects_before_the_last_words_are_there(second: Callable[[Lifeline], None]) -> None:
    store = SlowToWrite(dist.HashStore())
    rank = Lifeline(store, 0, 2)  # type: ignore[arg-type]
    disconnects: list[bool] = []

    def leave() -> None:
        second(rank)
        disconnects.append(store.store.check(["left/0"]))

    threads = [threading.Thread(target=rank.witness), threading.Thread(target=leave)]
    threads[0].start()
    assert store.begun.wait(LIMIT)
    threads[1].start()
    threads[1].join(BLOCKED)
    store.arrive.set()
    for thread in threads:
        thread.join(LIMIT)
    assert disconnects == [True]
    assert store.store.get("left/0") == b"lost touch"
    assert not store.store.check(["lost"]), "only the first reason counts"


class WithItsHost:
    """A store that is gone when the process of rank 0 has ended."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.gone = store, False

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


def broken() -> RuntimeError:
    return RuntimeError("Connection closed by peer")


class Clock:
    """Time passes only where a rank sleeps; then what is due happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = list[tuple[float, Callable[[], object]]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.events if event[0] <= self.now]
        for event in due:
            self.events.remove(event)
            event[1]()


@pytest.mark.parametrize("late", [0.1, 0.45, 0.6, 1.5, GRACE_SECONDS - 0.1, GRACE_SECONDS + 0.1, None])
def test_a_rank_that_lives_and_is_named_hears_of_it_though_it_notices_late(late: float | None) -> None:
    """Rank 0 names at once, and lingers; the accused looks `late`, and may find that the store has gone with rank 0."""
    store, clock = WithItsHost(dist.HashStore()), Clock()
    lines = [Lifeline(store, rank, 3, clock=clock) for rank in range(3)]  # type: ignore[arg-type]
    accused: list[PeerLostError] = []
    if late is not None:
        clock.events.append((late, lambda: accused.append(lines[1].explain(broken(), 2, "here"))))
    assert [lines[rank].explain(broken(), 1, "here").rank for rank in (2, 0)] == [1, 1]
    assert clock.now == 0.0, "nobody is named later because another rank may be late"
    lines[0].linger()
    assert clock.now <= GRACE_SECONDS + 0.1
    store.gone = True
    if late is not None and late < GRACE_SECONDS:
        assert clock.now < late + 0.1
        assert accused[0].rank == 1
    elif late is not None:
        clock.sleep(late)
        assert accused[0].rank == 0
        assert "store on its host closed, after the connection to rank 2 (host unknown) failed" in str(accused[0])


def test_what_was_heard_counts_when_the_store_has_gone() -> None:
    store = WithItsHost(dist.HashStore())
    lines = [Lifeline(store, rank, 3) for rank in range(3)]  # type: ignore[arg-type]
    lines[2].explain(broken(), 1, "here")
    assert lines[1].news("here") is None, "it has time to see it itself"
    store.gone = True
    assert lines[1].explain(broken(), 2, "here").rank == 1

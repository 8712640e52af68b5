"""A rank's failure detector, without processes. Each order of steps is forced; none that does as others is accused."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from clocks import Clock
from pairs import pairs

from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.failure import watchdog
from ringstrategy.failure.board import GRACE_SECONDS, Board
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.progress import DOUBT_SECONDS, Progress
from ringstrategy.failure.store import BoundedStore
from ringstrategy.failure.watchdog import Wait
from ringstrategy.membership import rendezvous
from ringstrategy.transport import gloo
from ringstrategy.transport.base import TransportError
from ringstrategy.transport.gloo import GlooPeers

HARD_END = 120.0
BLOCKED = 0.05  # seconds after which a thread waits for a lock


def lines_of(size: int, clock: Any = None, store: Any = None) -> tuple[Any, list[FailureDetector]]:
    store, clock = store or dist.HashStore(), clock or Clock()
    return store, [FailureDetector(Board(store, rank, size, clock=clock)) for rank in range(size)]


class Switched:
    """A client of a store as torch's is: what it writes is on its way until it next waits for an answer.

    Attributes:
        gone: with the process of rank 0.
        arrive: last words are held up until this is set.
    """

    def __init__(self, store: Any = None) -> None:
        self.store, self.gone = store or dist.HashStore(), False
        self.begun, self.arrive = threading.Event(), threading.Event()
        self.arrive.set()
        self._on_the_way = deque[tuple[str, str]]()

    def set(self, key: str, value: str) -> None:
        if key.startswith("left/"):
            self.begun.set()
            assert self.arrive.wait(HARD_END)
        self._on_the_way.append((key, value))

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise RuntimeError("Broken pipe")
        with contextlib.suppress(IndexError):
            while True:
                self.store.set(*self._on_the_way.popleft())
        return getattr(self.store, name)


# What a store does


@pytest.mark.parametrize(
    "second", [FailureDetector.report_broken_connection, FailureDetector.leave, lambda rank: rank.fail("an error")]
)
def test_no_thread_disconnects_before_the_last_words_are_there(second: Callable[[FailureDetector], None]) -> None:
    store, (rank, _) = lines_of(2, store=Switched())
    store.arrive.clear()

    def leave() -> bool:
        second(rank)
        return bool(store.store.check(["left/0"]))

    with futures.ThreadPoolExecutor(2) as threads:
        threads.submit(rank.report_broken_connection)
        assert store.begun.wait(HARD_END)
        left = threads.submit(leave)
        futures.wait([left], BLOCKED)
        store.arrive.set()
    assert left.result(), "it disconnects before the last words are there"
    assert store.store.get("left/0") == b"lost touch"
    assert not store.store.check(["lost"]), "only the first reason counts"


def test_what_a_rank_writes_is_there_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may look as soon as a barrier, or a closed connection, tells it that this one went on."""
    server = dist.HashStore()
    clients = [Switched(server) for _ in range(2)]
    runs = []
    for client in clients:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda client=client: client)
        runs.append(rendezvous.announce(clients.index(client)))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: clients[0])
    rendezvous.check_all_announced(runs[0], 2)
    with pytest.raises(PlanMismatchError, match="rank 2 does not train with a RingStrategy"):
        rendezvous.check_all_announced(runs[0], 3)
    FailureDetector(Board(clients[1], 1, 2)).leave("ValueError: no such file")  # type: ignore[arg-type]
    assert clients[0].get("left/1") == b"ValueError: no such file"


def test_a_store_that_is_gone_is_not_asked_again() -> None:
    client = mock.Mock()
    client.check.side_effect = dist.DistNetworkError("Broken pipe")
    store = BoundedStore(client, HARD_END)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Broken pipe"):
            store.has(["key"])
    client.check.assert_called_once()


def go(rank: FailureDetector, moves: str) -> None:
    for move in moves.split():
        if move in ("comes", "trains", "begins", "skips"):
            rank.progress.begin_batch()
        if move in ("trains", "begins", "exchanges"):
            rank.progress.begin_exchange()
        if move in ("trains", "skips"):
            rank.progress.end_batch(skipped=move == "skips")
        if move in ("validates", "tests"):
            rank.progress.leave_training(f"the place where it {move}")


@pytest.mark.parametrize(
    ("theirs", "mine", "found"),
    [
        ("trains validates", "trains begins", "it went on to the place where it validates after 1 batches.*at batch 2"),
        ("trains validates", "trains tests", "rank 0 went on to the place where it tests"),
        ("trains trains", "trains begins exchanges", "its next batch after 2 batches.*exchange 3"),
        ("trains skips", "trains begins", "its next batch, having skipped batch 2 after 2 batches"),
        ("skips validates", "begins", "it validates, having skipped batch 1 after 1 batches and 0"),
        ("skips", "skips begins", None),
        ("trains validates", "trains", None),
        ("trains validates", "begins", None),
        ("trains validates", "trains validates begins", None),
        ("trains", "trains begins", None),
    ],
)
def test_a_rank_that_waits_where_this_one_will_not_come_is_named(theirs: str, mine: str, found: str | None) -> None:
    _, (here, there) = lines_of(2)
    go(there, theirs)
    go(here, mine)
    assert there.check("there") is None
    error = here.check("here")
    assert (error is None) == (found is None)
    if error is not None:
        assert error.rank == 1
        with pytest.raises(PeerLostError, match=f"{found}.*(the same number of batches|on all ranks or on none)"):
            raise error


BARRIER, REDUCES, EXCHANGE = (
    Wait("barrier", "barrier() at a.py:1"),
    Wait("all_reduce", "theirs"),
    Wait("", "an exchange"),
)


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ([(EXCHANGE, 1, 2), (BARRIER, 2, 1), (EXCHANGE, 1, 2)], 1),
        ([(REDUCES, 2, 1), (REDUCES, 2, 1), (BARRIER, 2, 1)], 2),
        ([(EXCHANGE, 1, 2), (BARRIER, 2, 1), (None, 1, 2)], None),  # the last one is late
        ([(EXCHANGE, 2, 2), (BARRIER, 2, 1), (EXCHANGE, 2, 2)], None),  # has still to get what the others have sent
        ([(EXCHANGE, 1, 2), (BARRIER, 2, 2), (EXCHANGE, 1, 2)], None),  # has that exchange behind itself
        ([(REDUCES, 1, 1), (BARRIER, 2, 1), (BARRIER, 2, 1)], None),  # the first one is slower
    ],
)
def test_a_rank_alone_in_a_collective_is_named_if_all_wait_in_vain(
    waits: list[tuple[Wait | None, int, int]], named: int | None
) -> None:
    clock = Clock()
    _, lines = lines_of(len(waits), clock)
    for line, (_, _, exchanges) in zip(lines, waits, strict=True):
        for _ in range(exchanges):
            line.progress.begin_exchange()
    while clock.now < DOUBT_SECONDS:
        for line, (wait, called, _) in zip(lines, waits, strict=True):
            line.waits.compare(wait, called)
        clock.sleep(1.0)
    for line in lines:
        line.check("here")
    clock.sleep(GRACE_SECONDS)
    errors = [line.check("here") for line in lines]
    assert [error and error.rank for error in errors] == [named] * len(waits)
    assert all("on all ranks or on none" in str(error) for error in errors if error is not None)


def test_a_rank_that_never_comes_is_named() -> None:
    limit, clock = timedelta(seconds=10), Clock()
    store, never = lines_of(3, clock)
    store.set("host/1", "there 4711")
    with pytest.raises(PeerLostError, match=r"rank 2 .*while setting up: it did not come to set up in time") as caught:
        never[0].exchange_hosts("here 4711", limit, lambda: None)
    assert caught.value.rank == 2
    assert clock.now == pytest.approx(10, abs=0.1)
    _, breaks = lines_of(2, clock)
    begin = clock.now
    with pytest.raises(PeerLostError, match=r"rank 1 .*it has not come to set up; this rank saw: Connection closed"):
        breaks[0].exchange_hosts("here 4711", limit, mock.Mock(side_effect=BROKEN))
    assert clock.now < begin + 0.1, "nobody waits for a rank whose connection broke"
    store, comes = lines_of(3)
    store.set("host/1", "there 4711")
    store.set("host/2", "elsewhere 4712")
    assert comes[0].exchange_hosts("here 4711", limit, lambda: None) == ["here 4711", "there 4711", "elsewhere 4712"]
    assert comes[0].hosts.names == ["here", "there", "elsewhere"]


# Who was lost


BROKEN, SILENT = RuntimeError("Connection closed by peer"), RuntimeError("Timed out waiting 4000ms")


@pytest.mark.parametrize("late", [0.45, 1.5, GRACE_SECONDS - 0.1, GRACE_SECONDS + 0.1, None])
def test_a_rank_that_lives_and_is_named_hears_of_it_though_it_notices_late(late: float | None) -> None:
    """Rank 0 names at once, and lingers; the accused looks `late`, and may find that the store has gone with rank 0."""
    clock = Clock()
    store, lines = lines_of(3, clock, Switched())
    assert lines[2].explain(BROKEN, 1, "here").rank == 1

    def ends() -> None:
        assert lines[0].explain(BROKEN, 1, "here").rank == 1
        assert clock.now == 0.0, "nobody is named later because another rank may be late"
        lines[0].linger()
        assert clock.now <= min(GRACE_SECONDS, late or GRACE_SECONDS) + 0.1
        store.gone = True

    def notices() -> PeerLostError | None:
        clock.sleep(late or 0.0)
        return None if late is None else lines[1].explain(BROKEN, 2, "here")

    ended, accused = clock.run(ends, notices)
    assert ended is None, ended
    if late is not None and late < GRACE_SECONDS:
        assert accused.rank == 1
    elif late is not None:
        assert accused.rank == 0
        assert "store on its host closed, after the connection to rank 2 (host unknown) failed" in str(accused)


def test_what_was_heard_counts_when_the_store_has_gone() -> None:
    clock = Clock()
    store, lines = lines_of(3, clock, Switched())
    lines[2].explain(BROKEN, 1, "here")
    assert lines[1].check("here") is None, "it has time to see it itself"
    clock.sleep(GRACE_SECONDS)
    heard = lines[1].check("here")
    assert heard is not None
    assert heard.rank == 1
    store.gone = True
    assert lines[1].explain(BROKEN, 2, "here").rank == 1


@pytest.mark.parametrize(
    ("words", "error", "peer", "named", "cause"),
    [
        ({}, BROKEN, 2, 2, "closed without a word"),
        ({2: "ValueError: no"}, BROKEN, 2, 2, "it stopped with ValueError: no"),
        ({2: "lost touch"}, BROKEN, 2, 1, "closed without a word|stayed silent|its connection to rank 0"),
        ({1: "ValueError: no", 2: "lost touch"}, BROKEN, 2, 1, "it stopped with ValueError: no"),
        ({}, SILENT, 2, 2, "silent beyond the timeout"),
        ({1: "lost touch", 2: "lost touch"}, BROKEN, 2, 2, "broke, and both ranks live"),
        ({}, BROKEN, None, -1, r"ranks \[1, 2\] have not answered"),
    ],
)
def test_the_rank_that_left_first_is_named(
    words: dict[int, str], error: RuntimeError, peer: int | None, named: int, cause: str
) -> None:
    _, lines = lines_of(3)
    for rank, said in words.items():
        lines[rank].leave(said)
    with pytest.raises(PeerLostError, match=cause) as caught:
        raise lines[0].explain(error, peer, "here")
    assert caught.value.rank == named
    if named >= 0:
        assert lines[2 if named == 1 else 1].explain(BROKEN, 0, "there").rank == named, "all name the same"


def test_a_failed_rank_that_is_late_and_lives_is_waited_for_and_a_dead_one_is_not() -> None:
    """Rank 1 has not even failed yet; rank 2 has been killed, and nobody has asked for its exit code."""
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    clock = Clock()
    store, lines = lines_of(3, clock)
    with pytest.raises(PeerLostError):
        lines[0].exchange_hosts("here 4711", timedelta(0), lambda: None)
    store.set("process/1", f"{os.getpid()} here 4711")
    store.set("process/2", f"{killed.pid} here 4711")
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)

    def fails_late() -> None:
        clock.sleep(3 * GRACE_SECONDS)
        lines[1].barrier.wait()

    ended = []

    def waits() -> None:
        lines[0].barrier.wait()
        ended.append(clock.now)

    clock.run(waits, fails_late)
    assert 3 * GRACE_SECONDS <= ended[0] < 3 * GRACE_SECONDS + 0.1
    killed.communicate()


# What peers over gloo make of it


@pytest.mark.parametrize(
    ("ends", "order", "last"),
    [
        (
            lambda peers: peers.explain(TransportError(1, BROKEN), "here"),
            ["detector.report_broken_connection", "break_off", "break_off_default", "detector.explain"],
            "detector.linger",
        ),
        (lambda peers: peers.abort("ValueError: no"), ["detector.fail", "break_off"], "detector.linger"),
        # goes on with others
        (lambda peers: peers.abort(None), ["detector.report_broken_connection", "break_off"], "detector.barrier.leave"),
    ],
)
def test_last_words_are_written_before_connections_close(
    monkeypatch: pytest.MonkeyPatch, ends: Callable[[GlooPeers], object], order: list[str], last: str
) -> None:
    calls = mock.Mock()
    monkeypatch.setattr(gloo, "break_off", calls.break_off)
    monkeypatch.setattr(gloo, "break_off_default", calls.break_off_default)
    for name, value in {"get_rank": 0, "get_world_size": 2, "get_process_group_ranks": [0, 1]}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    calls.detector.board.name, calls.detector.board.store.read.return_value = "all 1", None
    peers = GlooPeers(mock.Mock(), calls.detector, mock.Mock(), ("here", "here"))
    calls.reset_mock()
    ends(peers)
    peers.close()
    called = [name for name, _, _ in calls.mock_calls if "board" not in name]
    assert called[: len(order)] == order
    assert called[-1] == last


# The thread that looks while another waits


def test_the_watch_ends_a_collective_that_waits_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what has only just begun: it may end at once, and its error names whom it met."""
    turns = iter([False, True, False, True, True])
    events, ended = list[str](), threading.Event()
    monkeypatch.setattr(watchdog, "_SECONDS", 0.001)
    monkeypatch.setattr(watchdog.CollectiveWatchdog, "_in_a_collective", lambda _: next(turns))

    def look() -> bool:
        events.append("look")
        return True

    watching = watchdog.CollectiveWatchdog(lambda _: events.append("listen"), look, ended.set)
    assert ended.wait(HARD_END)
    watching.close()
    assert events == ["listen"] * 5 + ["look"]


class Interleaved:
    """Calls `step`, and somewhere within it `other` in a thread; `again` while there are further places.

    The thread has ended when the step goes on, unless it waits for a lock that the step holds.
    """

    def __init__(self) -> None:
        self.places = 0
        self.again = True

    def run(self, step: Callable[[], object], other: Callable[[], object], *, opcodes: bool) -> None:
        left, begun = self.places, list[futures.Future[object]]()

        def at(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if not isinstance(frame.f_locals.get("self"), FailureDetector | Progress):
                return None
            frame.f_trace_opcodes = opcodes
            if event == ("opcode" if opcodes else "line"):
                if not left and not begun:
                    begun.append(thread.submit(other))
                    futures.wait(begun, BLOCKED)
                left -= 1
            return at

        tracing = sys.gettrace()
        with futures.ThreadPoolExecutor(1) as thread:
            sys.settrace(at)
            try:
                step()
            finally:
                sys.settrace(tracing)
        self.again = bool(begun)
        self.places += self.again
        for future in begun:
            future.result()


@pairs(move=["comes", "begins", "trains", "validates"], other_first=[False, True], looks_within=[False, True])
def test_ranks_that_do_the_same_are_never_accused(move: str, other_first: bool, looks_within: bool) -> None:
    """A look within a move, or a move within a look, at each of its lines."""
    interleaved = Interleaved()
    while interleaved.again:
        store, (mine, theirs) = lines_of(2)
        for rank in (mine, theirs):
            go(rank, "trains validates trains")
        if other_first:
            go(theirs, move)
            assert theirs.check("here") is None
        found: list[object] = []

        def look(rank: FailureDetector = mine, found: list[object] = found) -> None:
            found.append(rank.check("here"))

        go_on = partial(go, mine, move)
        step, other = (look, go_on) if looks_within else (go_on, look)
        interleaved.run(step, other, opcodes=not looks_within)
        if not other_first:
            go(theirs, move)
        found += [rank.check("here") for rank in (theirs, mine, theirs)]
        assert found.count(None) == len(found), found
        assert not store.check(["lost"])
    assert interleaved.places > 8

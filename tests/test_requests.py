"""Requests: what is asked arrives once, whole and in its place; strangers reach nothing; whoever is lost is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import job as job
from jobs import program as program
from torch import Tensor

from benchmarks import ranks
from benchmarks.ranks import Job, Program, note, noted
from ringstrategy.requests import Answer, Client, RefusedError, Request, Server, opening, server, sockets
from ringstrategy.requests.within import Within

SECRET = b"a secret for tests only"
LOCAL = ("127.0.0.1", 0)
END = 60.0  # seconds, hard
until = partial(ranks.until, what="what another thread does", pids=lambda: [os.getpid()], end=END)


def echo(request: Request) -> Answer:
    """What came, in one buffer, and what was said of it."""
    got = torch.empty(request.body.nbytes, dtype=torch.uint8)
    request.body.read_into(got)
    if request.operation == "refuse":
        raise RefusedError(request.meta["why"])
    if request.operation == "fail":
        raise KeyError(request.meta["why"])
    return Answer({**request.meta, "peer": request.peer}, [got[::2] if request.operation == "strided" else got])


@contextlib.contextmanager
def pair(handler: Any = echo, **how: Any) -> Iterator[tuple[Server, Client]]:
    with Server(LOCAL, SECRET, handler, **how) as serves, Client(serves.address, SECRET, name="me") as asks:
        yield serves, asks


def holding() -> tuple[Callable[[Request], Answer], threading.Event, threading.Event]:
    """A handler that keeps a `hold` waiting; whether one has come; lets all go on."""
    came, go = threading.Event(), threading.Event()

    def holds(request: Request) -> Answer:
        if request.operation == "hold":
            came.set()
            assert go.wait(END)
        return Answer({})

    return holds, came, go


def values(number: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(number)).to(dtype)


def moved_by(asks: Client | Within) -> int:
    """Many requests at once, of all kinds and sizes: each gets its own answer; returns the bytes."""
    dtypes = torch.float32, torch.bfloat16, torch.uint8, torch.bool
    sizes = 0, 1, 255, 1_000_003
    asked = []
    for number in range(16):
        parts = [values(number + part, sizes[(number + part) % 4], dtypes[number % 4]) for part in range(2)]
        into = torch.empty(sum(map(len, parts)), dtype=dtypes[number % 4]) if number % 3 else None
        future = asks.ask("echo", {"number": number}, parts, into=into, bulk=number % 5 > 0)
        asked.append((number, torch.cat(parts), into, future))
    for number, sent, into, future in asked:
        meta, [got], _ = future.result(END)
        assert meta == {"number": number, "peer": "me"}
        assert bytes(got) == bytes(sent.view(torch.uint8).numpy())
        assert into is None or torch.equal(into, sent)
    return sum(sent.nbytes for _, sent, _, _ in asked)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_every_request_gets_its_own_answer_in_its_own_place(host: str) -> None:
    with (
        Server((host, 0), SECRET, echo) as serves,
        Client((host or "localhost", serves.address[1]), SECRET, name="me") as asks,
    ):
        moved = moved_by(asks)
        assert (asks.bytes_sent, asks.bytes_received, asks.boot) == (moved, moved, serves.boot)


def test_within_a_process_it_is_the_same_and_nothing_is_sent() -> None:
    asks = Within(echo, name="me")
    assert moved_by(asks) > 1 << 20
    assert asks.bytes_sent == asks.bytes_received == 0
    parts = [values(1, 10, torch.float32), values(2, 7, torch.float32)]
    asks = Within(in_pieces, name="me")
    assert asks.ask("pieces", {}, parts).result(END).meta["sum"] == float(torch.cat(parts).sum())
    asks.close()


def in_pieces(request: Request) -> Answer:
    """Read by pieces that end elsewhere than what was sent."""
    whole = torch.empty(17)
    for begin, end in [(0, 3), (3, 12), (12, 17)]:
        request.body.read_into(whole[begin:end])
    return Answer({"sum": float(whole.sum())})


def test_errors_are_the_askers_and_keep_the_connection() -> None:
    with pair() as (serves, asks), mock.patch.object(serves, "holding", wraps=serves.holding) as opened:
        body = torch.zeros(300_000)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="only contiguous tensors"):
                asks.ask("strided", {}, [body]).result(END)
            with pytest.raises(RefusedError, match="too old"):
                asks.ask("refuse", {"why": "too old"}, [body]).result(END)
            with pytest.raises(RuntimeError, match=r"fail.*KeyError: 'broken'"):
                asks.ask("fail", {"why": "broken"}, [body]).result(END)
            asks.ask("echo", {}, [body], into=torch.empty(300_000)).result(END)
        assert opened.call_count <= 5 + 5  # four for bulk and one for beats; anew once they know which life it is
        with pytest.raises(ValueError, match="1200000 bytes, and there is a place for 8"):
            asks.ask("echo", {}, [body], into=torch.empty(2)).result(END)
        assert asks.ask("echo", {"still": "there"}).result(END).meta["still"] == "there"


def test_a_body_that_nobody_reads_hurts_no_later_request() -> None:
    with pair(lambda request: Answer({"bytes": request.body.nbytes})) as (_, asks):
        for nbytes in (1 << 22, 0, 5):
            assert asks.ask("drop", {}, [bytes(nbytes)]).result(END).meta == {"bytes": nbytes}


def reads_more(request: Request) -> Answer:
    request.body.read_into(bytearray(request.body.nbytes + 1))
    raise AssertionError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Client(LOCAL, b"short", name="me"), "at least 16 bytes, got 5: make one with `openssl"),
        (lambda: Server(LOCAL, b"short", echo), "at least 16 bytes"),
        (lambda: Client(LOCAL, SECRET, name="two\nlines"), "up to 200 letters and digits, got"),
        (lambda: asked("two words"), "a word, got 'two words'"),
        (lambda: asked("größe"), "a word, got"),
        (lambda: asked("echo", {"long": "x" * 60_000}), "send it as a buffer"),
        (lambda: asked("echo", {}, [torch.zeros(4, 4).T[1:]]), "only contiguous tensors on the CPU"),
        (lambda: asked("echo", {}, [torch.zeros(4, device="meta")]), "on meta"),
        (lambda: asked("echo", {}, [b"1234"], handler=reads_more), "5 bytes are wanted, and only 4 of 4"),
    ],
)
def test_what_cannot_be_right_is_an_error_with_the_cure(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


def asked(*what: Any, handler: Any = echo) -> Answer:
    with pair(handler) as (_, asks):
        return asks.ask(*what).result(END)


def test_words_and_beats_do_not_wait_for_bulk_data() -> None:
    began, go = threading.Semaphore(0), threading.Event()
    beats, fails = threading.Semaphore(0), threading.Event()

    def waits(request: Request) -> Answer:
        if request.operation == "bulk":
            began.release()
            assert go.wait(END)
        if request.operation == "beat":
            beats.release()
            if fails.is_set():
                fails.clear()
                raise KeyError("an error is a sign of life")
            return Answer({"version": 7})
        return Answer({})

    with pair(waits, silent=2.0) as (_, asks):  # the server's: by its own 10 s the client would beat too seldom
        slow = [asks.ask("bulk") for _ in range(4)]
        for _ in slow:
            assert began.acquire(timeout=END)
        fails.set()
        asks.ask("word", bulk=False).result(END)
        assert all(beats.acquire(timeout=END) for _ in range(3))
        assert asks.news == {"version": 7}
        go.set()
        for future in slow:
            future.result(END)


@pytest.fixture(scope="module")
def encrypted() -> tuple[ssl.SSLContext, trustme.CA]:
    """What a server needs, and who has signed its certificate."""
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context, authority


@pytest.mark.parametrize("trusts", [True, False])
def test_with_tls_only_those_that_trust_the_certificate_ask(
    encrypted: tuple[ssl.SSLContext, trustme.CA], trusts: bool
) -> None:
    of_server, authority = encrypted
    of_client = ssl.create_default_context()
    if trusts:
        authority.configure_trust(of_client)
    with Server(LOCAL, SECRET, echo, tls=of_server) as serves:
        with Client(serves.address, SECRET, name="me") as plain, pytest.raises(ConnectionError):
            plain.ask("echo").result(END)
        with Client(serves.address, SECRET, name="me", tls=of_client) as asks:
            sent, into = values(1, 300_001, torch.float32), torch.empty(300_001)
            future = asks.ask("echo", {}, [sent], into=into)
            if trusts:
                future.result(END)
                assert torch.equal(into, sent)
            else:
                with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                    future.result(END)


def test_what_is_broken_off_within_tls_is_no_data(encrypted: tuple[ssl.SSLContext, trustme.CA]) -> None:
    """The other side's bytes, still encrypted, lie in the kernel."""
    of_server, authority = encrypted
    of_client = ssl.create_default_context()
    authority.configure_trust(of_client)
    ours, theirs = socket.socketpair()
    opened = threading.Thread(target=lambda: kept.append(of_server.wrap_socket(theirs, server_side=True)), daemon=True)
    kept: list[ssl.SSLSocket] = []
    opened.start()
    with of_client.wrap_socket(ours, server_hostname="127.0.0.1") as reads:
        opened.join(END)
        [writes] = kept
        with writes:
            writes.sendall(b"x" * 40_000)  # several records
            got = sockets.reader(reads).read(1)
            sockets.break_off(reads)
            rest = b""
            with contextlib.suppress(OSError):
                rest = sockets.reader(reads).read()
    assert (got + rest).strip(b"x") == b""


# Strangers


def hello(*, magic: bytes = b"RING", lowest: int = 1, highest: int = 1) -> bytes:
    return struct.pack("!4sBB32s", magic, lowest, highest, bytes(32))


STRANGERS = [
    b"",
    b"POST /echo HTTP/1.1\r\nPeer: me\r\nMeta: {}\r\nContent-Length: 0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
    hello()[:-1],
    hello() + bytes(32) + b"POST /echo HTTP/1.1\r\n\r\n",
    hello(magic=b"GNIR") + bytes(32),
    hello(lowest=2, highest=255) + bytes(32),
    hello(lowest=0, highest=0) + bytes(32),
]


@pytest.fixture(scope="module")
def besieged() -> Iterator[Callable[[bytes], None]]:
    """A server to which strangers send these bytes. It goes on to serve others, and hears nothing of strangers."""
    calls: list[str] = []

    def counts(request: Request) -> Answer:
        calls.append(request.operation)
        return echo(request)

    with pair(counts) as (serves, asks):

        def send(stranger: bytes) -> None:
            before = [call for call in calls if call != "beat"]
            with socket.create_connection(serves.address) as connection, contextlib.suppress(OSError):
                connection.sendall(stranger)
                connection.shutdown(socket.SHUT_WR)
                received = b""
                while part := connection.recv(1 << 16):
                    received += part
                assert len(received) <= len(hello()), "its own proof is for those that know the secret"
            assert [call for call in calls if call != "beat"] == before
            assert asks.ask("echo", {"friend": 1}).result(END).meta["friend"] == 1

        yield send


@pytest.mark.parametrize("stranger", STRANGERS, ids=range(len(STRANGERS)))
def test_strangers_reach_no_handler(besieged: Callable[[bytes], None], stranger: bytes) -> None:
    besieged(stranger)


@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_any_bytes_reach_no_handler(besieged: Callable[[bytes], None], examples: int) -> None:
    begins = st.sampled_from([b"", hello()]) | st.binary(max_size=38)

    @settings(max_examples=examples)
    @given(begins, st.binary(max_size=200))
    def drawn(begin: bytes, rest: bytes) -> None:
        besieged(begin + rest)

    drawn()


def test_an_opening_that_was_recorded_opens_nothing() -> None:
    """A relay records what a client sends, and sends it again."""
    with pair() as (serves, _), socket.create_server(LOCAL) as relay:
        recorded = []

        def carry() -> None:
            client, _ = relay.accept()
            with client, socket.create_connection(serves.address) as forward:
                while len(b"".join(recorded)) < len(hello()) + 32:
                    client.sendall(forward.recv(38)) if not recorded else None
                    recorded.append(client.recv(70))
                    forward.sendall(recorded[-1])
                client.sendall(forward.recv(32))

        carries = threading.Thread(target=carry, daemon=True)
        carries.start()
        with socket.create_connection(relay.getsockname()) as first:
            opening.open_connection(first, SECRET, serves=False)  # it was a true one
        carries.join(END)
        with socket.create_connection(serves.address) as again:
            again.settimeout(END)
            again.sendall(b"".join(recorded))
            again.recv(38)
            with contextlib.suppress(ConnectionResetError):
                assert again.recv(1) == b""


def test_the_wrong_secret_is_named() -> None:
    with Server(LOCAL, SECRET, echo) as serves, Client(serves.address, b"another secret here", name="me") as asks:
        wrong = asks.ask("echo")
        with pytest.raises(ConnectionError, match="is its secret the same"):
            wrong.result(END)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (hello(), "another secret"),
        (hello(lowest=2, highest=3), "versions 2 to 3, and this one 1 to 1: install the same"),
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(38), "no server or client of ringstrategy"),
        (b"", "closed the connection"),
    ],
    ids=["secret", "version", "protocol", "nothing"],
)
def test_what_is_no_server_of_ours_is_found_out(said: bytes, words: str) -> None:
    with socket.create_server(LOCAL) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(said)
                came = connection.recv(70, socket.MSG_WAITALL) if said else b""
                connection.sendall(came[-32:])  # the client's own proof
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(64):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        connection = socket.create_connection(impostor.getsockname())
        with connection, pytest.raises(ConnectionError, match=words):
            opening.open_connection(connection, SECRET, serves=False)


def test_those_that_open_slowly_are_put_out_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_OPENING", 3)
    monkeypatch.setattr(opening, "SECONDS", 1000.0)
    with pair() as (serves, asks), contextlib.ExitStack() as open_:
        slow = [open_.enter_context(socket.create_connection(serves.address)) for _ in range(12)]
        for number in range(5):
            assert asks.ask("echo", {"number": number}).result(END).meta["number"] == number
        for connection in slow[:8]:  # the oldest, and perhaps more of them
            connection.settimeout(END)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(64):
                    pass


def test_nobody_waits_for_an_opening_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SECONDS", 0.2)
    with Server(LOCAL, SECRET, echo) as serves, socket.create_connection(serves.address, END) as slow:
        slow.sendall(hello()[:5])
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(64):
                pass


def test_a_server_that_is_closed_answers_nobody() -> None:
    """Not those either that have shown the secret and asked for nothing yet."""
    calls: list[str] = []

    def counts(request: Request) -> Answer:
        calls.append(request.operation)
        return Answer({})

    with Server(LOCAL, SECRET, counts) as serves, socket.create_connection(serves.address) as connection:
        opening.open_connection(connection, SECRET, serves=False)
        serves.close()
        connection.settimeout(END)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"POST /late HTTP/1.1\r\nPeer: me\r\nMeta: {}\r\nContent-Length: 0\r\n\r\n")
            assert connection.recv(100) == b""
        with pytest.raises(ConnectionError):
            socket.create_connection(serves.address)
    assert calls == []


def test_a_client_that_is_closed_leaves_nobody_waiting() -> None:
    """By a callback too, which its own thread calls."""
    holds, came, go = holding()
    with Server(LOCAL, SECRET, holds) as serves:
        asks = Client(serves.address, SECRET, name="me", connections=1)
        held, waits = asks.ask("hold"), asks.ask("hold")
        assert came.wait(END)
        asks.ask("word", bulk=False).add_done_callback(lambda _: asks.close())
        for future in (held, waits):
            with pytest.raises(ConnectionError):
                future.result(END)
        asks.close()
        with pytest.raises(RuntimeError, match="closed"):
            asks.ask("word")
        go.set()


EXITS = """
import os, sys, threading
from ringstrategy.requests import Answer, Client, Server
came = threading.Event()
def hold(request):
    if request.operation == "hold":
        came.set()
        threading.Event().wait()
    return Answer({})
serves = Server(("127.0.0.1", 0), b"a secret for tests only", hold)
asks = Client(serves.address, b"a secret for tests only", name="me")
asks.ask("hold")
came.wait()
if os.fork() == 0:
    try:
        asks.ask("word")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
sys.exit(7)
"""


def test_a_script_ends_although_a_request_is_under_way_and_a_fork_is_told(program: Callable[..., Program]) -> None:
    running = program(sys.executable, "-c", EXITS)
    assert running.wait() == 7
    assert "made in another process" in running.printed


# The lost


def test_a_request_is_never_sent_twice_and_the_next_one_finds_the_next_server() -> None:
    together, came, go = threading.Barrier(4), threading.Event(), threading.Event()
    pushed: list[tuple[str, int]] = []

    def notes(life: str) -> Callable[[Request], Answer]:
        def answer(request: Request) -> Answer:
            if request.operation == "push":
                pushed.append((life, request.meta["number"]))
            if request.operation == "meet":
                together.wait(END)
            if request.operation == "push" and life == "first":
                came.set()
                assert go.wait(END)
            return Answer({})

        return answer

    with Server(LOCAL, SECRET, notes("first")) as first, Client(first.address, SECRET, name="me") as asks:
        for future in [asks.ask("meet") for _ in range(4)]:
            future.result(END)
        before, under_way = asks.boot, asks.ask("push", {"number": 0})
        assert came.wait(END)
        first.close()
        go.set()
        with pytest.raises(ConnectionError, match=r"'push' got no answer from 127\.0\.0\.1:"):
            under_way.result(END)
        with pytest.raises(ConnectionError):
            asks.ask("word", bulk=False).result(END)
        with Server(first.address, SECRET, notes("second")) as second:
            asks.ask("word", bulk=False).result(END)
            assert asks.boot == second.boot != before
            for future in [asks.ask("push", {"number": number}) for number in range(1, 9)]:
                future.result(END)  # over new connections, although three of the old ones have met no error
    assert sorted(pushed) == [("first", 0), *(("second", number) for number in range(1, 9))]


def serve_until_killed(folder: Path) -> None:
    def hold(request: Request) -> Answer:
        if request.operation == "hold":
            note(folder / "held.jsonl")
            threading.Event().wait()
        return Answer({})

    with Server(LOCAL, SECRET, hold) as serves:
        note(folder / "port.jsonl", port=serves.address[1])
        threading.Event().wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_is_under_way_fails_if_the_server_dies_or_freezes(
    job: Callable[..., Job], tmp_path: Path, how: signal.Signals
) -> None:
    running = job(1, serve_until_killed, tmp_path)
    running.until(lambda: noted(tmp_path / "port.jsonl"), "it listens")
    address = ("127.0.0.1", noted(tmp_path / "port.jsonl")[0]["port"])
    with Client(address, SECRET, name="me", silent=4.0 if how == signal.SIGSTOP else 1000.0) as asks:
        asks.ask("word").result(END)
        held = [asks.ask("hold"), asks.ask("hold", bulk=False)]
        running.until(lambda: len(noted(tmp_path / "held.jsonl")) == 2, "it has both")
        os.kill(running.ranks[0].pid, how)
        for future in held:
            with pytest.raises(ConnectionError):
                future.result(END)
        if how == signal.SIGSTOP:
            assert isinstance(asks.lost, ConnectionError)


def test_both_sides_are_told_when_all_is_sent_or_will_never_be() -> None:
    holds, came, go = holding()
    answered, asked, failed = threading.Event(), threading.Event(), threading.Event()

    def handler(request: Request) -> Answer:
        if request.operation != "hold":  # a beat comes when it likes
            return Answer({})
        return holds(request)._replace(buffers=[torch.ones(1 << 20)], sent=answered.set)

    with pair(handler) as (serves, asks):
        future = asks.ask("hold", {}, [torch.ones(8)], sent=asked.set)
        assert came.wait(END)
        assert asked.wait(END)
        assert not future.done()
        assert not answered.is_set()
        go.set()
        future.result(END)
        assert answered.wait(END)
        serves.close()
        with pytest.raises(ConnectionError):
            asks.ask("echo", sent=failed.set).result(END)
        assert failed.wait(END)


def test_the_server_notices_who_leaves_and_who_is_silent() -> None:
    gone: list[str] = []
    holds, came, go = holding()
    with Server(LOCAL, SECRET, holds, gone=gone.append, silent=1000.0) as serves:
        with Client(serves.address, SECRET, name="leaves", connections=2) as leaves:
            silent = Client(serves.address, SECRET, name="silent", silent=1000.0)
            for asks in (leaves, silent):
                for future in [asks.ask("echo") for _ in range(8)]:
                    future.result(END)
            with mock.patch.object(serves, "closed", wraps=serves.closed) as closed:
                with pytest.raises(ValueError, match="a place for 1"):  # after which a connection is of no use
                    leaves.ask("word", into=bytearray(1)).result(END)
                until(lambda: closed.called)
            assert gone == [], "it has others"
        until(lambda: gone == ["leaves"])
        held = silent.ask("hold")
        assert came.wait(END)
        serves.break_off_silent(float("inf"))
        assert gone == ["leaves", "silent"], "although a handler still works for it"
        go.set()
        with pytest.raises(ConnectionError):
            held.result(END)
        silent.close()
    assert gone == ["leaves", "silent"]

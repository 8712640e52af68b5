"""A mailbox: each request is answered once, in whatever life of the server; strangers reach nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_requests import END, SECRET, echo, until

from ringstrategy.requests import Answer, MailboxClient, MailboxServer, RefusedError, Request
from ringstrategy.requests.mailbox import Mailbox

POLL = 0.01


@pytest.fixture(params=["folder", "memory"])
def url(request: Any, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "a box") if request.param == "folder" else "memory://box/of/a run"
    if request.param == "memory":
        Mailbox("memory://", SECRET)._files.store.clear()


@contextlib.contextmanager
def serving(url: str, handler: Callable[[Request], Answer] = echo, **how: Any) -> Iterator[MailboxServer]:
    with contextlib.closing(MailboxServer(url, SECRET, handler, poll=POLL, **how)) as server:
        yield server


@contextlib.contextmanager
def asking(url: str, name: str = "me", silent: float = END) -> Iterator[MailboxClient]:
    with contextlib.closing(MailboxClient(url, SECRET, name=name, silent=silent, poll=POLL)) as client:
        yield client


def later(threads: ThreadPoolExecutor, client: MailboxClient, *asked: Any) -> Future[Answer]:
    """`ask` waits for the answer."""
    return threads.submit(lambda: client.ask(*asked).result())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def test_every_request_gets_its_own_answer_and_nothing_is_left(url: str, threads: ThreadPoolExecutor) -> None:
    with serving(url):
        with asking(url, "first/~1") as first, asking(url, "second") as second:
            asked = []
            for number in range(5):
                for client, name in ((first, "first/~1"), (second, "second")):
                    values = torch.full((number * 1000,), 7.0 * number)
                    asked.append(
                        (number, name, values, later(threads, client, "give", {"number": number}, [values, b"!"]))
                    )
            for number, name, values, future in asked:
                answer = future.result(END)
                [got] = answer.buffers
                assert answer.meta == {"number": number, "peer": name}
                assert bytes(got) == values.numpy().tobytes() + b"!"
            with pytest.raises(RefusedError, match="not today"):
                first.ask("refuse", {"why": "not today"}).result(END)
            with pytest.raises(RuntimeError, match="failed at 'fail': KeyError: 'a bug'"):
                first.ask("fail", {"why": "a bug"}).result(END)
            assert first.ask("give").result(END).meta == {"peer": "first/~1"}
        box = Mailbox(url, SECRET)
        until(lambda: not box.names("requests"))
        assert not box.names("answers")


def test_who_leaves_is_gone_at_once_and_who_is_silent_in_time(tmp_path: Path) -> None:
    gone, url = list[str](), str(tmp_path)
    with serving(url, gone=gone.append, silent=100 * END):
        with asking(url, "leaves") as client:
            client.ask("give").result(END)
        until(lambda: gone == ["leaves"])
    with serving(url, gone=gone.append, silent=0.1) as server:
        silent = asking(url, "dies", silent=END)
        with silent as client, mock.patch.object(server, "_part_with", wraps=server._part_with) as parts:
            client.ask("give").result(END)
            client._closing.set()  # beats end, and it says nothing
            until(lambda: parts.called)
    assert "dies" in gone


def test_a_server_that_is_away_is_an_error_and_its_request_is_taken_back(tmp_path: Path) -> None:
    box = Mailbox(str(tmp_path), SECRET)
    box.make()
    with (
        asking(str(tmp_path), silent=0.05) as client,
        pytest.raises(ConnectionError, match="nobody has answered in the mailbox"),
    ):
        client.ask("give").result(END)
    [head] = [message[0] for message in map(box.get, box.names("requests")) if message is not None]
    assert head == {"peer": "me", "operation": "leave mailbox"}


def test_what_a_server_has_not_answered_the_next_one_answers(url: str, threads: ThreadPoolExecutor) -> None:
    """Also if it was killed after it had done what was asked: the handler sees it twice."""
    seen = list[int]()

    def counts(request: Request) -> Answer:
        if request.operation != "beat":
            seen.append(request.meta["number"])
        return echo(request)

    Mailbox(url, SECRET).make()
    with asking(url) as client:
        with serving(url, counts) as server:
            client.ask("give", {"number": 1}).result(END)
            with mock.patch.object(server._box, "put", side_effect=ConnectionError("killed")):
                answer = later(threads, client, "give", {"number": 2})
                until(lambda: 2 in seen)
                server.close()
        assert not answer.done()
        with serving(url, counts):
            assert answer.result(END).meta["number"] == 2
    assert seen[0] == 1
    assert set(seen[1:]) == {2}


@pytest.mark.parametrize("stranger", ["another secret", "moved", "cut", "changed", "half", "nothing", "a text"])
def test_strangers_reach_no_handler_and_what_is_half_written_is_waited_for(tmp_path: Path, stranger: str) -> None:
    came = list[str]()

    def notes(request: Request) -> Answer:
        came.append(request.operation)
        return echo(request)

    requests = tmp_path / "requests"
    Mailbox(str(tmp_path), SECRET).make()
    box = Mailbox(str(tmp_path), b"the secret of a stranger" if stranger == "another secret" else SECRET)
    box.put("requests/mark-1", {"peer": "x", "operation": "give", "meta": {}}, [memoryview(b"values")])
    file = requests / "mark-1"
    whole = file.read_bytes()
    if stranger == "moved":
        file.rename(requests / "mark-2")
    elif stranger == "cut":  # another cut between name and content
        file.rename(requests / "mark-")
        (requests / "mark-").write_bytes(whole[:32] + b"1" + whole[32:])
    elif stranger != "another secret":
        texts = {"changed": whole[:-1] + b"!", "half": whole[: len(whole) // 2], "nothing": b"", "a text": b"?" * 999}
        file.write_bytes(texts[stranger])
    [name] = (f"requests/{each.name}" for each in requests.iterdir())
    assert Mailbox(str(tmp_path), SECRET).get(name) is None
    with serving(str(tmp_path), notes), asking(str(tmp_path)) as client:
        for _ in range(3):
            client.ask("other").result(END)
        assert "give" not in came
        if stranger == "half":
            file.write_bytes(whole)
            until(lambda: "give" in came)


def test_an_answer_by_a_stranger_is_none(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    Mailbox(str(tmp_path), SECRET).make()
    with mock.patch.object(MailboxClient, "_beat"), asking(str(tmp_path)) as client:
        answer = later(threads, client, "give")
        until(lambda: bool(client._box.names("requests")))
        [name] = client._box.names("requests")
        told = {"status": "answered", "meta": {}, "silent": 1}
        Mailbox(str(tmp_path), b"the secret of a stranger").put(name.replace("requests", "answers"), told)
        client._closing.wait(10 * POLL)
        client.close()
        with pytest.raises(ConnectionError, match="closed"):
            answer.result(END)


def test_what_stays_no_message_and_answers_that_nobody_waits_for_are_removed(tmp_path: Path) -> None:
    box = Mailbox(str(tmp_path), SECRET)
    box.make()
    (tmp_path / "requests" / "mark-1").write_bytes(b"half of a dead learner's")
    box.put("answers/of the dead-3", {})
    with serving(str(tmp_path), silent=0.1):
        until(lambda: not box.names("requests") and not box.names("answers"))


def test_a_request_that_somebody_removed_is_an_error(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """Although beats are answered."""
    box = Mailbox(str(tmp_path), SECRET)
    box.make()
    with mock.patch.object(MailboxClient, "_beat"), asking(str(tmp_path), silent=0.4) as client:
        client._answered = float("inf")
        answer = later(threads, client, "give")
        until(lambda: bool(box.names("requests")))
        [name] = box.names("requests")
        box.remove(name)
        with pytest.raises(ConnectionError, match="removed from the mailbox"):
            answer.result(END)


def test_beats_are_answered_beside_requests_and_who_leaves_within_one_is_missed(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    go, gone, held = threading.Event(), list[str](), list[str]()

    def holds(request: Request) -> Answer:
        if request.operation == "hold":
            held.append(request.peer)
            assert go.wait(END)
        return echo(request)

    with serving(str(tmp_path), holds, gone=gone.append, silent=1.0):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(asking(str(tmp_path), f"{number}")) for number in range(17)]
            for client in clients:
                stack.enter_context(mock.patch.object(client, "_silent", END))
            many = [ThreadPoolExecutor(1) for _ in clients]
            for each, client in zip(many, clients, strict=True):
                later(each, client, "hold")
            until(lambda: len(held) == 16)
            assert clients[0]._answer("beat", "beat", {}, ()).meta == {"peer": "0"}
        until(lambda: set(gone) >= set(held))
        before = len(gone)
        go.set()
        until(lambda: len(gone) >= before + 16)  # their requests were answered after they had left
        for each in many:
            each.shutdown()


def test_a_storage_that_is_away_stops_nobody(tmp_path: Path) -> None:
    """The server looks again, and a client gets an error that names the mailbox."""
    url = str(tmp_path / "box")
    with serving(url) as server, asking(url) as client:
        away = mock.patch.object(client._box._files, "pipe_file", side_effect=OSError("no route"))
        with away, pytest.raises(ConnectionError, match=r"mailbox .*box is not reached: OSError\('no route'\)"):
            client.ask("give").result(END)
        with mock.patch.object(server._box, "names", side_effect=ConnectionError("no route")) as looks:
            until(lambda: looks.call_count > 2)
        assert client.ask("give").result(END).meta == {"peer": "me"}


@pytest.mark.parametrize(
    ("url", "secret", "words"),
    [("nothing://x", SECRET, "Protocol not known"), ("memory://x", b"short", "at least 16 bytes")],
)
def test_what_cannot_be_right_is_an_error(url: str, secret: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MailboxClient(url, secret, name="me")

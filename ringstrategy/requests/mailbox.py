"""Requests and answers as files in a folder or a bucket that both sides reach, where neither reaches the other."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import fsspec

from ringstrategy.errors import last_words
from ringstrategy.requests.client import BEAT
from ringstrategy.requests.messages import Answer, Body, Buffer, RefusedError, Request, view_of, written
from ringstrategy.requests.opening import check_secret
from ringstrategy.requests.server import Handler
from ringstrategy.requests.within import Views

SILENT = 30.0  # seconds
POLL = 1.0  # seconds between two looks
_ASK, _LEAVE = "ask", "leave mailbox"
_REQUESTS, _ANSWERS = "requests", "answers"
_PROOF, _LENGTH = 32, 4  # bytes
_AT_ONCE = 16  # requests, and a beat
_PATIENCE = 5.0  # seconds for each thread to end
_log = logging.getLogger(__name__)


class Mailbox:
    """Messages by name, each of which proves that its author knows the secret: an HMAC-SHA256 of name and content.

    A file that is only half written has no such proof yet, so nothing is asked of the storage but to put, get, list and
    remove. Whoever can read the storage can read the messages, and whoever can write to it can remove them. A
    ConnectionError says that the storage was not reached.

    Args:
        url: of a folder, as fsspec knows it: a path, "s3://bucket/run", "gs://bucket/run".
        secret: at least 16 bytes.
    """

    def __init__(self, url: str, secret: bytes) -> None:
        self.url, self._secret = url, check_secret(secret)
        try:
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ValueError(f"the mailbox {url} cannot be used: {error}") from error
        except OSError as error:
            raise self._away(error) from error
        self._root = root.rstrip("/")

    def make(self) -> None:
        """Make its folders, unless they are there."""
        for folder in (_REQUESTS, _ANSWERS):
            self._do(self._files.makedirs, folder, exist_ok=True)

    def put(self, name: str, head: Mapping[str, Any], views: Sequence[memoryview] = ()) -> None:
        """Write a message."""
        text = json.dumps(head).encode()
        content = b"".join([len(text).to_bytes(_LENGTH, "big"), text, *views])
        try:
            self._do(self._files.pipe_file, name, self._proof(name, content) + content)
        except FileNotFoundError as error:
            raise self._away(error) from error

    def get(self, name: str) -> tuple[dict[str, Any], memoryview] | None:
        """A message's head and bulk data. None: it is not there, not yet whole, or a stranger's."""
        try:
            whole = memoryview(bytearray(self._do(self._files.cat_file, name)))  # that may be written to
        except FileNotFoundError:
            return None
        proof, content = whole[:_PROOF], whole[_PROOF:]
        if not hmac.compare_digest(proof, self._proof(name, content)):
            return None
        end = _LENGTH + int.from_bytes(content[:_LENGTH], "big")
        return json.loads(bytes(content[_LENGTH:end])), content[end:]

    def names(self, folder: str) -> dict[str, int]:
        """Of the messages that are there, with their bytes."""
        try:
            listed = self._do(self._files.ls, folder, detail=True)
        except FileNotFoundError:
            return {}  # a bucket has no empty folders
        return {
            f"{folder}/{each['name'].rsplit('/', 1)[-1]}": each["size"] for each in listed if each["type"] == "file"
        }

    def remove(self, name: str) -> None:
        """If it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._do(self._files.rm_file, name)

    def _do(self, verb: Callable[..., Any], name: str, *given: Any, **how: Any) -> Any:
        try:
            return verb(f"{self._root}/{name}", *given, **how)
        except FileNotFoundError:
            raise
        except Exception as error:  # each storage has its own
            raise self._away(error) from error

    def _away(self, error: Exception) -> ConnectionError:
        return ConnectionError(f"the mailbox {self.url} is not reached: {error!r}")

    def _proof(self, name: str, content: bytes | memoryview) -> bytes:
        proof = hmac.new(self._secret, name.encode() + b"\0", "sha256")
        proof.update(content)
        return proof.digest()


class MailboxServer:
    """Answers the requests in a mailbox until `close`, several at once. It is the only server there.

    A request that it did not answer waits for the next server, although it may have done what was asked.

    Args:
        url: see `Mailbox`.
        secret: see `Mailbox`.
        handler: see `Server`.
        gone: see `Server`, but requests of a client that comes back may begin before it has returned.
        silent: seconds without a request after which a client is gone.
        poll: seconds between two looks for requests.
    """

    def __init__(
        self,
        url: str,
        secret: bytes,
        handler: Handler,
        *,
        gone: Callable[[str], None] = lambda peer: None,
        silent: float = SILENT,
        poll: float = POLL,
    ) -> None:
        self._box, self._handler, self._gone = Mailbox(url, secret), handler, gone
        self._box.make()
        self._silent, self._poll = silent, poll
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[str, float]] = {}  # clients by mark: name, and when
        self._under_way: set[str] = set()  # names of requests
        self._unread: dict[str, tuple[int, float]] = {}  # what is no message: its bytes, and since when
        self._requests, self._beats = SimpleQueue[tuple[str, int] | None](), SimpleQueue[tuple[str, int] | None]()
        self._closing = threading.Event()
        works: list[Callable[[], None]] = [self._serve, partial(self._answer_all, self._beats)]
        works += [partial(self._answer_all, self._requests)] * _AT_ONCE
        self._threads = [threading.Thread(target=work, name="ringstrategy-mailbox", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Answer what is under way, if that takes no longer than some seconds, and nothing more. Idempotent."""
        self._closing.set()
        for _ in range(_AT_ONCE):
            self._requests.put(None)
        self._beats.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _serve(self) -> None:
        looked, tidied = True, time.monotonic()
        while not self._closing.wait(self._poll):
            now = time.monotonic()
            try:
                self._look(now, all_heard=not looked)
                looked = True
                if now > tidied + self._silent / 4:
                    self._tidy(now)
                    tidied = now
            except Exception as error:
                looked = False
                _log.warning("%s", error)

    def _look(self, now: float, *, all_heard: bool) -> None:
        with self._lock:
            before = set(self._under_way)  # before the look: what ends meanwhile is still in the list
        there = self._box.names(_REQUESTS)
        marks = {_mark(name) for name in there}
        with self._lock:
            for mark, (peer, _) in self._heard.items():
                if all_heard or mark in marks:  # it may take long to read a request
                    self._heard[mark] = peer, now
            self._unread = {name: each for name, each in self._unread.items() if there.get(name) == each[0]}
            dead = [name for name, (_, since) in self._unread.items() if now > since + self._silent]
            new = [name for name in there if name not in before and name not in self._unread]
            self._under_way |= set(new)
        for name in dead:
            _log.warning("%s was no message for %.0f s, and is removed: is the secret the same?", name, self._silent)
            self._box.remove(name)
        for name in new:
            (self._requests if _ASK in name else self._beats).put((name, there[name]))

    def _answer_all(self, queue: SimpleQueue[tuple[str, int] | None]) -> None:
        while (request := queue.get()) is not None and not self._closing.is_set():
            try:
                self._answer(*request)
            except Exception as error:
                _log.warning("a request was not answered, and is tried again: %s", error)
            finally:
                with self._lock:
                    self._under_way.discard(request[0])

    def _answer(self, name: str, nbytes: int) -> None:
        message, mark = self._box.get(name), _mark(name)
        if message is None:
            with self._lock:
                self._unread[name] = nbytes, time.monotonic()
            return
        head, content = message
        if head["operation"] == _LEAVE:
            self._part_with(mark)
        else:
            self._hear(mark, head["peer"])
            status, meta, views = self._handled(head, content)
            self._box.put(_answer_to(name), {"status": status, "meta": meta, "silent": self._silent}, views)
            self._hear(mark, head["peer"])  # it may have left meanwhile: then it is silent from now on
        self._box.remove(name)

    def _hear(self, mark: str, peer: str) -> None:
        with self._lock:
            self._heard[mark] = peer, time.monotonic()

    def _handled(self, head: Mapping[str, Any], content: memoryview) -> tuple[str, dict[str, Any], list[memoryview]]:
        body = Body(Views([content]), content.nbytes)
        try:
            answer = self._handler(Request(head["peer"], head["operation"], head["meta"], body))
            return "answered", answer.meta, [view_of(buffer) for buffer in answer.buffers]
        except RefusedError as error:
            return "refused", {"error": str(error)}, []
        except Exception as error:
            _log.exception("the request %s of %s failed", head["operation"], head["peer"])
            return "failed", {"error": last_words(error)}, []

    def _tidy(self, now: float) -> None:
        """Part with the silent, and remove answers that nobody waits for any more."""
        with self._lock:
            silent = [mark for mark, (_, at) in self._heard.items() if now > at + self._silent]
        for mark in silent:
            self._part_with(mark)
        answers = self._box.names(_ANSWERS)
        with self._lock:  # after the look: whoever was answered by then was heard
            left = [name for name in answers if _mark(name) not in self._heard]
        for name in left:
            self._box.remove(name)

    def _part_with(self, mark: str) -> None:
        with self._lock:
            peer, _ = self._heard.pop(mark, (None, 0.0))
        if peer is not None:
            self._gone(peer)


class MailboxClient:
    """Asks the server that answers in a mailbox; see `Client`.

    Args:
        url: see `Mailbox`.
        secret: see `Mailbox`.
        name: by which the server knows this client.
        silent: seconds without any answer after which the server counts as lost.
        poll: seconds between two looks for an answer.
    """

    def __init__(self, url: str, secret: bytes, *, name: str, silent: float = SILENT, poll: float = POLL) -> None:
        self.address, self._name, self._silent, self._poll = url, name, silent, poll
        self._box, self._mark, self._numbers = Mailbox(url, secret), uuid.uuid4().hex, count()
        self._of_server = silent  # as the server says
        self._answered = time.monotonic()
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="ringstrategy-beats", daemon=True)
        self._beats.start()

    def ask(
        self,
        operation: str,
        meta: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        bulk: bool = True,
    ) -> Future[Answer]:
        """See `Client.ask`; but it returns when the answer is there, or what was asked has failed.

        A request whose answer does not come may still be answered by the next server.
        """
        del bulk
        future = Future[Answer]()
        try:
            answer = self._answer(_ASK, operation, dict(meta or {}), [view_of(buffer) for buffer in buffers])
            future.set_result(answer)
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Break off what waits for an answer, and tell the server. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._beats.join(_PATIENCE)
            with contextlib.suppress(ConnectionError):
                self._box.put(self._new(BEAT), {"peer": self._name, "operation": _LEAVE})

    def _new(self, kind: str) -> str:
        return f"{_REQUESTS}/{self._mark}-{kind}-{next(self._numbers)}"

    def _answer(self, kind: str, operation: str, meta: dict[str, Any], views: Sequence[memoryview]) -> Answer:
        name = self._new(kind)
        written(meta)
        try:
            self._box.put(name, {"peer": self._name, "operation": operation, "meta": meta}, views)
            told, content = self._wait(name)
        except ConnectionError:
            with contextlib.suppress(ConnectionError):
                self._box.remove(name)
            raise
        with contextlib.suppress(ConnectionError):
            self._box.remove(_answer_to(name))
        self._answered, self._of_server = time.monotonic(), told["silent"]
        if told["status"] == "refused":
            raise RefusedError(told["meta"]["error"])
        if told["status"] == "failed":
            raise RuntimeError(f"the server failed at {operation!r}: {told['meta']['error']}")
        return Answer(told["meta"], (content,))

    def _wait(self, name: str) -> tuple[dict[str, Any], memoryview]:
        """For the answer to this request. ConnectionError if none will come."""
        began = looked = time.monotonic()
        lost = False
        while (message := self._box.get(_answer_to(name))) is None:
            if lost:
                raise ConnectionError(f"a request was removed from the mailbox {self.address}, and not answered")
            if self._closing.wait(self._poll):
                raise ConnectionError("this client is closed")
            now = time.monotonic()
            if now > max(began, self._answered) + self._silent:
                raise ConnectionError(f"nobody has answered in the mailbox {self.address} for {self._silent:g} s")
            if now > looked + self._silent / 4:
                looked, lost = now, name not in self._box.names(_REQUESTS)
        return message

    def _beat(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # who asks for more is told
                self._answer(BEAT, BEAT, {}, ())
            if self._closing.wait(min(self._silent, self._of_server) / 4):
                return


def _mark(name: str) -> str:
    """The client's, of the name of its message."""
    return name.rsplit("/", 1)[-1].partition("-")[0]


def _answer_to(name: str) -> str:
    return name.replace(_REQUESTS, _ANSWERS, 1)

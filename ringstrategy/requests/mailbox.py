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
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from itertools import count
from typing import Any

import fsspec

from ringstrategy.errors import last_words
from ringstrategy.requests.client import BEAT
from ringstrategy.requests.messages import Answer, Body, Buffer, RefusedError, Request, view_of, written
from ringstrategy.requests.opening import check_secret
from ringstrategy.requests.server import Handler

SILENT = 30.0  # seconds
POLL = 1.0  # seconds between two looks
_LEAVE = "leave mailbox"
_REQUESTS, _ANSWERS = "requests", "answers"
_PROOF, _LENGTH = 32, 4  # bytes
_AT_ONCE = 16
_log = logging.getLogger(__name__)


class Mailbox:
    """Messages by name, each of which proves that its author knows the secret: an HMAC-SHA256 of name and content.

    A file that is only half written has no such proof yet, so nothing is asked of the storage but to put, get, list and
    remove. Whoever can read the storage can read the messages, and whoever can write to it can remove them. A
    ConnectionError says that the storage was not reached.

    Args:
        url: of a folder, as fsspec knows it: a path, "s3://bucket/run", "gs://bucket/run", "sftp://host/run".
        secret: at least 16 bytes.
    """

    def __init__(self, url: str, secret: bytes) -> None:
        self.url, self._secret = url, check_secret(secret)
        try:
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ValueError(f"the mailbox {url} cannot be used: {error}") from error
        self._root = root.rstrip("/")
        for folder in (_REQUESTS, _ANSWERS):
            self._do(self._files.makedirs, folder, exist_ok=True)

    def put(self, name: str, head: Mapping[str, Any], views: Sequence[memoryview] = ()) -> None:
        """Write a message."""
        text = json.dumps(head).encode()
        content = b"".join([len(text).to_bytes(_LENGTH, "big"), text, *views])
        self._do(self._files.pipe_file, name, self._proof(name, content) + content)

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

    def names(self, folder: str) -> list[str]:
        """Of the messages that are there."""
        try:
            listed = self._do(self._files.ls, folder, detail=False)
        except FileNotFoundError:
            return []  # a bucket has no empty folders
        return [f"{folder}/{each.rsplit('/', 1)[-1]}" for each in sorted(listed) if not each.endswith(f"/{folder}/")]

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
            raise ConnectionError(f"the mailbox {self.url} is not reached: {error!r}") from error

    def _proof(self, name: str, content: bytes | memoryview) -> bytes:
        proof = hmac.new(self._secret, name.encode(), "sha256")
        proof.update(content)
        return proof.digest()


class MailboxServer:
    """Answers the requests in a mailbox until `close`, several at once. A request that it did not answer waits.

    A request is answered by the next server if this one ends before it has written the answer, although it may have
    done what was asked.

    Args:
        url: see `Mailbox`.
        secret: see `Mailbox`.
        handler: see `Server`.
        gone: see `Server`.
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
        self._silent, self._poll, self._began = silent, poll, time.monotonic()
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[str, float]] = {}  # by client: its mark, and when
        self._under_way: set[str] = set()  # names of requests
        self._threads = ThreadPoolExecutor(_AT_ONCE, "ringstrategy-mailbox")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ringstrategy-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer what is under way, and nothing more."""
        self._closing.set()
        self._thread.join()
        self._threads.shutdown()

    def _serve(self) -> None:
        while not self._closing.wait(self._poll):
            try:
                self._look()
                self._tidy(time.monotonic())
            except Exception as error:
                _log.warning("%s", error)

    def _look(self) -> None:
        with self._lock:
            before = set(self._under_way)  # before the look: what ends meanwhile is still in the list
        new = [name for name in self._box.names(_REQUESTS) if name not in before]
        with self._lock:
            self._under_way |= set(new)
        for name in new:
            self._threads.submit(self._answer, name)

    def _answer(self, name: str) -> None:
        try:
            message = self._box.get(name)
            if message is None:
                return
            head, content = message
            if head["operation"] == _LEAVE:
                self._part_with(head["peer"])
            else:
                with self._lock:
                    self._heard[head["peer"]] = _mark(name), time.monotonic()
                status, meta, views = self._handled(head, content)
                told = {"status": status, "meta": meta, "silent": self._silent}
                self._box.put(name.replace(_REQUESTS, _ANSWERS, 1), told, views)
            self._box.remove(name)
        except Exception as error:
            _log.warning("a request was not answered, and is tried again: %s", error)
        finally:
            with self._lock:
                self._under_way.discard(name)

    def _handled(self, head: Mapping[str, Any], content: memoryview) -> tuple[str, dict[str, Any], list[memoryview]]:
        body = Body(BytesIO(content), content.nbytes)
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
        for peer in [peer for peer, (_, at) in self._heard.items() if now > at + self._silent]:
            self._part_with(peer)
        if now > self._began + self._silent:
            here = {mark for mark, _ in self._heard.values()}
            for name in self._box.names(_ANSWERS):
                if _mark(name) not in here:
                    self._box.remove(name)

    def _part_with(self, peer: str) -> None:
        with self._lock:
            if self._heard.pop(peer, None) is not None:
                self._gone(peer)


class MailboxClient:
    """Asks the server that answers in a mailbox, one request after the other; see `Client`.

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
        self._asks = ThreadPoolExecutor(1, "ringstrategy-requests")
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
        """See `Client.ask`. A request whose answer does not come may still be answered by the next server."""
        del bulk
        return self._asks.submit(self._answer, operation, dict(meta or {}), [view_of(buffer) for buffer in buffers])

    def close(self) -> None:
        """Break off what is under way, and tell the server. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._asks.shutdown()
            self._beats.join()
            with contextlib.suppress(ConnectionError):
                self._box.put(self._new(), {"peer": self._name, "operation": _LEAVE})

    def _new(self) -> str:
        return f"{_REQUESTS}/{self._mark}-{next(self._numbers)}"

    def _answer(self, operation: str, meta: dict[str, Any], views: Sequence[memoryview]) -> Answer:
        name = self._new()
        answer = name.replace(_REQUESTS, _ANSWERS, 1)
        written(meta)
        try:
            self._box.put(name, {"peer": self._name, "operation": operation, "meta": meta}, views)
            began = time.monotonic()
            while (message := self._box.get(answer)) is None:
                if self._closing.wait(self._poll):
                    raise ConnectionError("this client is closed")
                if time.monotonic() > max(began, self._answered) + self._silent:
                    raise ConnectionError(f"nobody has answered in the mailbox {self.address} for {self._silent:g} s")
            self._box.remove(answer)
        except ConnectionError:
            with contextlib.suppress(ConnectionError):
                self._box.remove(name)
            raise
        told, content = message
        self._answered, self._of_server = time.monotonic(), told["silent"]
        if told["status"] == "refused":
            raise RefusedError(told["meta"]["error"])
        if told["status"] == "failed":
            raise RuntimeError(f"the server failed at {operation!r}: {told['meta']['error']}")
        return Answer(told["meta"], (content,))

    def _beat(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # who asks for more is told
                self._answer(BEAT, {}, ())
            if self._closing.wait(min(self._silent, self._of_server) / 4):
                return


def _mark(name: str) -> str:
    """The client's, of the name of its message."""
    return name.rsplit("/", 1)[-1].partition("-")[0]

"""Asks a server, with several requests under way; notices when it is lost."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any, NamedTuple

from typing_extensions import override

from ringstrategy.requests.messages import (
    BOOT,
    META,
    PEER,
    SILENT,
    Answer,
    Buffer,
    RefusedError,
    nothing,
    view_of,
    written,
)
from ringstrategy.requests.opening import check_secret, open_connection
from ringstrategy.requests.sockets import break_off, notice_dead_paths, reader

BEAT = "beat"


class _Asked(NamedTuple):
    future: Future[Answer]
    operation: str
    meta: str
    views: Sequence[memoryview]
    out: memoryview | None
    sent: Callable[[], None]


_Queue = SimpleQueue[_Asked | None]  # None: no more


class Client:
    """One server's. Bulk data, words and beats each have connections and threads of their own.

    A connection is made when it is needed, and made anew after it broke. A request is never sent twice: if its
    connection breaks, its future holds a ConnectionError, and the caller knows whether it may ask again.

    Not noticed is a machine between both that loses one connection, answers for it, and lets the beats through.

    Args:
        address: host and port of the server.
        secret: the server's.
        name: by which the server knows this client: letters, digits and punctuation, at most 200.
        connections: for bulk data: so many requests at once.
        silent: seconds without an answer to a beat, after which the server counts as lost, and requests under way fail.
        tls: a context for clients, which verifies the server's certificate; or None.

    Attributes:
        boot: which life of the server answered last; None: none did.
        lost: why it did not answer the last beat, or with what error; None: it did, or none was sent yet.
        news: what it answered the last beat.
        bytes_sent: of bulk data, handed to the operating system.
        bytes_received: of bulk data.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        name: str,
        connections: int = 4,
        silent: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not re.fullmatch(r"[!-~]{1,200}", name):
            raise ValueError(f"a client's name is up to 200 letters and digits, got {name!r}")
        self.address, self.secret, self.name, self.silent, self.tls = address, check_secret(secret), name, silent, tls
        self.boot: str | None = None
        self.lost: Exception | None = None
        self.news: dict[str, Any] = {}
        self.bytes_sent = self.bytes_received = 0
        self._of_server = silent  # as the server says
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._bulk, self._words = _Queue(), _Queue()
        queues = [*[self._bulk] * connections, self._words]
        self._connections = [_Connection(self, silent=None) for _ in queues]
        self._threads = [
            threading.Thread(target=self._answer_all, args=given, name="ringstrategy-requests", daemon=True)
            for given in zip(queues, self._connections, strict=True)
        ]
        self._threads.append(threading.Thread(target=self._beat, name="ringstrategy-beats", daemon=True))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        operation: str,
        meta: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        into: Buffer | None = None,
        bulk: bool = True,
        sent: Callable[[], None] = nothing,
    ) -> Future[Answer]:
        """Send a request, in another thread.

        Args:
            operation: a word.
            meta: see `Answer`.
            buffers: bulk data; they must not change until the future is done.
            into: where the bulk data of the answer goes, all of it; None: to new memory. After an error it may hold a
                part of an answer.
            bulk: False: over a connection that no bulk data holds up.
            sent: called, perhaps twice, once all of it was handed to the operating system, or when it has failed.

        Returns:
            The answer. RefusedError if the server refuses, RuntimeError if its handler failed, ConnectionError if the
            server was not reached or was lost. Then nobody knows whether it has done what was asked.
        """
        if os.getpid() != self._process:
            raise RuntimeError("this client was made in another process, and has no threads here: make one in each")
        if not (operation.isidentifier() and operation.isascii()):
            raise ValueError(f"an operation is a word, got {operation!r}")
        views, out = [view_of(buffer) for buffer in buffers], None if into is None else view_of(into)
        asked = _Asked(Future(), operation, written(dict(meta or {})), views, out, sent)
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("this client is closed")
            (self._bulk if bulk else self._words).put(asked)
        return asked.future

    def close(self) -> None:
        """Break off what is under way: its futures hold a ConnectionError. Idempotent.

        It waits for a connection that is just being made, for `silent` seconds at most, and for its opening.
        """
        with self._lock:
            self._closing.set()
            for _ in self._connections:
                self._bulk.put(None)
                self._words.put(None)
        self._break_off()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback of a future
                thread.join()

    def _answer_all(self, queue: _Queue, connection: _Connection) -> None:
        while (asked := queue.get()) is not None:
            if asked.future.set_running_or_notify_cancel():
                try:
                    answer = self._answer(connection, asked)
                except BaseException as error:
                    asked.future.set_exception(error)
                else:
                    asked.future.set_result(answer)
        connection.close()

    def _answer(self, connection: _Connection, asked: _Asked) -> Answer:
        try:
            if self._closing.is_set():
                raise ConnectionError("this client is closed")
            if connection.broken or connection.boot != self.boot:
                connection.close()  # it led to an earlier life of the server
            response = connection.ask(asked)
            answer = _read(response, asked.out)
        except BaseException as error:
            asked.sent()
            connection.close()  # nobody knows what is still to be read of it
            if not isinstance(error, OSError | http.client.HTTPException):
                raise
            where = "{}:{}".format(*self.address)
            raise ConnectionError(f"{asked.operation!r} got no answer from {where}: {error!r}") from error
        with self._lock:
            self.bytes_sent += sum(view.nbytes for view in asked.views)
            self.bytes_received += sum(view.nbytes for view in map(view_of, answer.buffers))
        self.boot = connection.boot = response.headers[BOOT]
        self._of_server = float(response.headers[SILENT])
        if response.status == HTTPStatus.CONFLICT:
            raise RefusedError(answer.meta["error"])
        if response.status != HTTPStatus.OK:
            raise RuntimeError(f"the server failed at {asked.operation!r}: {answer.meta['error']}")
        return answer

    def _beat(self) -> None:
        connection = _Connection(self, silent=0.75 * self.silent)
        while True:
            began = time.monotonic()
            try:
                self.news = self._answer(connection, _Asked(Future(), BEAT, "{}", (), None, nothing)).meta
                self.lost = None
            except ConnectionError as error:
                self.lost = error
                self._break_off()
            except Exception as error:  # it is there
                self.lost = error
            if self._closing.wait(max(0.0, began + min(self.silent, self._of_server) / 4 - time.monotonic())):
                connection.close()
                return

    def _break_off(self) -> None:
        for connection in self._connections:
            connection.break_off()


def _read(response: http.client.HTTPResponse, out: memoryview | None) -> Answer:
    nbytes = response.length or 0
    if out is None or response.status != HTTPStatus.OK:
        out = memoryview(bytearray(nbytes))
    if out.nbytes != nbytes:
        raise ValueError(f"the answer has {nbytes} bytes, and there is a place for {out.nbytes}")
    if response.readinto(out) != nbytes:
        raise ConnectionError(f"the server was lost within an answer of {nbytes} bytes")
    response.read()  # nothing: so the next request may use the connection
    return Answer(json.loads(response.headers[META]), (out,))


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *how: Any, **more: Any) -> None:
        super().__init__(sock, *how, **more)
        self.fp.close()
        self.fp = reader(sock)


class _Connection(http.client.HTTPConnection):
    """A connection of one thread's, made when it is needed.

    Args:
        client: whose.
        silent: seconds that one read or write may take; None: the beats say whether it waits in vain.

    Attributes:
        boot: the server's life that it leads to.
        broken: it is of no more use.
    """

    response_class = _Response
    boot: str | None = None
    broken = False

    def __init__(self, client: Client, silent: float | None) -> None:
        super().__init__(*client.address)
        self._client, self._silent = client, silent

    @override
    def connect(self) -> None:
        client = self._client
        connection = socket.create_connection(client.address, client.silent)
        try:
            notice_dead_paths(connection, client.silent)
            if client.tls is not None:
                connection = client.tls.wrap_socket(connection, server_hostname=client.address[0])
            open_connection(connection, client.secret, serves=False)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(self._silent)
        self.sock, self.boot, self.broken = connection, client.boot, False
        if client._closing.is_set():  # only now: `close` breaks off what it finds
            self.break_off()

    def ask(self, asked: _Asked) -> http.client.HTTPResponse:
        """Send it, and read the head of the answer."""
        self.putrequest("POST", f"/{asked.operation}", skip_host=True, skip_accept_encoding=True)
        self.putheader(PEER, self._client.name)
        self.putheader(META, asked.meta)
        self.putheader("Content-Length", str(sum(view.nbytes for view in asked.views)))
        self.endheaders()
        for view in asked.views:
            self.send(view)
        asked.sent()
        return self.getresponse()

    def break_off(self) -> None:
        """Whoever uses it gets an error."""
        connection, self.broken = self.sock, True
        if connection is not None:
            break_off(connection)

    @override
    def close(self) -> None:
        if self.sock is not None:
            break_off(self.sock)
        super().close()

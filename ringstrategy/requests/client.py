"""Asks a server, with several requests under way; notices when it is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from typing_extensions import override

from ringstrategy.requests.messages import BOOT, META, PEER, Answer, Buffer, RefusedError, view_of, written
from ringstrategy.requests.opening import check_secret, open_connection
from ringstrategy.requests.reader import reader

BEAT = "beat"


class Client:
    """One server's. Bulk data, words and beats each have connections and threads of their own.

    A connection is made when it is needed, and made anew after it broke. A request is never sent twice: if its
    connection breaks, its future holds a ConnectionError, and the caller knows whether it may ask again.

    Args:
        address: host and port of the server.
        secret: the server's.
        name: by which the server knows this client.
        connections: for bulk data: so many requests at once.
        silent: seconds without an answer to a beat, after which the server counts as lost, and requests under way fail.
        tls: a context for clients, or None.

    Attributes:
        boot: which life of the server answered last; None: none did.
        lost: why it did not answer the last beat; None: it did, or none was sent yet.
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
        self.address, self.secret, self.name, self.silent, self.tls = address, check_secret(secret), name, silent, tls
        self.boot: str | None = None
        self.lost: ConnectionError | None = None
        self.news: dict[str, Any] = {}
        self.bytes_sent = self.bytes_received = 0
        self._lock = threading.Lock()
        self._own = threading.local()  # the connection of each thread
        self._connections: list[_Connection] = []
        self._bulk = ThreadPoolExecutor(connections, "ringstrategy-bulk")
        self._words = ThreadPoolExecutor(1, "ringstrategy-words")
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="ringstrategy-beats", daemon=True)
        self._beats.start()

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
    ) -> Future[Answer]:
        """Send a request, in another thread.

        Args:
            operation: a word.
            meta: see `Answer`.
            buffers: bulk data; they must not change until the future is done.
            into: where the bulk data of the answer goes, all of it; None: to new memory.
            bulk: False: over a connection that no bulk data holds up.

        Returns:
            The answer. RefusedError if the server refuses, RuntimeError if its handler failed, ConnectionError if the
            server was not reached or was lost. Then nobody knows whether it has done what was asked.
        """
        if self._closing.is_set():
            raise RuntimeError("this client is closed")
        if not operation.isidentifier():
            raise ValueError(f"an operation is a word, got {operation!r}")
        head, views = written(dict(meta or {})), [view_of(buffer) for buffer in buffers]
        out = None if into is None else view_of(into)
        return (self._bulk if bulk else self._words).submit(self._ask, operation, head, views, out)

    def close(self) -> None:
        """Break off what is under way. Idempotent."""
        self._closing.set()
        self._break_off()
        for threads in (self._bulk, self._words):
            threads.shutdown(cancel_futures=True)
        self._beats.join()
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _ask(self, operation: str, meta: str, views: Sequence[memoryview], out: memoryview | None) -> Answer:
        connection = self._connection()
        try:
            response = connection.ask(operation, meta, views)
            answer = self._answer(response, out)
        except BaseException as error:
            connection.close()  # nobody knows what is still to be read of it
            if not isinstance(error, OSError | http.client.HTTPException):
                raise
            where = "{}:{}".format(*self.address)
            raise ConnectionError(f"{operation!r} got no answer from {where}: {error!r}") from error
        with self._lock:
            self.bytes_sent += sum(view.nbytes for view in views)
            self.bytes_received += sum(view.nbytes for view in map(view_of, answer.buffers))
        self.boot = connection.boot = response.headers[BOOT]
        if response.status == http.client.CONFLICT:
            raise RefusedError(answer.meta["error"])
        if response.status != http.client.OK:
            raise RuntimeError(f"the server failed at {operation!r}: {answer.meta['error']}")
        return answer

    def _answer(self, response: http.client.HTTPResponse, out: memoryview | None) -> Answer:
        nbytes = response.length or 0
        if out is None or response.status != http.client.OK:
            out = memoryview(bytearray(nbytes))
        if out.nbytes != nbytes:
            raise ValueError(f"the answer has {nbytes} bytes, and there is a place for {out.nbytes}")
        if response.readinto(out) != nbytes:
            raise ConnectionError(f"the server was lost within an answer of {nbytes} bytes")
        response.read()  # nothing: so the next request may use the connection
        return Answer(json.loads(response.headers[META]), (out,))

    def _connection(self) -> _Connection:
        """This thread's."""
        if not hasattr(self._own, "connection"):
            self._own.connection = _Connection(self)
            with self._lock:
                self._connections.append(self._own.connection)
        connection: _Connection = self._own.connection
        if self._closing.is_set():
            raise ConnectionError("this client is closed")
        if connection.broken or connection.boot != self.boot:
            connection.close()  # it led to an earlier life of the server
        return connection

    def _beat(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.news = self._ask(BEAT, "{}", (), None).meta
                self.lost = None
            except Exception as error:  # whatever it is, nobody would wait for more beats
                self.lost = error if isinstance(error, ConnectionError) else ConnectionError(f"at a beat: {error}")
                self._break_off()
            if self._closing.wait(max(0.0, began + self.silent / 4 - time.monotonic())):
                return

    def _break_off(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.break_off()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *how: Any, **more: Any) -> None:
        super().__init__(sock, *how, **more)
        self.fp.close()
        self.fp = reader(sock)


class _Connection(http.client.HTTPConnection):
    """A connection of one thread's; `boot` is the server's life that it leads to."""

    response_class = _Response
    boot: str | None = None
    broken = False

    def __init__(self, client: Client) -> None:
        super().__init__(*client.address, timeout=client.silent)
        self._client = client

    @override
    def connect(self) -> None:
        client = self._client
        connection = socket.create_connection(client.address, client.silent)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if client.tls is not None:
                connection = client.tls.wrap_socket(connection, server_hostname=client.address[0])
            open_connection(connection, client.secret, serves=False)
        except BaseException:
            connection.close()
            raise
        beats = threading.current_thread() is client._beats
        connection.settimeout(0.75 * client.silent if beats else None)  # the beats say whether the others wait in vain
        self.sock, self.boot, self.broken = connection, client.boot, False
        if client._closing.is_set():  # only now: `close` breaks off what it finds
            self.break_off()

    def ask(self, operation: str, meta: str, views: Sequence[memoryview]) -> http.client.HTTPResponse:
        """Send it, and read the head of the answer."""
        self.putrequest("POST", f"/{operation}", skip_host=True, skip_accept_encoding=True)
        self.putheader(PEER, self._client.name)
        self.putheader(META, meta)
        self.putheader("Content-Length", str(sum(view.nbytes for view in views)))
        self.endheaders()
        for view in views:
            self.send(view)
        return self.getresponse()

    def break_off(self) -> None:
        """Whoever uses it gets an error."""
        connection, self.broken = self.sock, True
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

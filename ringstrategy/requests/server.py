"""Answers requests, each connection in a thread of its own, after it was opened by the secret."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from ringstrategy.errors import last_words
from ringstrategy.requests.messages import (
    BOOT,
    META,
    PEER,
    SILENT,
    Answer,
    Body,
    RefusedError,
    Request,
    nothing,
    view_of,
    written,
)
from ringstrategy.requests.opening import SECONDS, check_secret, open_connection
from ringstrategy.requests.sockets import break_off, notice_dead_paths, reader

_MOST_OPENING = 256  # connections that nobody has shown a secret on yet; of more the oldest are closed
_MOST_WORDS = 500  # characters of a refusal
_log = logging.getLogger(__name__)

Handler = Callable[[Request], Answer]


class _Peer:
    def __init__(self) -> None:
        self.connections: set[socket.socket] = set()
        self.heard = 0.0  # when


class Server:
    """Listens until `close`. HTTP/1.1 carries requests and answers; Python's own library reads and writes it.

    Args:
        address: host and port to listen on. Empty host: all addresses, of IPv6 too where there is any. Port 0: any.
        secret: at least 16 bytes; without it nothing is read but 70 bytes.
        handler: called in a thread of the client's, so several run at once. RefusedError tells the client why. An
            operation `beat` comes several times within `silent` seconds: answer it by the thread or lock that matters,
            because clients take an answer for a sign of life.
        gone: called with the name of a client that has closed its last connection, or was silent for too long. It may
            come back, but no request begins before this has returned: so it must not wait for one.
        silent: seconds without a request. Clients learn of it, and beat as often as it needs.
        tls: a context for servers, or None. The secret is not bound to it: clients must verify the certificate.

    Attributes:
        address: on which it listens.
        boot: a random word, another one in each life of the server.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        handler: Handler,
        *,
        gone: Callable[[str], None] = lambda peer: None,
        silent: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.secret, self.handler, self.silent, self.tls = check_secret(secret), handler, silent, tls
        self.boot = uuid.uuid4().hex
        self._gone = gone
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._opening: dict[socket.socket, None] = {}  # of those; the oldest first
        self._peers: dict[str, _Peer] = {}
        self._closing = threading.Event()
        self._http = _HttpServer(address, self)
        self.address: tuple[str, int] = self._http.server_address[:2]  # type: ignore[assignment]
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.1,), name="ringstrategy-server", daemon=True),
            threading.Thread(target=self._watch, name="ringstrategy-server-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and close all connections; handlers that still run end by themselves. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = list(self._connections)
        self._http.shutdown()
        break_off(self._http.socket)  # a forked process may hold it too
        self._http.server_close()
        for connection in connections:
            break_off(connection)
        for thread in self._threads:
            thread.join()

    @contextmanager
    def holding(self, connection: socket.socket) -> Generator[None, None, None]:
        """Until the connection ends, and after the other side has shown that it knows the secret: else an OSError."""
        with self._lock:
            if self._closing.is_set():
                raise ConnectionError("the server is closed")
            self._connections.add(connection)
            self._opening[connection] = None
            oldest = next(iter(self._opening)) if len(self._opening) > _MOST_OPENING else None
            if oldest is not None:
                del self._opening[oldest]
                break_off(oldest)
        try:
            notice_dead_paths(connection, self.silent)
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(SECONDS)
                connection.do_handshake()
            open_connection(connection, self.secret, serves=True)
            connection.settimeout(None)
            with self._lock:
                self._opening.pop(connection, None)
            yield
        finally:
            with self._lock:
                self._opening.pop(connection, None)
                self._connections.discard(connection)
            break_off(connection)
            connection.close()

    # Who is there

    def heard(self, name: str, connection: socket.socket) -> None:
        """A request has come from this client."""
        with self._lock:
            peer = self._peers.setdefault(name, _Peer())
            peer.heard = time.monotonic()
            peer.connections.add(connection)

    def closed(self, name: str, connection: socket.socket) -> None:
        """One of this client's connections has ended."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None:
                peer.connections.discard(connection)
                if not peer.connections:
                    self._part_with(name)

    def break_off_silent(self, now: float) -> None:
        """Close the connections of clients that were silent for too long."""
        with self._lock:
            for name in [name for name, peer in self._peers.items() if now > peer.heard + 0.75 * self.silent]:
                self._part_with(name)

    def _part_with(self, name: str) -> None:
        """Under the lock, so that a client that comes back comes after it has gone."""
        for connection in self._peers.pop(name).connections:
            break_off(connection)
        if self._closing.is_set():
            return
        try:
            self._gone(name)
        except Exception:
            _log.exception("nobody was told that %s is gone", name)

    def _watch(self) -> None:
        while not self._closing.wait(self.silent / 4):
            self.break_off_silent(time.monotonic())


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        self.owner = owner
        host, port = address
        if not host and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        elif host:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Connection)

    @override
    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        tls = self.owner.tls
        try:
            if tls is not None:
                request = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            with self.owner.holding(request):
                _Connection(request, client_address, self)
        except OSError as error:  # ssl's errors and ours are such
            _log.info("a connection from %s ended: %s", client_address[0], error)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("a connection from %s ended", client_address[0])


class _Connection(BaseHTTPRequestHandler):
    """One client's: a request, its answer, the next request."""

    protocol_version = "HTTP/1.1"
    server: _HttpServer
    _peer: str | None = None

    @override
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = reader(self.connection)

    @override
    def handle(self) -> None:
        try:
            super().handle()
        finally:
            if self._peer is not None:
                self.server.owner.closed(self._peer, self.connection)

    def do_POST(self) -> None:
        """Answer one request."""
        owner = self.server.owner
        self._peer = self.headers[PEER]
        owner.heard(self._peer, self.connection)
        body = Body(self.rfile, int(self.headers["Content-Length"]))
        status, views, sent = HTTPStatus.OK, list[memoryview](), nothing
        try:
            answer = owner.handler(Request(self._peer, self.path[1:], json.loads(self.headers[META]), body))
            sent = answer.sent
            head, views = written(answer.meta), [view_of(buffer) for buffer in answer.buffers]
        except RefusedError as error:
            status, head = HTTPStatus.CONFLICT, written({"error": str(error)[:_MOST_WORDS]})
        except Exception as error:
            if body.lost:
                raise
            _log.exception("the request %s of %s failed", self.path[1:], self._peer)
            status, head = HTTPStatus.INTERNAL_SERVER_ERROR, written({"error": last_words(error)})
        try:
            body.skip()
            self.send_response_only(status)
            self.send_header(BOOT, owner.boot)
            self.send_header(SILENT, str(owner.silent))
            self.send_header(META, head)
            self.send_header("Content-Length", str(sum(view.nbytes for view in views)))
            self.end_headers()
            for view in views:
                self.wfile.write(view)
        finally:
            sent()

    @override
    def log_message(self, format: str, *given: Any) -> None:
        _log.info(format, *given)

"""Answers requests, each connection in a thread of its own, after it was opened by the secret."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from ringstrategy.requests.messages import BOOT, META, PEER, Answer, Body, RefusedError, Request, view_of, written
from ringstrategy.requests.opening import SECONDS, check_secret, open_connection
from ringstrategy.requests.reader import reader

_MOST_OPENING = 256  # connections that nobody has shown a secret on yet; of more the oldest are closed
_log = logging.getLogger(__name__)

Handler = Callable[[Request], Answer]


class Server:
    """Listens until `close`. HTTP/1.1 carries requests and answers; Python's own library reads and writes it.

    Args:
        address: host and port to listen on. Empty host: all addresses, of IPv6 too where there is any. Port 0: any.
        secret: at least 16 bytes; without it nothing is read but 70 bytes.
        handler: called in a thread of the client's, so several run at once. RefusedError tells the client why. An
            operation `beat` comes several times within `silent` seconds: answer it by the thread or lock that matters,
            because clients take an answer for a sign of life.
        gone: called with the name of a client that has closed its last connection, or was silent for too long. It may
            come back.
        silent: seconds without a request.
        tls: a context for servers, or None.

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
        self.secret, self.handler, self.tls = check_secret(secret), handler, tls
        self.boot = uuid.uuid4().hex
        self._gone, self._silent = gone, silent
        self._lock = threading.Lock()
        self._opening: dict[socket.socket, None] = {}  # the oldest first
        self._peers: dict[str, set[socket.socket]] = {}
        self._heard: dict[str, float] = {}
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
        """Stop listening, and close all connections. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        with self._lock:
            left = [*self._opening, *(each for connections in self._peers.values() for each in connections)]
        for connection in left:
            _break_off(connection)
        for thread in self._threads:
            thread.join()

    def open(self, connection: socket.socket) -> socket.socket:
        """The connection, with TLS if it is asked for, once the other side has shown that it knows the secret."""
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._opening[connection] = None
            oldest = next(iter(self._opening)) if len(self._opening) > _MOST_OPENING else None
        if oldest is not None:
            _break_off(oldest)
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(SECONDS)
                connection.do_handshake()
            open_connection(connection, self.secret, serves=True)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._opening.pop(connection, None)
        return connection

    # Who is there

    def heard(self, peer: str, connection: socket.socket) -> None:
        """A request has come from this client."""
        with self._lock:
            self._heard[peer] = time.monotonic()
            self._peers.setdefault(peer, set()).add(connection)

    def closed(self, peer: str, connection: socket.socket) -> None:
        """One of this client's connections has ended."""
        with self._lock:
            connections = self._peers.get(peer, set())
            connections.discard(connection)
            last = peer in self._peers and not connections
            if last:
                del self._peers[peer], self._heard[peer]
        if last:
            self._tell_of(peer)

    def break_off_silent(self, now: float) -> None:
        """Close the connections of clients that were silent for too long."""
        with self._lock:
            silent = [peer for peer, heard in self._heard.items() if now > heard + 0.75 * self._silent]
            left = {peer: self._peers.pop(peer) for peer in silent if self._heard.pop(peer)}
        for peer, connections in left.items():
            for connection in connections:
                _break_off(connection)
            self._tell_of(peer)

    def _tell_of(self, peer: str) -> None:
        if not self._closing.is_set():
            try:
                self._gone(peer)
            except Exception:
                _log.exception("nobody was told that %s is gone", peer)

    def _watch(self) -> None:
        while not self._closing.wait(self._silent / 4):
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
        try:
            opened = self.owner.open(request)
        except OSError as error:  # ssl's errors and ours are such
            _log.info("refused a connection from %s: %s", client_address[0], error)
            return
        with contextlib.closing(opened):
            _Connection(opened, client_address, self)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("a connection from %s ended", client_address[0])


class _Connection(BaseHTTPRequestHandler):
    """One client's: a request, its answer, the next request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer
    _peer = ""

    @override
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = reader(self.connection)

    @override
    def handle(self) -> None:
        try:
            with contextlib.suppress(OSError):  # the client is gone
                super().handle()
        finally:
            if self._peer:
                self.server.owner.closed(self._peer, self.connection)

    def do_POST(self) -> None:
        """Answer one request."""
        owner = self.server.owner
        self._peer = self.headers[PEER]
        owner.heard(self._peer, self.connection)
        body = Body(self.rfile, int(self.headers["Content-Length"]))
        status = 200
        try:
            answer = owner.handler(Request(self._peer, self.path[1:], json.loads(self.headers[META]), body))
        except RefusedError as error:
            status, answer = 409, Answer({"error": str(error)})
        except Exception as error:
            if body.lost:
                raise
            _log.exception("the request %s of %s failed", self.path[1:], self._peer)
            status, answer = 500, Answer({"error": f"{type(error).__name__}: {error}"})
        body.skip()
        views = [view_of(buffer) for buffer in answer.buffers]
        self.send_response_only(status)
        self.send_header(BOOT, owner.boot)
        self.send_header(META, written(answer.meta))
        self.send_header("Content-Length", str(sum(view.nbytes for view in views)))
        self.end_headers()
        for view in views:
            self.wfile.write(view)

    @override
    def log_message(self, format: str, *given: Any) -> None:
        _log.info(format, *given)


def _break_off(connection: socket.socket) -> None:
    """Whoever reads or writes it gets an error, or the end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

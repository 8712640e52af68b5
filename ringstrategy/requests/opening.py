"""The opening of a connection: each side shows that it knows the secret, before anything else is read.

Each side sends its versions and a nonce, and then the HMAC-SHA256 of both (a challenge), so a recorded opening opens
nothing. This protects the opening, not what follows: on networks that are not trusted use TLS.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

LOWEST = HIGHEST = 1  # versions that this side understands
SECONDS = 5.0  # for all of it
_HELLO = struct.Struct("!4sBB32s")  # magic, lowest and highest version, nonce
_MAGIC = b"RING"
_PROOF = 32
_LEAST_SECRET = 16


class OpeningError(ConnectionError):
    """The other side is a stranger, or speaks another version."""


def check_secret(secret: bytes) -> bytes:
    """ValueError if it could be guessed."""
    if len(secret) < _LEAST_SECRET:
        raise ValueError(
            f"a secret has at least {_LEAST_SECRET} bytes, got {len(secret)}: make one with `openssl rand -hex 32`"
        )
    return secret


def open_connection(connection: socket.socket, secret: bytes, *, serves: bool) -> None:
    """Both sides call it first. OpeningError, or OSError, unless they trust each other.

    Args:
        connection: its time-out is changed.
        secret: the same on both sides.
        serves: this side is the server, and shows that it knows the secret only to those that do.
    """
    deadline = time.monotonic() + SECONDS
    ours = _HELLO.pack(_MAGIC, LOWEST, HIGHEST, secrets.token_bytes(32))
    connection.settimeout(SECONDS)
    connection.sendall(ours)
    theirs = _received(connection, _HELLO.size, deadline)
    magic, lowest, highest, _ = _HELLO.unpack(theirs)
    if magic != _MAGIC:
        raise OpeningError("the other side is no server or client of ringstrategy's")
    if lowest > HIGHEST or highest < LOWEST:
        raise OpeningError(
            f"the other side speaks versions {lowest} to {highest}, and this one {LOWEST} to {HIGHEST}: install the "
            "same ringstrategy on both"
        )
    both = ours + theirs if serves else theirs + ours
    of_server, of_client = (hmac.digest(secret, role + both, "sha256") for role in (b"server", b"client"))
    if not serves:
        connection.sendall(of_client)
    if not hmac.compare_digest(_received(connection, _PROOF, deadline), of_client if serves else of_server):
        raise OpeningError("the other side has another secret")
    if serves:
        connection.sendall(of_server)


def _received(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OpeningError(f"the other side did not open the connection within {SECONDS:.0f} s")
        connection.settimeout(left)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise OpeningError("the other side closed the connection: is its secret the same?")
        received += part
    return received

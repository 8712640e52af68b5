"""What both sides do to a socket."""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
from typing import Any

from typing_extensions import override

_LARGE = 1 << 16  # bytes; heads are shorter
_HEADS = 1 << 13  # bytes; Python's own buffer may be larger than that
_UNSENT = 1 << 18  # bytes that wait in the system: so who has written a message knows that it is nearly gone
_AT_ONCE = 1 << 30  # bytes; ssl counts them in a C int


class _Socket(io.RawIOBase):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._whole = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL

    @override
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a large buffer to its end, and a small one with what is there."""
        nbytes = min(len(buffer), _AT_ONCE)
        return self._connection.recv_into(buffer, nbytes, self._whole if nbytes > _LARGE else 0)


def reader(connection: socket.socket) -> io.BufferedReader:
    """Reads in as few calls as possible: Python's own wakes up for each packet. Its owner closes the connection."""
    return io.BufferedReader(_Socket(connection), _HEADS)


def notice_dead_paths(connection: socket.socket, silent: float) -> None:
    """Make the kernel end a connection whose packets get lost for so many seconds, where it can; send at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    often = max(1, int(silent / 4))
    options = {"TCP_KEEPIDLE": often, "TCP_KEEPINTVL": often, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": int(1000 * silent)}
    options |= {"TCP_NOTSENT_LOWAT": _UNSENT}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def break_off(connection: socket.socket) -> None:
    """Whoever reads or writes it gets an error or the end, also where a forked process has inherited it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # after ssl's own a reader takes ciphertext for data

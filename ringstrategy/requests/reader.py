"""Reads a socket in as few calls as possible: Python's own reader wakes up for each packet."""

from __future__ import annotations

import io
import socket
import ssl
from typing import Any

from typing_extensions import override

_LARGE = 1 << 16  # bytes; heads are shorter


class _Socket(io.RawIOBase):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._whole = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL

    @override
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a large buffer to its end, and a small one with what is there."""
        return self._connection.recv_into(buffer, 0, self._whole if len(buffer) > _LARGE else 0)


def reader(connection: socket.socket) -> io.BufferedReader:
    """Of what arrives. Its owner closes the connection."""
    return io.BufferedReader(_Socket(connection))

"""Asks a server of this process, by calls."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from typing_extensions import override

from ringstrategy.requests.messages import Answer, Body, Buffer, Request, nothing, view_of
from ringstrategy.requests.server import Handler

_AT_ONCE = 32


class Views(io.BufferedIOBase):
    """Reads from memory, without a copy beside."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.nbytes = sum(view.nbytes for view in views)
        self._views = deque(views)

    @override
    def readinto(self, buffer: Any) -> int:
        begin = 0
        while self._views and begin < len(buffer):
            view = self._views.popleft()
            nbytes = min(view.nbytes, len(buffer) - begin)
            buffer[begin : begin + nbytes] = view[:nbytes]
            begin += nbytes
            if nbytes < view.nbytes:
                self._views.appendleft(view[nbytes:])
        return begin


def answered(
    handler: Handler,
    name: str,
    operation: str,
    meta: Mapping[str, Any],
    buffers: Sequence[Buffer],
    into: Buffer | None = None,
) -> Answer:
    """The answer that a client of this name gets, in this thread; see `Client.ask`."""
    given = Views([view_of(buffer) for buffer in buffers])
    answer = handler(Request(name, operation, dict(meta), Body(given, given.nbytes)))
    views = [view_of(buffer) for buffer in answer.buffers]
    out = memoryview(bytearray(sum(view.nbytes for view in views))) if into is None else view_of(into)
    begin = 0
    for view in views:
        out[begin : begin + view.nbytes] = view
        begin += view.nbytes
    return Answer(answer.meta, (out,))


class Within:
    """What a `Client` is to a server of another process. Nothing is sent.

    Args:
        handler: the server's.
        name: of this client.

    Attributes:
        bytes_sent: none.
        bytes_received: none.
    """

    bytes_sent = bytes_received = 0

    def __init__(self, handler: Handler, *, name: str) -> None:
        self._handler, self._name = handler, name
        self._threads = ThreadPoolExecutor(_AT_ONCE, "ringstrategy-within")

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
        """As `Client.ask`."""
        del bulk
        sent()
        return self._threads.submit(answered, self._handler, self._name, operation, dict(meta or {}), buffers, into)

    def close(self) -> None:
        """Requests under way end by themselves."""
        self._threads.shutdown(wait=False)

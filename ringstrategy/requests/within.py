"""Asks a server of this process, by calls."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ringstrategy.requests.messages import Answer, Body, Buffer, Request, view_of
from ringstrategy.requests.server import Handler

_AT_ONCE = 32


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
    ) -> Future[Answer]:
        """As `Client.ask`."""
        del bulk
        return self._threads.submit(self._answer, operation, dict(meta or {}), buffers, into)

    def _answer(self, operation: str, meta: dict[str, Any], buffers: Sequence[Buffer], into: Buffer | None) -> Answer:
        content = b"".join(view_of(buffer) for buffer in buffers)
        answer = self._handler(Request(self._name, operation, meta, Body(io.BytesIO(content), len(content))))
        views = [view_of(buffer) for buffer in answer.buffers]
        out = memoryview(bytearray(sum(view.nbytes for view in views))) if into is None else view_of(into)
        begin = 0
        for view in views:
            out[begin : begin + view.nbytes] = view
            begin += view.nbytes
        return Answer(answer.meta, (out,))

    def close(self) -> None:
        """Requests under way end by themselves."""
        self._threads.shutdown(wait=False)

"""What client and server hand to each other: an operation with a few words about it, and bulk data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BufferedIOBase
from typing import Any, NamedTuple

import torch
from torch import Tensor

META, PEER, BOOT, SILENT = "Meta", "Peer", "Boot", "Silent"  # headers
_MOST_META = 60_000  # characters: Python's HTTP reads lines of at most 64 KiB
_SCRATCH = 1 << 18

Buffer = Tensor | memoryview | bytes | bytearray


class RefusedError(ValueError):
    """The server understood a request and refuses it. The connection stays open."""


def nothing() -> None:
    """What to call where nobody wants to know."""


class Answer(NamedTuple):
    """What a request is answered with.

    Attributes:
        meta: anything that `json` can write, at most 60,000 characters.
        buffers: bulk data. From `Client.ask` it is one buffer: `into`, or a `memoryview` of new memory.
        sent: called once the server has handed it to the operating system, or has failed to.
    """

    meta: dict[str, Any]
    buffers: Sequence[Buffer] = ()
    sent: Callable[[], None] = nothing


class Body:
    """The bulk data of a request, still on its way: the handler decides where it goes."""

    def __init__(self, source: BufferedIOBase, nbytes: int) -> None:
        self._source, self.nbytes, self._left = source, nbytes, nbytes
        self.lost = False  # the client went before all had come

    def read_into(self, buffer: Buffer) -> None:
        """Fill the buffer with the next bytes. Nothing is copied on the way.

        RefusedError if there are not as many left, ConnectionError if the client is lost.
        """
        view = view_of(buffer)
        if view.nbytes > self._left:
            raise RefusedError(f"{view.nbytes} bytes are wanted, and only {self._left} of {self.nbytes} are left")
        self.lost = True  # if that raises
        read = self._source.readinto(view)
        self._left -= read
        self.lost = read < view.nbytes
        if self.lost:
            raise ConnectionError(f"the client was lost within a body of {self.nbytes} bytes")

    def skip(self) -> None:
        """Drop the rest, so that the next request can be read."""
        scratch = memoryview(bytearray(min(self._left, _SCRATCH)))
        while self._left:
            self.read_into(scratch[: self._left])


class Request(NamedTuple):
    """What a handler answers.

    Attributes:
        peer: the name that the client gave itself.
        operation: what is asked for.
        meta: see `Answer`.
        body: bulk data.
    """

    peer: str
    operation: str
    meta: dict[str, Any]
    body: Body


def view_of(buffer: Buffer) -> memoryview:
    """Its bytes, without a copy. ValueError unless it is contiguous and on the CPU."""
    if isinstance(buffer, Tensor):
        if not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise ValueError(f"only contiguous tensors on the CPU travel, got {tuple(buffer.shape)} on {buffer.device}")
        flat: Any = buffer.detach().view(-1).view(torch.uint8).numpy()
        return memoryview(flat)
    return memoryview(buffer).cast("B")


def written(meta: dict[str, Any]) -> str:
    """As a header. ValueError if it is too long."""
    text = json.dumps(meta)
    if len(text) > _MOST_META:
        raise ValueError(f"meta has {len(text)} characters, and at most {_MOST_META} travel: send it as a buffer")
    return text

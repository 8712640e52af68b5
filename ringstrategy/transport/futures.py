"""Exchanges under way as torch futures, for whoever waits in C++, as torch DDP does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from ringstrategy.transport.base import Waitable
from ringstrategy.transport.worker import Worker


class Promise:
    """A future to give away before its exchanges begin.

    Args:
        value: of the future, such as the tensors that the exchanges change.
        device: of the value.

    Attributes:
        future: gets the value, or raises the error of an exchange. In C++ the error loses its type.
    """

    def __init__(self, value: Any, device: torch.device) -> None:
        self._value = value
        self._error: BaseException | None = None
        self._done: Future[Any] = Future(devices=None if device.type == "cpu" else [device])
        # only a callback may raise: `Future.set_exception` aborts DDP
        self.future: Future[Any] = self._done.then(self._value_or_error)

    def keep(self, error: BaseException | None = None) -> None:
        """The value is there, for what is queued on the current stream after this, or it never will be."""
        self._error = error
        self._done.set_result(self._value)

    def _value_or_error(self, done: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return done.value()


class Futures:
    """One thread that waits for exchanges, in order, and meanwhile looks for lost ranks.

    Args:
        device: of the values; promises of a GPU's are kept when they are queued there.

    Attributes:
        error: the first of an exchange; None while all goes well.
    """

    def __init__(self, device: torch.device) -> None:
        self.error: BaseException | None = None
        # of its own, so that the computing that follows on the default one does not wait for exchanges
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker = Worker("ringstrategy-futures")

    def keep(self, promise: Promise, exchanges: Sequence[Waitable]) -> None:
        """Once all of them are done; returns at once."""
        self._worker.submit(partial(self._wait, promise, exchanges), while_waiting=lambda: None)

    def close(self, timeout: float) -> bool:
        """Keep all promises and end the thread; True if it ended within `timeout` seconds."""
        return self._worker.close(timeout)

    def _wait(self, promise: Promise, exchanges: Sequence[Waitable]) -> None:
        error = None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                for exchange in exchanges:
                    exchange.wait()
            except BaseException as raised:
                error = raised
                self.error = self.error or error
            promise.keep(error)

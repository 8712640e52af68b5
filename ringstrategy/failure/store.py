"""Calls to a store that always end: torch's client would wait forever for a frozen host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")


class Clock(Protocol):
    """What Python's module `time` has."""

    def monotonic(self) -> float:
        """Seconds since any moment."""

    def sleep(self, seconds: float) -> None:
        """Let others go on."""


def poll_seconds(size: int) -> float:
    """How long each of `size` ranks sleeps between two looks: a store answers some thousands a second."""
    return max(0.02, size / 2000)


class StoreSilentError(RuntimeError):
    """The store does not answer; `waiting` is the call that a thread still waits for."""

    def __init__(self, waiting: Future[Any]) -> None:
        super().__init__("the rendezvous store does not answer")
        self.waiting = waiting


def begun(call: Callable[[], Answer]) -> Future[Answer]:
    """The call, begun in a thread that may be left behind: the process ends without waiting for it."""
    answer = Future[Answer]()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="ringstrategy-store", daemon=True).start()
    return answer


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """What the call returns or raises. StoreSilentError if it takes longer; then a thread is left behind with it."""
    answer = begun(call)
    if not wait([answer], seconds).done:
        raise StoreSilentError(answer)
    return answer.result()


class BoundedStore:
    """A store of torch, with calls that end within `limit` seconds, one after the other.

    Every call raises a StoreSilentError if there is no answer in time, and a RuntimeError if the store is gone. A store
    that is gone is not asked again: torch's client does not connect a second time, and logs a C++ trace at each call.

    Args:
        store: of torch.
        limit: seconds that a call may take; may be changed at any time.
    """

    def __init__(self, store: dist.Store, limit: float) -> None:
        self._store = store
        self._stuck: Future[Any] | None = None
        self._gone: dist.DistNetworkError | None = None
        self.limit = limit

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        if self._gone is not None:
            raise self._gone.with_traceback(None)
        if self._stuck is not None and not self._stuck.done():
            raise StoreSilentError(self._stuck)
        try:
            return within(self.limit, call)
        except StoreSilentError as silent:
            self._stuck = silent.waiting
            raise
        except dist.DistNetworkError as error:
            self._gone = error
            raise

    def set(self, key: str, value: str) -> None:
        """When this returns, every rank that looks finds it."""

        def write() -> None:
            self._store.set(key, value)
            self._store.check([key])  # torch's client sends a write and goes on; the server answers in order

        self._ask(write)

    def read(self, key: str) -> str | None:
        """None if nobody has written it."""
        return self.read_all([key])[0]

    def read_all(self, keys: list[str]) -> list[str | None]:
        """As `read`, in one go, in this order."""

        def read() -> list[str | None]:
            return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

        return self._ask(read)

    def forget(self, key: str) -> None:
        """Whether or not it is there."""
        self._ask(lambda: self._store.delete_key(key))

    def has(self, keys: list[str]) -> bool:
        """Whether all of the keys are there."""
        return self._ask(lambda: self._store.check(keys))

    def has_any(self, keys: list[str]) -> bool:
        """Whether one of the keys is there."""
        return any(self.has([key]) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """To the number that is there, or 0; returns the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def first(self, key: str, value: str) -> str:
        """Write unless there is a value already; returns the value in the store."""
        return self._ask(lambda: self._store.compare_set(key, "", value).decode())

"""Check the store while the training thread waits in a collective of torch; Lightning calls some by itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from ringstrategy.failure.waits import Wait

_SECONDS = 1.0
_COLLECTIVES = "torch.distributed.distributed_c10d"
_EXCHANGES = "ringstrategy.transport."
_TRAINER = ".trainer.trainer"
_OURS = {"contextlib", "ringstrategy", "torch"}
_LIBRARIES = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}


class CollectiveWatchdog:
    """A thread that watches the thread that creates it, until `close`.

    Args:
        listen: called once a second, wherever the watched thread is, with what it waits in: a collective of the default
            group, or an exchange. None: neither.
        look: called once a second while the watched thread is in a collective; True if it waits in vain.
        break_off: ends that collective with an error.
    """

    def __init__(
        self, listen: Callable[[Wait | None], None], look: Callable[[], bool], break_off: Callable[[], None]
    ) -> None:
        self._listen, self._look, self._break_off = listen, look, break_off
        self._watched = threading.get_ident()
        self._announced: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ringstrategy-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, what: str) -> Generator[None, None, None]:
        """Within, the watched thread may wait in a collective that is in no Python frame: in `what`, for messages."""
        self._announced = what
        try:
            yield
        finally:
            self._announced = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_SECONDS)

    def _loop(self) -> None:
        waits = False
        while not self._closed.wait(_SECONDS):
            waited, waits = waits, self._in_a_collective()
            with contextlib.suppress(RuntimeError):  # the store is gone: what is waited for has a timeout of its own
                self._listen(self._waits_in())
                if waited and waits and self._look():
                    self._break_off()
                    return

    def _in_a_collective(self) -> bool:
        if self._announced is not None:
            return True
        return any(_module(frame) == _COLLECTIVES for frame in self._stack())

    def _waits_in(self) -> Wait | None:
        stack = list(self._stack())
        if any(_module(frame).startswith(_EXCHANGES) for frame in stack):
            return Wait("", "an exchange")
        within = [place for place, frame in enumerate(stack) if _module(frame) == _COLLECTIVES]
        if not within:
            return Wait("broadcast", self._announced) if self._announced else None
        called = stack[within[-1]]
        if called.f_locals.get("group") not in (None, dist.group.WORLD):
            return None  # of which not all ranks are
        name = called.f_code.co_name
        callers = [frame for frame in stack[within[-1] :] if _module(frame).partition(".")[0] not in _OURS]
        for frame in callers:
            if _module(frame).endswith(_TRAINER):
                break  # Lightning calls it by itself
            if _module(frame).partition(".")[0] not in _LIBRARIES:
                return Wait(name, f"{name}() at {_line(frame)}")
        return Wait(name, self._announced or f"{name}() at {_line((callers or [called])[0])}")

    def _stack(self) -> Iterator[FrameType]:
        """Of the watched thread, innermost first."""
        frame: FrameType | None = sys._current_frames().get(self._watched)
        while frame is not None:
            yield frame
            frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Check the store while the training thread waits in a collective of torch; Lightning calls some by itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_SECONDS = 1.0
_COLLECTIVES = "torch.distributed.distributed_c10d"


class Watch:
    """A thread that watches the thread that creates it, until `close`.

    Args:
        listen: called once a second, wherever the watched thread is.
        look: called once a second while the watched thread is in a collective; True if it waits in vain.
        break_off: ends that collective with an error.
    """

    def __init__(self, listen: Callable[[], None], look: Callable[[], bool], break_off: Callable[[], None]) -> None:
        self._listen, self._look, self._break_off = listen, look, break_off
        self._watched = threading.get_ident()
        self._announced = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ringstrategy-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self) -> Generator[None, None, None]:
        """Within, the watched thread may wait in a collective that is in no Python frame."""
        self._announced = True
        try:
            yield
        finally:
            self._announced = False

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_SECONDS)

    def _loop(self) -> None:
        waits = False
        while not self._closed.wait(_SECONDS):
            waited, waits = waits, self._in_a_collective()
            with contextlib.suppress(RuntimeError):  # the store is gone: what is waited for has a timeout of its own
                self._listen()
                if waited and waits and self._look():
                    self._break_off()
                    return

    def _in_a_collective(self) -> bool:
        if self._announced:
            return True
        frame: FrameType | None = sys._current_frames().get(self._watched)
        while frame is not None and frame.f_globals.get("__name__") != _COLLECTIVES:
            frame = frame.f_back
        return frame is not None

"""Time for what waits in threads: seconds cost none, and no order depends on how busy the machine is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

HARD_END = 120.0  # seconds of the real clock


class Clock:
    """As Python's `time`, but time passes only while all threads sleep: then the next one wakes up."""

    def __init__(self) -> None:
        self.now = 0.0
        self._awake = 1  # threads; the one that made it
        self._wakes: dict[object, float] = {}  # of those that sleep
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        me = object()
        with self._changed:
            self._wakes[me] = self.now + max(seconds, 1e-9)
            self._nap()
            while me in self._wakes:
                assert self._changed.wait(HARD_END)

    def run(self, *works: Callable[[], Any]) -> list[Any]:
        """Each in a thread; returns what they return, or the exceptions that they raise."""
        results: list[Any] = [None] * len(works)

        def do(place: int) -> None:
            try:
                results[place] = works[place]()
            except Exception as error:
                results[place] = error
            finally:
                with self._changed:
                    self._nap()

        threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(works))]
        with self._changed:
            self._awake += len(works) - 1
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HARD_END)
            assert not thread.is_alive()
        self._awake += 1
        return results

    def _nap(self) -> None:
        """A thread is not awake any more."""
        self._awake -= 1
        if not self._awake and self._wakes:
            self.now = min(self._wakes.values())
            for sleeper in [sleeper for sleeper, wake in self._wakes.items() if wake <= self.now]:
                del self._wakes[sleeper]
                self._awake += 1
            self._changed.notify_all()

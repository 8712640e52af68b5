"""Keep the tensors of tasks until a device has done what the tasks have queued."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from ringstrategy.transport.worker import Task

_POLL_SECONDS = 0.01
_never_done: list[tuple[Task, torch.cuda.Event]] = []  # the device may still write to their tensors


class Held:
    """Tasks that a device still works on, and so all tensors that they refer to.

    The owner of a tensor may drop it before: after an exception within a backward, or when training ends with an
    exchange under way. Torch would give its memory to another tensor, and the exchange would write to that.
    """

    def __init__(self) -> None:
        self._tasks: deque[tuple[Task, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many tasks the device had done when it was asked last."""
        return self._dropped

    def done(self) -> int:
        """How many tasks the device has done."""
        self._drop()
        return self._dropped

    def until(self, done: torch.cuda.Event, task: Task) -> None:
        """Keep `task` until `done`, an event that is recorded. Those before it that are done are dropped."""
        with self._lock:
            self._tasks.append((task, done))
        self._drop()

    def release(self, seconds: float) -> bool:
        """Drop all tasks as soon as they are done; True if they were within `seconds`. Others are kept for good."""
        deadline = time.monotonic() + seconds
        while self._drop():
            if time.monotonic() > deadline:
                with self._lock:
                    _never_done.extend(self._tasks)
                    self._tasks.clear()
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _drop(self) -> int:
        """Drop those that are done; returns how many are left."""
        with self._lock:
            while self._tasks and self._tasks[0][1].query():
                self._tasks.popleft()
                self._dropped += 1
            return len(self._tasks)

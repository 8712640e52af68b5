"""One thread that runs exchanges beside the training thread, first in, first out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Task = Callable[[], None]
CLOSE_SECONDS = 30.0
CLOSE_SECONDS_AFTER_ERROR = 5.0  # the thread may be finding out which rank was lost
_IDLE_SECONDS = 1.0


class Ticket:
    """A submitted task. `wait` returns when it is done, and raises its error.

    Args:
        while_waiting: called once a second by whoever waits; may raise to end the wait.
    """

    def __init__(self, while_waiting: Callable[[], None]) -> None:
        self._while_waiting = while_waiting
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the task is done."""
        while not self._done.wait(_IDLE_SECONDS):
            self._while_waiting()
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """The task is done, or failed, or will not run because an earlier one failed."""
        self._error = error
        self._done.set()


class Worker:
    """Runs tasks in order. After a failure it refuses every later task with the same error: no mean may be wrong."""

    def __init__(self, name: str) -> None:
        self._handed_in: queue.SimpleQueue[tuple[Task, Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, while_waiting: Callable[[], None]) -> Ticket:
        """Queue a task; returns at once."""
        ticket = Ticket(while_waiting)
        self._handed_in.put((task, ticket))
        return ticket

    def close(self, timeout: float) -> bool:
        """Finish all submitted tasks and end the thread; True if it ended within `timeout` seconds."""
        self._handed_in.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @torch.no_grad()  # the mode is of a thread; tasks write to users' tensors
    def _loop(self) -> None:
        error: BaseException | None = None
        while (handed_in := self._handed_in.get()) is not None:
            task, ticket = handed_in
            if error is None:
                error = _outcome(task)
            del handed_in, task  # whoever waits may count on the memory that it kept, such as gradients
            ticket.end(error)
            del ticket


def _outcome(task: Task) -> BaseException | None:
    try:
        task()
    except BaseException as error:
        return error
    return None

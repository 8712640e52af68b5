"""One thread that does exchanges first in, first out, beside the training thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class Ticket:
    """A piece of work handed in; `wait` returns when it is done, and raises what it raised."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the work is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def run(self, work: Work) -> BaseException | None:
        """Do the work and keep its error for whoever waits."""
        try:
            work()
        except BaseException as error:
            self._error = error
        self._done.set()
        return self._error

    def refuse(self, error: BaseException) -> None:
        """Never to be done: an earlier piece of work failed."""
        self._error = error
        self._done.set()


class Worker:
    """After a failure every later piece of work is refused with the same error: a mean is right or it is an error."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Work, Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Ticket:
        """Hand in; returns at once."""
        ticket = Ticket()
        self._tasks.put((work, ticket))
        return ticket

    def close(self, timeout: float) -> None:
        """Finish what was handed in, then end the thread; raise if it does not end within `timeout` seconds."""
        self._tasks.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise RuntimeError(f"the communication thread did not end within {timeout:.0f} s")

    def _loop(self) -> None:
        error: BaseException | None = None
        while (task := self._tasks.get()) is not None:
            work, ticket = task
            if error is not None:
                ticket.refuse(error)
            else:
                error = ticket.run(work)

"""Exchanges under way as torch futures, for whoever waits in C++, as torch DDP does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from ringstrategy.transport.base import Peers, Waitable
from ringstrategy.transport.worker import Task


class Futures:
    """One thread that waits for the exchanges of `peers`, in their order, and meanwhile looks for lost ranks.

    Args:
        peers: whose exchanges.
        device: of the values; futures of a GPU's are complete when they are queued there.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._handed_in: queue.SimpleQueue[tuple[Waitable, Future[Any], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="ringstrategy-futures", daemon=True)
        self._thread.start()

    def submit(self, task: Task, where: str, value: Any) -> tuple[Waitable, Future[Any]]:
        """`Peers.submit`, and a future that gets `value` when the task is done, or the task's error as its value.

        Who waits in Python had better wait for the first of the two, which raises the error.
        """
        future: Future[Any] = Future(devices=[self._device] if self._device.type != "cpu" else None)
        ticket = self._peers.submit(task, where)
        self._handed_in.put((ticket, future, value))
        return ticket, future

    def close(self, timeout: float) -> None:
        """End the thread, after all that was submitted, and within so many seconds."""
        self._handed_in.put(None)
        self._thread.join(timeout)

    def _loop(self) -> None:
        wait: Callable[[Waitable, Future[Any], Any], None] = self._wait
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)

            def wait(ticket: Waitable, future: Future[Any], value: Any) -> None:
                with torch.cuda.stream(stream):  # what the future waits for
                    self._wait(ticket, future, value)

        while (handed_in := self._handed_in.get()) is not None:
            wait(*handed_in)
            del handed_in  # its tensors

    def _wait(self, ticket: Waitable, future: Future[Any], value: Any) -> None:
        try:
            ticket.wait()
        except BaseException as error:
            value = error
        future.set_result(value)


def raised(done: Future[Any]) -> Any:
    """For `Future.then`: the value, or the error raised. A future that is given an exception would end the process."""
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value

"""CUDA tensors over gloo: one thread, with copies through pinned host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.failure.detector import FailureDetector
from ringstrategy.transport.base import Handle, Waitable
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.held import Held
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import CLOSE_SECONDS_AFTER_ERROR, Task


class _Pool:
    """Pinned buffers by their size, the longest unused first, each with the event after which it may be written to."""

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[Tensor, torch.cuda.Event | None]]] = {}

    def take(self, nbytes: int) -> Tensor:
        """At least so many bytes: a power of two, so that sizes that vary share buffers."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        free = self._free.setdefault(size, deque())
        if not free:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        buffer, read = free.popleft()
        if read is not None:
            read.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, read: torch.cuda.Event | None) -> None:
        """Its bytes have been read, or will have been when `read` has come."""
        self._free[buffer.numel()].append((buffer, read))


class _StagedHandle:
    def __init__(
        self,
        handle: Handle,
        leaving: list[Tensor],
        arriving: list[tuple[Tensor, Tensor]],
        pool: _Pool,
        stream: torch.cuda.Stream,
    ) -> None:
        self._handle, self._leaving, self._arriving = handle, leaving, arriving
        self._pool, self._stream = pool, stream

    def wait(self) -> None:
        self._handle.wait()
        for buffer in self._leaving:  # gloo has read them
            self._pool.give_back(buffer, None)
        for tensor, buffer in self._arriving:
            tensor.copy_(buffer[: tensor.numel()], non_blocking=True)
        read = self._stream.record_event() if self._arriving else None
        for _, buffer in self._arriving:
            self._pool.give_back(buffer, read)
        self._leaving, self._arriving = [], []


class _StagedTicket:
    def __init__(self, ticket: Waitable, done: torch.cuda.Event, device: torch.device) -> None:
        self._ticket, self._done, self._device = ticket, done, device

    def wait(self) -> None:
        self._ticket.wait()
        torch.cuda.current_stream(self._device).wait_event(self._done)


class StagedPeers(GlooPeers):
    """CUDA tensors over gloo: the thread copies wire bytes through pinned host memory, on a stream of its own.

    The thread waits only for the copies that gloo is about to send. What it queues behind them, such as decoding, runs
    while the next messages travel; `finish` lets the current stream wait for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        detector: FailureDetector,
        stats: Stats,
        hosts: tuple[str, ...],
        device: torch.device,
        *,
        owned: bool = True,
    ) -> None:
        super().__init__(group, detector, stats, hosts, owned=owned)
        self._stream = torch.cuda.Stream(device)
        self._pool = _Pool()
        self._held = Held()

    def expect(self, source: int, arriving: Tensor) -> None:
        """Nothing: it arrives in memory that is taken when it is received."""

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Copy to the host, wait for that copy (in the communication thread alone), start.

        What goes to several ranks is copied once, and leaves from the same buffer.
        """
        on_host, staged = dict(sends), dict[tuple[int, int], Tensor]()
        for peer, tensor in sends.items():
            if tensor.device.type != "cpu":
                what = tensor.data_ptr(), tensor.numel()
                if what not in staged:
                    staged[what] = self._pool.take(tensor.numel())
                    staged[what][: tensor.numel()].copy_(tensor, non_blocking=True)
                on_host[peer] = staged[what][: tensor.numel()]
        leaving = list(staged.values())
        if leaving:
            self._stream.record_event().synchronize()
        to_host, arriving = dict(recvs), []
        for peer, tensor in recvs.items():
            if tensor.device.type != "cpu":
                arriving.append((tensor, self._pool.take(tensor.numel())))
                to_host[peer] = arriving[-1][1][: tensor.numel()]
        return _StagedHandle(super().post(on_host, to_host), leaving, arriving, self._pool, self._stream)

    def all_reduce_(self, values: Tensor) -> None:
        """Gloo's all-reduce of a copy on the host."""
        buffer = self._pool.take(values.nbytes)
        host = buffer[: values.nbytes].view(values.dtype)
        host.copy_(values, non_blocking=True)
        self._stream.record_event().synchronize()
        super().all_reduce_(host)
        values.copy_(host, non_blocking=True)
        self._pool.give_back(buffer, self._stream.record_event())

    def submit(self, task: Task, where: str) -> Waitable:
        """Hand to the thread, which does it on its stream once the work queued here so far is done."""
        ready = torch.cuda.current_stream(self._stream.device).record_event()
        done = torch.cuda.Event()

        def on_stream() -> None:
            torch.cuda.set_device(self._stream.device)  # else the thread would make a context on device 0 too
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                try:
                    task()
                finally:
                    done.record(self._stream)
                    self._held.until(done, task)

        return _StagedTicket(super().submit(on_stream, where), done, self._stream.device)

    def close(self) -> None:
        """As gloo's. Tasks keep their tensors until the copies that they have queued are done."""
        try:
            super().close()
        finally:
            self._held.release(CLOSE_SECONDS_AFTER_ERROR)

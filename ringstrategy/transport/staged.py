"""CUDA tensors over gloo: one thread, with copies through pinned host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.transport.base import Handle
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.lifeline import Lifeline
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import Task, Ticket


class _StagedHandle:
    def __init__(self, handle: Handle, arrivals: list[tuple[Tensor, Tensor]], staging: _Staging) -> None:
        self._handle, self._arrivals, self._staging = handle, arrivals, staging

    def wait(self) -> None:
        self._handle.wait()
        for tensor, host in self._arrivals:
            tensor.copy_(host, non_blocking=True)
        self._staging.give_back()


class _Staging:
    """Pinned buffers of one post, taken from and given back to the pool of their size."""

    def __init__(self, pool: dict[int, list[tuple[Tensor, torch.cuda.Event]]], stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._taken: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        size = 1 << max(nbytes - 1, 0).bit_length()  # a power of two, so that sizes that vary share buffers
        free = self._pool.setdefault(size, [])
        if free:
            host, copied = free.pop()
            copied.synchronize()  # its last copy to the device must have read it before gloo writes into it again
        else:
            host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._taken.append(host)
        return host[:nbytes]

    def give_back(self) -> None:
        for host in self._taken:
            self._pool[host.numel()].append((host, self._stream.record_event()))
        self._taken = []


class StagedPeers(GlooPeers):
    """CUDA tensors over gloo: the thread copies wire bytes through pinned host memory, on a stream of its own."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        lifeline: Lifeline,
        stats: Stats,
        hosts: tuple[str, ...],
        device: torch.device,
    ) -> None:
        super().__init__(group, lifeline, stats, hosts)
        self._stream = torch.cuda.Stream(device)
        self._pool: dict[int, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def expect(self, source: int, arriving: Tensor) -> None:
        """Nothing: it arrives in memory that is taken when it is received."""

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Copy to the host, wait for that copy (in the communication thread alone), start."""
        staging = _Staging(self._pool, self._stream)
        on_host: dict[int, Tensor] = {}
        for peer, tensor in sends.items():
            on_host[peer] = tensor if tensor.device.type == "cpu" else staging.take(tensor.numel())
            if on_host[peer] is not tensor:
                on_host[peer].copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        arriving: dict[int, Tensor] = {}
        for peer, tensor in recvs.items():
            arriving[peer] = tensor if tensor.device.type == "cpu" else staging.take(tensor.numel())
        arrivals = [(recvs[peer], host) for peer, host in arriving.items() if host is not recvs[peer]]
        return _StagedHandle(super().post(on_host, arriving), arrivals, staging)

    def all_reduce_(self, values: Tensor) -> None:
        """Gloo's all-reduce of a copy on the host."""
        host = values.cpu()
        super().all_reduce_(host)
        values.copy_(host)

    def submit(self, task: Task, where: str) -> Ticket:
        """Hand to the thread, which does it on its stream once the work queued here so far is done."""
        ready = torch.cuda.current_stream(self._stream.device).record_event()

        def on_stream() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                task()
                self._stream.synchronize()

        return super().submit(on_stream, where)

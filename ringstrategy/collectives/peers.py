"""Move bytes between peers; knows nothing of gradients.

`post` starts sends and receives and returns at once; `submit` runs an exchange (many posts) beside the training
thread. How it does so is one class each: a thread over gloo (CPU), the same thread with copies through pinned host
memory (CUDA over gloo), and a side stream over NCCL.
"""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.lifeline import Lifeline
from ringstrategy.collectives.stats import Stats
from ringstrategy.collectives.worker import Ticket, Work, Worker
from ringstrategy.errors import PeerLostError, PlanMismatchError

_CLOSE_SECONDS = 30.0
_CLOSE_SECONDS_AFTER_ERROR = 5.0  # the thread may be finding out who was lost
_CONTROL_TAG = 1  # small messages cannot meet values, wherever a rank is that has fewer batches
_NOBODYS_TAG = 1 << 20


class Handle(Protocol):
    """Sends and receives under way."""

    def wait(self) -> None:
        """Return when the sent tensors may be changed and the received ones read."""


class Waitable(Protocol):
    """What `submit` returns."""

    def wait(self) -> None:
        """Return when the work is done (over NCCL: when the current stream will wait for it); raise its error."""


class TransportError(RuntimeError):
    """A transfer failed; `peer` is the rank at the other end, None if all were."""

    def __init__(self, peer: int | None, error: BaseException) -> None:
        self.peer, self.error = peer, error
        super().__init__(str(error))


class Peers(ABC):
    """The ranks that average together, as one of them sees them.

    Attributes:
        rank: this one, 0 <= rank < size.
        size: how many.
        stats: bytes are counted here, where they are handed to the transport.
        control: peers for small host-side messages (itself, unless the data go over NCCL).
        hosts: for each rank which host it is on: equal where ranks share one. By default each has its own.
    """

    def __init__(self, rank: int, size: int, stats: Stats | None = None, hosts: tuple[str, ...] | None = None) -> None:
        self.rank, self.size = rank, size
        self.stats = Stats() if stats is None else stats
        self.hosts = tuple(map(str, range(size))) if hosts is None else hosts
        assert len(self.hosts) == size
        self._scratch: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def control(self) -> Peers:
        """Where small messages on host memory go."""
        return self

    @property
    def lifeline(self) -> Lifeline | None:
        """This rank's line to the store; None where nobody can get lost."""
        return None

    def pairs(self) -> list[tuple[int, int]]:
        """At each distance to whom and from whom, nearest first: so everyone sends to everyone, nobody to one twice."""
        return [((self.rank + d) % self.size, (self.rank - d) % self.size) for d in range(1, self.size)]

    @abstractmethod
    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Start sending and receiving flat uint8 tensors, keyed by the other rank; several posts may be in flight.

        Every rank posts one static schedule: the i-th send from a to b meets the i-th receive at b from a.
        """

    def swap(self, target: int, leaving: Tensor, source: int, arriving: Tensor) -> Handle:
        """`post` of one send and one receive. What is empty does not travel: both ends know its size."""
        return self.post({target: leaving} if leaving.numel() else {}, {source: arriving} if arriving.numel() else {})

    def add_(self, values: Tensor, summand: Tensor) -> None:
        """Add in place. Who adds without a codec does it by this, so that `ringstrategy.cost` sees it."""
        values.add_(summand)

    @abstractmethod
    def all_reduce_(self, values: Tensor) -> None:
        """Sum over all peers in place, by the backend's own algorithm."""

    @abstractmethod
    def submit(self, work: Work, where: str) -> Waitable:
        """Run `work` beside the training thread, after all work submitted before. `where` goes into its errors."""

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Wait for all, and count how long the training thread waited."""
        begin = time.perf_counter()
        for ticket in tickets:
            ticket.wait()
        self.stats.exposed_seconds += time.perf_counter() - begin

    def scratch(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """A flat uint8 tensor of at least `nbytes`, the same memory at each call: no allocation in the steady state."""
        held = self._scratch.get((name, device))
        if held is None or held.numel() < nbytes:
            held = self._scratch[name, device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held

    def forget_scratch(self) -> None:
        """Give that memory back, while nothing is under way."""
        self._scratch.clear()

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Name the lost peer behind a transport's `error`."""
        return error

    def abort(self, cause: str) -> None:
        """After an error of this rank's own: tell the others why they must stop, and let go of them. No collective."""

    @abstractmethod
    def close(self) -> None:
        """End threads and connections. Idempotent, never a collective."""


class _GlooHandle:
    def __init__(self, works: list[tuple[int, dist.Work]]) -> None:
        self._works = works

    def wait(self) -> None:
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(peer, error) from error
        self._works = []


class GlooPeers(Peers):
    """CPU tensors over gloo, exchanged by one thread. `timed`: its work counts as communication time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        lifeline: Lifeline,
        stats: Stats,
        hosts: tuple[str, ...],
        *,
        timed: bool = True,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), stats, hosts)
        self._group: dist.ProcessGroup | None = group
        self._lifeline = lifeline
        self._global_ranks = dist.get_process_group_ranks(group)
        self._worker: Worker | None = Worker("ringstrategy-communication")
        self._broken = False
        self._timed = timed
        self._control = _Control(self)

    @property
    def lifeline(self) -> Lifeline:
        """See `Peers.lifeline`."""
        return self._lifeline

    @property
    def control(self) -> Peers:
        """The same connections, with a tag of their own."""
        return self._control

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Start; receives first, so that bytes land in place."""
        return self.post_tagged(sends, recvs, 0)

    def post_tagged(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> Handle:
        """`post` of messages that only meet those with the same tag."""
        works: list[tuple[int, dist.Work]] = []
        peer = None
        try:
            for peer, tensor in recvs.items():
                works.append((peer, self._start(partial(dist.irecv, tag=tag), tensor, peer)))
            for peer, tensor in sends.items():
                works.append((peer, self._start(partial(dist.isend, tag=tag), tensor, peer)))
        except RuntimeError as error:
            raise TransportError(peer, error) from error
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _GlooHandle(works)

    def _start(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.Work:
        work = operation(tensor, self._global_ranks[peer], group=self._group)
        assert work is not None, "this rank is not in its own group"
        return work

    def all_reduce_(self, values: Tensor) -> None:
        """Gloo's all-reduce."""
        self.stats.uncountable()
        try:
            dist.all_reduce(values, group=self._group)
        except RuntimeError as error:
            raise TransportError(None, error) from error

    def submit(self, work: Work, where: str) -> Ticket:
        """Hand to the thread."""
        if self._worker is None:
            raise RuntimeError("these peers are closed")

        def guarded() -> None:
            begin = time.perf_counter()
            try:
                work()
            except TransportError as error:
                raise self.explain(error, where) from error
            finally:
                if self._timed and not self.stats.probing:
                    self.stats.communication_seconds += time.perf_counter() - begin

        def look_around() -> None:
            lost = self._lifeline.news(where)
            if lost is not None:
                self._disconnect()
                raise lost

        return self._worker.submit(guarded, look_around)

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Say that we noticed, disconnect so that all others notice too, then find the culprit."""
        if isinstance(error, PeerLostError | PlanMismatchError):
            return error
        peer, cause = (error.peer, error.error) if isinstance(error, TransportError) else (None, error)
        self._lifeline.witness()
        self._disconnect()
        return self._lifeline.explain(cause, peer, where)

    def abort(self, cause: str) -> None:
        """Publish, disconnect, and wait a moment for the others to read it if the store ends with this process."""
        self._lifeline.fail(cause)
        self._disconnect()
        self._lifeline.outlast()

    def _disconnect(self) -> None:
        """The thread stops waiting, and so do the threads at the other ends."""
        if self._group is not None and not self._broken:
            self._broken = True
            break_off(self._group)

    def close(self) -> None:
        """End the thread, then the group."""
        self._lifeline.leave()
        self._lifeline.go()
        worker, self._worker = self._worker, None
        if worker is not None:
            limit = _CLOSE_SECONDS_AFTER_ERROR if self._broken else _CLOSE_SECONDS
            if not worker.close(limit) and not self._broken:
                raise RuntimeError(f"the communication thread did not end within {limit:.0f} s")
        group, self._group = self._group, None  # only now: the thread may still have used it
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self.forget_scratch()


class _Control(Peers):
    """Small messages on host memory beside the values that `peers` exchange."""

    def __init__(self, peers: GlooPeers) -> None:
        super().__init__(peers.rank, peers.size, peers.stats, peers.hosts)
        self._peers = peers

    @property
    def lifeline(self) -> Lifeline:
        """See `Peers.lifeline`."""
        return self._peers.lifeline

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """See `Peers.post`."""
        return GlooPeers.post_tagged(self._peers, sends, recvs, _CONTROL_TAG)

    def all_reduce_(self, values: Tensor) -> None:
        """See `Peers.all_reduce_`."""
        self._peers.all_reduce_(values)

    def submit(self, work: Work, where: str) -> Waitable:
        """To the same thread."""
        return self._peers.submit(work, where)

    def close(self) -> None:
        """Closed with the others."""


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

    def submit(self, work: Work, where: str) -> Ticket:
        """Hand to the thread, which does it on its stream once the work queued here so far is done."""
        ready = torch.cuda.current_stream(self._stream.device).record_event()

        def on_stream() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                work()
                self._stream.synchronize()

        return super().submit(on_stream, where)


class _NcclHandle:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _StreamTicket:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class NcclPeers(Peers):
    """CUDA tensors over NCCL, on a side stream. Control messages go over gloo, beside it.

    The host waits for the device only to learn how many rows a sparse gradient has, and for the other ranks' hosts at
    the first bucket of a backward and at its end.
    """

    def __init__(self, group: dist.ProcessGroup, control: GlooPeers, device: torch.device) -> None:
        super().__init__(control.rank, control.size, control.stats, control.hosts)
        self._group: dist.ProcessGroup | None = group
        self._control = control
        self._global_ranks = dist.get_process_group_ranks(group)
        self._stream = torch.cuda.Stream(device)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._aborted = False

    @property
    def control(self) -> Peers:
        """Gloo."""
        return self._control

    @property
    def lifeline(self) -> Lifeline:
        """See `Peers.lifeline`."""
        return self._control.lifeline

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """One NCCL group call; NCCL matches in order."""
        operations = [dist.P2POp(dist.irecv, t, self._global_ranks[p], self._group) for p, t in recvs.items()]
        operations += [dist.P2POp(dist.isend, t, self._global_ranks[p], self._group) for p, t in sends.items()]
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _NcclHandle(dist.batch_isend_irecv(operations) if operations else [])

    def all_reduce_(self, values: Tensor) -> None:
        """NCCL's all-reduce."""
        self.stats.uncountable()
        dist.all_reduce(values, group=self._group)

    def submit(self, work: Work, where: str) -> Waitable:
        """Queue on the side stream, behind what is queued on the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            try:
                work()
            except dist.DistError as error:
                raise self.explain(error, where) from error
            done.record()
        self._count_spans(("communication_seconds", begin, done))
        return _StreamTicket(done)

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Let the current stream wait; how long it will have waited is known later."""
        begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for ticket in tickets:
            ticket.wait()
        done.record()
        self._count_spans(("exposed_seconds", begin, done))

    def _count_spans(self, *new: tuple[str, torch.cuda.Event, torch.cuda.Event]) -> None:
        while self._spans and self._spans[0][2].query():
            name, begin, done = self._spans.pop(0)
            setattr(self.stats, name, getattr(self.stats, name) + begin.elapsed_time(done) / 1000)
        if not self.stats.probing:
            self._spans.extend(new)

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """As gloo's."""
        return self._control.explain(error, where)

    def abort(self, cause: str) -> None:
        """Last words, then NCCL's abort."""
        self._control.abort(cause)
        if self._group is not None and not self._aborted:
            self._aborted = True
            self._group._get_backend(self._stream.device).abort()

    def close(self) -> None:
        """Drain the stream, then end both groups."""
        group, self._group = self._group, None
        try:
            if group is not None and dist.is_initialized():
                if not self._aborted:
                    self._stream.synchronize()
                    self._count_spans()
                dist.destroy_process_group(group)
        finally:
            self._control.close()
            self.forget_scratch()


def connect(device: torch.device, timeout: timedelta, stats: Stats | None = None) -> Peers:
    """Join all ranks of the default process group, in a group of its own for gradient traffic.

    Every rank calls it, at the same place in its order of collectives.

    Args:
        device: where the values live: CPU tensors travel over gloo; CUDA tensors over NCCL if that is the default
            process group's backend, else over gloo.
        timeout: how long a peer may stay silent before it counts as lost.
        stats: counters to add to.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    stats = Stats() if stats is None else stats
    lifeline = Lifeline.cast(rank, size)
    # over gloo it fails as soon as a process has died that is to come
    everyone = dist.barrier(async_op=True) if "gloo" in dist.get_backend() else None

    def watch() -> None:
        if everyone is not None and everyone.is_completed():
            everyone.wait()

    hosts = tuple(lifeline.greet(f"{socket.gethostname()} {_boot_id()}", timeout, watch))
    if everyone is not None:
        try:
            everyone.wait()
        except RuntimeError as error:
            raise lifeline.explain(error, None, "while setting up") from error
    host_group = dist.new_group(timeout=timeout, backend="gloo")
    if device.type == "cpu":
        return GlooPeers(host_group, lifeline, stats, hosts)
    if "nccl" not in dist.get_backend():
        return StagedPeers(host_group, lifeline, stats, hosts, device)
    device_group = dist.new_group(timeout=timeout, backend="nccl")
    # all ranks must take part in a group's first call; a ring's first messages may leave some out
    dist.all_reduce(torch.zeros(1, device=device), group=device_group)
    return NcclPeers(device_group, GlooPeers(host_group, lifeline, stats, hosts, timed=False), device)


def break_off(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a gloo group: who waits for something over them gets an error.

    Gloo's own `abort` does nothing, but a wait that times out closes all connections of its group.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            with contextlib.suppress(RuntimeError):  # either it timed out, or this connection was closed already
                receiving = dist.irecv(nothing, peer, group=group, tag=_NOBODYS_TAG)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=1))


def _boot_id() -> str:
    """Tells machines of one host name apart; empty where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

"""CUDA tensors over NCCL, queued by one thread on a side stream."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group
from typing_extensions import override

from ringstrategy.failure.detector import FailureDetector
from ringstrategy.transport import trace
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import FEW, Handle, Peers, Waitable
from ringstrategy.transport.gloo import GlooPeers, opened
from ringstrategy.transport.groups import new_group
from ringstrategy.transport.held import Held
from ringstrategy.transport.worker import CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR, Task, Ticket, Worker

_LOOK_SECONDS = 1.0  # between two looks at exchanges that last
_REMEMBERED = 1000  # exchanges under way, of which an error can say where they were
_FEW_CTAS = 4  # thread blocks of one NCCL kernel, which hold their cores while it waits: enough for 25 Gbit/s


class _NcclHandle:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _StreamTicket:
    def __init__(self, queued: Ticket, done: torch.cuda.Event, device: torch.device, check: Callable[[], None]) -> None:
        self._queued, self._done, self._device, self._check = queued, done, device, check

    def wait(self) -> None:
        self._queued.wait()  # an event that is not recorded yet would hold up nothing
        self._check()
        torch.cuda.current_stream(self._device).wait_event(self._done)


class NcclPeers(Peers):
    """CUDA tensors over NCCL, on a side stream. Control messages go over gloo, beside it.

    One thread makes all calls of NCCL and launches all kernels of an exchange, in the order of `submit`, so they come
    in the same order on all ranks. The training thread only records an event. It waits for the other one to have queued
    all, and then lets its stream wait, at the end of a backward.

    A kernel of NCCL's waits for a lost rank without end, and so would the host, in whatever call of CUDA it makes next.
    So another thread looks at the gloo connections while an exchange lasts, and breaks NCCL off. What waits then goes
    on, with whatever had arrived, and the next call of these peers raises the error.

    Args:
        group: of NCCL's.
        control: the same ranks over gloo.
        device: of this rank.
        timeout: how long no exchange may end, while some are under way, before a rank counts as lost.
    """

    queues = True

    def __init__(self, group: dist.ProcessGroup, control: GlooPeers, device: torch.device, timeout: timedelta) -> None:
        super().__init__(control.rank, control.size, control.stats, control.hosts)
        self._group: dist.ProcessGroup | None = group
        self._control = control
        self._global_ranks = dist.get_process_group_ranks(group)
        self._stream = torch.cuda.Stream(device, priority=-1)  # else each hop would queue behind matrix products
        self._device = self._stream.device  # with its index; a thread's current device may be another
        self._worker: Worker | None = Worker("ringstrategy-communication")
        self._held = Held()
        self._submitted = 0
        self._counting = threading.Lock()
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._aborted = False
        self._breaking = threading.Lock()
        self._where: deque[str] = deque(maxlen=_REMEMBERED)  # of the last exchanges
        self._timeout = timeout.total_seconds()
        self._lost: RuntimeError | None = None
        self._told = False  # somebody got that error
        self._closing = threading.Event()
        own = (weakref.ref(self), self._closing)
        self._look_out = threading.Thread(target=_look_out, args=own, name="ringstrategy-look-out", daemon=True)
        self._look_out.start()

    @property
    def control(self) -> Peers:
        """Gloo."""
        return self._control

    @property
    @override
    def detector(self) -> FailureDetector:
        return self._control.detector

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """One NCCL group call; NCCL matches in order."""
        group = opened(self._group)
        operations = [dist.P2POp(dist.irecv, t, self._global_ranks[p], group) for p, t in recvs.items()]
        operations += [dist.P2POp(dist.isend, t, self._global_ranks[p], group) for p, t in sends.items()]
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _NcclHandle(dist.batch_isend_irecv(operations) if operations else [])

    def all_to_all(self, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> Handle:
        """One NCCL group call, of which torch makes one operation; it takes messages of any size, wherever they lie."""
        self.stats.count(sum(t.nbytes for t in leaving), sum(t.nbytes for t in arriving))
        work = dist.all_to_all(list(arriving), list(leaving), group=opened(self._group), async_op=True)
        assert work is not None, "this rank is not in its own group"
        return _NcclHandle([work])

    def all_reduce_(self, values: Tensor) -> None:
        """NCCL's all-reduce."""
        self.stats.uncountable()
        dist.all_reduce(values, group=opened(self._group))

    def backlog(self) -> int:
        """See `Peers.backlog`. After an error, tasks that never ran count too."""
        return self._submitted - self._held.done()

    def submit(self, task: Task, where: str) -> Waitable:
        """Hand to the thread, which queues on its stream, after all work that the current stream has queued so far."""
        if self._worker is None:
            raise RuntimeError("these peers are closed")
        self._check()
        self._where.append(where)
        self._submitted += 1
        ready = torch.cuda.current_stream(self._device).record_event()
        begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def queue() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # both are each thread's own
                self._stream.wait_event(ready)
                begin.record()
                try:
                    with trace.task(where):
                        task()
                except dist.DistError as error:
                    self._closing.set()  # all that is submitted from now on gets this error
                    raise self.explain(error, where) from error
                except BaseException:
                    self._closing.set()
                    raise
                finally:
                    done.record()
                    self._held.until(done, task)
            self._count_spans(("communication_seconds", begin, done))

        queued = self._worker.submit(queue, partial(self._control.look_around, where))
        return _StreamTicket(queued, done, self._device, self._check)

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Let the device's current stream wait. How long it waited is known later."""
        stream = torch.cuda.current_stream(self._device)
        begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for ticket in tickets:
            ticket.wait()
        done.record(stream)
        self._held.done()  # drops what it keeps for those
        self._count_spans(("exposed_seconds", begin, done))

    def _count_spans(self, *new: tuple[str, torch.cuda.Event, torch.cuda.Event]) -> None:
        with self._counting:  # both threads do
            while self._spans and self._spans[0][2].query():
                name, begin, done = self._spans.pop(0)
                setattr(self.stats, name, getattr(self.stats, name) + begin.elapsed_time(done) / 1000)
            if not self.stats.probing:
                self._spans.extend(new)

    def look_for_the_lost(self, before: int, since: float) -> tuple[int, float]:
        """See `_look_out`: how many exchanges had ended at the look before, since when, and both for the next look."""
        done, now = self._held.dropped, time.monotonic()  # asks no event, which would end the capture of a CUDA graph
        if done != before or done == self._submitted:
            return done, now
        where = self._where[-min(self._submitted - done, len(self._where))]
        try:
            self._control.look_closely(where)
            if now > since + self._timeout and self._held.done() == done:
                raise self.explain(RuntimeError(f"timed out after {now - since:.0f} s"), where)
        except RuntimeError as error:
            self._lost = error
            self._closing.set()
            self._break_off()
        return done, since

    def _check(self) -> None:
        if self._lost is not None:
            self._told = True
            raise self._lost

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """As gloo's."""
        return self._control.explain(error, where)

    def abort(self, cause: str | None) -> None:
        """Last words, then NCCL's abort."""
        self._control.abort(cause)
        self._break_off()

    def _break_off(self) -> None:
        with self._breaking:
            group, aborts = self._group, not self._aborted
            self._aborted = True
        if group is None or not aborts:
            return
        group._get_backend(self._device).abort()
        # only now: an abort may wait for all kernels of the device. Else `destroy_process_group` would hang
        if dist.is_initialized() and backend_of("cuda") == "nccl":
            _get_default_group()._get_backend(self._device).abort()

    def close(self) -> None:
        """End the thread, drain the stream, then end both groups.

        Tasks under way keep their tensors until they are done; after an `abort`, until NCCL has broken them off.
        """
        worker, self._worker = self._worker, None
        limit = CLOSE_SECONDS_AFTER_ERROR if self._aborted else CLOSE_SECONDS
        ended = worker is None or worker.close(limit)
        group, self._group = self._group, None  # only now: the thread may still have used it
        try:
            if ended and not self._aborted:
                ended = self._held.release(limit)
                self._count_spans()
            self._closing.set()
            self._look_out.join(limit)
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        finally:
            self._held.release(limit)
            self._control.close()
            self.forget_scratch()
        if not self._told:
            self._check()
        if not ended and not self._aborted:
            raise RuntimeError(f"the exchanges under way did not end within {limit:.0f} s")


def _look_out(peers: weakref.ref[NcclPeers], closing: threading.Event) -> None:
    """Until they are closed: whenever no exchange has ended for a while, see whether all ranks are there."""
    before, since = -1, 0.0
    while not closing.wait(_LOOK_SECONDS):
        these = peers()
        if these is None:
            return
        with torch.cuda.device(these._device):  # else CUDA would begin on the first one
            before, since = these.look_for_the_lost(before, since)
        del these


def nccl_group(
    device: torch.device, timeout: timedelta, ranks: list[int] | None = None, *, beside_steps: bool
) -> dist.ProcessGroup:
    """These ranks as a group of NCCL's, with streams of high priority, and connected: all of them call it.

    Args:
        device: of this rank.
        timeout: of its calls; they get a second one, since after the first these peers say whom they miss.
        ranks: of the default group; None: all.
        beside_steps: its kernels wait for slower ranks through whole steps: few cores of the GPU for them.
    """
    timeout = 2 * timeout
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it is not what `new_group` is given
    if beside_steps:
        options.config.max_ctas = _FEW_CTAS
    group = new_group(ranks, timeout, "nccl", options)
    # all ranks must take part in a group's first call; a ring's first messages may leave some out
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    size = dist.get_world_size(group)
    if size <= FEW:  # NCCL connects a pair at its first message: now rather than in a step
        ones = list(torch.ones(size, device=device).split(1))
        dist.all_to_all([torch.empty_like(one) for one in ones], ones, group=group)
    return group

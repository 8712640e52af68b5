"""CUDA tensors over NCCL, on a side stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.transport.base import Handle, Peers, Waitable
from ringstrategy.transport.gloo import GlooPeers
from ringstrategy.transport.lifeline import Lifeline
from ringstrategy.transport.worker import Task


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

    def submit(self, task: Task, where: str) -> Waitable:
        """Queue on the side stream, after all work that the current stream has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            try:
                task()
            except dist.DistError as error:
                raise self.explain(error, where) from error
            done.record()
        self._count_spans(("communication_seconds", begin, done))
        return _StreamTicket(done)

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Let the current stream wait. How long it waited is known later."""
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

"""CPU tensors over gloo, exchanged by one thread."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.progress import has_ended
from ringstrategy.transport import trace
from ringstrategy.transport.agree import mismatch
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import Handle, Peers, TransportError, Waitable, Word
from ringstrategy.transport.messages import Message, Messages, Mismatches, difference, misfit
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR, Task, Worker

_NOBODYS_TAG = 1 << 20
_LOOKS_FOR_CLOSED, _LOOK_SECONDS = 5, 0.02  # gloo's thread may not have seen yet what another group's has
_FIRST_TAG, _TAGS = 1 << 21, 1 << 29  # of messages: the second number for values, and as many for control
_LOOKS_FOR_MISFIT = 3  # a second apart: where ranks wait at different places in training, that says more


class _GlooHandle:
    def __init__(
        self, rank: int, works: list[tuple[Message, dist.Work]], messages: Messages, between: trace.Between
    ) -> None:
        self._rank, self._works, self._messages, self._between = rank, works, messages, between

    def wait(self) -> None:
        for message, work in self._works:
            self._messages.awaited = message
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(message.other(self._rank), error) from error
            self._messages.end(message)
            trace.ended(message, self._rank, self._between)
        self._messages.awaited, self._works = None, []


class GlooPeers(Peers):
    """CPU tensors over gloo, exchanged by one thread.

    Args:
        group: its connections are used, beside its own collectives.
        detector: of this rank.
        stats: counters to add to.
        hosts: of each rank.
        timed: the thread's work counts as communication time.
        owned: the group ends with these peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        detector: FailureDetector,
        stats: Stats,
        hosts: tuple[str, ...],
        *,
        timed: bool = True,
        owned: bool = True,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), stats, hosts)
        self._group: dist.ProcessGroup | None = group
        self._detector = detector
        self._mismatches = Mismatches(detector.board, detector.progress)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._worker: Worker | None = Worker("ringstrategy-communication")
        self._broken, self._lingers = False, True
        self._breaking = threading.RLock()  # who looks for closed connections must not see those that this rank closes
        self._expected: dict[tuple[int, int], tuple[Message, dist.Work]] = {}  # by source and address
        self._timed, self._owned = timed, owned
        self._between = trace.Between(detector.board.name, self._global_ranks)
        self._messages = Messages()
        self._looks: tuple[Message | None, int] = (None, 0)  # at the message that is waited for
        self._said = self._name = detector.board.name  # by all ranks whose messages these are to meet
        self._word: Word | None = None
        self._control = _Control(self)

    @property
    @override
    def detector(self) -> FailureDetector:
        return self._detector

    @property
    def control(self) -> Peers:
        """The same connections, with a tag of their own."""
        return self._control

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Start; receives first, so that bytes land in place."""
        return self._post(sends, recvs, control=False)

    def only_with(self, word: Word, *, tagged: bool, where: str) -> Waitable | None:
        """See `Peers.only_with`: what is said is in the tags, and compared in the store if it takes a second."""
        self._word = word

        def speak() -> None:
            self._said = f"{self._name} {word.digest.hex()}"

        return self.submit(speak, where) if tagged else None

    def _mismatch(self) -> PlanMismatchError | None:
        """The error to raise if ranks say something else, or have found that two describe a message differently."""
        if self._word is not None:
            texts = self._mismatches.differing(self._word.digest.hex(), self._word.details)
            if texts:
                return mismatch(texts)
        text = self._mismatches.published()
        return misfit(text) if text is not None else None

    def _look_at_message(self) -> PlanMismatchError | None:
        """The error to raise if the rank at the other end describes the message that is waited for differently."""
        awaited = self._messages.awaited
        self._looks = awaited, self._looks[1] + 1 if awaited == self._looks[0] else 1
        if awaited is None:
            return None
        theirs = self._mismatches.compare_messages(self._messages.written(), awaited.other(self.rank))
        if theirs is None or self._looks[1] < _LOOKS_FOR_MISFIT:
            return None
        text = difference(awaited, self.rank, theirs)
        return misfit(self._mismatches.publish(text)) if text is not None else None

    def expect(self, source: int, arriving: Tensor) -> None:
        """Start to receive."""
        if arriving.numel():
            self._expected[source, arriving.data_ptr()] = self._receive(arriving, source, control=False)

    def _post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], *, control: bool) -> Handle:
        works: list[tuple[Message, dist.Work]] = []
        for peer, tensor in recvs.items():
            started = self._expected.pop((peer, tensor.data_ptr()), None) if self._expected else None
            works.append(started or self._receive(tensor, peer, control=control))
        for peer, tensor in sends.items():
            message = self._messages.begin(self.rank, peer, control, tensor.nbytes)
            trace.begun(message, self.rank, self._between)
            works.append((message, self._start(dist.isend, tensor, peer, message)))
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _GlooHandle(self.rank, works, self._messages, self._between)

    def _receive(self, arriving: Tensor, source: int, *, control: bool) -> tuple[Message, dist.Work]:
        message = self._messages.begin(source, self.rank, control, arriving.nbytes)
        trace.begun(message, self.rank, self._between)
        return message, self._start(dist.irecv, arriving, source, message)

    def _start(
        self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, message: Message
    ) -> dist.Work:
        group = opened(self._group)
        tag = _FIRST_TAG + 2 * (message.digest(self._said) % _TAGS) + message.control
        try:
            work = operation(tensor, self._global_ranks[peer], group=group, tag=tag)
        except RuntimeError as error:
            raise TransportError(peer, error) from error
        assert work is not None, "this rank is not in its own group"
        return work

    def all_reduce_(self, values: Tensor) -> None:
        """Gloo's all-reduce."""
        self.stats.uncountable()
        group = opened(self._group)
        try:
            dist.all_reduce(values, group=group)
        except RuntimeError as error:
            raise TransportError(None, error) from error

    def submit(self, task: Task, where: str) -> Waitable:
        """Hand to the thread."""
        if self._worker is None:
            raise RuntimeError("these peers are closed")

        def guarded() -> None:
            begin = time.perf_counter()
            self._messages.where = where
            try:
                with trace.task(where):
                    task()
            except TransportError as error:
                raise self.explain(error, where) from error
            finally:
                if self._timed and not self.stats.probing:
                    self.stats.communication_seconds += time.perf_counter() - begin

        return self._worker.submit(guarded, partial(self.look_around, where))

    def look_around(self, where: str) -> None:
        """While waiting: raise if a peer was lost, says something else, or sends something else."""
        lost = self._mismatch() or self._detector.check(where) or self._look_at_message()
        if lost is not None:
            self._disconnect()
            if isinstance(lost, PeerLostError):
                break_off_default()
            raise lost

    def look_closely(self, where: str) -> None:
        """Raise if a rank has closed its connection to this one before the end of its training. For any thread."""
        with self._breaking:
            closed = self._closed(looks=1)
        if closed:
            with contextlib.suppress(RuntimeError):  # the store is gone with its host, which is lost
                closed = [peer for peer in closed if not has_ended(self._detector.board.exit_reason(peer))]
        if closed:
            raise self.explain(TransportError(closed[0], RuntimeError("a closed connection")), where)

    def explain(self, error: RuntimeError, where: str) -> RuntimeError:
        """Say that we noticed, disconnect so that all others notice too, then find the culprit.

        The error may be of another group: of the default one, in which Lightning and users call collectives.
        """
        if isinstance(error, PeerLostError | PlanMismatchError):
            return error
        peer, cause = (error.peer, error.error) if isinstance(error, TransportError) else (None, error)
        differs = self._mismatch()  # then they have disconnected
        if differs is not None:
            self._disconnect()
            return differs
        with self._breaking:
            closed = self._closed() if peer is None else []
            self._detector.report_broken_connection(cause, closed if peer is None else [peer])
            self._disconnect()
        break_off_default()
        return self._detector.explain(cause, peer, where, closed)

    def _closed(self, looks: int = _LOOKS_FOR_CLOSED) -> list[int]:
        """The ranks that have closed their connections to this one: an error of another group does not say whose."""
        closed: list[int] = []
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for look in range(looks):
            if look:
                time.sleep(_LOOK_SECONDS)
            if self._broken or self._group is None:
                return []
            for peer, global_rank in enumerate(self._global_ranks):
                if peer != self.rank:
                    try:
                        dist.irecv(nothing, global_rank, group=self._group, tag=_NOBODYS_TAG)  # nothing comes
                    except RuntimeError:
                        closed.append(peer)
            if closed:
                break
        return closed

    def abort(self, cause: str | None) -> None:
        """Publish, and disconnect."""
        if cause is None:
            self._lingers = False
            self._detector.report_broken_connection()
        else:
            self._detector.fail(cause)
        self._disconnect()

    def _disconnect(self) -> None:
        """The thread stops waiting, and so do the threads at the other ends."""
        with self._breaking:
            if self._group is not None and not self._broken:
                self._broken = True
                break_off(self._group)

    def close(self) -> None:
        """End the thread, then the group. After a failure a rank that does not go on waits for the others to know."""
        self._detector.leave()
        self._detector.barrier.leave()
        worker, self._worker = self._worker, None
        limit = CLOSE_SECONDS_AFTER_ERROR if self._broken else CLOSE_SECONDS
        ended = worker is None or worker.close(limit)
        group, self._group = self._group, None  # only now: the thread may still have used it
        if group is not None and self._owned and dist.is_initialized():
            dist.destroy_process_group(group)
        self.forget_scratch()
        if self._lingers:
            self._detector.linger()
        if not ended and not self._broken:
            raise RuntimeError(f"the communication thread did not end within {limit:.0f} s")


class _Control(Peers):
    """Small messages on host memory, which cannot meet the values of `peers`, wherever a rank with fewer batches is."""

    def __init__(self, peers: GlooPeers) -> None:
        super().__init__(peers.rank, peers.size, peers.stats, peers.hosts)
        self._peers: GlooPeers = weakref.proxy(peers)  # no cycle: sockets close with the last that holds the peers

    @property
    @override
    def detector(self) -> FailureDetector:
        return self._peers.detector

    @override
    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        return self._peers._post(sends, recvs, control=True)

    @override
    def all_reduce_(self, values: Tensor) -> None:
        self._peers.all_reduce_(values)

    def submit(self, task: Task, where: str) -> Waitable:
        """To the same thread."""
        return self._peers.submit(task, where)

    def close(self) -> None:
        """Closed with the others."""


def opened(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """RuntimeError after `close`: torch takes None for the default group, and a thread may outlive its peers."""
    if group is None:
        raise RuntimeError("these peers are closed")
    return group


def break_off(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a gloo group: whoever waits on them gets an error.

    Gloo's own `abort` does nothing, but a wait that times out closes all connections of its group.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in dist.get_process_group_ranks(group):
        if peer != dist.get_rank():
            with contextlib.suppress(RuntimeError):  # either it timed out, or this connection was closed already
                receiving = dist.irecv(nothing, peer, group=group, tag=_NOBODYS_TAG)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=1))


def break_off_default() -> None:
    """`break_off` of the default group, if it is gloo's: other ranks may wait there for one that is lost."""
    if dist.is_initialized() and backend_of("cpu") == "gloo":
        break_off(dist.group.WORLD)

"""CPU tensors over gloo, exchanged by one thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.transport.agree import mismatch
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import Handle, Peers, TransportError, Waitable, Word
from ringstrategy.transport.lifeline import Lifeline
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR, Task, Worker

_CONTROL_TAG = 1  # more than that of values
_NOBODYS_TAG = 1 << 20
_LOOKS_FOR_CLOSED, _LOOK_SECONDS = 5, 0.02  # gloo's thread may not have seen yet what another group's has
_FIRST_WORD, _WORDS = 1 << 21, 1 << 29  # tags of exchanges in which all ranks say the same: two for each word


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
        self._breaking = threading.RLock()  # who looks for closed connections must not see those that this rank closes
        self._expected: dict[tuple[int, int], dist.Work] = {}  # by source and address
        self._timed = timed
        self._tag = 0
        self._word: Word | None = None
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
        return self.post_tagged(sends, recvs, self._tag)

    def post_control(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """`post` small messages, which cannot meet values, wherever a rank is that has fewer batches."""
        return self.post_tagged(sends, recvs, self._tag + _CONTROL_TAG)

    def only_with(self, word: Word, *, tagged: bool, where: str) -> Waitable | None:
        """See `Peers.only_with`: what is said is in the tags, and compared in the store if it takes a second."""
        self._word = word

        def speak() -> None:
            self._tag = _FIRST_WORD + 2 * (int.from_bytes(word.digest[:8], "little") % _WORDS)

        return self.submit(speak, where) if tagged else None

    def _mismatch(self) -> PlanMismatchError | None:
        """The error to raise if other ranks say something else."""
        if self._word is None:
            return None
        texts = self._lifeline.differing(self._word.digest.hex(), self._word.details)
        return mismatch(texts) if texts else None

    def expect(self, source: int, arriving: Tensor) -> None:
        """Start to receive."""
        if arriving.numel():
            group = opened(self._group)
            try:
                work = self._start(partial(dist.irecv, group=group, tag=self._tag), arriving, source)
            except RuntimeError as error:
                raise TransportError(source, error) from error
            self._expected[source, arriving.data_ptr()] = work

    def post_tagged(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> Handle:
        """`post` messages that only match messages with the same tag."""
        works: list[tuple[int, dist.Work]] = []
        peer, group = None, opened(self._group)
        receive, send = (partial(start, group=group, tag=tag) for start in (dist.irecv, dist.isend))
        try:
            for peer, tensor in recvs.items():
                work = self._expected.pop((peer, tensor.data_ptr()), None) if self._expected else None
                works.append((peer, work or self._start(receive, tensor, peer)))
            for peer, tensor in sends.items():
                works.append((peer, self._start(send, tensor, peer)))
        except RuntimeError as error:
            raise TransportError(peer, error) from error
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _GlooHandle(works)

    def _start(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.Work:
        work = operation(tensor, self._global_ranks[peer])
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
            try:
                task()
            except TransportError as error:
                raise self.explain(error, where) from error
            finally:
                if self._timed and not self.stats.probing:
                    self.stats.communication_seconds += time.perf_counter() - begin

        return self._worker.submit(guarded, partial(self.look_around, where))

    def look_around(self, where: str) -> None:
        """While waiting: raise if a peer was lost, or says something else."""
        lost = self._mismatch() or self._lifeline.news(where)
        if lost is not None:
            self._disconnect()
            if isinstance(lost, PeerLostError):
                break_off_default()
            raise lost

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
            self._lifeline.witness(cause, closed if peer is None else [peer])
            self._disconnect()
        break_off_default()
        return self._lifeline.explain(cause, peer, where, closed)

    def _closed(self) -> list[int]:
        """The ranks that have closed their connections to this one: an error of another group does not say whose."""
        closed: list[int] = []
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for _ in range(_LOOKS_FOR_CLOSED):
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
            time.sleep(_LOOK_SECONDS)
        return closed

    def abort(self, cause: str | None) -> None:
        """Publish, disconnect, and wait a moment for the others to read it if the store ends with this process."""
        if cause is None:
            self._lifeline.witness()
        else:
            self._lifeline.fail(cause)
        self._disconnect()
        self._lifeline.outlast()

    def _disconnect(self) -> None:
        """The thread stops waiting, and so do the threads at the other ends."""
        with self._breaking:
            if self._group is not None and not self._broken:
                self._broken = True
                break_off(self._group)

    def close(self) -> None:
        """End the thread, then the group."""
        self._lifeline.leave()
        self._lifeline.go()
        worker, self._worker = self._worker, None
        limit = CLOSE_SECONDS_AFTER_ERROR if self._broken else CLOSE_SECONDS
        ended = worker is None or worker.close(limit)
        group, self._group = self._group, None  # only now: the thread may still have used it
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self.forget_scratch()
        if not ended and not self._broken:
            raise RuntimeError(f"the communication thread did not end within {limit:.0f} s")


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
        return self._peers.post_control(sends, recvs)

    def all_reduce_(self, values: Tensor) -> None:
        """See `Peers.all_reduce_`."""
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

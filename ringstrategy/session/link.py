"""What a session has of the other ranks: connections, and errors that name a lost rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.collectives.hierarchical import ranks_of_hosts
from ringstrategy.errors import is_of_a_connection, last_words
from ringstrategy.failure.detector import FailureDetector
from ringstrategy.failure.orphans import end_with_agent
from ringstrategy.failure.watchdog import CollectiveWatchdog, Wait
from ringstrategy.kernels.threads import begin_threads, end_threads, free_cores
from ringstrategy.transport.agree import compare_plans
from ringstrategy.transport.backend import backend_of
from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect
from ringstrategy.transport.gloo import break_off_default
from ringstrategy.transport.groups import new_group
from ringstrategy.transport.stats import Stats

_BROADCAST_BYTES = 250 * 2**20
_FROM_RANK_0 = "a broadcast of rank 0's tensors"
_NO_GROUP = "Session.open needs a process group: call torch.distributed.init_process_group before"


class Link:
    """Connections to the other ranks. With one rank, before `open` and after `close` there are none: nothing is sent.

    Args:
        timeout: how long a peer may stay silent before it counts as lost (`PeerLostError`).
        stats: counters to add to.
        group: the ranks. None: all.

    Attributes:
        peers: all ranks; None if there are none.
        place: where training stands, for error messages.
    """

    def __init__(self, timeout: timedelta, stats: Stats, group: dist.ProcessGroup | None) -> None:
        self.peers: Peers | None = None
        self.place = "while setting up"
        self._timeout, self._stats, self._group = timeout, stats, group
        self._within: Peers | None = None  # a host, beside those of all ranks
        self._watchdog: CollectiveWatchdog | None = None

    @property
    def rank(self) -> int:
        """This one."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self._group)

    def open(self, device: torch.device, *, beside_steps: bool, tagged: bool) -> Peers | None:
        """Connect; every rank calls it. None if there is one rank. PeerLostError on every rank if one does not come.

        Args:
            device: where the values are.
            beside_steps: see `connect`.
            tagged: see there.
        """
        if not dist.is_initialized():
            raise RuntimeError(_NO_GROUP)
        end_with_agent()
        if self.size == 1:
            return None
        self.peers = connect(
            device, self._timeout, self._stats, beside_steps=beside_steps, group=self._group, tagged=tagged
        )
        begin_threads(free_cores(self.peers.hosts.count(self.peers.hosts[self.peers.rank])))
        if backend_of("cpu") == "gloo":
            self._watchdog = CollectiveWatchdog(self._listen, self._waits_in_vain, break_off_default)
        return self.peers

    def add(self, within: Peers) -> None:
        """The ranks of this host have connections of their own, which somebody else closes."""
        self._within = within

    def close(self) -> None:
        """Disconnect from all ranks. No collective."""
        watchdog, self._watchdog = self._watchdog, None
        peers, self.peers, self._within = self.peers, None, None
        with ExitStack() as ends:  # each of them, last first, whatever the others raise
            if peers is not None:
                ends.callback(end_threads)
                ends.callback(peers.close)
            if watchdog is not None:
                ends.callback(watchdog.close)

    def _all(self) -> list[Peers]:
        """The ranks of this host, and all ranks."""
        return [peers for peers in (self._within, self.peers) if peers is not None]

    # Collectives

    def compare(self, text: str) -> None:
        """PlanMismatchError on all ranks, which quotes the difference, unless all say the same; all ranks call it."""
        if self.peers is not None:
            compare_plans(self.peers, text)

    def broadcast(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Give every rank rank 0's tensors; of the group, if there is one."""
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        if filled and self.peers is not None:
            with self.naming_lost_peers():
                group = group or self._group or dist.group.WORLD
                assert group is not None
                dist._broadcast_coalesced(group, filled, _BROADCAST_BYTES, 0)

    # Where ranks are

    @property
    def detector(self) -> FailureDetector | None:
        """What this rank knows of failures, while peers are connected."""
        peers = self.peers
        return None if peers is None else peers.detector

    def _detectors(self) -> list[FailureDetector]:
        return [peers.detector for peers in self._all() if peers.detector is not None]

    def begin_batch(self, place: str) -> None:
        """This rank trains on the next batch."""
        self.place = place
        for detector in self._detectors():
            detector.progress.begin_batch()

    def end_batch(self, *, skipped: bool) -> None:
        """All exchanges of the batch have begun; none, if the user has skipped it."""
        for detector in self._detectors():
            detector.progress.end_batch(skipped=skipped)

    def leave_training(self, place: str, what: str) -> None:
        """This rank goes on to `what`, such as its validation; all ranks do, after as many batches."""
        self.place = place
        for detector in self._detectors():
            detector.progress.leave_training(what)

    @contextmanager
    def collective(self, what: str) -> Generator[None, None, None]:
        """Around a collective that is no part of training: as `naming_lost_peers`, and all ranks learn where they wait.

        All ranks call it, after as many batches. A rank that trains on meanwhile is an error on all.

        Args:
            what: the collective, for messages.
        """
        detector = self.detector
        with nullcontext() if detector is None else detector.progress.elsewhere(what), self.naming_lost_peers():
            yield

    # Errors

    def _listen(self, waits_in: Wait | None) -> None:
        detector = self.detector  # once: `close` may come between
        if detector is not None:
            detector.poll()
            world: Any = dist.group.WORLD  # torch's stubs lack the method
            detector.waits.compare(waits_in, world._get_sequence_number_for_group())

    def _waits_in_vain(self) -> bool:
        detector = self.detector  # once, as above
        return detector is not None and detector.check(self.place) is not None

    @contextmanager
    def naming_lost_peers(self, what: str = _FROM_RANK_0) -> Generator[None, None, None]:
        """Around a torch collective: ends it if ranks wait in vain, and makes its error name the lost rank.

        Args:
            what: this rank waits in, for messages, if no user's call of a collective shows it.
        """
        try:
            with nullcontext() if self._watchdog is None else self._watchdog.over(what):
                yield
        except RuntimeError as error:
            if self.peers is None or not is_of_a_connection(error):
                raise
            raise self.peers.explain(error, self.place) from error

    def leave(self) -> None:
        """Before `close`, if this rank goes on with other ranks: disconnect, so that those that wait notice too."""
        for peers in self._all():
            peers.abort(None)

    def tell(self, exception: BaseException) -> None:
        """This rank ends in an exception: tell the others why. No collective. A broken connection gets words."""
        if self.peers is None:
            return
        if is_of_a_connection(exception):  # a collective outside `naming_lost_peers`
            exception.args = (f"{self.peers.explain(exception, self.place)}",)
        for peers in self._all():
            peers.abort(last_words(exception))


class Host:
    """The other ranks of this host, over connections and a thread of their own.

    So the exchanges of each step do not wait for those that go on between hosts.

    Attributes:
        algorithm: averages their gradients; to be set up with `peers`.
        group: these ranks.
        peers: likewise; its bytes are not counted, because they never leave the host.
    """

    def __init__(self, algorithm: Algorithm, ranks: list[int], device: torch.device, timeout: timedelta) -> None:
        self.algorithm = algorithm
        self.group = new_group(ranks, timeout)
        self.peers = connect(device, timeout, Stats(), group=self.group)

    @classmethod
    def around(
        cls,
        everyone: Peers,
        algorithm: Algorithm,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta,
    ) -> Host | None:
        """This rank's host; None if the rank is alone there. All ranks of the host call it."""
        [members] = [ranks for ranks in ranks_of_hosts(everyone.hosts) if everyone.rank in ranks]
        if len(members) == 1:
            return None
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return cls(algorithm, [ranks[member] for member in members], device, timeout)

    def close(self) -> None:
        """Disconnect. No collective."""
        self.algorithm.close()
        self.peers.close()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

"""Seconds that an all-reduce takes on given machines: the collective's own code, run against a clock.

The alpha-beta-gamma model (Hockney 1994; Thakur, Rabenseifner and Gropp 2005): a message of n bytes takes
alpha + n beta on a link, a codec gamma a value. What overlaps what is not modelled a second time: the collective itself
runs, with tensors on the meta device, peers whose posts only reserve a link, and a codec whose calls only pass the
time. One rank is enough, because in a schedule all ranks do alike at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.collectives.base import Collective, Summand, mean_
from ringstrategy.collectives.by_size import BySize
from ringstrategy.collectives.hierarchical import Hierarchical, ranks_of_hosts
from ringstrategy.transport.base import Done, Handle, Peers, Waitable
from ringstrategy.transport.worker import Task

_SAMPLE = 1 << 22  # values, by which a host's ranks are compared


@dataclass(frozen=True)
class Link:
    """A full-duplex link: a message of n bytes arrives `alpha + n * beta` seconds after it was begun."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Work:
    """A computation over n values: `fixed + n * per_value` seconds of one thread."""

    fixed: float
    per_value: float

    def seconds(self, numel: int) -> float:
        """For `numel` values."""
        return self.fixed + numel * self.per_value

    def slower(self, factor: float) -> Work:
        """The same work, `factor` times as long."""
        return Work(self.fixed * factor, self.per_value * factor)


_NOTHING = Work(0.0, 0.0)


@dataclass(frozen=True)
class CodecCost:
    """What a codec's calls cost one thread. With feedback, `encode` and `relay` add a residual and write `lost`."""

    encode: Work  # `Codec.hop` with nothing that arrived
    relay: Work  # `Codec.hop` with one wire that arrived
    decode: Work  # `Codec.deliver`
    add: Work  # `Codec.decode` with `add`

    def slower(self, factor: float) -> CodecCost:
        """The same calls, each `factor` times as long."""
        return CodecCost(*(work.slower(factor) for work in (self.encode, self.relay, self.decode, self.add)))


@dataclass(frozen=True)
class Machines:
    """The ranks and what joins them.

    Attributes:
        hosts: each rank's host.
        across: a host's link to the network, which all its ranks share.
        inside: between two ranks of one host.
        post: seconds that starting one message costs the thread that communicates, not contained in `alpha`.
        transport: seconds that the system needs to send or receive a byte on the core of the thread that communicates,
            while that waits as far as it does; 0 where another core does it.
        wake: seconds from a message's arrival until that thread has a core, while training computes: about a time slice
            where they share one, 0 where each has its own.
        pack: of the training thread, to copy gradients into a bucket.
        codecs: what each codec costs there, without and with feedback.
        crowding: 0 to 1, how far computing and the communication thread's work slow each other down: 1 where they share
            a core, 0 where each has one.
        queues: see `Peers.queues`.
    """

    hosts: tuple[str, ...]
    across: Link
    inside: Link
    post: float
    codecs: Mapping[tuple[Codec, bool], CodecCost]
    crowding: float
    transport: float = 0.0
    wake: float = 0.0
    pack: Work = Work(0.0, 0.0)
    queues: bool = False


@dataclass(frozen=True)
class Cost:
    """Of one exchange, as the rank with the most to send sees it."""

    seconds: float
    busy: float  # the communication thread computes for so long, if nothing slows it down
    bytes_sent: int
    bytes_across: int  # of all ranks of that one's host, to other hosts


class _Clock:
    def __init__(self, wake: float) -> None:
        self.now = self.busy = 0.0
        self.owed = 0.0  # work of the transport that was begun and not done
        self._wake = wake

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def wait(self, until: float) -> None:
        self.busy += self.owed
        self.now, self.owed = self.now + self.owed, 0.0
        if until > self.now:
            self.now = until + self._wake


class _Arrival:
    """Sends and receives that end at a known time."""

    def __init__(self, clock: _Clock, time: float) -> None:
        self._clock, self._time = clock, time

    def wait(self) -> None:
        self._clock.wait(self._time)


class _Clocked(Peers):
    """Peers that carry nothing: a post reserves the links, and its handle ends when the slower side would."""

    def __init__(self, rank: int, machines: Machines, clock: _Clock, shared_by: float) -> None:
        super().__init__(rank, len(machines.hosts), hosts=machines.hosts)
        self.queues = machines.queues
        self._machines, self._clock = machines, clock
        self._across = replace(machines.across, beta=machines.across.beta * shared_by)
        self._free: dict[tuple[bool, bool], float] = {}  # (across, outward): when that direction is free again
        self.bytes_across = 0

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        """Messages of one link queue up behind each other, in both directions at once."""
        end = self._clock.now
        for peers, outward in ((sends, True), (recvs, False)):
            for peer, tensor in peers.items():
                self._clock.work(self._machines.post)
                is_across = self.hosts[peer] != self.hosts[self.rank]
                link = self._across if is_across else self._machines.inside
                key = (is_across, outward)
                self._free[key] = max(self._free.get(key, 0.0), self._clock.now) + tensor.numel() * link.beta
                end = max(end, self._free[key] + link.alpha)
                self._clock.owed += tensor.numel() * self._machines.transport
                self.bytes_across += tensor.numel() if outward and is_across else 0
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        return _Arrival(self._clock, end)

    def all_reduce_(self, values: Tensor) -> None:
        """The all-reduce of a backend, modelled as a ring over the network whose additions are hidden."""
        share = 2 * (self.size - 1) / self.size
        link = self._across if len(set(self.hosts)) > 1 else self._machines.inside
        self._clock.owed += 2 * share * values.nbytes * self._machines.transport
        self._clock.wait(self._clock.now + 2 * (self.size - 1) * link.alpha + share * values.nbytes * link.beta)
        if self.hosts[(self.rank + 1) % self.size] != self.hosts[self.rank]:
            self.bytes_across += round(share * values.nbytes)
        self.stats.count(round(share * values.nbytes), round(share * values.nbytes))

    def submit(self, task: Task, where: str) -> Waitable:
        """At once."""
        task()
        return Done()

    def close(self) -> None:
        """Nothing is open."""


class _Timed(Codec):
    """A codec whose calls only take time."""

    def __init__(self, codec: Codec, cost: CodecCost, clock: _Clock) -> None:
        self._codec, self._cost, self._clock = codec, cost, clock
        self.block, self.hop_by_hop = codec.block, codec.hop_by_hop

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._codec.nbytes(numel, dtype)

    def raw(self, values: Tensor) -> Tensor | None:
        return self._codec.raw(values)

    def summable(self, dtype: torch.dtype) -> torch.dtype | None:
        return self._codec.summable(dtype)

    @property
    def lossless(self) -> bool:
        return self._codec.lossless

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        self._clock.work(self._cost.encode.seconds(values.numel()))

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        self._clock.work((self._cost.add if add else self._cost.decode).seconds(out.numel()))

    def hop(
        self,
        arrived: Sequence[Tensor],
        values: Tensor,
        wire: Tensor,
        *,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        seed: int,
        own_seed: int,
        offset: int = 0,
    ) -> None:
        numel = values.numel()
        others = max(0, len(arrived) - 1) * self._cost.add.seconds(numel)
        self._clock.work(others + (self._cost.relay if arrived else self._cost.encode).seconds(numel))

    def deliver(self, wire: Tensor, out: Tensor, *, seed: int, add: bool = False) -> None:
        self._clock.work((self._cost.add if add else self._cost.decode).seconds(out.numel()))


def exchange_cost(
    machines: Machines,
    collective: Collective,
    codec: Codec,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    feedback: bool = False,
    beside_computing: bool = False,
) -> Cost:
    """What it costs to average `numel` values over all ranks.

    Args:
        machines: the ranks; `machines.codecs` has this codec, with or without feedback.
        collective: the schedule.
        codec: what travels.
        numel: values, of `dtype`.
        dtype: of the values.
        feedback: is there a residual?
        beside_computing: does training compute meanwhile?
    """
    slowed = 1 + machines.crowding if beside_computing else 1.0
    machines = replace(
        machines,
        post=machines.post * slowed,
        transport=machines.transport * slowed,
        pack=machines.pack.slower(slowed),
    )
    clock = _Clock(machines.wake if beside_computing else 0.0)
    if isinstance(collective, BySize):  # before who sends most is found with values of another length
        collective = collective.chosen(codec.nbytes(numel, dtype), _Clocked(0, machines, clock, 1.0))
    rank, shared_by = _sends_most(machines.hosts, machines.queues, collective, codec)
    peers = _Clocked(rank, machines, clock, shared_by)
    values = torch.empty(numel, dtype=dtype, device="meta")
    residual = torch.empty_like(values) if feedback else None
    if isinstance(collective, Hierarchical):
        host, *others = ranks_of_hosts(machines.hosts)
        width = min(map(len, (host, *others)))
        # to add within a host takes about as long as to copy
        clock.work((len(host) - 1) * machines.pack.seconds(numel // width))
    timed = _Timed(codec, machines.codecs[codec, feedback].slower(slowed), clock)
    mean_(Summand(values, timed, residual), peers, collective)
    return Cost(clock.now, clock.busy / slowed, peers.stats.bytes_sent or 0, round(shared_by * peers.bytes_across))


@cache
def _sends_most(hosts: tuple[str, ...], queues: bool, collective: Collective, codec: Codec) -> tuple[int, float]:
    """Of the first host the rank that sends most to other hosts, and what all its ranks send, in units of that.

    By so much a rank's part of its host's link is smaller than the link.
    """
    first = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    if len(first) == 1:
        return first[0], 1.0
    nowhere = Machines(hosts, Link(0.0, 0.0), Link(0.0, 0.0), post=0.0, codecs={}, crowding=0.0, queues=queues)
    sent = {}
    for rank in first:
        clock = _Clock(0.0)
        peers = _Clocked(rank, nowhere, clock, 1.0)
        timed = _Timed(codec, CodecCost(_NOTHING, _NOTHING, _NOTHING, _NOTHING), clock)
        mean_(Summand(torch.empty(_SAMPLE, device="meta"), timed), peers, collective)
        sent[rank] = peers.bytes_across
    most = max(sent, key=lambda rank: sent[rank])
    return most, sum(sent.values()) / sent[most] if sent[most] else 1.0

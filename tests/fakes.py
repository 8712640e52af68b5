"""Peers in one process, one thread a rank, that hold each rank to one static schedule; a codec that loses a lot."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import Patience
from ringstrategy.codecs import Codec
from ringstrategy.transport.base import Done, Handle, Peers

LIMIT = 300.0  # seconds: the hard end; a schedule that waits for what nobody sends uses no CPU, and ends before


class Aborted(Exception):
    """Another rank failed, or all wait."""


_WAITED = (Aborted, threading.BrokenBarrierError)


class Network:
    """First in, first out between each pair; nothing is matched by tag or by size.

    Args:
        size: how many ranks.
        hosts: of each rank.
    """

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        self.size = size
        self.hosts = None if hosts is None else tuple(hosts)
        pairs = itertools.permutations(range(size), 2)
        self.channels: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]]
        self.channels = {pair: queue.SimpleQueue() for pair in pairs}
        self.posts: list[list[_Post]] = [[] for _ in range(size)]
        self.barrier = threading.Barrier(size)
        self.table: list[Tensor | None] = [None] * size

    def abort(self) -> None:
        """Whoever waits, or will, fails."""
        self.barrier.abort()
        for channel in self.channels.values():
            channel.put(None)

    def receive(self, source: int, rank: int) -> Tensor:
        """The next message; `Aborted` if there will be none."""
        arrived = self.channels[source, rank].get(timeout=LIMIT)
        if arrived is None:
            self.channels[source, rank].put(None)
            raise Aborted(f"rank {rank} waited for rank {source}")
        return arrived

    def check(self) -> None:
        """All was waited for, and would have ended over NCCL, where a post begins when those before have ended."""
        assert all(channel.empty() for channel in self.channels.values()), "bytes were sent that nobody received"
        assert all(post.landed for posts in self.posts for post in posts), "a handle was not waited for"
        begun: Counter[tuple[int, int, int]] = Counter()  # at how many of its ends; by sender, receiver and number
        sent: Counter[tuple[int, int]] = Counter()
        received: Counter[tuple[int, int]] = Counter()
        left = [iter(posts) for posts in self.posts]
        current: list[list[tuple[int, int, int]]] = [[] for _ in range(self.size)]
        going, progress = set(range(self.size)), True
        while going:
            assert progress, f"over NCCL ranks {sorted(going)} would wait for each other forever"
            progress = False
            for rank in sorted(going):
                if any(begun[message] < 2 for message in current[rank]):
                    continue
                progress = True
                post = next(left[rank], None)
                if post is None:
                    going.remove(rank)
                    continue
                outward = [(rank, peer) for peer in post.targets]
                inward = [(peer, rank) for peer in post.sources]
                current[rank] = [(*pair, sent[pair]) for pair in outward] + [(*pair, received[pair]) for pair in inward]
                begun.update(current[rank])
                sent.update(outward)
                received.update(inward)


class _Post:
    """Sends leave at once, but their memory must not change; receives complete in order, and land when waited for."""

    def __init__(self, peers: FakePeers, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        self.targets, self.sources = tuple(sends), tuple(recvs)
        self.landed = 0  # after how many posts of its rank
        self._peers, self._recvs = peers, recvs
        self._sent = [(tensor, tensor.clone()) for tensor in sends.values()]
        for peer, (_, copy) in zip(sends, self._sent, strict=True):
            peers.network.channels[peers.rank, peer].put(copy)
        for tensor in recvs.values():
            tensor.fill_(0xA5)  # nobody may still need what was here
        self._arrived: list[Tensor] = []

    def complete(self) -> None:
        self._arrived = [self._peers.network.receive(source, self._peers.rank) for source in self.sources]

    def wait(self) -> None:
        assert not self.landed, "waited for twice"
        while self in self._peers.incomplete:
            self._peers.incomplete.popleft().complete()
        for tensor, copy in self._sent:
            assert torch.equal(tensor, copy), "memory changed while it was being sent"
        for target, arrived in zip(self._recvs.values(), self._arrived, strict=True):
            assert arrived.numel() == target.numel(), f"{arrived.numel()} bytes met a receive of {target.numel()}"
            target.copy_(arrived)
        self._sent, self._recvs, self._arrived = [], {}, []
        self.landed = len(self._peers.network.posts[self._peers.rank])


class FakePeers(Peers):
    """The strictest transport: what a collective does here it can do over gloo and over NCCL.

    Attributes:
        sent_to: bytes by receiver.
        incomplete: posts in order.
    """

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(rank, network.size, hosts=network.hosts)
        self.network = network
        self.sent_to: Counter[int] = Counter()
        self.incomplete: deque[_Post] = deque()
        self._expected: defaultdict[int, deque[int]] = defaultdict(deque)  # addresses, by source

    def expect(self, source: int, arriving: Tensor) -> None:
        if arriving.numel():
            self._expected[source].append(arriving.data_ptr())

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        for peer, tensor in [*sends.items(), *recvs.items()]:
            assert tensor.dtype == torch.uint8
            assert tensor.dim() == 1
            assert tensor.numel() > 0
            assert 0 <= peer < self.size
            assert peer != self.rank
        for source, arriving in recvs.items():
            if self._expected[source]:
                assert self._expected[source].popleft() == arriving.data_ptr(), "another receive was expected"
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        self.sent_to.update({peer: tensor.nbytes for peer, tensor in sends.items()})
        post = _Post(self, sends, recvs)
        self.network.posts[self.rank].append(post)
        self.incomplete.append(post)
        return post

    def all_reduce_(self, values: Tensor) -> None:
        self.stats.uncountable()
        self.network.table[self.rank] = values.clone()
        self.network.barrier.wait(LIMIT)
        total = torch.zeros_like(values)
        for other in self.network.table:
            assert other is not None
            total += other
        self.network.barrier.wait(LIMIT)
        values.copy_(total)

    def submit(self, work: Callable[[], None], where: str) -> Done:
        work()
        return Done()

    def close(self) -> None:
        return


@functools.cache
def _threads(size: int) -> ThreadPoolExecutor:
    """Kept, since a new thread's first allocations cost more than most of what it is to do."""
    return ThreadPoolExecutor(size)


def on_all_ranks(size: int, function: Callable[[FakePeers], Any], hosts: Sequence[str] | None = None) -> list[Any]:
    """Run `function` on every rank of a fake network, where rank r is on `hosts[r]`; nothing may be left in flight."""
    network = Network(size, hosts)
    threads = _threads(size)
    futures = [threads.submit(function, FakePeers(network, rank)) for rank in range(size)]
    _wait_for_all(futures, network)
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, _WAITED)):  # others only waited for the culprit
        raise error
    network.check()
    return [future.result() for future in futures]


def of_each_rank(size: int, run: Callable[..., Any] = on_all_ranks) -> Callable[[Callable[..., None]], Any]:
    """A test that is one function on each rank: `@of_each_rank(2)`. After its peers it takes what pytest gives."""

    def as_test(story: Callable[..., None]) -> Any:
        @functools.wraps(story)
        def test(**given: Any) -> None:
            run(size, lambda peers: story(peers, **given))

        _, *others = inspect.signature(story).parameters.values()
        vars(test)["__signature__"] = inspect.Signature(others)
        return test

    return as_test


def _wait_for_all(futures: list[Future[Any]], network: Network) -> None:
    """Until all have ended; if one fails, or all wait for what nobody sends, the others fail too."""
    patience = None
    left = set(futures)
    while left:
        done, left = wait(left, timeout=1.0, return_when="FIRST_EXCEPTION")
        if any(future.exception() is not None for future in done):
            network.abort()
        patience = patience or Patience(lambda: [os.getpid()])
        if not done and patience.gone():
            network.abort()


@dataclass(frozen=True)
class Toy(Codec):
    """Blocks of 4 as one float32 scale and 4 signed bytes, dithered by (seed, place); rotated by a seeded sign flip."""

    block: int = 4

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        blocks = -(-numel // 4)
        return 4 * blocks + numel

    def _blocks(self, values: Tensor) -> Tensor:
        padded = torch.zeros(-(-values.numel() // 4) * 4)
        padded[: values.numel()] = values
        return padded.view(-1, 4)

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        assert offset % 4 == 0
        blocks = self._blocks(values)
        scale = blocks.abs().amax(1, keepdim=True) / 3
        place = torch.arange(offset, offset + blocks.numel()).view_as(blocks)
        dither = ((place * 2654435761 + seed) % 1000003).float() / 1000003
        codes = torch.where(scale > 0, blocks / scale + dither, torch.zeros(())).floor().clamp(-4, 4)
        codes = codes.nan_to_num(0, 0, 0).to(torch.int8)
        count = len(blocks)
        wire[: 4 * count].view(torch.float32).copy_(scale.view(-1))
        wire[4 * count :].copy_(codes.view(-1)[: values.numel()].view(torch.uint8))
        if lost is not None:
            decoded = torch.empty_like(values)
            self.decode(wire, decoded)
            lost.copy_(torch.where(decoded.isfinite(), values - decoded, lost))

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        count = -(-out.numel() // 4)
        scale = wire[: 4 * count].view(torch.float32).view(-1, 1)
        codes = self._blocks(wire[4 * count :].view(torch.int8).float())
        values = (codes * scale).view(-1)[: out.numel()]
        out.add_(values) if add else out.copy_(values)

    def _signs(self, numel: int, seed: int) -> Tensor:
        return (torch.arange(numel) % 4 * 40503 + seed) % 7 % 2 * 2.0 - 1

    def prepare_(self, values: Tensor, seed: int) -> None:
        values.mul_(self._signs(values.numel(), seed))

    restore_ = prepare_

"""Peers in one process, one thread a rank, that hold each rank to one static schedule; a codec that loses a lot."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringstrategy.codecs import Codec
from ringstrategy.collectives.peers import Handle, Peers

LIMIT = 20.0  # seconds; a schedule that waits for what nobody sends fails here


class Network:
    """First in, first out between each pair; nothing is matched by tag or by size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.channels: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.barrier = threading.Barrier(size)
        self.table: list[Tensor | None] = [None] * size


class _FakeHandle:
    def __init__(self, arrivals: list[tuple[queue.SimpleQueue[Tensor], Tensor]], turn: list[int], place: int) -> None:
        self._arrivals, self._turn, self._place = arrivals, turn, place

    def wait(self) -> None:
        assert self._turn[0] == self._place, "handles must be waited for in the order of their posts, as NCCL completes"
        self._turn[0] += 1
        for channel, target in self._arrivals:
            arrived = channel.get(timeout=LIMIT)
            assert arrived.numel() == target.numel(), f"{arrived.numel()} bytes met a receive of {target.numel()}"
            target.copy_(arrived)


class _DoneTicket:
    def wait(self) -> None:
        return


class FakePeers(Peers):
    """The strictest transport: sends leave at once, receives land at `wait`, in the order of the posts."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(rank, network.size)
        self._network = network
        self._posts = 0
        self._turn = [0]

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        for peer, tensor in sends.items():
            assert tensor.dtype == torch.uint8
            assert tensor.dim() == 1
            assert peer != self.rank
            self._network.channels[self.rank, peer].put(tensor.clone())
        for peer, tensor in recvs.items():
            assert peer != self.rank
            tensor.fill_(0xA5)  # nobody may still need what was here
        self.stats.count(sum(t.nbytes for t in sends.values()), sum(t.nbytes for t in recvs.values()))
        arrivals = [(self._network.channels[peer, self.rank], tensor) for peer, tensor in recvs.items()]
        handle = _FakeHandle(arrivals, self._turn, self._posts)
        self._posts += 1
        return handle

    def all_reduce_(self, values: Tensor) -> None:
        self.stats.uncountable()
        self._network.table[self.rank] = values.clone()
        self._network.barrier.wait(LIMIT)
        total = torch.zeros_like(values)
        for other in self._network.table:
            assert other is not None
            total += other
        self._network.barrier.wait(LIMIT)
        values.copy_(total)

    def submit(self, work: Callable[[], None], where: str) -> _DoneTicket:
        work()
        return _DoneTicket()

    def close(self) -> None:
        return


def on_all_ranks(size: int, function: Callable[[FakePeers], Any]) -> list[Any]:
    """Run `function` on every rank of a fake network; nothing may be left in flight."""
    network = Network(size)
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(function, [FakePeers(network, rank) for rank in range(size)], timeout=4 * LIMIT))
    assert all(channel.empty() for channel in network.channels.values()), "bytes were sent that nobody received"
    return results


@dataclass(frozen=True)
class Toy(Codec):
    """Blocks of 4 as one float32 scale and 4 signed bytes, dithered by (seed, place); rotated by a seeded sign flip."""

    block: int = 4
    feedback: bool = True

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        return self.feedback

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

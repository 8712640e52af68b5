"""What several ranks of a host send, and in which order (test_collectives.py has the mean); once over gloo."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, on_all_ranks
from pool import Pool
from test_collectives import data
from torch import Tensor

from ringstrategy import (
    BlockInt,
    Codec,
    Collective,
    Direct,
    Hierarchical,
    Identity,
    Peers,
    TopK,
)
from ringstrategy.collectives import mean_
from ringstrategy.collectives.base import Summand
from ringstrategy.transport import connect

MINUTE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)


def test_an_owner_adds_its_own_values_first_then_the_others_in_rank_order() -> None:
    def summed(peers: FakePeers) -> Tensor:
        values = data(peers.rank, 1008)
        Hierarchical().sum_(Summand(values, Identity()), peers)
        return values

    values = [data(rank, 1008).chunk(3) for rank in range(3)]
    expected = [
        values[own][own] + values[one][own] + values[two][own] for own, one, two in [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    ]
    for result in on_all_ranks(3, summed, "aaa"):
        assert torch.equal(result, torch.cat(expected))


# What leaves a host


@pytest.mark.parametrize(
    ("collective", "codec"),
    [(Hierarchical(), Identity()), (Hierarchical(), BlockInt(8)), (Hierarchical(Direct(), 1), TopK(64))],
    ids=str,
)
def test_a_host_sends_its_share_of_whole_blocks_however_many_ranks_it_has(collective: Collective, codec: Codec) -> None:
    def sent(peers: FakePeers, numel: int) -> dict[int, int]:
        collective.sum_(Summand(data(peers.rank, numel), codec), peers)
        assert peers.stats.bytes_sent == sum(peers.sent_to.values())
        return dict(peers.sent_to)

    def between_and_within(hosts: str, numel: int) -> list[tuple[int, int]]:
        """Bytes that each host sends to other hosts, and that its ranks send each other."""
        everyone = on_all_ranks(len(hosts), partial(sent, numel=numel), hosts)
        pairs = [(hosts[rank], hosts[peer], n) for rank, to in enumerate(everyone) for peer, n in to.items()]
        return [
            (
                sum(n for here, there, n in pairs if here == host != there),
                sum(n for here, there, n in pairs if here == host == there),
            )
            for host in sorted(set(hosts))
        ]

    even, uneven = 256 * 2 * 12 * 12 * 4, 37 * 256 + 5  # whole blocks, however it is cut; and not
    for hosts in ("aabbccdd", "aaab", "aabbbc", "aaaa", "abcd", "abab", "abbcabb"):  # each rank's
        names = sorted(set(hosts))
        link = 2 * codec.nbytes(even, torch.float32) * (len(names) - 1) // len(names)
        for host, (outside, inside) in zip(names, between_and_within(hosts, even), strict=True):
            assert outside == link, hosts
            # each rank but the owner sends each value once, and is sent each sum once
            assert inside == 2 * (hosts.count(host) - 1) * 4 * even, hosts
        total = sum(outside for outside, _ in between_and_within(hosts, uneven))
        assert total == 2 * (len(names) - 1) * codec.nbytes(uneven, torch.float32), hosts


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_pieces_travel_within_hosts_while_others_travel_between_them(segments: int) -> None:
    hosts = "aabb"

    def one(peers: FakePeers) -> list[str]:
        Hierarchical(segments=segments).sum_(Summand(data(peers.rank, 1 << 16), BlockInt(8)), peers)
        posts = peers.network.posts[peers.rank]
        order = ["".join({hosts[peer] for peer in (*post.targets, *post.sources)}) for post in posts]
        back = [post for post, host in zip(posts, order, strict=True) if host == hosts[peers.rank]][segments:]
        assert all(post.landed == len(posts) for post in back)
        return order

    for rank, order in enumerate(on_all_ranks(4, one, hosts)):
        runs = [(host == hosts[rank], len(list(posts))) for host, posts in groupby(order)]
        within = [count for inside, count in runs if inside]
        assert within == [segments] + [1] * segments  # all parts leave; then piece by piece between, and back
        assert [inside for inside, _ in runs] == [True, *[False, True] * segments]


def test_no_piece_is_needlessly_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def one(peers: FakePeers, kilobytes: int) -> int:
        Hierarchical(segments=4).sum_(Summand(torch.zeros(kilobytes * 256), BlockInt(8)), peers)
        return sum(peers.rank % 2 == peer % 2 for post in peers.network.posts[peers.rank] for peer in post.targets)

    for kilobytes, pieces in {100: 1, 2000: 1, 3100: 2, 20_000: 2, 30_000: 3}.items():
        assert on_all_ranks(4, partial(one, kilobytes=kilobytes), "abab") == [2 * pieces] * 4


def test_columns_and_pieces_draw_noise_of_their_own() -> None:
    numel, block = 1 << 15, 64
    flat = torch.full((numel,), 0.3)
    flat[::block] = 1.0

    def one(peers: FakePeers) -> list[Tensor]:
        results = []
        for seed in (1, 1, 2):
            values = flat.clone()
            Hierarchical().sum_(Summand(values, BlockInt(4, block, rounding="stochastic"), seed=seed), peers)
            results.append(values)
        return results

    first, again, other = on_all_ranks(4, one, "abab")[0]
    assert torch.equal(first, again)
    pieces = first.view(8, -1)  # two columns of four pieces
    assert len({tuple(piece.tolist()) for piece in pieces}) == 8
    assert not torch.equal(first, other)


@dataclass(frozen=True)
class Witness(Collective):
    """Notes what peers it is given."""

    seen: list[Any] = field(default_factory=list)

    def sum_(self, summand: Summand, peers: Peers, **_: Any) -> None:
        self.seen.append((peers.rank, peers.size, peers.hosts))
        with pytest.raises(NotImplementedError, match=r"between=Ring\(\)"):
            peers.all_reduce_(summand.values)


def test_what_is_between_sees_one_rank_of_each_host() -> None:
    def one(peers: FakePeers) -> list[Any]:
        witness = Witness()
        Hierarchical(witness, 1).sum_(Summand(data(peers.rank, 10), Identity()), peers)
        return witness.seen

    first, second = [(0, 2, ("b", "a"))], [(1, 2, ("b", "a"))]
    assert on_all_ranks(5, one, "baabb") == [first, second, second, first, []]


# Real processes


def _mean(peers: Peers) -> Tensor:
    values = data(peers.rank, 1001) / peers.size
    task = partial(mean_, values, peers, Hierarchical(), BlockInt(8), seed=1)
    peers.submit(task, "here").wait()
    return values


def _on_hosts(boots: Sequence[str]) -> tuple[tuple[str, ...], Tensor, int | None]:
    """Ranks 0 and 2 have a host of one name; each rank's kernel has booted as that."""
    rank = dist.get_rank()
    with (
        patch.object(socket, "gethostname", lambda: f"host-{rank % 2}"),
        patch("ringstrategy.transport.connect._boot_id", lambda: boots[rank]),
    ):
        peers = connect(torch.device("cpu"), MINUTE)
    values = _mean(peers)
    dist.barrier()  # the store is in rank 0's process
    peers.close()
    return peers.hosts, values, peers.stats.bytes_sent


def _really(cases: Sequence[Sequence[str]]) -> list[Any]:
    dist.init_process_group("gloo", timeout=MINUTE)
    return [_on_hosts(boots) for boots in cases]


def test_ranks_share_a_host_if_its_name_and_its_kernel_are_one(ranks: Pool) -> None:
    cases = {("x", "x", "x"): "aba", ("x", "x", "y"): "abc", ("", "", ""): "aba"}
    every_rank = ranks(3, _really, list(cases))
    for case, hosts in enumerate(cases.values()):
        expected = on_all_ranks(3, _mean, hosts)
        for rank in every_rank:
            told, values, sent = rank[case]
            assert (told[0] == told[2]) == (hosts == "aba")
            assert told[1] not in (told[0], told[2])
            assert torch.equal(values, expected[0])
            assert sent

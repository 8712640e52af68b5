"""Ranks of one host that read each other's memory by address: the bits of messages, whoever is late."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from fakes import FakePeers, Network, Toy, on_all_ranks, run_on
from pairs import pairs
from torch import Tensor

from ringstrategy import BlockInt, Cast, Codec, Collective, Direct, Hierarchical, Identity, RandomK, TopK, TwoShot
from ringstrategy.codecs import Gaussian, Rotated, Sign
from ringstrategy.collectives import mean_, two_shot
from ringstrategy.collectives.base import Summand

SOME: list[Codec] = [Identity(), Toy(), BlockInt(4, 64, rounding="stochastic"), Rotated(Gaussian(4)), TopK(64)]
LENGTHS = [5001, 0, 1, 3, 700, 4096, 257]  # one exchange after another, long and short


def data(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def several(peers: FakePeers, collective: Collective, codec: Codec, lengths: list[int] = LENGTHS) -> list[Tensor]:
    """What exchanges of these lengths in a row make of the values, of the residuals, of flags and of a rider."""
    made = []
    for step, numel in enumerate(lengths):
        values, residual = data(100 * step + peers.rank, numel), data(100 * step + 50 + peers.rank, numel) / 100
        flags, riders = None, []
        if collective.carries_extras(peers):
            flags, small = torch.zeros(5, dtype=torch.uint8), data(1000 + peers.rank, 130)
            flags[peers.rank % 5] = 1
            riders = [Summand(small, Toy(), torch.ones(130), seed=4)]
            made += [flags, small]
        mean_(values, peers, collective, codec, residual=residual, seed=7 * step + 1, flags=flags, riders=riders)
        made += [values, residual]
    return made


def counted(collective: Collective, codec: Codec) -> Callable[[FakePeers], tuple[list[Tensor], int | None, int | None]]:
    def one(peers: FakePeers) -> tuple[list[Tensor], int | None, int | None]:
        made = several(peers, collective, codec)
        return made, peers.stats.bytes_sent, peers.stats.bytes_received

    return one


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)


@pytest.mark.parametrize("codec", [*SOME, Cast("bf16"), BlockInt(8), Rotated(Sign()), RandomK(64)], ids=str)
def test_two_shot_has_the_bits_and_counts_the_bytes_of_direct(codec: Codec) -> None:
    for size in (1, 2, 5):
        ours = on_all_ranks(size, counted(TwoShot(), codec), "a" * size, shared=True)
        theirs = on_all_ranks(size, counted(Direct(1), codec), "a" * size)
        assert same([made for made, *_ in ours], [made for made, *_ in theirs]), size
        assert [sent for _, *sent in ours] == [sent for _, *sent in theirs]
        assert size == 1 or all(sent for _, sent, _ in ours)
        assert size == 1 or not torch.equal(ours[0][0][2], data(0, LENGTHS[0]))


@pytest.mark.parametrize("collective", [TwoShot(), Hierarchical()], ids=str)
def test_two_barriers_an_exchange_and_no_message(collective: Collective) -> None:
    def one(peers: FakePeers) -> tuple[int, int, int | None]:
        several(peers, collective, BlockInt(8), [5000, 0, 70])
        return peers.barriers, len(peers.network.posts[peers.rank]), peers.stats.bytes_sent

    for barriers, posts, sent in on_all_ranks(3, one, "aaa", shared=True):
        assert barriers == (6 if collective.carries_extras(FakePeers(Network(3, "aaa"), 0)) else 4)
        assert posts == 0
        assert sent


@pairs(codec=SOME, hosts=["aa", "aaab", "aabbbc", "abbcabb"])
def test_a_hierarchy_has_the_bits_of_its_messages(codec: Codec, hosts: str) -> None:
    one = counted(Hierarchical(Direct(), 3), codec)
    ours, theirs = on_all_ranks(len(hosts), one, hosts, shared=True), on_all_ranks(len(hosts), one, hosts)
    assert same([made for made, *_ in ours], [made for made, *_ in theirs])
    assert [sent for _, *sent in ours] == [sent for _, *sent in theirs]
    assert all(made[0].equal(ours[0][0][0]) for made, *_ in ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_a_hierarchy_carries_other_dtypes(dtype: torch.dtype) -> None:
    def one(peers: FakePeers) -> list[Tensor]:
        values, residual = data(peers.rank, 1011).to(dtype), torch.ones(1011, dtype=dtype)
        mean_(values, peers, Hierarchical(), Identity(), residual=residual)
        return [values, residual]

    assert same(on_all_ranks(5, one, "aabbb", shared=True), on_all_ranks(5, one, "aabbb"))


LATE = 0.004  # seconds: what others do meanwhile is done


@pytest.mark.parametrize("late", ["first", "last", "in turn"])
@pytest.mark.parametrize("collective", [TwoShot(), Hierarchical()], ids=str)
def test_ranks_that_read_late_read_the_same(collective: Collective, late: str) -> None:
    noise = [torch.Generator().manual_seed(rank) for rank in range(4)]
    lengths = [5000, 9000, 70, 8000, 5000, 5000, 300, 9001, 17, 6000]
    network = Network(4, "aaaa", shared=True)
    network.late = {
        "first": lambda rank: LATE * (rank == 0),
        "last": lambda rank: LATE * (rank == 3),
        "in turn": lambda rank: LATE * torch.rand(1, generator=noise[rank]).item() ** 4,
    }[late]
    ours = run_on(network, lambda peers: several(peers, collective, Toy(), lengths))
    assert same(ours, on_all_ranks(4, lambda peers: several(peers, collective, Toy(), lengths), "aaaa"))


@pytest.mark.parametrize(
    ("hosts", "shared", "why"), [("aaa", False, "cannot read each other's memory"), ("aab", True, "are on 2 hosts")]
)
def test_where_no_memory_is_shared_it_is_direct_and_rank_0_says_so_once(
    hosts: str, shared: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    two_shot._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        ours = on_all_ranks(3, lambda peers: several(peers, TwoShot(), Toy(), [700, 900]), hosts, shared=shared)
    assert same(ours, on_all_ranks(3, lambda peers: several(peers, Direct(), Toy(), [700, 900]), hosts))
    [said] = [record.getMessage() for record in caplog.records]
    assert "as Direct() does" in said
    assert why in said

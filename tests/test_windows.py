"""Ranks of one host that read each other's memory by address: the bits of messages, whoever is late."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakePeers, Network, Toy, on_all_ranks, run_on
from test_collectives import BOUNDS, CODECS, data
from torch import Tensor

from ringstrategy import (
    BlockInt,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Hierarchical,
    Identity,
    RandomK,
    Rotated,
    TopK,
    TwoShot,
)
from ringstrategy.collectives import mean_, two_shot
from ringstrategy.collectives.base import Summand

SOME: list[Codec] = [Identity(), Toy(), BlockInt(4, 64, rounding="stochastic"), Rotated(Gaussian(4)), TopK(64)]
LENGTHS = [5001, 0, 1, 3, 700, 4096, 257]  # one exchange after another, long and short


def several(peers: FakePeers, collective: Collective, codec: Codec, lengths: list[int]) -> list[Tensor]:
    """What exchanges of these lengths in a row make of the values, of the residuals and of flags."""
    made = []
    for step, numel in enumerate(lengths):
        values, residual = data(100 * step + peers.rank, numel), data(100 * step + 50 + peers.rank, numel) / 100
        flags = None
        if collective.carries_extras(peers):
            flags = torch.zeros(5, dtype=torch.uint8)
            flags[peers.rank % 5] = 1
        mean_(values, peers, collective, codec, residual=residual, seed=7 * step + 1, flags=flags)
        made += [values, residual, *([] if flags is None else [flags])]
    return made


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_two_shot_has_the_bits_of_direct(codec: Codec, size: int) -> None:
    host = "a" * size
    ours = on_all_ranks(size, lambda peers: several(peers, TwoShot(), codec, LENGTHS), host, shared=True)
    theirs = on_all_ranks(size, lambda peers: several(peers, Direct(1), codec, LENGTHS), host)
    assert same(ours, theirs)
    exact = torch.stack([data(rank, LENGTHS[0]).double() + data(50 + rank, LENGTHS[0]) / 100 for rank in range(size)])
    error = (ours[0][0] - exact.sum(0)).abs().max() / exact.sum(0).abs().max()
    assert (size == 1) or 0 < error < 2 * BOUNDS[codec]


@pytest.mark.parametrize("collective", [TwoShot(), Hierarchical()], ids=str)
def test_two_barriers_an_exchange_and_no_message(collective: Collective) -> None:
    def one(peers: FakePeers) -> tuple[int, int, int | None]:
        several(peers, collective, BlockInt(8), [5000, 0, 70])
        return peers.barriers, len(peers.network.posts[peers.rank]), peers.stats.bytes_sent

    for barriers, posts, sent in on_all_ranks(3, one, "aaa", shared=True):
        assert barriers == (6 if collective.carries_extras(FakePeers(Network(3, "aaa"), 0)) else 4)
        assert posts == 0
        assert sent


@pytest.mark.parametrize("codec", SOME, ids=str)
def test_two_shot_counts_the_bytes_that_direct_sends(codec: Codec) -> None:
    def one(collective: Collective) -> Callable[[FakePeers], tuple[int | None, int | None]]:
        def run(peers: FakePeers) -> tuple[int | None, int | None]:
            several(peers, collective, codec, LENGTHS)
            return peers.stats.bytes_sent, peers.stats.bytes_received

        return run

    ours = on_all_ranks(4, one(TwoShot()), "aaaa", shared=True)
    assert ours == on_all_ranks(4, one(Direct(1)), "aaaa")
    assert all(sent for sent, _ in ours)


def test_riders_use_the_same_windows() -> None:
    def one(collective: Collective) -> Callable[[FakePeers], list[Tensor]]:
        def run(peers: FakePeers) -> list[Tensor]:
            flags = torch.zeros(9, dtype=torch.uint8)
            flags[peers.rank] = 1
            exact, small = data(peers.rank, 33), data(10 + peers.rank, 130)
            values, residual = data(20 + peers.rank, 5000), torch.zeros(5000)
            riders = [Summand(exact, Identity(), seed=3), Summand(small, Toy(), torch.ones(130), seed=4)]
            mean_(values, peers, collective, BlockInt(4), residual=residual, seed=5, flags=flags, riders=riders)
            return [values, residual, exact, small, flags]

        return run

    ours = on_all_ranks(3, one(TwoShot()), "aaa", shared=True)
    assert same(ours, on_all_ranks(3, one(Direct(1)), "aaa"))
    assert all(made[-1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0] for made in ours)


@pytest.mark.parametrize("hosts", ["aa", "aaaa", "aabb", "aaab", "aabbbc", "abab", "abbcabb"])
@pytest.mark.parametrize("codec", SOME, ids=str)
def test_a_hierarchy_has_the_bits_of_its_messages(codec: Codec, hosts: str) -> None:
    collective = Hierarchical(Direct(), 3)

    def one(peers: FakePeers) -> tuple[list[Tensor], int | None, int | None]:
        return several(peers, collective, codec, LENGTHS), peers.stats.bytes_sent, peers.stats.bytes_received

    ours = on_all_ranks(len(hosts), one, hosts, shared=True)
    theirs = on_all_ranks(len(hosts), one, hosts)
    assert same([made for made, *_ in ours], [made for made, *_ in theirs])
    assert [counted for _, *counted in ours] == [counted for _, *counted in theirs]
    assert all(made[0].equal(ours[0][0][0]) for made, *_ in ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_a_hierarchy_carries_other_dtypes(dtype: torch.dtype) -> None:
    def one(peers: FakePeers) -> list[Tensor]:
        values, residual = data(peers.rank, 1011, torch.float64).to(dtype), torch.ones(1011, dtype=dtype)
        mean_(values, peers, Hierarchical(), Identity(), residual=residual)
        return [values, residual]

    assert same(on_all_ranks(5, one, "aabbb", shared=True), on_all_ranks(5, one, "aabbb"))


LATE = 0.004  # seconds: what others do meanwhile is done


@pytest.mark.parametrize("culprit", [0, 1, 3])
@pytest.mark.parametrize("collective", [TwoShot(), Hierarchical()], ids=str)
def test_a_rank_that_always_reads_late_reads_the_same(collective: Collective, culprit: int) -> None:
    codec, lengths = BlockInt(8), [5000, 9000, 70, 8000, 5000, 5000, 300, 9001]
    network = Network(4, "aaaa", shared=True)
    network.late = lambda rank: LATE if rank == culprit else 0.0
    ours = run_on(network, lambda peers: several(peers, collective, codec, lengths))
    assert same(ours, on_all_ranks(4, lambda peers: several(peers, collective, codec, lengths), "aaaa"))


def test_ranks_that_are_late_in_turn_read_the_same() -> None:
    noise = [torch.Generator().manual_seed(rank) for rank in range(5)]
    network = Network(5, "aaaaa", shared=True)
    network.late = lambda rank: LATE * torch.rand(1, generator=noise[rank]).item() ** 4
    lengths = [int(length) for length in torch.randint(0, 9000, (40,), generator=torch.Generator().manual_seed(0))]
    ours = run_on(network, lambda peers: several(peers, TwoShot(), Toy(), lengths))
    assert same(ours, on_all_ranks(5, lambda peers: several(peers, Direct(1), Toy(), lengths), "aaaaa"))


@pytest.mark.parametrize("codec", [RandomK(64), BlockInt(8)], ids=str)
def test_a_non_finite_value_of_one_rank_is_non_finite_on_all(codec: Codec) -> None:
    def one(peers: FakePeers) -> tuple[Tensor, Tensor]:
        values, residual = data(peers.rank, 3000), torch.full((3000,), 0.25)
        if peers.rank == 2:
            values[700] = torch.nan
        mean_(values, peers, TwoShot(), codec, residual=residual, seed=1)
        return values, residual

    for values, residual in on_all_ranks(3, one, "aaa", shared=True):
        assert not values[700].isfinite()
        assert residual.isfinite().all()


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


# The stand-in, which holds what is offered to what a slow reader needs


def _changed_too_early(peers: FakePeers) -> None:
    windows = peers.windows(64)
    assert windows is not None
    mine = windows.memory[peers.rank][:16]
    windows.barrier([mine], [])
    mine.fill_(1)
    windows.barrier([], [])


def _of_another(peers: FakePeers) -> None:
    windows = peers.windows(64)
    assert windows is not None
    windows.barrier([windows.memory[1 - peers.rank][:16]], [])


@pytest.mark.parametrize(("function", "why"), [(_changed_too_early, "others could read"), (_of_another, "not its own")])
def test_the_fake_refuses_what_a_slow_reader_would_see(function: Any, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        on_all_ranks(2, function, "aa", shared=True)

"""Every collective through every codec, in one process, against a mean in float64; of several hosts once over gloo."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, Network, Toy, on_all_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from pairs import all_pairs
from torch import Tensor

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, Sign, TopK
from ringstrategy.collectives import BySize, Collective, Direct, Hierarchical, Native, Ring, mean_
from ringstrategy.collectives.base import Summand, cut, cut_chunks
from ringstrategy.transport import connect
from ringstrategy.transport.base import FEW, Peers

WORLDS = ["a", "ab", "abc", "abcd", "abcde", "abcdefgh", "aabb", "aabbbc", "aaaa", "abbcabb"]  # each rank's host
NUMELS = [0, 1, 7, 31, 33, 257, 3000, 9003]
COLLECTIVES: list[Collective] = [Ring(1), Ring(), Ring(7), Direct(1), Direct(3), BySize(below=3000), Native()]
COLLECTIVES += [Hierarchical(), Hierarchical(Direct(2), 3)]
BOUNDS: dict[Codec, float] = {  # worst element, of the largest
    Identity(): 1e-6,
    Cast("float16"): 2e-3,
    Cast("bfloat16"): 2e-2,
    Toy(): 1.0,
    BlockInt(8): 0.03,
    BlockInt(4, 64, rounding="stochastic"): 0.8,
    BlockFloat8(): 0.3,
    Sign(): 2.5,
    Rotated(Gaussian(4)): 1.0,
    Rotated(Sign()): 2.5,
    TopK(64): 1.2,
}
CODECS = list(BOUNDS)
_LONGEST = 1 << 25  # of what `Ring` expects


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 10)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 10)
    monkeypatch.setattr("ringstrategy.collectives.direct._LONG", 1 << 8)  # so that some are long and others short


def fitting(codec: Codec) -> list[Collective]:
    def fits(collective: Collective) -> bool:
        try:
            collective.check(codec)
        except ValueError:
            return False
        return True

    return [collective for collective in COLLECTIVES if fits(collective)]


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank), dtype=torch.float64).to(dtype)


def residual_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return data(rank + 50, numel, dtype) / 64


def plainly(peers: FakePeers, numel: int, collective: Collective, codec: Codec, dtype: torch.dtype) -> list[Tensor]:
    """The mean, and what takes the place of the residual."""
    values, residual = data(peers.rank, numel) / peers.size, residual_of(peers.rank, numel, dtype)
    mean_(Summand(values, codec, residual, seed=3), peers, collective)
    assert (peers.stats.bytes_sent is None) == (collective == Native() and peers.size > 1 and numel > 0), (
        "nobody can count those"
    )
    return [values, residual]


def otherwise(peers: FakePeers, numel: int, collective: Collective, codec: Codec, dtype: torch.dtype) -> list[Tensor]:
    """The same in other segments, with flags, what is lost in a place of its own, and `Direct` in two calls."""
    flags, hierarchical = None, isinstance(collective, Hierarchical)
    assert collective.carries_extras(peers) or collective == Native() or hierarchical
    if collective.carries_extras(peers):
        collective = collective if hierarchical else replace(collective, segments=2)  # type: ignore[type-var]
        flags = torch.zeros(11, dtype=torch.uint8)
        flags[[peers.rank, 9]] = torch.tensor([1, 0x10 << peers.rank % 4], dtype=torch.uint8)
    peers.queues = hierarchical or isinstance(collective, Direct)
    values, residual = data(peers.rank, numel) / peers.size, residual_of(peers.rank, numel, dtype)
    before, lost = residual.clone(), torch.full_like(residual, 77.0)
    mean_(Summand(values, codec, residual, lost, seed=3), peers, collective, flags=flags)
    assert torch.equal(residual, before)
    if flags is not None:
        everyone = sum({0x10 << rank % 4 for rank in range(peers.size)})
        assert flags.tolist() == [*(int(rank < peers.size) for rank in range(9)), everyone, 0]
    if isinstance(collective, Direct) and peers.size > 1:
        assert len(peers.network.posts[peers.rank]) == 2
    return [values, lost]


def cells(codec: Codec) -> list[Sequence[Any]]:
    """All pairs with the codec that loses most; of each other codec, and of what it meets, all pairs too."""
    rest: list[list[Any]] = [WORLDS, NUMELS, [torch.float32, torch.bfloat16], [_LONGEST, 0]]
    if codec == Toy():
        return [*all_pairs(fitting(codec), *rest)]
    rows = [row for own, *row in all_pairs(CODECS, COLLECTIVES, *rest) if own == codec]
    others = cycle(fitting(codec))
    return [[each if each in fitting(codec) else next(others), *row] for each, *row in rows]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_ranks_hold_one_mean_and_what_it_lacks_whichever_way_it_travels(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for collective, hosts, numel, dtype, expected in cells(codec):
        size, lossy = len(hosts), codec != Identity() and not (isinstance(collective, Hierarchical) and hosts == "aaaa")
        cell = f"{collective}, on {hosts}, {numel} values, residuals of {dtype}, up to {expected} bytes expected"
        how = {"numel": numel, "collective": collective, "codec": codec, "dtype": dtype}
        monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", expected)
        found = on_all_ranks(size, partial(plainly, **how), hosts)
        monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", _LONGEST - expected)
        again = on_all_ranks(size, partial(otherwise, **how), hosts)
        [mean, *others] = [values for values, _ in found]
        assert all(torch.equal(other, mean) for other in others), cell
        for one, other in zip(found, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), cell
        if size == 1:
            assert torch.equal(mean, data(0, numel)), cell
            assert torch.equal(found[0][1], residual_of(0, numel, dtype)), cell
            continue
        given = [data(rank, numel).double() / size + residual_of(rank, numel, dtype).double() for rank in range(size)]
        exact = torch.stack(given).sum(0)
        error = (mean - exact).abs().max().item() if numel else 0.0
        largest = (
            exact.abs().max()
            if numel > 5000
            else max((rank.abs().max() * size for rank in given if numel), default=1.0)
        )
        bound = 2 * BOUNDS[codec] if isinstance(collective, Hierarchical) else BOUNDS[codec]
        assert error <= (bound if lossy else 1e-6) * largest, cell
        assert error > 1e-4 or not lossy or numel < 200, cell
        lost = torch.stack([rest.double() for _, rest in found])
        if collective != Native() and dtype == torch.float32:  # which loses more by its sum in 16 bits
            assert torch.allclose(mean + lost.sum(0), exact, rtol=0, atol=1e-5), cell


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_non_finite_value_of_one_rank_is_non_finite_on_all(codec: Codec) -> None:
    block = max(codec.block, 16)
    numel, at = 5 * block, 2 * block + 1
    inside = torch.arange(numel) // block == 2

    def one(peers: FakePeers, collective: Collective, poison: float, culprit: int) -> tuple[Tensor, Tensor]:
        values, residual = data(peers.rank, numel) / 3, torch.full((numel,), 0.25)
        if peers.rank == culprit:
            values[at] = poison
        mean_(Summand(values, codec, residual), peers, collective)
        return values, residual

    poisons, worlds = [float("nan"), float("inf"), -float("inf")], ["abc", "aabb", "aaaa", "abbcabb"]
    for collective, hosts, poison, culprit in all_pairs(fitting(codec), worlds, poisons, [0, 1, -1]):
        cell, size = (collective, hosts, poison, culprit), len(hosts)
        how = {"collective": collective, "poison": poison, "culprit": culprit % size}
        results = on_all_ranks(size, partial(one, **how), hosts)
        for values, residual in results:
            assert not values[at].isfinite(), cell
            assert values[~inside].isfinite().all(), cell
            assert residual.isfinite().all(), cell
        kept = sum(bool(residual[at].sub(0.25).abs() < 1e-6) for _, residual in results)
        if isinstance(collective, Hierarchical):  # of a host one rank encodes it
            assert kept >= size - len(set(hosts)) * (hosts != "aaaa"), cell
        else:
            assert kept == size or not codec.lossless, "it was not delivered"


def test_each_rank_rounds_by_noise_of_its_own() -> None:
    def lost(peers: FakePeers) -> Tensor:
        values, residual = data(0, 3 * 512), torch.zeros(3 * 512)  # the same values on all
        mean_(Summand(values, BlockInt(4, 64, rounding="stochastic"), residual, seed=1), peers, Direct())
        return residual[-512:]  # both of the others encode it

    first, second, _ = on_all_ranks(3, lost)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("queues", [False, True])
def test_riders_are_summed_as_if_each_went_alone_but_in_the_same_messages(
    queues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(peers: FakePeers, numel: int, collective: Collective, together: bool) -> tuple[list[Tensor], int]:
        peers.queues, rank = queues, peers.rank
        first, *others = every = [
            Summand(data(rank, numel), BlockInt(8), residual_of(rank, numel), seed=0),
            Summand(data(rank + 10, 515, torch.float64), Identity(), residual_of(rank + 1, 515, torch.float64), seed=1),
            Summand(data(rank + 20, 1), Rotated(Gaussian(4)), residual_of(rank + 2, 1, torch.bfloat16), seed=2),
        ]
        if isinstance(collective, BySize) and not together:  # riders go the way of what carries them
            nbytes = sum(one.codec.nbytes(one.values.numel(), one.values.dtype) for one in every)
            collective = collective.chosen(nbytes, peers)
        mean_(
            first,
            peers,
            collective,
            flags=torch.zeros(9, dtype=torch.uint8),  # else nothing is sent of no values
            riders=others if together else (),
        )
        posts = len(peers.network.posts[rank])
        for one in () if together else others:  # in one piece
            alone = replace(collective, segments=1)  # type: ignore[type-var]
            mean_(one, peers, alone)
        return [*(one.values for one in every), *(one.residual for one in every if one.residual is not None)], posts

    ways = [Ring(), Direct(), Direct(3), BySize(below=3000)]
    for collective, numel, size, expected in all_pairs(ways, [0, 1, 700, 30_000], [1, 2, 3, 5], [_LONGEST, 0]):
        monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", expected)
        together, apart = (
            on_all_ranks(size, partial(go, numel=numel, collective=collective, together=on)) for on in (True, False)
        )
        for (found, posts), (alone, posts_alone) in zip(together, apart, strict=True):
            cell = collective, numel, size, expected
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True)), cell
            assert posts == posts_alone, cell


def test_short_values_go_direct_and_long_ones_over_the_ring_or_in_two_calls() -> None:
    long, short = 1 << 24, 1 << 10
    for hosts, queued in {
        "abcdefgh": Direct(),
        "aaaaaaaa": Direct(),
        "aaaabbbb": Ring(),  # which leaves each host once
        "a" * FEW: Direct(),
        "a" * 17: Ring(),
    }.items():
        peers = FakePeers(Network(len(hosts), hosts), 0)
        shared = 1 < len(set(hosts)) < len(hosts)
        assert BySize(below=short).chosen(short - 1, peers) == (Ring() if shared else Direct())
        assert BySize(2, below=short).chosen(short, peers) == Ring(2)
        assert BySize().chosen(long, peers) == Ring()
        peers.queues = True
        assert BySize().chosen(long, peers) == queued


@pytest.mark.parametrize("codec", [Identity(), BlockInt(8)], ids=str)
@pytest.mark.parametrize("long", [True, False])
def test_long_messages_go_to_one_rank_after_the_other_and_short_ones_to_all_at_once(
    monkeypatch: pytest.MonkeyPatch, long: bool, codec: Codec
) -> None:
    monkeypatch.setattr("ringstrategy.collectives.direct._LONG", 0 if long else 1 << 30)
    segments, size = 3, 4

    def one(peers: FakePeers) -> list[tuple[int, int]]:
        Direct(segments).sum_(Summand(data(peers.rank, 70_001), codec), peers)
        posts = peers.network.posts[peers.rank]
        return [((post.targets[0] - peers.rank) % size, post.landed - number) for number, post in enumerate(posts)]

    for posts in on_all_ranks(size, one):
        distances, posted_while_under_way = zip(*posts, strict=True)
        if long:
            assert distances == (1, 1, 1, 2, 2, 2, 3, 3, 3) * 2
            assert max(posted_while_under_way) == 2
        else:
            assert distances == (1, 2, 3) * (2 * segments)
            assert posted_while_under_way[0] == segments * (size - 1)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != Sign()], ids=str)
def test_each_rank_gets_its_chunk_of_the_sum_and_nothing_is_lost(codec: Codec) -> None:
    def one(peers: FakePeers, shard: int, collective: Collective) -> tuple[Tensor, Tensor]:
        numel = peers.size * shard
        values, residual = data(peers.rank, numel), residual_of(peers.rank, numel)
        lost = residual if shard == 1000 else torch.full((numel,), 1e9)
        collective.scatter_(Summand(values, codec, residual=residual, lost=lost, seed=5), peers)
        assert peers.stats.bytes_sent == (peers.size - 1) * codec.nbytes(shard, torch.float32)
        return values, lost

    halves = [each for each in fitting(codec) if isinstance(each, Ring | Direct | BySize)]
    worlds = [(1, 255), (2, 6001), (3, 1), (5, 3), (5, 257), (3, 1000)]
    for collective, (size, shard) in all_pairs(halves, worlds):
        found = on_all_ranks(size, partial(one, shard=shard, collective=collective))
        cell, numel = (collective, size, shard), size * shard
        own = torch.cat([values[rank * shard : (rank + 1) * shard] for rank, (values, _) in enumerate(found)])
        if size == 1:
            assert torch.equal(own, data(0, numel)), cell
            continue
        mine = [data(rank, numel).double() + residual_of(rank, numel).double() for rank in range(size)]
        true, lost = torch.stack(mine).sum(0), torch.stack([lost for _, lost in found])
        bound = BOUNDS[codec] * size * max(each.abs().max() for each in mine)
        assert (own - true).abs().max() <= bound, cell
        if codec.lossless:
            continue
        assert shard < 1000 or (own - true).abs().max() > 1e-4, cell
        assert (own + lost.double().sum(0) - true).abs().max() < 3e-5, cell
        for rank in range(size):
            assert not lost[rank, rank * shard : (rank + 1) * shard].any(), "what a rank keeps is not encoded"


# What leaves a host


@pytest.mark.parametrize(
    ("collective", "codec"),
    [(Hierarchical(), Identity()), (Hierarchical(), BlockInt(8)), (Hierarchical(Direct(), 1), TopK(64))],
    ids=str,
)
def test_a_host_sends_its_share_of_whole_blocks_however_many_ranks_it_has(collective: Collective, codec: Codec) -> None:
    numel = 256 * 2 * 12 * 12 * 4  # whole blocks, however it is cut

    def sent(peers: FakePeers) -> dict[int, int]:
        collective.sum_(Summand(data(peers.rank, numel), codec), peers)
        assert peers.stats.bytes_sent == sum(peers.sent_to.values())
        return dict(peers.sent_to)

    for hosts in ("aabbccdd", "aaab", "aabbbc", "aaaa", "abcd", "abab", "abbcabb"):  # each rank's
        size, within, between = len(set(hosts)), dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0)
        for rank, to in enumerate(on_all_ranks(len(hosts), sent, hosts)):
            for peer, nbytes in to.items():
                (within if hosts[peer] == hosts[rank] else between)[hosts[rank]] += nbytes
        assert set(between.values()) == {2 * codec.nbytes(numel, torch.float32) * (size - 1) // size}, hosts
        # each rank but the owner sends each value once, and is sent each sum once
        assert all(inside == 2 * (hosts.count(host) - 1) * 4 * numel for host, inside in within.items()), hosts


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


def _mean(peers: Peers) -> Tensor:
    values = data(peers.rank, 1001) / peers.size
    task = partial(mean_, Summand(values, BlockInt(8), seed=1), peers, Hierarchical())
    peers.submit(task, "here").wait()
    return values


@pytest.mark.parametrize(("boots", "hosts"), [("xxx", "aba"), ("xxy", "abc"), (["", "", ""], "aba")])
@on_ranks(3)
def test_ranks_share_a_host_if_its_name_and_its_kernel_are_one(boots: Sequence[str], hosts: str) -> None:
    """Ranks 0 and 2 have a host of one name; each rank's kernel has booted as `boots` says."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (
        patch.object(socket, "gethostname", lambda: f"host-{rank % 2}"),
        patch("ringstrategy.transport.connect._boot_id", lambda: boots[rank]),
    ):
        peers = connect(torch.device("cpu"), timedelta(minutes=1))
    first, second, third = peers.hosts
    assert (first == third) == (hosts == "aba")
    assert second not in (first, third)
    assert torch.equal(_mean(peers), on_all_ranks(3, _mean, hosts)[rank])
    dist.barrier()  # the store is in rank 0's process
    peers.close()


# How values are cut


@given(
    begin=st.integers(0, 3).map(lambda b: b * 8),
    length=st.integers(0, 2000),
    parts=st.integers(1, 9),
    block=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=200, deadline=None)
def test_cutting_covers_all_and_keeps_blocks_whole(begin: int, length: int, parts: int, block: int) -> None:
    runs = cut(begin, begin + length, parts, block)
    assert len(runs) == parts
    assert [i for run in runs for i in range(*run)] == list(range(begin, begin + length))
    assert all(start % block == 0 or start == begin + length for start, _ in runs)
    sizes = [end - start for start, end in runs]
    assert max(sizes) - min(sizes) < max(2 * block, length / parts / 4)  # and shared evenly


def test_pieces_begin_where_a_gpu_reads_16_bytes_at_once() -> None:
    for codec, size, segments in all_pairs([c for c in CODECS if not isinstance(c, Toy)], [2, 3, 5, 8], [1, 4]):
        values = torch.empty(64 * size * segments * codec.block + 12345)
        for begin, end in (run for chunk in cut_chunks(values, size, segments, codec.block) for run in chunk):
            assert values[begin:].data_ptr() % 16 == 0
            assert codec.nbytes(begin, torch.float32) % 16 == 0  # so what lies behind as many scales does too
            assert end > begin
    for dtype in (torch.float16, torch.float32, torch.float64):
        values = torch.empty(10_007, dtype=dtype)
        assert all(values[begin:].data_ptr() % 16 == 0 for [(begin, _)] in cut_chunks(values, 7, 1, Identity().block))


def scattered(collective: Collective, numel: int) -> None:
    collective.scatter_(Summand(torch.ones(numel), Identity()), FakePeers(Network(2), 0))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *((lambda bad=bad: Ring(segments=bad), ValueError, "segments") for bad in (0, -1, 1.5, "4", True)),
        (lambda: Direct(segments=0), ValueError, "segments"),
        (lambda: BySize(below=-1), ValueError, "below"),
        (lambda: Ring().check(TopK(64)), ValueError, r"pass collective=Direct\(\)"),
        (lambda: Hierarchical(Native()), ValueError, r"between=Ring\(\)"),
        (lambda: Hierarchical("ring"), TypeError, r"ringstrategy\.Ring\(\)"),
        (lambda: Hierarchical(segments=0), ValueError, "whole number"),
        (lambda: Hierarchical().check(TopK(64)), ValueError, r"Direct\(\) \(here the argument `between`"),
        (lambda: Native().check(Toy()), ValueError, r"pass collective=Ring\(\)"),
        (lambda: scattered(Hierarchical(), 4), ValueError, "pass collective=Ring"),
        (lambda: scattered(Ring(), 7), ValueError, "7 values cannot be cut into 2 chunks"),
        *((lambda bad=bad: Cast(bad), ValueError, "float16") for bad in ("int8", torch.float32, 16)),
        (lambda: Cast("float16").check(torch.complex64), TypeError, r"Identity\(\)"),
    ],
)
def test_what_cannot_travel_is_refused_with_the_cure(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()

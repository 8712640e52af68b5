"""Every collective through every codec, in one process, against a mean in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import FakePeers, Network, Toy, on_all_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstrategy.codecs import (
    BlockFloat8,
    BlockInt,
    Cast,
    Codec,
    Gaussian,
    Identity,
    RandomK,
    Rotated,
    Sign,
    TopK,
    derive_seed,
)
from ringstrategy.collectives import BySize, Collective, Direct, Hierarchical, Native, Ring, mean_
from ringstrategy.collectives.base import Summand, cut, cut_chunks
from ringstrategy.transport.base import FEW

SIZES = [1, 2, 3, 4, 5, 8]
COLLECTIVES = [Ring(1), Ring(), Ring(7), Direct(1), Direct(3), BySize(below=3000), Native()]
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
    RandomK(64): 1.2,
}
CODECS = list(BOUNDS)


def _fits(collective: Collective, codec: Codec) -> bool:
    try:
        collective.check(codec)
    except ValueError:
        return False
    return True


PAIRS = [(collective, codec) for collective in COLLECTIVES for codec in CODECS if _fits(collective, codec)]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 10)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 10)
    monkeypatch.setattr("ringstrategy.collectives.direct._LONG", 1 << 8)  # so that some are long and others short


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank), dtype=torch.float64).to(dtype)


def averaged(size: int, numel: int, collective: Collective, codec: Codec) -> list[torch.Tensor]:
    def one(peers: FakePeers) -> torch.Tensor:
        values = data(peers.rank, numel) / size
        mean_(values, peers, collective, codec, seed=3)
        return values

    return on_all_ranks(size, one)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_all_ranks_hold_the_same_bits_of_the_mean(size: int, collective: Collective, codec: Codec) -> None:
    numel = 17_501
    results = averaged(size, numel, collective, codec)
    exact = torch.stack([data(rank, numel).double() for rank in range(size)]).mean(0)
    assert all(torch.equal(result, results[0]) for result in results)
    error = ((results[0] - exact).abs().max() / exact.abs().max()).item()
    if size == 1:
        assert torch.equal(results[0], data(0, numel))
    elif codec == Identity():
        assert error < BOUNDS[codec]
    else:
        assert 0 < error < BOUNDS[codec]


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 33])
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_awkward_lengths(numel: int, collective: Collective, codec: Codec) -> None:
    for size in (2, 3, 5, 8):
        results = averaged(size, numel, collective, codec)
        exact = torch.stack([data(rank, numel).double() for rank in range(size)]).mean(0)
        assert all(torch.equal(result, results[0]) for result in results)
        largest = max(data(rank, numel).abs().max().item() for rank in range(size)) if numel else 1.0
        assert torch.allclose(results[0].double(), exact, atol=BOUNDS[codec] * largest, rtol=0)


@pytest.mark.parametrize(("collective", "codec"), [p for p in PAIRS if p[0] in (Ring(), Direct())], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_what_was_delivered_and_what_was_lost_make_the_true_sum(
    size: int, collective: Collective, codec: Codec
) -> None:
    if codec.lossless:
        return
    numel = 9003

    def one(peers: FakePeers) -> tuple[torch.Tensor, torch.Tensor]:
        values, lost = data(peers.rank, numel), torch.full((numel,), 1e9)
        collective.sum_(Summand(values, codec, lost=lost, seed=5), peers)
        return values, lost

    results = on_all_ranks(size, one)
    total = results[0][0].double() + sum(lost.double() for _, lost in results)
    exact = sum(data(rank, numel).double() for rank in range(size))
    assert (results[0][0] - exact).abs().max() > 1e-4
    assert (total - exact).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("collective", "codec", "hosts"),
    [
        *((Ring(), codec, None) for codec in (BlockInt(3), Sign(), Cast("bfloat16"), Rotated(Gaussian(4)), Toy())),
        *((Direct(), codec, None) for codec in (BlockFloat8(), TopK(64), RandomK(64), Identity())),
        (Native(), Cast("float16"), None),
        (Hierarchical(), BlockInt(4), "aab"),
        (Hierarchical(), Rotated(Sign()), "aaa"),
    ],
    ids=str,
)
def test_what_is_lost_may_have_a_place_of_its_own_and_loses_nothing_of_what_is_not_finite(
    collective: Collective, codec: Codec, hosts: str | None, dtype: torch.dtype
) -> None:
    numel = 9003

    def one(peers: FakePeers, apart: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, residual = data(peers.rank, numel), data(peers.rank + 50, numel, dtype) / 8
        values[300] = torch.inf if peers.rank == 0 else 0.0
        lost = torch.full_like(residual, 77.0) if apart else residual
        before = residual.clone()
        mean_(values, peers, collective, codec, residual=residual, lost=lost, seed=5)
        assert not apart or torch.equal(residual, before)
        return values, before, lost

    for size in (3,) if hosts else (1, 2, 3):
        network = [hosts] if hosts else []
        together = on_all_ranks(size, lambda peers: one(peers, False), *network)
        apart = on_all_ranks(size, lambda peers: one(peers, True), *network)
        for rank, ((values, _, kept), (found, before, lost)) in enumerate(zip(together, apart, strict=True)):
            assert torch.equal(found.isfinite(), values.isfinite())
            assert torch.equal(found.nan_to_num(), values.nan_to_num())
            assert torch.equal(lost, kept)
            assert size == 1 or not torch.equal(lost, before)
            if size > 1 and rank == 0 and not hosts and not isinstance(codec, Identity):
                rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5  # where it is rotated there and back
                assert abs(lost[300] - before[300]) <= rounding * before[256:512].abs().max()


@pytest.mark.parametrize("collective", [Ring(), Direct()], ids=str)
@pytest.mark.parametrize("codec", [Toy(), BlockInt(3), Sign()], ids=str)
def test_feedback_repairs_every_rounding(collective: Collective, codec: Codec) -> None:
    size, numel, steps = 4, 203, 80

    def one(peers: FakePeers) -> list[torch.Tensor]:
        sums = []
        for residual in (None, torch.zeros(numel)):
            total = torch.zeros(numel)
            for step in range(steps):
                values = data(peers.rank, numel) / size
                mean_(values, peers, collective, codec, residual=residual, seed=derive_seed(1, step))
                total += values
            sums.append(total / steps)
        return sums

    without, with_feedback = on_all_ranks(size, one)[0]
    exact = torch.stack([data(rank, numel) for rank in range(size)]).mean(0)
    assert (with_feedback - exact).norm() < 0.15 * (without - exact).norm()


@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_of_one_rank_is_non_finite_on_all(
    collective: Collective, codec: Codec, poison: float
) -> None:
    block = max(codec.block, 16)
    numel, at = 5 * block, 2 * block + 1
    inside = torch.arange(numel) // block == 2

    def one(peers: FakePeers) -> tuple[torch.Tensor, torch.Tensor]:
        values, residual = data(peers.rank, numel) / 3, torch.full((numel,), 0.25)
        if peers.rank == 1:
            values[at] = poison
        mean_(values, peers, collective, codec, residual=residual, seed=0)
        return values, residual

    for values, residual in on_all_ranks(3, one):
        assert not values[at].isfinite()
        assert values[~inside].isfinite().all()
        assert residual.isfinite().all()
        assert residual[at] == 0.25 or not codec.lossless, "it was not delivered"


@pytest.mark.parametrize("collective", [Ring(1), Ring(3), Direct(1), Direct(4)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bytes_are_those_that_the_codec_names(collective: Collective, codec: Codec) -> None:
    size, numel = 4, 4096 * 40

    def one(peers: FakePeers) -> tuple[int | None, int | None]:
        collective.sum_(Summand(data(peers.rank, numel), codec), peers)
        return peers.stats.bytes_sent, peers.stats.bytes_received

    [chunk, *_] = cut_chunks(torch.empty(numel), size, collective.segments, codec.block)  # type: ignore[attr-defined]
    expected = 2 * (size - 1) * sum(codec.nbytes(end - begin, torch.float32) for begin, end in chunk)
    assert on_all_ranks(size, one) == [(expected, expected)] * size


def test_native_bytes_cannot_be_counted() -> None:
    def one(peers: FakePeers) -> int | None:
        Native().sum_(Summand(data(peers.rank, 10), Identity()), peers)
        return peers.stats.bytes_sent

    assert on_all_ranks(2, one) == [None, None]


@pytest.mark.parametrize("codec", [Toy(), *(c for c in CODECS if isinstance(c, Rotated | BlockInt | Sign))], ids=str)
@pytest.mark.parametrize("segments", [1, 2, 5])
def test_segments_change_no_bit(segments: int, codec: Codec) -> None:
    numel = 300_007
    for family in (Ring, Direct):
        assert torch.equal(averaged(3, numel, family(segments), codec)[0], averaged(3, numel, family(), codec)[0])


@pytest.mark.parametrize("codec", [Identity(), Toy(), Rotated(Gaussian(4))], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_receives_that_begin_early_change_no_bit(size: int, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(FakePeers, "expect", lambda peers, source, arriving: begun.append(source))
    early = averaged(size, 30_000, Ring(), codec)
    assert begun
    begun.clear()
    monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", 1 << 10)
    late = averaged(size, 30_000, Ring(), codec)
    assert not begun
    assert all(torch.equal(one, other) for one, other in zip(early, late, strict=True))


@pytest.mark.parametrize(("collective", "codec"), [p for p in PAIRS if p[0] != Native()], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3000])
@pytest.mark.parametrize("early", [True, False])
def test_flags_of_any_rank_reach_all_and_change_no_value(
    early: bool, numel: int, collective: Collective, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not early:
        monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", 0)

    def one(peers: FakePeers) -> tuple[torch.Tensor, torch.Tensor]:
        assert collective.carries_extras(peers)
        values, flags = data(peers.rank, numel) / peers.size, torch.zeros(11, dtype=torch.uint8)
        flags[[peers.rank, 9]] = torch.tensor([1, 0x10 << peers.rank % 4], dtype=torch.uint8)
        mean_(values, peers, collective, codec, seed=3, flags=flags)
        return values, flags

    for size in (1, 2, 3, 5):
        expected = torch.zeros(11, dtype=torch.uint8)
        expected[:size], expected[9] = 1, sum({0x10 << rank % 4 for rank in range(size)})
        without = averaged(size, numel, collective, codec)
        for (values, flags), plain in zip(on_all_ranks(size, one), without, strict=True):
            assert torch.equal(flags, expected)
            assert torch.equal(values, plain)


@pytest.mark.parametrize("collective", [Ring(), Direct(), Direct(3), BySize(below=3000)], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 700, 30_000])
@pytest.mark.parametrize("early", [True, False])
def test_riders_are_summed_as_if_each_went_alone_but_in_the_same_messages(
    early: bool, numel: int, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not early:
        monkeypatch.setattr("ringstrategy.collectives.ring._EXPECTED", 0)
    codecs = [BlockInt(8), Identity(), Rotated(Gaussian(4))]
    sizes = [numel, 515, 1]
    dtypes = [torch.float32, torch.float64, torch.float32]
    residual_dtypes = [torch.float32, torch.float64, torch.bfloat16]
    way = collective
    if isinstance(collective, BySize):  # riders go the way of what carries them
        carried = sum(codec.nbytes(n, dtype) for codec, n, dtype in zip(codecs, sizes, dtypes, strict=True))
        way = collective.chosen(carried, FakePeers(Network(2), 0))
    assert isinstance(way, Ring | Direct)
    alone = replace(way, segments=1)

    def summands(rank: int) -> list[Summand]:
        return [
            Summand(data(rank + 10 * i, n, dtype), codec, data(rank + 50 + i, n, residual_dtype) / 8, seed=i)
            for i, (n, dtype, codec, residual_dtype) in enumerate(
                zip(sizes, dtypes, codecs, residual_dtypes, strict=True)
            )
        ]

    def go(peers: FakePeers, together: bool) -> tuple[list[Summand], list[torch.Tensor], int]:
        first, *others = every = summands(peers.rank)
        flags = torch.zeros(3, dtype=torch.uint8)
        flags[peers.rank % 3] = 1
        before = len(peers.network.posts[peers.rank])
        for one, by in [
            (first, collective if together else way),
            *((other, alone) for other in others if not together),
        ]:
            mean_(
                one.values,
                peers,
                by,
                one.codec,
                residual=one.residual,
                seed=one.seed,
                flags=flags if one is first else None,
                riders=others if together and one is first else (),
            )
        posts = len(peers.network.posts[peers.rank]) - before
        return [one.values for one in every], [*(one.residual for one in every), flags], posts  # type: ignore[return-value]

    for size in (1, 2, 3, 5):
        together = on_all_ranks(size, lambda peers: go(peers, True))
        apart = on_all_ranks(size, lambda peers: go(peers, False))
        main = [averaged_posts(size, numel, way)] if numel else []
        for (values, kept, posts), (expected, left, _) in zip(together, apart, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
            assert all(torch.equal(one, other) for one, other in zip(kept, left, strict=True))
            assert not main or posts == main[0]


def averaged_posts(size: int, numel: int, collective: Collective) -> int:
    def one(peers: FakePeers) -> int:
        mean_(data(peers.rank, numel), peers, collective, BlockInt(8))
        return len(peers.network.posts[peers.rank])

    [posts] = set(on_all_ranks(size, one))
    return posts


@pytest.mark.parametrize("numel", [1000, 1025])
def test_what_is_short_goes_direct_and_what_is_long_over_the_ring(numel: int) -> None:
    collective = BySize(below=BlockInt(8).nbytes(1025, torch.float32))

    def targets(peers: FakePeers) -> set[int]:
        collective.sum_(Summand(data(peers.rank, numel), BlockInt(8)), peers)
        return {target for post in peers.network.posts[peers.rank] for target in post.targets}

    assert [len(to) for to in on_all_ranks(4, targets)] == [1 if numel == 1025 else 3] * 4


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=str)
def test_identity_carries_other_dtypes(collective: Collective, dtype: torch.dtype) -> None:
    def one(peers: FakePeers) -> torch.Tensor:
        values = data(peers.rank, 11, torch.float64).to(dtype) * (1j if dtype.is_complex else 1)
        collective.sum_(Summand(values, Identity()), peers)
        return values

    results = on_all_ranks(3, one)
    exact = sum(data(rank, 11, torch.float64).to(dtype) * (1j if dtype.is_complex else 1) for rank in range(3))
    assert torch.allclose(results[0], exact)
    assert torch.equal(results[0], results[2])


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


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not isinstance(codec, Toy)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("segments", [1, 4])
def test_pieces_begin_where_a_gpu_reads_16_bytes_at_once(segments: int, size: int, codec: Codec) -> None:
    values = torch.empty(64 * size * segments * codec.block + 12345)
    for chunk in cut_chunks(values, size, segments, codec.block):
        for begin, end in chunk:
            assert values[begin:].data_ptr() % 16 == 0
            assert codec.nbytes(begin, torch.float32) % 16 == 0  # so what lies behind as many scales does too
            assert end > begin


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_raw_values_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    values = torch.empty(10_007, dtype=dtype)
    assert all(values[begin:].data_ptr() % 16 == 0 for [(begin, _)] in cut_chunks(values, 7, 1, Identity().block))


@pytest.mark.parametrize(
    ("megabytes", "count"), [(0.001, 1), (0.99, 1), (2, 2), (15.9, 2), (24.1, 3), (63, 7), (64.1, 8), (96, 8)]
)
def test_a_chunk_is_halved_unless_tiny_and_cut_further_only_into_large_pieces(
    monkeypatch: pytest.MonkeyPatch, megabytes: float, count: int
) -> None:
    monkeypatch.undo()
    values = torch.empty(round(megabytes * 2**18), device="meta")
    for chunk in cut_chunks(values, 4, segments=8, block=1):
        assert len(chunk) == count


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize("family", [Ring, Direct])
def test_bad_segments_are_refused(family: type, bad: object) -> None:
    with pytest.raises(ValueError, match="segments"):
        family(segments=bad)


def test_native_refuses_what_a_backend_cannot_add() -> None:
    with pytest.raises(ValueError, match=r"pass collective=Ring\(\)"):
        Native().check(Toy())
    Native().check(Cast("bf16"))


def test_cast_refuses_other_dtypes() -> None:
    for bad in ("int8", torch.float32, 16):
        with pytest.raises(ValueError, match="float16"):
            Cast(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Identity\(\)"):
        Cast("float16").check(torch.complex64)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=str)
def test_a_residual_is_delivered_once_by_a_lossless_codec(collective: Collective) -> None:
    def one(peers: FakePeers) -> tuple[torch.Tensor, torch.Tensor]:
        values, residual = torch.zeros(30), torch.ones(30)
        mean_(values, peers, collective, Identity(), residual=residual)
        return values, residual

    for values, residual in on_all_ranks(3, one):
        assert values.eq(3).all()
        assert residual.eq(0).all()


# Where messages are only queued, `Direct` is two calls


def queueing(peers: FakePeers) -> FakePeers:
    peers.queues = True
    return peers


@pytest.mark.parametrize("numel", [0, 1, 7, 257, 9003, 70_001])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_two_calls_give_the_bits_of_the_messages(size: int, codec: Codec, numel: int) -> None:
    def one(peers: FakePeers) -> list[torch.Tensor]:
        values, residual = data(peers.rank, numel) / size, data(peers.rank + 100, numel) / 64
        mean_(values, peers, Direct(3), codec, residual=residual, seed=5)
        return [values, residual]

    messages, calls = on_all_ranks(size, one), on_all_ranks(size, lambda peers: one(queueing(peers)))
    for expected, found in zip(messages, calls, strict=True):
        for one_tensor, other in zip(expected, found, strict=True):
            assert torch.equal(one_tensor, other)


@pytest.mark.parametrize("numel", [0, 1, 700, 30_000])
@pytest.mark.parametrize("codec", [Identity(), BlockInt(8)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_flags_and_riders_travel_in_the_two_calls(size: int, codec: Codec, numel: int) -> None:
    def one(peers: FakePeers) -> tuple[list[torch.Tensor], int]:
        values, flags = data(peers.rank, numel), torch.zeros(11, dtype=torch.uint8)
        flags[peers.rank] = 1
        riders = [
            Summand(data(peers.rank + 10, 515, torch.float64), Identity(), seed=1),
            Summand(data(peers.rank + 20, 300), Rotated(Gaussian(4)), data(peers.rank, 300, torch.bfloat16), seed=2),
        ]
        mean_(values, peers, Direct(3), codec, residual=torch.zeros(numel), seed=5, flags=flags, riders=riders)
        assert riders[1].residual is not None
        kept = [values, flags, *(rider.values for rider in riders), riders[1].residual]
        return kept, len(peers.network.posts[peers.rank])

    messages, calls = on_all_ranks(size, one), on_all_ranks(size, lambda peers: one(queueing(peers)))
    for (expected, _), (found, posts) in zip(messages, calls, strict=True):
        assert all(torch.equal(one_tensor, other) for one_tensor, other in zip(expected, found, strict=True))
        assert found[1].tolist() == [1] * size + [0] * (11 - size)
        assert posts == 2


@pytest.mark.parametrize("hosts", ["abcde", "aabbc"])
def test_what_hosts_send_each_other_goes_in_two_calls_of_some_ranks(hosts: str) -> None:
    def one(peers: FakePeers) -> torch.Tensor:
        values = data(peers.rank, 9003)
        mean_(values, peers, Hierarchical(segments=1), BlockInt(8), seed=3)
        return values

    messages = on_all_ranks(5, one, hosts)
    calls = on_all_ranks(5, lambda peers: one(queueing(peers)), hosts)
    assert all(torch.equal(expected, found) for expected, found in zip(messages, calls, strict=True))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("abcdefgh", Direct()), ("aaaaaaaa", Direct()), ("aaaabbbb", Ring()), ("a" * FEW, Direct()), ("a" * 17, Ring())],
)
def test_long_values_go_in_two_calls_where_they_would_not_cross_a_link_more_often(
    hosts: str, expected: Collective
) -> None:
    long, short = 1 << 24, 1 << 10
    peers = FakePeers(Network(len(hosts), hosts), 0)
    assert BySize().chosen(long, peers) == Ring()
    assert BySize().chosen(long, queueing(peers)) == expected
    assert BySize().chosen(short, queueing(peers)) == (Ring() if 1 < len(set(hosts)) < len(hosts) else Direct())

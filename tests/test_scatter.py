"""The two halves of an all-reduce: sums of which each rank gets its chunk, and chunks of which all get all."""

from __future__ import annotations

import pytest
import torch
from fakes import FakePeers, Toy, on_all_ranks

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, Sign, TopK
from ringstrategy.collectives import BySize, Collective, Direct, Hierarchical, Native, Ring, TwoShot
from ringstrategy.collectives.base import Summand

RINGS: list[Collective] = [Ring(1), Ring(3), BySize(below=3000)]
BY_HOPS: dict[Codec, float] = {  # worst element, of the largest
    Identity(): 1e-6,
    Cast("float16"): 2e-3,
    BlockInt(8): 0.03,
    BlockInt(4, 64, rounding="stochastic"): 0.8,
    BlockFloat8(): 0.3,
    Rotated(Gaussian(4)): 1.0,
    Toy(): 1.0,
}
PAIRS = [
    *((collective, codec) for collective in RINGS for codec in BY_HOPS),
    *((Direct(segments), codec) for segments in (1, 3) for codec in (*BY_HOPS, Rotated(Sign()), TopK(64))),
]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.direct._LONG", 1 << 10)


def data(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


def exact(size: int, numel: int) -> torch.Tensor:
    return torch.stack([data(rank, numel).double() for rank in range(size)]).sum(0)


@pytest.mark.parametrize("shard", [1, 3, 255, 257, 6001])
@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_each_rank_gets_its_chunk_of_the_sum(collective: Collective, codec: Codec, shard: int) -> None:
    for size in (1, 2, 3, 5):
        numel = size * shard

        def one(peers: FakePeers, numel: int = numel) -> tuple[torch.Tensor, torch.Tensor]:
            values, lost = data(peers.rank, numel), torch.full((numel,), 1e9)
            collective.scatter_(Summand(values, codec, lost=lost, seed=5), peers)
            return values, lost

        found = on_all_ranks(size, one)
        true = exact(size, numel)
        own = torch.cat([values[rank * shard : (rank + 1) * shard] for rank, (values, _) in enumerate(found)])
        if size == 1 or codec.lossless:
            assert (own - true).abs().max() < 1e-5
            continue
        bound = BY_HOPS.get(codec, 3.0)
        assert (own - true).abs().max() <= bound * size * max(data(rank, numel).abs().max() for rank in range(size))
        assert shard < 6001 or (own - true).abs().max() > 1e-4
        assert (own + sum(lost.double() for _, lost in found) - true).abs().max() < 3e-5
        for rank, (_, lost) in enumerate(found):
            assert not lost[rank * shard : (rank + 1) * shard].any(), "what a rank keeps is not encoded"


@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_residuals_count(collective: Collective, codec: Codec) -> None:
    size, shard = 3, 1000
    numel = size * shard

    def one(peers: FakePeers) -> tuple[torch.Tensor, torch.Tensor]:
        values, residual = data(peers.rank, numel), data(peers.rank + 50, numel)
        collective.scatter_(Summand(values, codec, residual=residual, lost=residual, seed=5), peers)
        return values, residual

    found = on_all_ranks(size, one)
    own = torch.cat([values[rank * shard : (rank + 1) * shard] for rank, (values, _) in enumerate(found)]).double()
    if not codec.lossless:  # as for a sum, `mean_` clears what a lossless codec has delivered
        own += sum(residual.double() for _, residual in found)
    residuals = torch.stack([data(rank + 50, numel).double() for rank in range(size)]).sum(0)
    assert (own - exact(size, numel) - residuals).abs().max() < 3e-5


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("codec", [BlockInt(8), Rotated(Gaussian(4))], ids=str)
def test_no_rank_sends_more_than_the_first_phase(codec: Codec, size: int) -> None:
    shard = 2560

    def one(peers: FakePeers, collective: Collective) -> int:
        collective.scatter_(Summand(data(peers.rank, size * shard), codec), peers)
        return peers.stats.bytes_sent

    for collective in (Ring(), Direct()):
        sent = on_all_ranks(size, lambda peers, c=collective: one(peers, c))
        assert sent == [(size - 1) * codec.nbytes(shard, torch.float32)] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shard", [0, 1, 7, 9003])
def test_all_ranks_get_every_chunk_bit_for_bit(shard: int, dtype: torch.dtype) -> None:
    for size in (1, 2, 3, 5):

        def one(peers: FakePeers, size: int = size) -> torch.Tensor:
            values = torch.zeros(size * shard, dtype=dtype)
            values[peers.rank * shard : (peers.rank + 1) * shard] = (data(peers.rank, shard) * 9).to(dtype)
            Ring().gather_(values, peers)
            assert peers.stats.bytes_sent == (size - 1) * shard * dtype.itemsize
            return values

        true = torch.cat([(data(rank, shard) * 9).to(dtype) for rank in range(size)])
        assert all(torch.equal(found, true) for found in on_all_ranks(size, one))


@pytest.mark.parametrize("collective", [Native(), Hierarchical(), TwoShot()], ids=str)
def test_who_has_no_reduce_scatter_says_who_has(collective: Collective) -> None:
    with pytest.raises(ValueError, match="pass collective=Ring"):
        collective.scatter_(Summand(torch.ones(4), Identity()), FakePeers.__new__(FakePeers))


def test_uneven_chunks_are_refused() -> None:
    def one(peers: FakePeers) -> None:
        with pytest.raises(ValueError, match="7 values cannot be cut into 2 chunks"):
            Ring().scatter_(Summand(torch.ones(7), Identity()), peers)

    on_all_ranks(2, one)

"""The two halves of an all-reduce: sums of which each rank gets its chunk, and chunks of which all get all."""

from __future__ import annotations

import pytest
import torch
from fakes import FakePeers, Network, Toy, on_all_ranks

from ringstrategy.codecs import BlockFloat8, BlockInt, Cast, Codec, Gaussian, Identity, Rotated, Sign, TopK
from ringstrategy.collectives import BySize, Collective, Direct, Hierarchical, Native, Ring
from ringstrategy.collectives.base import Summand

BOUNDS: dict[Codec, float] = {  # worst element, of the largest
    Identity(): 1e-6,
    Cast("float16"): 2e-3,
    BlockInt(8): 0.03,
    BlockInt(4, 64, rounding="stochastic"): 0.8,
    BlockFloat8(): 0.3,
    Rotated(Gaussian(4)): 1.0,
    Toy(): 1.0,
}
PAIRS = [
    *((collective, codec) for collective in (Ring(3), BySize(below=3000)) for codec in BOUNDS),
    *((Direct(3), codec) for codec in (*BOUNDS, Rotated(Sign()), TopK(64))),
    *((Ring(1), BlockInt(8)), (Direct(1), BlockInt(8))),
]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors too are cut into several."""
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_SEGMENT", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.base.SMALLEST_HALF", 1 << 12)
    monkeypatch.setattr("ringstrategy.collectives.direct._LONG", 1 << 10)


def data(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


@pytest.mark.parametrize(("collective", "codec"), PAIRS, ids=str)
def test_each_rank_gets_its_chunk_of_the_sum_and_nothing_is_lost(collective: Collective, codec: Codec) -> None:
    for size, shard in ((1, 255), (2, 6001), (3, 1), (5, 3), (5, 257), (3, 1000)):
        numel = size * shard

        def one(peers: FakePeers, numel: int = numel) -> tuple[torch.Tensor, torch.Tensor]:
            values, residual = data(peers.rank, numel), data(peers.rank + 50, numel) / 10
            lost = residual if numel == 3000 else torch.full((numel,), 1e9)
            collective.scatter_(Summand(values, codec, residual=residual, lost=lost, seed=5), peers)
            return values, lost

        found = on_all_ranks(size, one)
        mine = [data(rank, numel).double() + data(rank + 50, numel).double() / 10 for rank in range(size)]
        true = torch.stack(mine).sum(0)
        own = torch.cat([values[rank * shard : (rank + 1) * shard] for rank, (values, _) in enumerate(found)])
        if size == 1 or codec.lossless:
            assert (own - (true if size > 1 else data(0, numel))).abs().max() < 1e-5, (size, shard)
            continue
        assert (own - true).abs().max() <= BOUNDS.get(codec, 3.0) * size * max(each.abs().max() for each in mine)
        assert shard < 1000 or (own - true).abs().max() > 1e-4
        assert (own + sum(lost.double() for _, lost in found) - true).abs().max() < 3e-5, (size, shard)
        for rank, (_, lost) in enumerate(found):
            assert not lost[rank * shard : (rank + 1) * shard].any(), "what a rank keeps is not encoded"


@pytest.mark.parametrize("codec", [BlockInt(8), Rotated(Gaussian(4))], ids=str)
def test_no_rank_sends_more_than_the_first_phase(codec: Codec) -> None:
    shard = 2560

    def one(peers: FakePeers, collective: Collective) -> int:
        collective.scatter_(Summand(data(peers.rank, peers.size * shard), codec), peers)
        return peers.stats.bytes_sent

    for size in (2, 3, 8):
        for collective in (Ring(), Direct()):
            sent = on_all_ranks(size, lambda peers, c=collective: one(peers, c))
            assert sent == [(size - 1) * codec.nbytes(shard, torch.float32)] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_all_ranks_get_every_chunk_bit_for_bit(dtype: torch.dtype) -> None:
    for size, shard in ((1, 7), (2, 0), (3, 1), (5, 9003)):

        def one(peers: FakePeers, size: int = size, shard: int = shard) -> torch.Tensor:
            values = torch.zeros(size * shard, dtype=dtype)
            values[peers.rank * shard : (peers.rank + 1) * shard] = (data(peers.rank, shard) * 9).to(dtype)
            Ring().gather_(values, peers)
            assert peers.stats.bytes_sent == (size - 1) * shard * dtype.itemsize
            return values

        true = torch.cat([(data(rank, shard) * 9).to(dtype) for rank in range(size)])
        assert all(torch.equal(found, true) for found in on_all_ranks(size, one)), (size, shard)


@pytest.mark.parametrize(
    ("collective", "numel", "said"),
    [
        (Native(), 4, "pass collective=Ring"),
        (Hierarchical(), 4, "pass collective=Ring"),
        (Ring(), 7, "7 values cannot be cut into 2 chunks"),
    ],
)
def test_what_cannot_be_scattered_is_refused(collective: Collective, numel: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        collective.scatter_(Summand(torch.ones(numel), Identity()), FakePeers(Network(2), 0))

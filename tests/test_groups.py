"""Peers of some ranks: over a process group's own connections, beside its collectives."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from ringstrategy.codecs import BlockInt
from ringstrategy.collectives import Direct, Ring, mean_
from ringstrategy.errors import PeerLostError
from ringstrategy.transport.base import Peers
from ringstrategy.transport.connect import connect

TIMEOUT = timedelta(seconds=30)
CPU = torch.device("cpu")


def data(rank: int) -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(rank))


def _mean(peers: Peers) -> torch.Tensor:
    values = data(dist.get_rank()) / peers.size
    peers.submit(lambda: mean_(values, peers, Direct(), BlockInt(8)), "in a test").wait()
    return values


def _in_groups() -> dict[str, torch.Tensor]:
    """Ranks 0 and 2, and twice ranks 2 and 1, which rank 1 joins in another order than rank 2 does."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, found = dist.get_rank(), {}
    even = dist.new_group([0, 2], backend="gloo")
    high = dist.new_group([1, 2], backend="gloo")
    for round_ in range(2):  # a group can be joined again
        for name, group in {"even": even, "high": high}.items():
            if rank in dist.get_process_group_ranks(group):
                peers = connect(CPU, TIMEOUT, group=group)
                assert (peers.rank, peers.size) == (dist.get_rank(group), 2)
                found[f"{name}{round_}"] = _mean(peers)
                peers.close()
                total = torch.ones(3)
                dist.all_reduce(total, group=group)  # its connections are still open
                assert total.tolist() == [2, 2, 2]
    dist.barrier()  # rank 0 has the store
    return found


def test_ranks_of_a_group_average_among_themselves(ranks: Pool) -> None:
    zero, one, two = ranks(3, _in_groups)
    assert set(zero) == {"even0", "even1"}
    assert set(one) == {"high0", "high1"}
    assert len(two) == 4
    for name, others, members in (("even", zero, (0, 2)), ("high", one, (1, 2))):
        exact = torch.stack([data(rank).double() for rank in members]).mean(0)
        for round_ in "01":
            assert torch.equal(two[name + round_], others[name + round_])
            assert 0 < (two[name + round_] - exact).abs().max() < 0.05


def _in_pairs() -> list[torch.Tensor]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    pairs = [dist.new_group(pair, backend="gloo") for pair in ([0, 1], [2, 3])]
    found = []
    for _ in range(3):
        peers = connect(CPU, TIMEOUT, group=pairs[dist.get_rank() // 2])
        found.append(_mean(peers))
        peers.close()
    dist.barrier()  # rank 0 has the store
    return found


def test_groups_without_a_common_rank_connect_at_once(ranks: Pool) -> None:
    results = ranks(4, _in_pairs)
    for first in (0, 2):
        exact = (data(first).double() + data(first + 1)) / 2
        for mine, theirs in zip(results[first], results[first + 1], strict=True):
            assert torch.equal(mine, theirs)
            assert 0 < (mine - exact).abs().max() < 0.05


def _beside_its_own_collectives() -> list[torch.Tensor]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    group = dist.new_group(backend="gloo")
    peers = connect(CPU, TIMEOUT, group=group)
    mine = data(dist.get_rank())
    found = []
    for _ in range(20):
        values, total = mine.clone(), mine.clone()
        ticket = peers.submit(lambda values=values: mean_(values, peers, Ring(), BlockInt(8)), "in a test")
        dist.all_reduce(total, group=group)
        ticket.wait()
        found += [values, total]
    peers.close()
    dist.barrier()
    return found


def test_exchanges_and_collectives_of_one_group_do_not_meet(ranks: Pool) -> None:
    zero, one, two = ranks(3, _beside_its_own_collectives)
    exact = torch.stack([data(rank).double() for rank in range(3)]).sum(0)
    for values, total, *others in zip(zero[::2], zero[1::2], one[::2], two[::2], strict=True):
        assert 0 < (values - exact).abs().max() < 0.2
        assert (total - exact).abs().max() < 1e-5
        assert all(torch.equal(values, other) for other in others)


def _one_does_not_come() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    group = dist.new_group([1, 2], backend="gloo")
    if dist.get_rank() == 2:
        with pytest.raises(PeerLostError, match=r"rank 1 .*did not come to set up in time"):
            connect(CPU, timedelta(seconds=1), group=group)
    dist.barrier()


def test_who_does_not_come_is_named_by_its_rank(ranks: Pool) -> None:
    ranks(3, _one_does_not_come)

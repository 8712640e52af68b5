"""Peers of some ranks: over a process group's own connections, beside its collectives."""

from __future__ import annotations

from collections import defaultdict
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


GROUPS = [[0, 2], [1, 2], [0, 1], [2, 3]]  # those of the last two have no rank in common, and connect at once


def _in_groups() -> dict[tuple[int, ...], list[torch.Tensor]]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, found = dist.get_rank(), defaultdict(list)
    groups = [dist.new_group(members, backend="gloo") for members in GROUPS]
    for _ in range(2):  # a group can be joined again
        for members, group in zip(GROUPS, groups, strict=True):
            if rank in members:
                peers = connect(CPU, TIMEOUT, group=group)
                assert (peers.rank, peers.size) == (dist.get_rank(group), 2)
                found[tuple(members)].append(_mean(peers))
                peers.close()
                total = torch.ones(3)
                dist.all_reduce(total, group=group)  # its connections are still open
                assert total.tolist() == [2, 2, 2]
    dist.barrier()  # rank 0 has the store
    return dict(found)


def test_ranks_of_a_group_average_among_themselves(ranks: Pool) -> None:
    results = ranks(4, _in_groups)
    for first, second in GROUPS:
        exact = (data(first).double() + data(second)) / 2
        for mine, theirs in zip(*(results[rank][first, second] for rank in (first, second)), strict=True):
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

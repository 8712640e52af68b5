"""The tests' own pool: each world is alone on its port, and what one test breaks the next does not meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankFailed

from benchmarks.ranks import reserve_port

MINUTE = timedelta(seconds=60)


def test_only_a_store_that_is_told_listens_on_a_reserved_port() -> None:
    with reserve_port() as holder, socket.socket() as late:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            late.bind(("127.0.0.1", port))
        for _ in range(2):  # one after the other: a task may rendezvous twice
            store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=MINUTE)
            store.set("here", "")
            assert store.check(["here"])
            del store


def _mean(value: float) -> float:
    dist.init_process_group("gloo", timeout=MINUTE)
    assert dist.get_world_size() == 2
    mean = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(mean)
    return float(mean / 2)


def _one_comes_late_for_ever() -> None:
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))


def test_a_world_that_never_met_does_not_spoil_the_next(ranks: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0:(?s:.*)timeout"):
        ranks(2, _one_comes_late_for_ever)
    assert ranks(2, _mean, 3.0) == [3.5, 3.5]

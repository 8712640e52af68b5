"""The tests' own pool: each world is alone on its port, and what one test breaks the next does not meet."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankFailed, reserve_port

MINUTE = timedelta(seconds=60)


@pytest.fixture
def other() -> Iterator[Pool]:
    """A second pool, as another pytest has it."""
    pool = Pool()
    yield pool
    pool.close()


def _mean(value: float) -> float:
    dist.init_process_group("gloo", timeout=MINUTE)
    assert dist.get_world_size() == 2
    mean = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(mean)
    return float(mean / 2)


def _all_try(monkeypatch: pytest.MonkeyPatch, ports: Iterable[int]) -> None:
    tried = iter(ports)

    class Choice(random.SystemRandom):
        def choice(self, _: Any) -> Any:
            return next(tried)

    monkeypatch.setattr(random, "SystemRandom", Choice)


def test_only_a_store_that_is_told_listens_on_a_reserved_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_port() as holder, socket.socket() as late:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            late.bind(("127.0.0.1", port))
        _all_try(monkeypatch, range(port, port + 100))
        with reserve_port() as second:
            assert second.getsockname()[1] > port
        for _ in range(2):  # one after the other: a task may rendezvous twice
            store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=MINUTE)
            store.set("here", "")
            assert store.check(["here"])
            del store


def test_worlds_of_two_pools_never_meet(ranks: Pool, other: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though both come upon the same ports."""
    _all_try(monkeypatch, (port for port in range(20_000, 32_000) for _ in range(2)))
    means: dict[Pool, list[float]] = {}

    def use(which: Pool, value: float) -> None:
        means[which] = [mean for _ in range(5) for mean in which(2, _mean, value)]

    threads = [threading.Thread(target=use, args=(ranks, 1.0)), threading.Thread(target=use, args=(other, 10.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert means == {ranks: [1.5] * 10, other: [10.5] * 10}


def _one_comes_late_for_ever() -> None:
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))


def test_a_world_that_never_met_does_not_spoil_the_next(ranks: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0:(?s:.*)timeout"):
        ranks(2, _one_comes_late_for_ever)
    assert ranks(2, _mean, 3.0) == [3.5, 3.5]

"""Ranks that start late, again, or beside what an earlier attempt has left in the store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from clocks import Clock
from jobs import program as program  # a fixture
from pool import Pool
from test_strategy import Net, check_replicas, fit

from benchmarks.ranks import Program
from ringstrategy import RingStrategy
from ringstrategy.membership.rendezvous import _QUIET_SECONDS, _meet, store_of_attempt

LIMIT = 20.0


class Hosts:
    """Ranks that meet at one store, by one clock."""

    def __init__(self) -> None:
        self.store, self.clock = dist.HashStore(), Clock()

    def meet(self, rank: int, size: int, delay: float = 0.0, limit: float = LIMIT) -> str:
        self.clock.sleep(delay)
        return _meet(self.store, rank, size, self.clock.now + limit, self.clock)

    def all_meet(self, delays: list[float]) -> list[str]:
        """The name that each gets; none may go on before the last one is there."""
        begin = self.clock.now

        def come(rank: int, delay: float) -> str:
            name = self.meet(rank, len(delays), delay)
            assert self.clock.now >= begin + max(delays)
            return name

        return self.clock.run(*(partial(come, *place) for place in enumerate(delays)))


@pytest.mark.parametrize("delays", [[0.0], [0.0, 0.2], [0.3, 0.0, 0.1], [0.0, 0.3, 0.0, 0.15]])
def test_all_ranks_of_an_attempt_get_one_name_and_each_attempt_another(delays: list[float]) -> None:
    hosts = Hosts()
    names = [hosts.all_meet(delays) for _ in range(4)]
    assert all(len(set(of_attempt)) == 1 for of_attempt in names), names
    assert len({of_attempt[0] for of_attempt in names}) == 4


@pytest.mark.parametrize("fell", [[0, 1], [1, 2], [0], [2]])
def test_what_ranks_that_fell_had_written_misleads_nobody(fell: list[int]) -> None:
    hosts = Hosts()
    for _ in range(2):  # some ranks of an attempt came this far, and were killed
        for rank in fell:
            with pytest.raises(TimeoutError, match="did not come"):
                hosts.meet(rank, 3, limit=0.1)
    [name] = set(hosts.all_meet([0.0, 0.2, 0.1]))
    assert isinstance(name, str), name


@pytest.mark.parametrize(("again", "waits"), [(0, 2), (2, 0)])
def test_a_rank_may_start_again_while_another_waits(again: int, waits: int) -> None:
    """torchrun restarts each host's ranks by itself. The other one has taken its offer, or rank 0 has been taken."""
    hosts = Hosts()

    def fall_and_come() -> str:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come" if again == 0 else "another rank"):
            hosts.meet(again, 3, limit=0.5)
        if again:
            hosts.store.set(f"ringstrategy/rendezvous/greeting/{again}", "of the process that is starting")
        return hosts.meet(again, 3, 0.3 * (again > 0))

    names = hosts.clock.run(partial(hosts.meet, waits, 3), fall_and_come, partial(hosts.meet, 1, 3, 0.6))
    assert len(set(names)) == 1, names


def test_rank_0_says_for_whom_it_waits() -> None:
    with (
        pytest.warns(UserWarning, match=r"ranks \[1, 2\] have not come yet"),
        pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come"),
    ):
        Hosts().meet(0, 3, limit=_QUIET_SECONDS + 1)
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        Hosts().meet(1, 3)


def _meets_twice() -> bool:
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60)
    first = store_of_attempt(*place)
    first.set("address", "of a process that has ended")
    second = store_of_attempt(*place)
    seen = second.check(["address"])
    second.set(f"looked/{place[0]}", "")
    if place[0] == 0:  # the store is in this process
        second.wait(["looked/1"])
    return seen


def test_an_attempt_sees_nothing_of_another_in_the_store(ranks: Pool) -> None:
    assert ranks(2, _meets_twice) == [False, False]


def _late(seconds: float) -> None:
    if int(os.environ["RANK"]) == 1:
        time.sleep(2.5 * seconds)
    trainer = fit(RingStrategy(timeout=timedelta(seconds=seconds)), Net())
    check_replicas(trainer)
    timeouts = dist.group.WORLD._get_backend(trainer.strategy.root_device).options._timeout
    assert timeouts == timedelta(seconds=seconds)


@pytest.mark.nightly
def test_a_rank_may_start_later_than_the_timeout(ranks: Pool) -> None:
    ranks(2, _late, 2.0)


# As a shell starts them

ENDLESS = """
import time
from lightning.pytorch.callbacks import Callback
from test_strategy import Net, fit

class Slow(Callback):
    def on_train_batch_end(self, trainer, *_):
        open(f"rank{trainer.global_rank}", "w").close()
        time.sleep(0.1)

fit("ring", Net(), devices=2, max_epochs=1000, callbacks=[Slow()])
"""


@pytest.mark.slow
def test_no_rank_outlives_the_agent_of_torchrun(program: Callable[..., Program], tmp_path: Path) -> None:
    """They would train for minutes."""
    (tmp_path / "script.py").write_text(ENDLESS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py")
    running = program(*torchrun)
    running.until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), "both train")
    running.process.kill()
    running.wait()

"""Ranks that start late, again, or beside what an earlier attempt has left in the store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pool import Pool
from scripts import lines_of
from test_strategy import HERE, Net, check_replicas, fit, run_script, shell

from ringstrategy import RingStrategy
from ringstrategy.transport import rendezvous
from ringstrategy.transport.rendezvous import _meet, store_of_attempt


def meet(store: dist.Store, rank: int, size: int, delay: float = 0.0, limit: float = 20.0) -> str:
    time.sleep(delay)
    return _meet(store, rank, size, time.monotonic() + limit)


def all_meet(store: dist.Store, delays: list[float]) -> list[str]:
    with ThreadPoolExecutor(len(delays)) as threads:
        meetings = [threads.submit(meet, store, rank, len(delays), delay) for rank, delay in enumerate(delays)]
        return [meeting.result() for meeting in meetings]


@pytest.mark.parametrize(
    "delays",
    [
        [0.0],
        *(pytest.param(each, marks=pytest.mark.slow) for each in ([0.0, 0.2], [0.3, 0.0, 0.1])),
        [0.0, 0.3, 0.0, 0.15],
    ],
)
def test_all_ranks_of_an_attempt_get_one_name_and_each_attempt_another(delays: list[float]) -> None:
    store = dist.HashStore()
    names = [all_meet(store, delays) for _ in range(4)]
    assert all(len(set(of_attempt)) == 1 for of_attempt in names)
    assert len({of_attempt[0] for of_attempt in names}) == 4


@pytest.mark.parametrize("fell", [[0, 1], [1, 2], [0], [2]])
def test_what_ranks_that_fell_had_written_misleads_nobody(fell: list[int]) -> None:
    store = dist.HashStore()
    for _ in range(2):  # some ranks of an attempt came this far, and were killed
        for rank in fell:
            with pytest.raises(TimeoutError, match="did not come"):
                meet(store, rank, 3, limit=0.1)
    names = all_meet(store, [0.0, 0.2, 0.1])
    assert len(set(names)) == 1


def test_ranks_of_one_host_may_start_again_while_others_wait() -> None:
    """torchrun restarts each host's ranks by itself, and those that wait on another host go on waiting."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(meet, store, 2, 3)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come"):
            meet(store, 0, 3, limit=0.5)  # rank 2 has taken this offer
        again = [threads.submit(meet, store, 0, 3), meet(store, 1, 3)]
        assert {waiting.result(), again[0].result()} == {again[1]}


def test_a_rank_that_took_the_offer_and_fell_is_waited_for_again() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, store, 0, 3)
        with pytest.raises(TimeoutError, match="another rank did not come"):
            meet(store, 2, 3, limit=0.5)
        with ThreadPoolExecutor(1) as others:
            late = others.submit(meet, store, 2, 3, 0.3)  # greets anew, and rank 1 comes meanwhile
            store.set("ringstrategy/rendezvous/greeting/2", "of the process that is starting")
            assert {meet(store, 1, 3), late.result()} == {first.result()}


def test_nobody_goes_on_before_the_last_rank_is_there() -> None:
    store = dist.HashStore()
    all_meet(store, [0.0, 0.0, 0.0])
    gone_on: list[int] = []

    def come(rank: int, delay: float) -> None:
        meet(store, rank, 3, delay)
        gone_on.append(rank)

    threads = [threading.Thread(target=come, args=place) for place in ((0, 0.0), (1, 0.0), (2, 0.6))]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    assert gone_on == []
    for thread in threads:
        thread.join(20)
    assert sorted(gone_on) == [0, 1, 2]


def test_rank_0_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.05)
    store = dist.HashStore()
    with (
        pytest.warns(UserWarning, match=r"ranks \[1, 2\] have not come yet"),
        pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come"),
    ):
        meet(store, 0, 3, limit=0.4)
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        meet(dist.HashStore(), 1, 3, limit=0.2)


def _meets_twice() -> bool:
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=20)
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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_may_start_later_than_the_timeout(ranks: Pool) -> None:
    ranks(2, _late, 2.0)


RESTARTED = """
import json, os
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from test_strategy import Net, check_replicas, fit

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

class Dies(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, place):
        if attempt == 0 and rank == 1 and place == 2:
            os._exit(7)

trainer = fit("ring", Net(), devices=2, callbacks=[Dies()])
check_replicas(trainer)
open(f"rank{rank}.json", "w").write(json.dumps([attempt, trainer.global_step]))
dist.barrier()
"""


@pytest.mark.slow
def test_torchrun_restarts_with_a_port_that_is_given(tmp_path: Path) -> None:
    """The last test here has another rendezvous."""
    where = ("--master-addr=127.0.0.1", "--master-port=29417")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node=2")
    done = run_script(tmp_path, RESTARTED, *torchrun, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    records: list[Any] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert records == [[1, 12], [1, 12]]


ENDLESS = """
import os, time
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from test_strategy import Net, fit

class Slow(Callback):
    def on_train_batch_end(self, *args):
        Path(f"rank{os.environ['RANK']}.pid").write_text(str(os.getpid()))
        time.sleep(0.1)

fit("ring", Net(), devices=2, max_epochs=50, callbacks=[Slow()])
"""


@pytest.mark.slow
def test_no_rank_outlives_the_agent_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{ENDLESS}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    written = [tmp_path / f"rank{rank}.pid" for rank in range(2)]
    with subprocess.Popen(
        torchrun, cwd=tmp_path, env=shell(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as agent:
        try:
            assert until(lambda: all(path.exists() and path.read_text() for path in written), 90), "nobody trains"
        finally:
            agent.kill()
    pids = [int(path.read_text()) for path in written]
    ended = until(lambda: not any(is_running(pid) for pid in pids), 10)
    for pid in filter(is_running, pids):
        os.kill(pid, signal.SIGKILL)
    assert ended, "orphans train on"


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_ends_bit_for_bit_as_one_that_nobody_disturbs(tmp_path: Path) -> None:
    """The benchmark measures more kills, and their parts."""
    [row] = lines_of("restart", tmp_path / "restart.jsonl", "--ranks=2", "--rounds=1", "--cases=ring_int8")
    assert (row["faults"], row["whole"], row["torn"]) == (1, 1, 0)
    assert sum(row["restart_seconds"].values()) == pytest.approx(row["seconds"][0], abs=0.01)
    assert 0 < row["restart_seconds"]["import ringstrategy"] < row["seconds"][0]

"""Ranks that start late, again, or beside what an earlier attempt has left; and what strangers reach of their store."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from clocks import Clock
from jobs import program as program  # a fixture
from on_ranks import on_ranks
from pool import Pool
from test_strategy import Net, check_replicas, fit

import ringstrategy.horovod as hvd
from benchmarks.ranks import Program, reserve_port
from ringstrategy.membership.rendezvous import _meet
from ringstrategy.transport.exposure import bound_to, guarded_store

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


# What strangers on the network reach: the store listens at the address of the job alone, and port scans kill no rank

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux has the limit")
LOW = 256  # descriptors; Linux's usual limit is 1024


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process listens, as the kernel writes them."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def _trains() -> None:
    check_replicas(fit("ring", Net(), max_epochs=1))


def _averages_as_horovod_does() -> None:
    hvd.init()
    assert hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum) == 1
    hvd.shutdown()  # the store stays, for who begins again


def _opens_at(address: str, task: Callable[[], None]) -> set[tuple[str, int]]:
    """Where it listens in addition."""
    os.environ["MASTER_ADDR"] = address
    before = listening()  # the process has run other tests, whose groups may have stores of torch
    task()
    return listening() - before


@on_linux
@pytest.mark.parametrize(("address", "task"), [("127.0.0.1", _trains), ("localhost", _averages_as_horovod_does)])
def test_a_job_of_one_machine_is_reached_from_this_machine_alone(
    ranks: Pool, address: str, task: Callable[[], None]
) -> None:
    of_rank_0, of_rank_1 = ranks(2, _opens_at, address, task)
    assert {place for place, _ in of_rank_0} <= LOOPBACK
    assert len(of_rank_0) > len(of_rank_1)  # the store's


@on_linux
def test_only_addresses_of_this_machine_that_are_free_are_bound_to() -> None:
    with reserve_port() as holder:
        port = holder.getsockname()[1]
        for address in ("127.0.0.1", "localhost"):
            bound = bound_to(address, port)
            assert bound is not None
            assert bound.getsockname()[:2] in {("127.0.0.1", port), ("::1", port)}
            bound.close()
        assert bound_to("192.0.2.1", port) is None  # a document's: nobody's
        assert bound_to(socket.gethostname(), port) is None  # other machines may look it up with another result
    with socket.create_server(("127.0.0.1", 0)) as taken:  # torch shares its server within a process
        port = taken.getsockname()[1]
        assert bound_to("127.0.0.1", port) is None
        with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
            assert guarded_store(0, 1, dist.default_pg_timeout) is None


@on_linux
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8 * LOW, reason="the hard limit is low")
@on_ranks(2)
def test_a_port_scanner_kills_no_rank() -> None:
    """gloo keeps a descriptor of each connection that was ever made to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    before = listening()
    trainer = fit("ring", Net(), max_epochs=1)
    if dist.get_rank() == 0:
        for address, port in listening() - before:
            assert address in LOOPBACK
            for _ in range(LOW):
                socket.create_connection(("127.0.0.1" if address == "0100007F" else "::1", port)).close()
    dist.barrier()
    check_replicas(trainer)
    trainer = fit("ring", Net(), max_epochs=1)
    check_replicas(trainer)
    kept = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (kept > LOW) == (dist.get_rank() == 0)


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

"""What strangers on the network reach: the store listens at the job's address alone, and port scans kill no rank."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_strategy import Net, check_replicas, fit

import ringstrategy.horovod as hvd
from benchmarks.ranks import reserve_port
from ringstrategy.transport.exposure import bound_to, guarded_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux has the limit")
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


@pytest.mark.parametrize(("address", "task"), [("127.0.0.1", _trains), ("localhost", _averages_as_horovod_does)])
def test_a_job_of_one_machine_is_reached_from_this_machine_alone(
    ranks: Pool, address: str, task: Callable[[], None]
) -> None:
    of_rank_0, of_rank_1 = ranks(2, _opens_at, address, task)
    assert {place for place, _ in of_rank_0} <= LOOPBACK
    assert len(of_rank_0) > len(of_rank_1)  # the store's


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


def _scanned() -> int:
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
    return kept


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8 * LOW, reason="the hard limit is low")
def test_a_port_scanner_kills_no_rank(ranks: Pool) -> None:
    """gloo keeps a descriptor of each connection that was ever made to it."""
    of_rank_0, of_rank_1 = ranks(2, _scanned)
    assert of_rank_0 > LOW > of_rank_1

"""Hosts that lose their network while their processes live: an error that names the host, on both sides of the cut."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from test_failures import PROMPT, Job, note, wait_until
from test_lab import needs_namespaces
from test_strategy import Net, fit, rows
from torch import Tensor

from benchmarks import lab
from ringstrategy import PeerLostError, RingStrategy
from ringstrategy.names import STRATEGIES
from ringstrategy.transport import reach

TIMEOUT = 4.0  # seconds, of the strategy
pytestmark = pytest.mark.timeout(120)


class Trains(Net):
    """Says how far it is, and trains until something ends it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        note(f"trains{self.global_rank}.json", step=self.global_step)
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def train(name: str) -> None:
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=TIMEOUT))
    try:
        fit(strategy, Trains(), data=rows(), max_epochs=-1, num_nodes=int(os.environ["WORLD_SIZE"]), devices=1)
    except BaseException as error:
        facts = {"kind": type(error).__name__, "message": str(error), "lost": getattr(error, "rank", None)}
        note(f"record{os.environ['RANK']}.json", **facts)
        raise


def steps(folder: Path) -> list[int]:
    """That the ranks have come to."""
    paths = [folder / f"trains{rank}.json" for rank in range(3)]
    return [json.loads(path.read_text())["step"] if path.exists() else 0 for path in paths]


def run_and_cut(folder: Path, name: str, victim: int) -> list[dict[str, Any]]:
    """What each of three ranks, on hosts of their own, recorded after the network of one host was cut.

    It was cut before, for a part of the timeout, and training went on.
    """
    command = [sys.executable, "-c", f"import test_cut; test_cut.train({name!r})"]
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = 'cd "$1"; shift; exec "$@" > output$RANK 2>&1'
    with lab.Lab(3, "none") as net:
        children = [net.popen(rank, ["sh", "-c", script, "sh", str(folder), *command], here) for rank in range(3)]
        wait_until(lambda: min(steps(folder)) > 5, 60, "all train")
        net.cut(victim)
        time.sleep(TIMEOUT / 4)
        far = max(steps(folder))
        net.mend(victim)
        wait_until(lambda: min(steps(folder)) > far + 5, TIMEOUT, "all train again")
        net.cut(victim)
        cut = time.time()
        wait_until(lambda: all(child.poll() is not None for child in children), TIMEOUT + 25, "all ended")
    assert [child.returncode for child in children] == [1, 1, 1]
    records = [json.loads((folder / f"record{rank}.json").read_text()) for rank in range(3)]
    for record in records:
        assert record["kind"] == PeerLostError.__name__, record
        assert record["time"] - cut < TIMEOUT + 10, record
    return records


@needs_namespaces
def test_a_host_is_reached_whether_or_not_anybody_listens_there() -> None:
    assert reach.unreachable({"127.0.0.1", "127.0.0.2"}) == set()
    with lab.Lab(2, "none") as net:

        def look() -> set[str]:
            return reach.unreachable({net.address(0), net.address(1)}, 1.0)

        assert net._on_host(0, look) == set()
        net.cut(1)
        assert net._on_host(0, look) == {net.address(1)}


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(("name", "victim"), [("ring", 0), ("gossip", 2)])
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path, name: str, victim: int) -> None:
    records = run_and_cut(tmp_path, name, victim)
    for rank, record in enumerate(records):
        assert record["lost"] == victim, record
        sign = "it can reach no other host (10.77.0." if rank == victim else "its host cannot be reached at 10.77.0."
        assert sign in record["message"] or "says another rank" in record["message"], record


class Resets(Net):
    """In batch 3, rank 1 ends all connections of gloo that it has, and goes on; its connections to the store stay."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == 3:
            assert end_connections(but_port=int(os.environ["MASTER_PORT"])) >= 4, "to two ranks, in two groups"
            note("struck.json")
        return super().training_step(batch, batch_idx)


def end_connections(but_port: int) -> int:
    """Of this process, as a firewall or a router does that forgets them; returns how many there were."""
    ended = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            ports = connection.getsockname()[1], connection.getpeername()[1]
            if but_port not in ports:
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def train_and_reset(name: str) -> None:
    fit(name, Resets(), data=rows(96), max_epochs=1)


@pytest.mark.parametrize("name", ["ring", pytest.param("gossip", marks=pytest.mark.slow)])
def test_both_ends_of_a_connection_that_broke_are_named(tmp_path: Path, name: str) -> None:
    with contextlib.closing(Job(tmp_path, 3, train_and_reset, name)) as running:
        assert running.wait([0, 1, 2]) == [1, 1, 1]
        records = [running.record(rank) for rank in range(3)]
    struck = json.loads((tmp_path / "struck.json").read_text())["time"]
    assert len({record["rank"] for record in records}) == 1, records
    for record in records:
        assert record["kind"] == PeerLostError.__name__, record
        ends = re.search(r"lost rank (\d) .* its connection to rank (\d) \(host .*\) (broke|closed)", record["message"])
        assert ends is not None, record
        assert "1" in ends.groups()
        assert record["time"] - struck < PROMPT

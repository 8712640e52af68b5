"""Hosts that lose their network while their processes live: an error that names the host, on both sides of the cut."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import job as job  # a fixture
from test_lab import needs_namespaces
from test_strategy import Net, fit, rows
from torch import Tensor

from benchmarks import lab
from benchmarks.faulted import Plan, be_a_rank
from benchmarks.ranks import Job, note, noted, until
from ringstrategy import PeerLostError, RingStrategy
from ringstrategy.failure import reach
from ringstrategy.names import STRATEGIES

TIMEOUT = 4.0  # seconds, of the strategy


class Trains(Net):
    """Notes how far it is, and trains until something ends it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        note(f"trains{self.global_rank}", step=self.global_step)
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def train(name: str) -> None:
    strategy = RingStrategy(STRATEGIES[name](), timeout=timedelta(seconds=TIMEOUT))
    try:
        fit(strategy, Trains(), data=rows(), max_epochs=-1, num_nodes=int(os.environ["WORLD_SIZE"]), devices=1)
    except PeerLostError as error:
        note(f"lost{os.environ['RANK']}", message=str(error), rank=error.rank)
        raise


def steps(folder: Path) -> list[int]:
    """That the ranks have come to."""
    return [[{"step": 0}, *noted(folder / f"trains{rank}")][-1]["step"] for rank in range(3)]


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "victim"),
    [pytest.param("ring", 0, marks=pytest.mark.slow), pytest.param("gossip", 2, marks=pytest.mark.nightly)],
)
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path, name: str, victim: int) -> None:
    """Three ranks on hosts of their own. A cut for a part of the timeout ends nothing."""
    command = [sys.executable, "-c", f"import test_cut; test_cut.train({name!r})"]
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = 'cd "$1"; shift; exec "$@" > output$RANK 2>&1'
    with lab.Lab(3, "none") as net:
        children = [net.popen(rank, ["sh", "-c", script, "sh", str(tmp_path), *command], here) for rank in range(3)]

        def wait(condition: Callable[[], Any], what: str) -> None:
            until(condition, what, lambda: [child.pid for child in children])

        wait(lambda: min(steps(tmp_path)) > 5, "all train")
        net.cut(victim)
        time.sleep(TIMEOUT / 4)
        far = max(steps(tmp_path))
        net.mend(victim)
        wait(lambda: min(steps(tmp_path)) > far + 5, "all train again")
        net.cut(victim)
        wait(lambda: all(child.poll() is not None for child in children), "all ended")
    assert [child.returncode for child in children] == [1, 1, 1]
    for rank in range(3):
        [record] = noted(tmp_path / f"lost{rank}")
        assert record["rank"] == victim, record
        sign = "it can reach no other host (10.77.0." if rank == victim else "its host cannot be reached at 10.77.0."
        assert sign in record["message"] or "says another rank" in record["message"], record


@needs_namespaces
def test_a_host_is_reached_whether_or_not_anybody_listens_there() -> None:
    assert reach.unreachable({"127.0.0.1", "127.0.0.2"}) == set()
    with lab.Lab(2, "none") as net:

        def look(seconds: float) -> set[str]:
            return reach.unreachable({net.address(0), net.address(1)}, seconds)

        assert net._on_host(0, partial(look, 60.0)) == set()
        net.cut(1)
        assert net._on_host(0, partial(look, 0.5)) == {net.address(1)}


def test_both_ends_of_a_connection_that_broke_are_named(job: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 1 ends all connections of gloo that it has, and goes on; its connections to the store stay."""
    running = job(3, be_a_rank, Plan(str(tmp_path), fault="reset", place="forward", step=3, victims=(1,)))
    assert running.wait() == [1, 1, 1]
    named = [running.named(rank) for rank in range(3)]
    assert len({lost for lost, _ in named}) == 1, named
    for _, message in named:
        ends = re.search(r"lost rank (\d) .* its connection to rank (\d) \(host .*\) (broke|closed)", message)
        assert ends is not None, message
        assert "1" in ends.groups()

"""Other launchers start the ranks: Ray, Spark, submitit, Hydra, torchrun on two hosts.

Each runs its example as a user does, and leaves no process behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ringstrategy

ROOT = Path(__file__).parents[1]
_OF_RANKS = {"RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # left by a fit in a test


def marked(mark: str) -> list[int]:
    """The processes that have it in their environment, which children inherit."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if mark.encode() in environment:
                found.append(int(process.name))
    return found


def run(command: list[str], cwd: Path, limit: float, environment: Mapping[str, str] | None = None) -> str:
    """What it and its processes print. It must end well, in time, and leave no process behind."""
    mark = f"RINGSTRATEGY_TEST={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    inherited = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**inherited, **(environment or {}), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=limit,
        )
    finally:
        left = marked(mark)
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                left.remove(process)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert not left, f"processes {left} were left behind:\n{done.stdout[-5_000:]}"
    return done.stdout


def bytes_sent(printed: str) -> list[int]:
    return [int(sent) for sent in re.findall(r"Stats\(bytes_sent=(\d+)", printed)]


# Ray


@pytest.fixture
def ray_strategy() -> Any:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    return ringstrategy.RayRingStrategy


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ray_starts_all_again_if_a_worker_dies(ray_strategy: Any, tmp_path: Path) -> None:
    printed = run(
        [sys.executable, str(ROOT / "examples/ray_digits.py"), "kill"],
        tmp_path,
        220,
        {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
    )
    assert "PeerLostError: lost rank 1" in printed
    resumed = set(re.findall(r"worker (\d) goes on after epoch ([01])\n", printed))
    assert {worker for worker, _ in resumed} == {"0", "1"}
    assert len({epoch for _, epoch in resumed}) == 1
    assert set(re.findall(r"worker (\d) of 2: ", printed)) == {"0", "1"}
    assert all(sent > 0 for sent in bytes_sent(printed))
    last = re.search(r"\{'right': ([\d.]+), 'epoch': 3, 'step': 92\}", printed)
    assert last is not None, printed[-5_000:]
    assert float(last[1]) > 0.8


def test_with_ray_a_rank_saves_in_its_own_folder(ray_strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray's callback uploads what each worker has in a folder of its own, which may be on another host
    monkeypatch.setattr(ray_strategy, "world_size", 2)
    monkeypatch.setattr(ray_strategy, "broadcast", lambda self, given: ("/of rank 0/epoch=1.ckpt", "token"))
    strategy = ray_strategy()
    for path in ("/of rank 1/epoch=2.ckpt", Path("/of rank 1/epoch=2.ckpt")):
        assert strategy._path_and_token(path) == ("/of rank 1/epoch=1.ckpt", "token")


def test_ray_refuses_what_ray_decides(ray_strategy: Any) -> None:
    for unknown in ({"on_peer_loss": "shrink"}, {"process_group_backend": "gloo"}, {"start_method": "spawn"}):
        with pytest.raises(TypeError, match=rf"does not take {next(iter(unknown))}.*FailureConfig\(max_failures=\)"):
            ray_strategy(**unknown)
    strategy = ray_strategy(ringstrategy.AllReduce(), timeout=timedelta(seconds=7), broadcast_buffers=False)
    assert isinstance(strategy, ringstrategy.RingStrategy)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ringstrategy.__dict__, "RayRingStrategy", raising=False)
    monkeypatch.delitem(sys.modules, "ringstrategy.integrations.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray.train.lightning", None)
    with pytest.raises(ModuleNotFoundError, match=r"RayRingStrategy needs ray.*: in a clone .* install '\.\[ray\]'"):
        ringstrategy.RayRingStrategy  # noqa: B018

"""Processes that need a cold kernel at the same time: one compiles it, the others wait for its file."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch.distributed as dist
from pool import Pool

from ringstrategy.kernels import jit


def _doubled() -> jit.Kernel:
    @jit.kernel("for this test")
    def double(values: Any) -> None:
        for i in range(len(values)):
            values[i] *= 2

    return double


def _meet_cold(folder: str) -> tuple[int, float]:
    """How many this rank compiled, and what its kernel does."""
    dist.init_process_group("gloo")
    numba.config.CACHE_DIR = folder
    double, values = _doubled(), np.ones(3)
    dist.barrier()
    double(values)
    dist.barrier()
    return sum(double._compiled.stats.cache_misses.values()), values.sum()


def test_one_of_several_ranks_compiles(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(4, _meet_cold, str(tmp_path))
    assert sorted(misses for misses, _ in found) == [0, 0, 0, 1]
    assert {total for _, total in found} == {6.0}


def _use(folder: str) -> tuple[int, float]:
    numba.config.CACHE_DIR = folder
    jit._LOCKED_SECONDS = 0.1
    double, values = _doubled(), np.ones(3)
    double(values)
    return sum(double._compiled.stats.cache_misses.values()), values.sum()


def test_a_process_that_keeps_the_lock_keeps_nobody_out(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_lock", lambda file: locks.append(Path(file.name)) or True)
    locks: list[Path] = []
    _doubled()(np.ones(3))
    with locks[0].open("a") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        assert ranks(1, _use, str(tmp_path)) == [(0, 6.0)]


def test_a_disk_that_cannot_lock_is_used_without(tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    with jit._locked(tmp_path / "file" / "kernel.lock"):
        pass

"""Shared by all tests: one thread a process, and the pool of worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pool import Pool


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Call it as `ranks(size, function, *args)`: the function runs on `size` real processes."""
    pool = Pool()
    yield pool
    pool.close()

"""Shared by all tests: one thread a process, the pool of worker processes, and tests that nothing may run beside."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pool
import pytest
import torch
from pool import Pool


def pytest_configure() -> None:
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # started in the background by a shell: children would inherit it, and the tests of Ctrl-C with them
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # so that no time limit counts the waiting
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` has the machine to itself, also among several workers of pytest-xdist."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    how = fcntl.LOCK_SH if item.get_closest_marker("alone") is None else fcntl.LOCK_EX
    with Path(__file__).open() as floor, Path(pool.__file__).open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)  # who wants to be alone keeps others out until all have left
        fcntl.flock(floor, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(floor, fcntl.LOCK_UN)  # a forked process may have the file open still


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Call it as `ranks(size, function, *args)`: the function runs on `size` real processes."""
    pool = Pool()
    yield pool
    pool.close()

"""Shared by all tests: one thread a process, and the pool of worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=100, help="of the differential campaign")
    parser.addoption("--first-case", type=int, default=0, help="its seed")


def pytest_configure(config: pytest.Config) -> None:
    # the same examples on each run, however long each takes; at night others, and what they find becomes a case
    at_random = "nightly" in config.option.markexpr and "not nightly" not in config.option.markexpr
    hypothesis.settings.register_profile("here", derandomize=not at_random, deadline=None, database=None)
    hypothesis.settings.load_profile("here")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # else the first trainer here takes all cores, for all later tests too
    # Torch's store asks the name server for the name of each process that connects, and all ranks wait for the answer:
    # 5 seconds if it gets lost. Nothing here needs a name server, or to be warned each time that there is none.
    os.environ.update(RES_OPTIONS="attempts:0", TORCH_CPP_LOG_LEVEL="ERROR")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # started in the background by a shell: children would inherit it, and the tests of Ctrl-C with them
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Call it as `ranks(size, function, *args)`: the function runs on `size` real processes."""
    pool = Pool()
    yield pool
    pool.close()

"""The end of the process, which may come before what it has opened is closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_exit(end: Callable[[BaseException | None], None]) -> Callable[[], object]:
    """Call `end` when this process ends, with the error that ends it, or None; returns what takes that back."""
    # not by atexit, which forked processes skip
    return Finalize(None, lambda: end(_error()), exitpriority=0).cancel


def _error() -> BaseException | None:
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]  # the second one in a process of multiprocessing
    return error.__context__ if isinstance(error, SystemExit) else error

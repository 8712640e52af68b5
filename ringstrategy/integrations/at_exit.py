"""The end of the process, which may come before what it has opened is closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_exit(end: Callable[[BaseException | None], None]) -> Callable[[], object]:
    """Call `end` when this process ends, with the error that ends it, or None; returns what takes that back."""
    # not by atexit, which forked processes skip
    return Finalize(None, lambda: end(getattr(sys, "last_value", None)), exitpriority=0).cancel

"""What training says: log lines and warnings, in the process that listens."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core import rank_zero


@contextmanager
def listening() -> Iterator[list[str]]:
    """What is logged and warned."""
    heard: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    # of all packages of Lightning, the one that a process imports last says by which logger all of them speak
    handler, loggers = Handler(), {logging.getLogger("lightning.pytorch.utilities.rank_zero"), rank_zero.log}
    levels = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)  # a benchmark that ran in this process may have silenced Lightning
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield heard
            heard += [str(warning.message) for warning in caught]
    finally:
        for logger, level in levels.items():
            logger.removeHandler(handler)
            logger.setLevel(level)

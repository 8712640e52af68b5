"""What a syncer does, as scalars for TensorBoard: the numbers of its page, over merges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringstrategy.server.store import Taken


def scalars(report: dict[str, Any]) -> dict[str, float]:
    """By tag; what is not known yet is left out."""
    learners = report["learners"]
    found: dict[str, float | None] = {
        "syncer/learners": sum(told["there"] for told in learners.values()),
        "syncer/goodput": report["goodput"],
        **{f"syncer/{each.value}": sum(told[each.value] for told in learners.values()) for each in Taken},
        "syncer/MB in": sum(told["bytes in"] for told in learners.values()) / 1e6,
        "syncer/MB out": sum(told["bytes out"] for told in learners.values()) / 1e6,
    }
    for name, told in learners.items():
        found |= {f"staleness/{name}": told["staleness"], f"goodput/{name}": told["goodput"]}
    return {tag: value for tag, value in found.items() if value is not None}


class Scalars:
    """Writes them every so many seconds until `close`, with the number of merges as the step.

    Args:
        folder: for TensorBoard's files; that of an earlier life of the syncer is gone on with.
        report: of now; see `Syncer.report`.
        every: seconds.
    """

    def __init__(self, folder: Path, report: Callable[[], dict[str, Any]], every: float = 10.0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, and has an extra of its own

        self._writer, self._report, self._every = SummaryWriter(folder), report, every
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write, name="ringstrategy-scalars", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        going = True
        while going:
            going = not self._ends.wait(self._every)
            report = self._report()
            for tag, value in scalars(report).items():
                self._writer.add_scalar(tag, value, sum(report["versions"]))
            self._writer.flush()

    def close(self) -> None:
        """Write what is so now, and no more."""
        self._ends.set()
        self._thread.join()
        self._writer.close()

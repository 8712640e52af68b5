"""When to stop waiting for processes: if they hang, which a busy machine is not."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

IDLE = 20.0  # seconds without any use of a CPU: a hang
END = 300.0  # seconds, whatever they do
_TRACE = 0.05  # CPU seconds of a process in that time that are none: a thread that looks around once a second
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Patience:
    """For processes and all that they started. Begins to count when it is made.

    Args:
        pids: the processes, asked for at each look.
        idle: seconds without any use of a CPU after which they hang.
        end: seconds after which waiting ends anyway.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], idle: float = IDLE, end: float = END) -> None:
        self._pids, self._idle, self._end = pids, idle, end
        self._begin = self._moved = time.monotonic()
        self._used, self._count = _used(pids())

    def gone(self) -> str | None:
        """Why nobody should wait any longer, or None. Ask about once a second."""
        now = time.monotonic()
        used, count = _used(self._pids())
        if abs(used - self._used) > _TRACE * count or count != self._count:
            self._used, self._count, self._moved = used, count, now
        if now - self._moved > self._idle:
            return f"used no CPU for {self._idle:.0f} s"
        if now - self._begin > self._end:
            return f"did not end within {self._end:.0f} s"
        return None


def _used(pids: Iterable[int]) -> tuple[float, int]:
    """CPU seconds of these processes and their descendants, and how many they are."""
    children, ticks = defaultdict(list), {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(path.name))
        ticks[int(path.name)] = sum(map(int, fields[11:15]))  # its own, and of children that it has waited for
    tree, left = set(), [pid for pid in pids if pid in ticks]
    while left:
        pid = left.pop()
        if pid not in tree:
            tree.add(pid)
            left += children[pid]
    return sum(ticks[pid] for pid in tree) * _TICK, len(tree)

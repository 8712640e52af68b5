"""Slow hosts: what runs there gets 1/factor of the time. And when the lab has gone, nothing runs on any host.

lab.py starts this program once a lab, on no host and in a session of its own. Each line of its input, `host factor` or
`host factor owner`, sets a host's factor and counts an owner to that host: the inode of a network namespace, or the
number of a session, as the program's one argument says. The input ends when the lab does, even if that is killed, and
then whatever still belongs to a host is killed too, stopped or not. (The death signal that the lab gives its children
reaches no grandchildren, and those that are stopped would stay for ever.)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

RUN = 0.02  # seconds of each turn of running; shorter: smoother, but on busy cores a turn could end before it began
LOOK = 0.25  # seconds between two looks for new process groups; what forks within a known one is in it at once


class Host:
    """Process groups that run and stand still together; how long they really ran decides how long they stand."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.stopped = False
        self.groups: set[int] = set()
        self._since = time.monotonic()
        self._owed = 0.0  # seconds of standing still for the time it has run

    def set_factor(self, factor: float) -> None:
        """From now on; with a factor of 1 the host runs when this returns."""
        if factor == self.factor:
            return
        if self.stopped:
            self.turn()
        self.factor, self._since, self._owed = factor, time.monotonic(), 0.0

    def turn_ends(self) -> float:
        """On the clock of `time.monotonic`."""
        if self.stopped:
            return self._since + self._owed
        if self.factor == 1.0:
            return float("inf")
        return self._since + RUN - self._owed / (self.factor - 1)

    def turn(self) -> None:
        """Stop what runs, or let it run on."""
        self.stopped = not self.stopped
        for group in self.groups:
            _signal(os.killpg, group, signal.SIGSTOP if self.stopped else signal.SIGCONT)
        now = time.monotonic()
        lasted, self._since = now - self._since, now
        if self.stopped:
            self._owed += lasted * (self.factor - 1)
        else:
            pardoned = -RUN * (self.factor - 1)  # no long run in return for a pause of the whole machine
            self._owed = max(self._owed - lasted, pardoned)


class Keeper:
    """Who belongs to which host."""

    def __init__(self, owner_of: Callable[[int], int]) -> None:
        self.hosts: dict[int, Host] = {}
        self._owner_of = owner_of
        self._host_of: dict[int, Host] = {}  # by owner
        # the lab's own process group: whatever of it enters a host, as its `tc` does, must not stop the lab
        self._outside = os.getpgid(os.getppid())

    def read(self, line: str) -> None:
        """Take in one line of the input."""
        number, factor, *owners = line.split()
        host = self.hosts.setdefault(int(number), Host())
        self._host_of.update({int(owner): host for owner in owners})
        host.set_factor(float(factor))

    def look(self) -> None:
        """Find every host's process groups anew."""
        for host in self.hosts.values():
            host.groups.clear()
        for pid, host in self._members():
            with contextlib.suppress(ProcessLookupError):
                host.groups.add(os.getpgid(pid))
        for host in self.hosts.values():
            host.groups.discard(self._outside)

    def end(self) -> None:
        """Kill all, in rounds, until a round finds nobody new: the killed fork no more."""
        killed: set[int] = set()
        while found := {pid for pid, _ in self._members()} - killed:
            for pid in found:
                _signal(os.kill, pid, signal.SIGKILL)
            killed |= found

    def _members(self) -> Iterator[tuple[int, Host]]:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    host = self._host_of.get(self._owner_of(int(name)))
                except OSError:  # it ended, or is somebody else's
                    continue
                if host is not None:
                    yield int(name), host


def network_of(pid: int) -> int:
    """Inode of the network namespace that a process is in."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or became another user's
        send(target, number)


def main() -> None:
    """Take turns until the input ends, then end all."""
    keeper = Keeper({"network": network_of, "session": os.getsid}[sys.argv[1]])
    next_look = 0.0
    while True:
        slow = [host for host in keeper.hosts.values() if host.factor > 1]
        wake = min([next_look, *(host.turn_ends() for host in slow)]) if slow else None
        ready, _, _ = select.select([0], [], [], None if wake is None else max(0.0, wake - time.monotonic()))
        if ready:
            lines = os.read(0, 1 << 16).decode()  # whole lines: each is one short write
            if not lines:
                break
            for line in lines.splitlines():
                keeper.read(line)
        if slow and time.monotonic() >= next_look:
            keeper.look()
            next_look = time.monotonic() + LOOK
        for host in slow:
            if time.monotonic() >= host.turn_ends():
                host.turn()
    keeper.end()


if __name__ == "__main__":
    main()

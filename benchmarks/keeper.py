"""When the lab has gone, nothing runs on any of its hosts.

lab.py starts this program once a lab, on no host and in a session of its own. Each line of its input is an owner: the
inode of a network namespace, or the number of a session, as the program's one argument says. The input ends when the
lab does, even if that is killed, and then whatever still belongs to an owner is killed too. (The death signal that the
lab gives its children reaches no grandchildren.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable


def network_of(pid: int) -> int:
    """Inode of the network namespace that a process is in."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def members(owners: set[int], owner_of: Callable[[int], int]) -> set[int]:
    """The processes that belong to them."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            if name.isdigit() and owner_of(int(name)) in owners:
                found.add(int(name))
    return found


def main() -> None:
    """Kill all in the end, in rounds, until a round finds nobody new: the killed fork no more."""
    owner_of = {"network": network_of, "session": os.getsid}[sys.argv[1]]
    owners = {int(line) for line in sys.stdin}
    killed: set[int] = set()
    while found := members(owners, owner_of) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or became another user's
                os.kill(pid, signal.SIGKILL)
        killed |= found


if __name__ == "__main__":
    main()

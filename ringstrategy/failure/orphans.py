"""A rank ends with the agent of torchrun that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_PARENT = os.getppid()  # when this was imported


def end_with_agent() -> None:
    """If torchrun has started this process: Linux kills it when the agent has died. Nothing happens elsewhere.

    An agent that is killed itself (SIGKILL, out of memory) cannot stop its ranks. They would train on to the end,
    beside those that another agent starts in their place.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1 != _PARENT:  # it has died meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

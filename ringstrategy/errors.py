"""What can go wrong between ranks, named so that a user knows which rank, and what to do."""

from typing import TypeGuard

import torch.distributed as dist


class PlanMismatchError(RuntimeError):
    """The ranks were built from different arguments, or from different models. Raised on every rank."""


class PeerLostError(RuntimeError):
    """A peer died, left, or stayed silent beyond the timeout. Raised on every survivor.

    Attributes:
        rank: the rank that was lost, or -1 when it could not be found out.
        host: the host name of that rank, as it gave it at setup.
    """

    def __init__(self, rank: int, host: str, where: str, cause: str) -> None:
        self.rank, self.host, self.where, self.cause = rank, host, where, cause
        who = f"rank {rank} (host {host})" if rank >= 0 else "a peer that could not be named"
        super().__init__(f"lost {who} {where}: {cause}")

    def __reduce__(self) -> tuple[type, tuple[int, str, str, str]]:  # a spawned child hands it to its parent
        return type(self), (self.rank, self.host, self.where, self.cause)


class LeftBehindError(Exception):  # no RuntimeError: those may be of a rank that is lost, and are tried again
    """This process cannot train on with the others, under `RingStrategy(on_peer_loss="shrink")` or `"wait"`.

    Raised on a process that was silent for longer than the timeout, without which the others went on, and on all ranks
    of a part of a broken network that is no majority. Start the process again as a replacement, or start all again.
    """


def last_words(exception: BaseException) -> str:
    """The reason that other ranks are told."""
    return f"{type(exception).__name__}: {exception}"[:500]


def is_of_a_connection(error: BaseException) -> TypeGuard[RuntimeError]:
    """Whether a connection to another rank failed, and nobody has found out yet which rank is lost."""
    if isinstance(error, PeerLostError | PlanMismatchError) or not isinstance(error, RuntimeError):
        return False
    # gloo throws plain RuntimeErrors that name its source files, or their first line; its devices are this rank's own
    signs = [] if "/device.cc" in str(error) else ["/gloo/", "gloo::", "pair closure"]
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)

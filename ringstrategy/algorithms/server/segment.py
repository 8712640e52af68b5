"""Memory that all ranks of a host share. It has no name, so nothing of it is left when they end, however they end."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from ringstrategy.transport.agree import all_gather_texts
from ringstrategy.transport.base import Peers

EDGE = 64  # bytes: what begins here shares no cache line with what lies before it


class Segment:
    """Zeros, the same memory on all ranks, for as long as a tensor lies in it. All ranks make one, at the same time.

    Rank 0 allocates it as a file in memory without a directory entry (`memfd_create`); the others open it through rank
    0's descriptor in `/proc`. So the size of `/dev/shm` is no limit, and no tracker unlinks it too early or too late.

    Args:
        peers: all on one host.
        nbytes: how many, > 0.
        what: it is for, in messages.

    Raises:
        ValueError: on all ranks, with the cure: there is too little memory, or ranks do not see each other's processes.
    """

    def __init__(self, peers: Peers, nbytes: int, what: str) -> None:
        self._peers, self._nbytes, self._what = peers, nbytes, what
        card, error = "", ""
        try:
            if peers.rank == 0:
                self._keep(_allocate(nbytes))
                card = _card(self._descriptor)
        except OSError as why:
            error = f"{what} needs {nbytes / 1e9:.3g} GB of memory on the host at once, and {why.strerror or why}: use "
            error += "a smaller model or fewer ranks, or a strategy that spreads over several hosts, such as 'ring'"
        card, *_ = self._agree(card, error)
        try:
            if peers.rank != 0:
                self._keep(_open(card))
            self._map = mmap.mmap(self._descriptor, nbytes)
        except OSError as why:
            error = (
                f"rank {peers.rank} cannot open the memory of rank 0 ({why.strerror or why}): run all ranks as one "
                "user and in one container, so that they see each other's processes, or use a strategy such as 'ring'"
            )
        self._agree("", error)

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    def _agree(self, text: str, error: str) -> list[str]:
        """Everyone's text; ValueError on all ranks if there is an error on one."""
        control, said = self._peers.control, list[str]()
        where = f"while ranks share {self._what}"
        control.submit(lambda: said.extend(all_gather_texts(control, f"{error}\0{text}")), where).wait()
        for each in said:
            if not each.startswith("\0"):
                raise ValueError(each.partition("\0")[0])
        return [each[1:] for each in said]

    def tensor(self, begin: int, numel: int, dtype: torch.dtype) -> Tensor:
        """These elements, from a byte on, with a storage that is no longer than they are."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)

    def make_private(self) -> None:
        """From now on `tensor` gives what nobody else sees changes of; memory is copied only where it is written."""
        self._map = mmap.mmap(self._descriptor, self._nbytes, flags=mmap.MAP_PRIVATE)

    def close(self) -> None:
        """Memory stays for as long as tensors lie in it. Idempotent, no collective."""
        self._closing()


def _allocate(nbytes: int) -> int:
    """A descriptor of so many bytes that are really there. OSError if they are not."""
    if not hasattr(os, "memfd_create"):
        raise OSError("memory without a name is there on Linux alone")
    free = _available()
    if nbytes > free:
        raise OSError(f"{free / 1e9:.3g} GB are free")
    descriptor = os.memfd_create("ringstrategy")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # else a page that is not there is a SIGBUS in some later step
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _available() -> float:
    """Bytes that this host can still give; infinity where the kernel does not say."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float("inf")


def _card(descriptor: int) -> str:
    """Where others find it, and what tells it from all else."""
    of = os.fstat(descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor} {of.st_dev} {of.st_ino}"


def _open(card: str) -> int:
    path, *identity = card.split()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    of = os.fstat(descriptor)
    if [str(of.st_dev), str(of.st_ino)] != identity:  # a process of that number in another container
        os.close(descriptor)
        raise OSError("there is another file at its place")
    return descriptor


class Layout:
    """Places in a segment that is not there yet, one behind the other; the same calls give the same on all ranks."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        """Where so many bytes begin."""
        begin = self.nbytes
        self.nbytes += -(-nbytes // EDGE) * EDGE
        return begin

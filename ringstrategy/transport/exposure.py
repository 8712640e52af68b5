"""What others on the network reach of this process: the store's address, and how many connections it endures."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

_log = logging.getLogger("ringstrategy")
_PREFIX = "default_pg"  # torch's, which ranks use that let torch make their client
_DESCRIPTORS = 2**20


def guarded_store(rank: int, size: int, timeout: timedelta) -> dist.Store | None:
    """`store_at_address` for `dist.init_process_group`; None: let torch make it. Takes the same arguments."""
    store = store_at_address(rank, size, timeout)
    return None if store is None else dist.PrefixStore(_PREFIX, store)


def store_at_address(rank: int, size: int, timeout: timedelta) -> dist.Store | None:
    """Rank 0's store, which listens at MASTER_ADDR alone; None on other ranks, and where torch must make it.

    Torch's listens on all interfaces of rank 0's machine. This one is made on rank 0, if MASTER_ADDR is an address of
    this machine or "localhost". Another name may lead to another address on the other machines, and an address that a
    router translates is none of this machine: then torch makes the store, and the log says so.

    It waits for the other ranks.

    Args:
        rank: of this process.
        size: how many ranks there are.
        timeout: how long to wait for the last rank.
    """
    if rank != 0 or not os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:  # torch says which is missing
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    bound = bound_to(address, port)
    if bound is None:
        _log.info(
            "the rendezvous store listens on all interfaces, because MASTER_ADDR=%s is no address of this machine, or "
            "port %d of it is taken: see docs/clusters.md",
            address,
            port,
        )
        return None
    # torch shares the server of a port among the stores of a process, as for the stores that it makes itself
    return dist.TCPStore(address, port, size, True, timeout, multi_tenant=True, master_listen_fd=bound.detach())


def bound_to(address: str, port: int) -> socket.socket | None:
    """A TCP socket that is bound to the address alone; None if it is a name, or not this machine's, or not free.

    Args:
        address: an IPv4 or IPv6 address, or "localhost".
        port: not 0.
    """
    if address != "localhost":
        try:
            ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return None
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
        except OSError:
            bound.close()
            continue
        return bound
    return None


def raise_file_limit() -> None:
    """Let this process open as many files as it may on Linux.

    gloo keeps a descriptor of every connection that anybody opens to its ports, also when it is closed again, and ends
    the process at the limit. The usual limit is 1024, and the kernel allows far more.
    """
    if sys.platform != "linux":
        return
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        _log.info("this process may now open %d files at once, and not %d", allowed, soft)

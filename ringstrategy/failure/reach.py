"""Which hosts can this one reach? Asked when ranks are silent, to tell a cut cable from a process that hangs."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Collection

import torch.distributed as dist

# Whether anybody listens there does not matter: a host that gets a packet for a port without a listener says so. It is
# one of those of which gloo takes its ports, so no firewall within the job may drop it.
_PORT = 50321
_SECONDS = 2.5  # a packet that got lost is sent again after one second
_SILENCE = {errno.EINPROGRESS, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


def host_of(store: dist.Store) -> str:
    """The name or address that leads to the store's machine; empty for a store that is a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def address_of(host: str) -> str:
    """The address that a name or an address leads to from here; empty if there is none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def address_towards(host: str) -> str:
    """This machine's address on the way to a host, which is asked for nothing; empty if there is no way."""
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.connect(place)  # of UDP: it only chooses the way
            return str(sender.getsockname()[0])
    return ""


def unreachable(addresses: Collection[str], seconds: float = _SECONDS) -> set[str]:
    """Those from which nothing comes back in time. A process that hangs, or has died, does not matter.

    Args:
        addresses: of IPv4 or IPv6.
        seconds: to wait at most, for all of them together.
    """
    silent: set[str] = set()
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as answers:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):  # no socket to be had: then nobody is accused
                asking = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
                asking.setblocking(False)
                code = asking.connect_ex((address, _PORT))
                if code == errno.EINPROGRESS:
                    answers.register(asking, selectors.EVENT_WRITE, address)
                if code in _SILENCE:
                    silent.add(address)
        deadline = time.monotonic() + seconds
        while answers.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in answers.select(left):
                answers.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _SILENCE:
                    silent.discard(key.data)
    return silent

"""A learner's exchanges in a thread of their own, over a client that comes back after the syncer was away."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ringstrategy.codecs import Codec
from ringstrategy.requests import Answer, Client, MailboxClient
from ringstrategy.requests.messages import Buffer
from ringstrategy.server.learner import Learner, values_of

IN_FILE = "file:"  # before the path of a file that has an address
MAILBOX = "mailbox:"  # before the URL of a folder or a bucket
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries while the syncer is away

Address = tuple[str, int] | str  # host and port, or the URL of a mailbox
Find = Callable[[], Address]


def connect(address: Address, secret: bytes, name: str, tls: ssl.SSLContext | None) -> Client | MailboxClient:
    """What asks the syncer at this address."""
    if isinstance(address, str):
        return MailboxClient(address, secret, name=name)
    return Client(address, secret, name=name, tls=tls)


class Background:
    """Makes the exchanges of a learner whenever it is woken.

    Args:
        learner: see `Learner`.
        find: returns the syncer's address; see `finder`. Asked at the beginning, and at each try while it is away.
        secret: the syncer's.
        tls: see `Client`.
    """

    def __init__(self, learner: Learner, find: Find, secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        self._learner, self._find, self._secret, self._tls = learner, find, secret, tls
        # a life has a name of its own, by which the syncer tells it from the one before
        self._name = f"{learner.name[:150]}/{uuid.uuid4().hex}"
        self._client: Client | MailboxClient | None = None
        self._lock = threading.Lock()  # over the client, and what both threads know of it
        self._finding = self._ended = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._tried, self._done = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self.away: ConnectionError | None = None  # why the syncer was not reached last
        self._thread = threading.Thread(target=self._exchange, name="ringstrategy-learner", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def check(self) -> None:
        """Raise what has made an exchange fail for good: see `Learner.exchange`."""
        if self._failure is not None:
            raise self._failure

    def wait(self, seconds: float, *, insist: bool) -> None:
        """Wait until an exchange is done, or could not be.

        Args:
            seconds: no longer.
            insist: not even while the syncer is away.
        """
        self.wake()
        (self._done if insist else self._tried).wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Make a last exchange, for so many seconds at most, and part with the syncer. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)
        with self._lock:
            self._ended, finding, client = True, self._finding, self._client
        if client is not None:
            client.close()
        if not finding:  # else nobody knows when that returns, and nothing comes after it
            self._thread.join()

    def _exchange(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()
            try:
                self._learner.exchange(self._ask)
                self.away, pause = None, _FIRST_PAUSE
            except ConnectionError as error:
                self.away = error
                self._tried.set()
                self._closing.wait(pause * random.uniform(0.5, 1.0))  # not all learners at once
                pause = min(2 * pause, _LONGEST_PAUSE)
                self._wake.set()
                if not last:
                    continue
            except Exception as error:
                self._failure = error
            self._tried.set()
            self._done.set()
            if last or self._failure is not None:
                return

    def _ask(self, operation: str, meta: Mapping[str, Any], buffers: Sequence[Buffer]) -> Answer:
        return self._reach().ask(operation, meta, buffers, bulk=operation in ("push", "pull", "join")).result()

    def _reach(self) -> Client | MailboxClient:
        """The client of the address where the syncer is now."""
        client = self._client
        if client is not None and self.away is None:
            return client
        with self._lock:
            self._finding = not self._ended
        address = self._find() if self._finding else None
        if client is not None and address not in (None, client.address):
            client.close()  # first: the syncer knows both by the same name
        with self._lock:
            self._finding = False
            if self._ended or address is None:
                raise ConnectionError("this learner has parted with the syncer")
            if self._client is None or self._client.address != address:
                self._client = connect(address, self._secret, self._name, self._tls)
            return self._client


def newest(
    fragments: Sequence[Mapping[str, Tensor]],
    plan: str,
    broadcast: Codec,
    address: Address,
    secret: bytes,
    tls: ssl.SSLContext | None = None,
) -> dict[str, Tensor]:
    """Theta, by name, on the CPU. ConnectionError if the syncer is away, RefusedError if it has another plan.

    Args:
        fragments: for the names, shapes and dtypes.
        plan: the digest of the plan.
        broadcast: the plan's codec of Theta.
        address: of the syncer.
        secret: the syncer's.
        tls: see `Client`.
    """
    found: dict[str, Tensor] = {}
    with contextlib.closing(connect(address, secret, f"reader/{uuid.uuid4().hex}", tls)) as client:
        for number, fragment in enumerate(fragments):
            answer = client.ask("pull", {"plan": plan, "fragment": number, "have": -1}).result()
            said, [came] = answer.meta, answer.buffers
            parts = values_of(came, broadcast, sum(each.numel() for each in fragment.values()), said["version"], number)
            runs = parts.split([each.numel() for each in fragment.values()])
            for (name, each), run in zip(fragment.items(), runs, strict=True):
                found[name] = run.view(each.shape).to(each.dtype)
    return found


def finder(syncer: str | Path | Callable[[], str]) -> Find:
    """What returns the address that a syncer has now. ConnectionError if nobody knows it, ValueError if it is none.

    Args:
        syncer: "host:port"; or "mailbox:" and a URL; or a path, or "file:" and a path, of a file that has it; or a
            function that returns it. Whatever error this function raises says that the syncer is away.
    """
    if isinstance(syncer, str) and syncer.startswith(MAILBOX):
        url = syncer.removeprefix(MAILBOX)
        return lambda: url
    if isinstance(syncer, str) and not syncer.startswith(IN_FILE):
        address = address_of(syncer)
        return lambda: address
    where = Path(syncer.removeprefix(IN_FILE)) if isinstance(syncer, str) else syncer

    def find() -> tuple[str, int]:
        try:
            text = where.read_text().strip() if isinstance(where, Path) else where()
        except Exception as error:
            raise ConnectionError(f"{where} does not tell where the syncer is: {error!r}") from error
        if not text:
            raise ConnectionError(f"{where} is empty, and should tell where the syncer is")
        return address_of(text)

    return find


def address_of(text: str) -> tuple[str, int]:
    """From "host:port" or "[::1]:port". ValueError if it is none."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"an address is host:port, or [host]:port for IPv6, got {text!r}")
    return host.strip("[]"), int(port)


def text_of(address: tuple[str, int]) -> str:
    """By which others find a server that listens there: on all addresses, it has the name of this host."""
    host, port = address
    host = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def secret_of(file: str | Path) -> bytes:
    """The content of a file, without white space around it. ValueError if it cannot be read."""
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(
            f"the secret file {file} cannot be read ({error.strerror}): make one with `openssl rand -hex 32`, and "
            "copy it to all hosts"
        ) from error

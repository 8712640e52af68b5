"""The servers of a job, as one of its ranks asks them. One may run in this process."""

from __future__ import annotations

import ipaddress
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunningError
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from ringstrategy.algorithms.server.service import LEFT, Service, of_rank
from ringstrategy.errors import PlanMismatchError
from ringstrategy.failure.board import GRACE_SECONDS
from ringstrategy.failure.reach import address_towards
from ringstrategy.requests import Answer, Client, RefusedError, Server
from ringstrategy.requests.messages import Buffer
from ringstrategy.requests.within import Within
from ringstrategy.transport.agree import all_gather_texts
from ringstrategy.transport.base import Peers

_SILENT = 300.0  # seconds, in which a process may stand still; a connection that closes is noticed at once
_LOOK_SECONDS = 0.5  # between two looks for what other ranks have to say
_CONNECTIONS = 2  # for bulk data, to each server
_SETTING_UP = "while setting up"
_T = TypeVar("_T")


class Servers:
    """The first ranks serve. All ranks make one, at the same time.

    Args:
        peers: all ranks.
        count: how many serve.
        service: makes this rank's, given its name and the names of all.
    """

    def __init__(
        self,
        peers: Peers,
        count: int,
        service: Callable[[str, Sequence[str]], Service],
    ) -> None:
        self.count = count
        self._peers, self._me = peers, of_rank(peers.rank)
        self._generation = 0
        self._counted = 0, 0
        self._service: Service | None = None
        self._server: Server | None = None
        self._clients: list[Client | Within] = []
        with ExitStack() as ends:  # if it fails half-way
            ends.callback(self._end)
            card = self._serve(service) if peers.rank < count else ""
            cards: list[str] = []
            peers.control.submit(lambda: cards.extend(all_gather_texts(peers.control, card)), _SETTING_UP).wait()
            for rank in range(count):
                self._clients.append(self._client(rank, cards[rank]))
            ends.pop_all()

    def _serve(self, service: Callable[[str, Sequence[str]], Service]) -> str:
        """Returns where, and the secret."""
        detector = self._peers.detector
        host = address_towards("" if detector is None else detector.board.store_host) or "127.0.0.1"
        self._service = service(self._me, [of_rank(rank) for rank in range(self._peers.size)])
        secret = secrets.token_bytes(32)
        self._server = Server((host, 0), secret, self._service.handle, gone=self._service.gone, silent=_SILENT)
        return f"{host} {self._server.address[1]} {secret.hex()}"

    def _client(self, rank: int, card: str) -> Client | Within:
        if rank == self._peers.rank:
            assert self._service is not None
            return Within(self._service.handle, name=self._me)
        host, port, secret = card.split()
        if self._peers.hosts[rank] != self._peers.hosts[self._peers.rank] and ipaddress.ip_address(host).is_loopback:
            raise ValueError(
                f"rank {rank} cannot be reached at {host} from other hosts: set MASTER_ADDR to an address of the first "
                "host that the others reach, and not to a name that leads to 127.x.x.x there"
            )
        return Client((host, int(port)), bytes.fromhex(secret), name=self._me, connections=_CONNECTIONS, silent=_SILENT)

    def begin(self, serve: Callable[[Service, int, int], None]) -> None:
        """All ranks begin anew. On those that serve, `serve(service, server, generation)` says what.

        A request waits until its server is as far.
        """
        self._generation += 1
        if self._service is not None:
            serve(self._service, self._peers.rank, self._generation)

    def ask(
        self,
        server: int,
        operation: str,
        meta: Mapping[str, Any],
        buffers: Sequence[Buffer] = (),
        **how: Any,
    ) -> Future[Answer]:
        """See `Client.ask`."""
        meta = {"generation": self._generation, **meta}
        return self._clients[server].ask(operation, meta, buffers, **how)

    def send_each(
        self, operation: str, meta: Mapping[str, Any], parts: Iterable[tuple[int, Buffer]]
    ) -> list[tuple[int, Future[Answer]]]:
        """Ask servers, each with its part. If all ranks serve, a part waits until the one before was sent.

        So a link carries one message at a time, and parts that are encoded meanwhile cost nothing.
        """
        asked, sent = list[tuple[int, Future[Answer]]](), threading.Event()
        for server, part in parts:
            if asked and self._in_turn:
                sent.wait()
            sent = threading.Event()
            asked.append((server, self.ask(server, operation, meta, [part], sent=sent.set)))
        return asked

    def wait(self, asked: Sequence[tuple[int, Future[Answer]]], where: str) -> list[Answer]:
        """The answers of servers, once all are there.

        PeerLostError if a rank is lost meanwhile, PlanMismatchError if a server refuses what was asked.

        Args:
            asked: of which server what.
            where: this rank is, for messages.
        """
        begin = time.perf_counter()
        answers = [self._until_done(future, where, server) for server, future in asked]
        self._peers.stats.wait(time.perf_counter() - begin)
        self._count()
        return answers

    def wait_until_sent(
        self, sending: Future[list[tuple[int, Future[Answer]]]], where: str
    ) -> list[tuple[int, Future[Answer]]]:
        """What was asked of whom, in another thread. PeerLostError if a rank is lost meanwhile."""
        begin = time.perf_counter()
        asked = self._until_done(sending, where)
        self._peers.stats.wait(time.perf_counter() - begin)
        return asked

    def _until_done(self, future: Future[_T], where: str, server: int = 0) -> _T:
        detector = self._peers.detector
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except StillRunningError:
                if future.done():
                    raise
                lost = None if detector is None else detector.check(where)
                if lost is not None:
                    raise lost from None
            except RefusedError as error:
                if detector is None or not str(error).startswith(LEFT):
                    raise PlanMismatchError(str(error)) from error
                raise detector.explain(error, int(str(error).removeprefix(LEFT)), where) from error
            except ConnectionError as error:
                if detector is None:
                    raise
                raise detector.explain(error, server, where) from error

    @property
    def _in_turn(self) -> bool:
        """Whether links carry alike. Else a server's may carry several ranks' at once, or a rank's several servers'."""
        return self.count == self._peers.size

    def _count(self) -> None:
        """Add to the stats what has travelled since the last call."""
        ends = [*self._clients, *([] if self._service is None else [self._service])]
        now = sum(end.bytes_sent for end in ends), sum(end.bytes_received for end in ends)
        self._peers.stats.count(now[0] - self._counted[0], now[1] - self._counted[1])
        self._counted = now

    def close(self) -> None:
        """Leave. A rank that serves waits a little for the others to leave too. No collective."""
        if self._peers.detector is not None:
            self._peers.detector.leave()  # servers tell the others, who look for the reason
        leaving = [client.ask("leave", {"generation": 0}, bulk=False) for client in self._clients]
        for future in leaving:
            with suppress(Exception):  # who has gone does not answer
                future.result(GRACE_SECONDS)
        if self._service is not None:
            self._service.wait_until_alone(GRACE_SECONDS)
        self._count()
        self._end()

    def _end(self) -> None:
        for client in self._clients:
            client.close()
        if self._service is not None and self._server is not None:
            self._service.close(f"the server of rank {self._peers.rank} is closed")
            self._server.close()

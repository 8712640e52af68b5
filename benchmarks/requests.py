"""Bulk data in requests and answers, beside one raw TCP stream and gloo over the same link, with the CPU of both ends.

python -m benchmarks requests                       # two hosts at 1 Gbit/s
python -m benchmarks requests --mb 100 --rate none  # what the CPUs bound
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Case
from ringstrategy.requests import Answer, Client, Request, Server
from ringstrategy.requests.messages import view_of

_SECRET = b"only of benchmarks, no secret"
_AT_ONCE = 4  # requests under way


class _Host:
    """Rank 0 serves, rank 1 asks: so many buffers of one size, one way or both ways."""

    def __init__(self, nbytes: int, times: int) -> None:
        self.rank, self.times = dist.get_rank(), times
        self.buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(_AT_ONCE)]
        self.cpu: dict[str, float] = {}
        self._places = {threading.get_ident(): self.buffers[0]}  # by thread
        ports = torch.zeros(2, dtype=torch.int64)
        if self.rank == 0:
            self.server, stream = Server(("", 0), _SECRET, self._handle), socket.create_server(("", 0))
            ports = torch.tensor([self.server.address[1], stream.getsockname()[1]])
        dist.broadcast(ports, 0)
        host, (port, raw) = os.environ["MASTER_ADDR"], ports.tolist()
        if self.rank == 0:
            self.raw, _ = stream.accept()
            stream.close()
        else:
            self.client = Client((host, port), _SECRET, name="benchmark", connections=2 * _AT_ONCE)
            self.raw = socket.create_connection((host, raw))
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.raw.close()
        dist.barrier()
        self.server.close() if self.rank == 0 else self.client.close()

    def _handle(self, request: Request) -> Answer:
        if request.operation == "pull":
            return Answer({}, [self.buffers[request.meta["place"]]])
        if request.operation == "push":
            request.body.read_into(self._places.setdefault(threading.get_ident(), torch.empty_like(self.buffers[0])))
        return Answer({})

    def raw_stream(self) -> None:
        """Bytes one way, then one byte back."""
        view = view_of(self.buffers[0])
        for _ in range(self.times):
            if self.rank == 1:
                self.raw.sendall(view)
            else:
                received = 0
                while received < view.nbytes:
                    received += self.raw.recv_into(view[received:])
        if self.rank == 1:
            self.raw.recv(1)
        else:
            self.raw.sendall(b".")

    def gloo(self) -> None:
        """Torch's own send and receive."""
        for _ in range(self.times):
            if self.rank == 1:
                dist.send(self.buffers[0], 0)
            else:
                dist.recv(self.buffers[0], 1)
        dist.barrier()

    def ask(self, *operations: str) -> None:
        """All of them, so many times, on the client; the server only answers."""
        if self.rank == 1:
            places = range(self.times)
            asked = [self._asked(operation, place % _AT_ONCE) for place in places for operation in operations]
            for future in asked:
                future.result()
        dist.barrier()

    def _asked(self, operation: str, place: int) -> Any:
        buffer = self.buffers[place]
        if operation == "pull":
            return self.client.ask("pull", {"place": place}, into=buffer)
        return self.client.ask("push", buffers=[buffer])

    def timed(self, name: str, run: Callable[[], None]) -> Case:
        def counted() -> None:
            begin = time.process_time()
            run()
            self.cpu[name] = time.process_time() - begin

        result: list[Tensor] = []
        return Case(name, counted, lambda: result)


def _measure(options: argparse.Namespace) -> None:
    for size in options.mb:
        nbytes = round(size * 2**20)
        host = _Host(nbytes, max(_AT_ONCE, round(options.total * 2**20 / nbytes)))
        moved = host.times * nbytes
        cases = [
            host.timed("raw TCP", host.raw_stream),
            host.timed("gloo", host.gloo),
            host.timed("push", partial(host.ask, "push")),
            host.timed("pull", partial(host.ask, "pull")),
            host.timed("both ways", partial(host.ask, "push", "pull")),
        ]
        for case in cases:
            case.limit_seconds = harness.wire_seconds(moved)
        harness.interleave(cases, options.rounds, options.warmup)
        cpu = torch.tensor([host.cpu[case.name] for case in cases], dtype=torch.float64)
        dist.all_reduce(cpu)
        of_case = dict(zip(host.cpu, (cpu / moved * 1e9).tolist(), strict=True))
        host.close()
        if dist.get_rank() == 0:
            spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in of_case.items())
            notes = [f"CPU s a GB, both ends: {spent}"]
            harness.report("requests", f"{host.times} x {size:g} MiB", cases, options, notes, partial(_spent, of_case))


def _spent(of_case: dict[str, float], case: Case) -> dict[str, Any]:
    return {"cpu_seconds": {"both ends": of_case[case.name]}}


def main(given: Sequence[str]) -> None:
    """Measure on two hosts."""
    parser = harness.over_hosts("requests", __doc__, cases=False)
    parser.set_defaults(hosts=[2])
    parser.add_argument("--mb", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 16.0, 100.0])
    parser.add_argument("--total", type=float, default=400.0, help="MiB that a case moves one way")
    harness.run(parser, given, _measure)

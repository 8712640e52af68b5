"""One pool of worker processes for all multi-process tests: a task is a function run on N ranks, a world of its own.

Processes are forked from a server that has imported torch, lightning, Numba and ringstrategy once, and are reused: a
task costs a rendezvous, not an import. A task that hangs (see `benchmarks.ranks.Patience`) costs the pool its processes
and the test its pass.

Several pools may run at once, each in a pytest of its own: a world's port is held by its pool from the choice to the
end, so no two worlds meet on one port. (They did when a port was looked for and let go again: the ranks of the world
that came second joined the store of the first, and both waited in gloo's connect.)
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.ranks import Patience, reserve_port

_GRACE = 60.0  # seconds, for other ranks after one has failed, which may wait for it: the test is red already
_IMPORTED = ["ringstrategy.integrations.lightning.for_lightning", "ringstrategy.names", "pytest"]
_IMPORTED += [f"ringstrategy.kernels.{name}" for name in ("compiled", "cpu", "cpu_elementwise", "cpu_sparse")]  # Numba
multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class Pool:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on ranks 0..size-1, with the environment set as a launcher would; returns all results."""
        outcomes = self._ask(size, function, args, grace=_GRACE)
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(outcomes) if error is not None]
        if errors:
            raise RankFailed("\n".join(errors))
        return [result for result, _ in outcomes]

    def outcomes(self, size: int, function: Callable[..., Any], *args: Any) -> list[tuple[Any, str | None]]:
        """As `__call__`, but a rank that raised gives (None, its traceback)."""
        return self._ask(size, function, args, grace=None)

    def _ask(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], grace: float | None
    ) -> list[tuple[Any, str | None]]:
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        try:
            with reserve_port() as holder:
                task = (function.__module__, function.__qualname__, args)
                return self._run(size, holder.getsockname()[1], task, grace)
        except BaseException:  # such as a time-out of pytest: the next task must not get the answers to this one
            self.close()
            raise

    def _run(
        self, size: int, port: int, task: tuple[str, str, tuple[Any, ...]], grace: float | None
    ) -> list[tuple[Any, str | None]]:
        for rank in range(size):
            self._workers[rank][1].send((rank, size, port, list(sys.path), os.getcwd(), task))
        waiting = {self._workers[rank][1]: rank for rank in range(size)}
        outcomes: dict[int, tuple[Any, str | None]] = {}
        patience = Patience(lambda: [process.pid for process, _ in self._workers[:size]])
        failed = math.inf  # when the first of them did
        while waiting:
            ready = wait(list(waiting), timeout=1.0)
            why = f"did not end {grace} s after another failed" if time.monotonic() - failed > (grace or 0) else ""
            if not ready and (why := why or patience.gone()):
                stuck = sorted(waiting.values())
                raise TimeoutError(f"ranks {stuck} of {task[1]} {why}; others: {outcomes}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    outcomes[rank] = (None, "the process died")
                if grace is not None and outcomes[rank][1] is not None:
                    failed = min(failed, time.monotonic())
        alive = all(process.is_alive() for process, _ in self._workers)
        if not alive or any(error is not None for _, error in outcomes.values()):
            # torch counts a process's groups; who failed to join one has counted further than the others for good
            self.close()
        return [outcomes[rank] for rank in range(size)]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, size, port, path, folder, (module, name, args) = connection.recv()
        except EOFError:
            return
        before, arguments = dict(os.environ), list(sys.argv)
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        sys.path[:] = path
        os.chdir(folder)
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            NODE_RANK="0",
            OMP_NUM_THREADS="1",
        )
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            outcome = (function(*args), None)
        except BaseException:
            outcome = (None, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()  # of what a launcher sets, and of what the task has set: the next one begins without
            os.environ.update(before)
            sys.argv[:] = arguments
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)
        connection.send(outcome)

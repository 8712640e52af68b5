"""What a rank does in an exchange, and when, as named spans: in torch's profiler, and in a file for Perfetto.

With no trace on, a span is one object that does nothing, and no code here allocates.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import torch.distributed as dist
from torch.autograd import profiler

from ringstrategy.transport.messages import Message

CLOCK = "ringstrategy clock"  # name of the event that says on which host times were taken
_VARIABLE = "RINGSTRATEGY_TIMELINE"
_OFF = nullcontext()
_MANY = 4096  # events in memory, after which they are written
_timeline: _Timeline | None = None
_task = threading.local()  # `label` and `where` of the task that the thread works on


def span(what: str, chunk: int = -1, hop: int = -1, bucket: int = -1) -> AbstractContextManager[None]:
    """Around some work: a span "bucket 3: encode chunk 1 hop 2".

    Args:
        what: is done.
        chunk: of the values, if it is one.
        hop: of the message that is made, sent, waited for or read: how often its chunk was passed on before.
        bucket: whose; without it, the bucket of the task that the thread works on.
    """
    if _timeline is None and not profiler._is_profiler_enabled:
        return _OFF
    return _Span(what, chunk, hop, bucket)


def task(where: str) -> AbstractContextManager[None]:
    """Around a task of a communication thread: a span "at step 5, in bucket 3 of 4". Spans within it are bucket 3's."""
    if _timeline is None and not profiler._is_profiler_enabled:
        return _OFF
    return _Task(where)


class Between(NamedTuple):
    """Whose messages.

    Attributes:
        group: another text for each set of peers, the same on all of its ranks.
        ranks: of the peers, as all ranks are counted.
    """

    group: str
    ranks: Sequence[int]


def begun(message: Message, rank: int, between: Between) -> None:
    """This rank has started to send a message, or to receive it."""
    if _timeline is not None:
        _timeline.message(message, rank, "b", between)


def ended(message: Message, rank: int, between: Between) -> None:
    """It has left, or arrived: noticed by the thread that waits for it, which may have done something else before."""
    if _timeline is not None:
        _timeline.message(message, rank, "e", between)


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Within, record what this rank exchanges, whichever loop trains, in Chrome's trace format, for ui.perfetto.dev.

    Each rank writes a file of its own: `timeline.rank0.json` for the path `timeline.json`. `merge_timelines` makes one
    of all. If you cannot change the code, or a strategy such as `ring_spawn` starts the processes, set the environment
    variable RINGSTRATEGY_TIMELINE to the path: each rank then records from its first exchange to its end.

    Args:
        path: of the timeline; its folder must exist.

    Raises:
        FileNotFoundError: it does not.
        RuntimeError: a timeline is being recorded already.
    """
    global _timeline
    if _timeline is not None:
        raise RuntimeError(
            f"{_timeline.path} is being recorded already: end that timeline before, or unset {_VARIABLE}"
        )
    _timeline = recorded = _Timeline(Path(path))
    try:
        yield
    finally:
        _timeline = None
        recorded.close()


def begin_if_asked() -> None:
    """Record until this process ends, if the environment variable says where to."""
    global _timeline
    path = os.environ.get(_VARIABLE)
    if path and _timeline is None:
        _timeline = _Timeline(Path(path))
        Finalize(None, _timeline.close, exitpriority=0)  # not atexit, which forked processes skip


def this_rank() -> int:
    """As torch says, or before that the launcher."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


class _Timeline:
    """Events of this rank, on their way to its file."""

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} for the timeline {path}: make it before")
        self.path = path
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        self._rank = -1  # not known yet
        self._threads: set[int] = set()
        self._closed = False
        self._begin = time.time_ns() - time.perf_counter_ns()  # of the clock of spans, which never jumps

    def add(self, name: str, phase: str, at: int, **more: Any) -> None:
        """An event of the calling thread.

        Args:
            name: of the event.
            phase: "X", "b" or "e": see Chrome's trace format.
            at: in nanoseconds, as `time.perf_counter_ns` counts.
            more: other fields.
        """
        thread = threading.get_native_id()
        with self._lock:
            if self._closed:
                return
            if self._rank < 0:
                self._rank = this_rank()
                host = socket.gethostname()
                self._say("process_name", 0, name=f"rank {self._rank} on {host}")
                self._say("process_sort_index", 0, sort_index=self._rank)
                self._say(CLOCK, 0, host=host)
            if thread not in self._threads:
                self._threads.add(thread)
                self._say("thread_name", thread, name=threading.current_thread().name)
            microseconds = (at + self._begin) / 1000
            self._events.append(
                {"name": name, "ph": phase, "ts": microseconds, "pid": self._rank, "tid": thread, **more}
            )
            if len(self._events) >= _MANY:
                self._write()

    def _say(self, what: str, thread: int, **arguments: Any) -> None:
        self._events.append({"name": what, "ph": "M", "pid": self._rank, "tid": thread, "args": arguments})

    def message(self, message: Message, rank: int, phase: str, between: Between) -> None:
        """One that leaves or arrives: a row of its own, since many are under way at once."""
        sent = rank == message.sender
        kind = "control" if message.control else "values"
        sender, receiver = between.ranks[message.sender], between.ranks[message.receiver]
        name = f"{_label(message.where)}: {f'send to rank {receiver}' if sent else f'receive from rank {sender}'}"
        self.add(
            name,
            phase,
            time.perf_counter_ns(),
            cat="send" if sent else "receive",
            id=f"{sender}>{receiver} {kind} {message.number} {between.group}",
            args={"bytes": message.nbytes, "kind": kind, "where": message.where},
        )

    def _write(self) -> None:
        if self._file is None:
            path = self.path.with_name(f"{self.path.stem}.rank{max(self._rank, 0)}{self.path.suffix}")
            self._file = path.open("w")
            self._file.write("[\n")
        else:
            self._file.write(",\n")
        self._file.write(",\n".join(map(json.dumps, self._events)))
        self._events = []

    def close(self) -> None:
        """Write the rest."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._rank < 0:
                self._rank = this_rank()
            if self._events or self._file is None:
                self._write()
            assert self._file is not None
            self._file.write("\n]\n")
            self._file.close()


class _Span:
    def __init__(self, what: str, chunk: int, hop: int, bucket: int) -> None:
        label = f"bucket {bucket}" if bucket >= 0 else getattr(_task, "label", "")
        name = f"{label}: {what}" if label else what
        self._arguments: dict[str, str | int] = {"what": what}
        for of, number in (("chunk", chunk), ("hop", hop)):
            if number >= 0:
                name += f" {of} {number}"
                self._arguments[of] = number
        self._name = name
        self._profiled = profiler.record_function(name) if profiler._is_profiler_enabled else _OFF
        self._begin = 0

    def __enter__(self) -> None:
        self._profiled.__enter__()
        self._begin = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.perf_counter_ns()
        self._profiled.__exit__(kind, error, trace)
        recorded = _timeline
        if recorded is not None:
            arguments = {**self._arguments, "where": getattr(_task, "where", "")}
            recorded.add(self._name, "X", self._begin, dur=(end - self._begin) / 1000, args=arguments)


class _Task(_Span):
    def __init__(self, where: str) -> None:
        super().__init__(where, -1, -1, -1)
        self._where = where

    def __enter__(self) -> None:
        _task.where, _task.label = self._where, _label(self._where)
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        _task.where = _task.label = ""


def _label(where: str) -> str:
    """ "bucket 3" of "at step 5, in bucket 3 of 4", "all-reduce 7" of "in all-reduce 7 of process group 2"."""
    if where.startswith("in operation "):  # whose name may be anything
        return where.removeprefix("in ")
    return where.rpartition(", in ")[2].partition(" of ")[0].removeprefix("in ")


def _forget() -> None:
    global _timeline
    _timeline = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # the file is the parent's

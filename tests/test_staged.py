"""CUDA tensors over gloo, with stand-ins for torch's streams and events that do everything as late as they may."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

from ringstrategy.transport import connect
from ringstrategy.transport.staged import StagedPeers

DEVICE = torch.device("cuda:3")


class Stream:
    """Its work waits in a queue until somebody waits for an event behind it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    @property
    def pending(self) -> int:
        return len(self.queue) - self.done


class Event:
    """A place in the queue of a stream."""

    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def query(self) -> bool:
        """The device goes on while somebody asks."""
        assert self.stream is not None
        before = self.stream.done >= self.place
        self.stream.run(min(self.stream.done + 1, self.place))
        return before

    def synchronize(self) -> None:
        assert self.stream is not None, "an event was waited for that nobody has recorded"
        self.stream.run(self.place)


class OnDevice(Tensor):
    """Host memory that says it is on a GPU: all operations wait in the queue of the current stream."""

    device = DEVICE  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [arg.as_subclass(Tensor) if isinstance(arg, OnDevice) else arg for arg in args]
        if func.__name__ in ("add_", "copy_", "fill_", "mul_"):
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "non_blocking"}
            Cuda.now.current_stream().add(lambda: func(*plain, **kwargs))
            return args[0]
        result = func(*plain, **(kwargs or {}))
        return result.as_subclass(OnDevice) if isinstance(result, Tensor) else result


class Cuda:
    """What `torch.cuda` knows, by thread."""

    now: Cuda

    def __init__(self) -> None:
        self.default = Stream(DEVICE)
        self.devices: dict[str, torch.device] = {}
        self._local = threading.local()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        yield
        del self._local.stream

    def set_device(self, device: torch.device) -> None:
        self.devices[threading.current_thread().name] = device


@contextmanager
def no_gpu() -> Iterator[Cuda]:
    """A GPU that is none."""
    Cuda.now = cuda = Cuda()
    empty = torch.empty
    names = {name: getattr(cuda, name) for name in ("current_stream", "stream", "set_device")}
    with (
        mock.patch.multiple(torch.cuda, Stream=Stream, Event=Event, **names),
        mock.patch.object(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how)),
    ):
        yield cuda


def on_device(numel: int) -> Tensor:
    return torch.zeros(numel, dtype=torch.uint8).as_subclass(OnDevice)


@on_ranks(2)
def test_copies_waits_and_reuse_are_in_order() -> None:
    """Messages whose memory is written and read as late as it may be, by way of few buffers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, other, rounds = dist.get_rank(), 1 - dist.get_rank(), 40
    with no_gpu() as cuda:
        peers = connect(DEVICE, timedelta(seconds=60))
        assert isinstance(peers, StagedPeers)
        leaving, results = on_device(64), [on_device(64) for _ in range(rounds)]
        seen = []

        def task() -> None:
            # all one way first, so that no copy to the host makes the thread wait for one to the device before it
            for sender in range(2):
                for place, result in enumerate(results):
                    if rank == sender:
                        leaving.fill_(100 * rank + place)  # "encode"
                        peers.post({other: leaving}, {}).wait()
                    else:
                        arriving = on_device(64)
                        peers.post({}, {other: arriving}).wait()
                        result.copy_(arriving)  # "decode"
            seen.append(cuda.current_stream().pending)

        leaving.fill_(77)  # by the training thread: what is queued there comes first
        ticket = peers.submit(task, "test")
        peers.finish([ticket])
        assert cuda.default.pending, "the host waited for what the device had to do"
        cuda.default.run(len(cuda.default.queue))
        for place, result in enumerate(results):
            assert (result.as_subclass(Tensor) == 100 * other + place).all(), place
        assert seen[0] > 0 or rank == 1, "the thread waited for more than its copies"
        assert sum(map(len, peers._pool._free.values())) == 1, "a buffer is used again"
        assert cuda.devices["ringstrategy-communication"] == DEVICE, "a thread begins on device 0"
        total = on_device(8)
        total.fill_(rank + 1)
        total.mul_(2)
        peers.finish([peers.submit(lambda: peers.all_reduce_(total), "test")])
        cuda.default.run(len(cuda.default.queue))
        assert total.as_subclass(Tensor).tolist() == [6] * 8
        last, given_back = on_device(64), list[int]()
        watched = weakref.ref(last, lambda _: given_back.append(peers._stream.pending))  # type: ignore[attr-defined]
        peers.submit(partial(last.add_, 1), "test")
        del last
        peers.close()
        assert watched() is None
        assert given_back == [0], "the device had not used it yet"

"""What one bucket of 25 MB costs a GPU and its host, measured on one GPU without a wire.

python -m benchmarks bucket

Pack, exchange as one of 2 or 8 ranks, unpack, the optimizer's step. NCCL's calls are replaced by nothing, so what is
left is our kernels, torch's, and Python.

- host: until all is queued, while the stream is busy with something else for 50 ms.
- on the device: the operations' own times, added up; launches: how many they are.
- as a graph: the same as a CUDA graph, so without the gaps that a slow host leaves.
- waits: where torch says that the host waits for the device. One is an error.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from benchmarks import harness
from benchmarks.rows import Row
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.buckets.base import Bucket
from ringstrategy.codecs import BlockInt, Gaussian, Rotated
from ringstrategy.codecs.base import derive_seed
from ringstrategy.collectives import Direct, Ring
from ringstrategy.names import STRATEGIES
from ringstrategy.transport import nccl
from ringstrategy.transport.base import Done, Handle, Peers, Waitable
from ringstrategy.transport.stats import Stats
from ringstrategy.transport.worker import Task

SHAPES = [(1280, 1024)] * 5  # 25 MB of float32
CASES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    **{
        name: (make, torch.float32)
        for name, make in STRATEGIES.items()
        if name.startswith("ring") and name != "ring_auto"  # which is one of the others
    },
    "ring_int8, bfloat16 gradients": (STRATEGIES["ring_int8"], torch.bfloat16),
    "BlockInt(8), Ring, feedback": (lambda: AllReduce(BlockInt(8), Ring(), error_feedback=True), torch.float32),
    "BlockInt(8), Direct": (lambda: AllReduce(BlockInt(8), Direct()), torch.float32),
    "BlockInt(8), Direct, feedback": (lambda: AllReduce(BlockInt(8), Direct(), error_feedback=True), torch.float32),
    "Rotated(Gaussian(4)), Ring": (lambda: AllReduce(Rotated(Gaussian(4)), Ring()), torch.float32),
}
_SIZES = (2, 8)
_BUSY_SECONDS = 0.05  # more than any case queues for
_REPLAYS = 5
_STEPS = itertools.count()  # of all cases: what is kept for a seed must not serve another case
_OURS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("ringstrategy", "triton_kernels"))


def our_function() -> str:
    """The innermost function of ours that is running in this thread."""
    ours = [f"`{Path(f.filename).stem}.{f.name}`" for f in traceback.extract_stack() if f.filename.startswith(_OURS)]
    return ours[-1] if ours else "elsewhere"


def no_wire(ranks: int, called: Callable[[], object] = lambda: None) -> mock._patch[SimpleNamespace]:
    """NCCL's calls send nothing; each calls `called`."""

    def call(*args: object, **kwargs: object) -> Done:
        del args, kwargs
        called()
        return Done()

    stand_in = SimpleNamespace(
        DistError=dist.DistError,
        P2POp=lambda *_: None,
        isend=None,
        irecv=None,
        all_to_all=call,
        all_reduce=call,
        batch_isend_irecv=lambda operations: [call()],
        get_process_group_ranks=lambda group: list(range(ranks)),
        is_initialized=lambda: False,  # nothing to end
    )
    return mock.patch.object(nccl, "dist", stand_in)


class _Echo(Peers):
    """For messages in host memory: all other ranks say what rank 1 says."""

    def __init__(self, ranks: int) -> None:
        super().__init__(1, ranks, Stats(), tuple(map(str, range(ranks))))

    def post(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle:
        for said, heard in zip(sends.values(), recvs.values(), strict=True):
            heard.copy_(said)
        return Done()

    def all_reduce_(self, values: Tensor) -> None:
        values.mul_(self.size)

    def submit(self, task: Task, where: str) -> Waitable:
        task()
        return Done()

    def look_around(self, where: str) -> None:
        """Nobody gets lost."""

    look_closely = look_around

    def abort(self, cause: str | None) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


class LonelyPeers(nccl.NcclPeers):
    """Rank 1 of `ranks` on hosts of their own, with values on `device`, where there is `no_wire`."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        control: Any = _Echo(ranks)
        super().__init__(mock.sentinel.group, control, device, timedelta(minutes=1))


class _InStream(LonelyPeers):
    """Runs exchanges where they are submitted, in the current stream, so that a graph can hold them."""

    def submit(self, task: Task, where: str) -> Waitable:
        """See `Peers.submit`."""
        del where
        task()
        return Done()

    def finish(self, tickets: Sequence[Waitable]) -> None:
        """Nothing is left to wait for."""


@contextmanager
def _watched() -> Iterator[list[str]]:
    """The functions in which the host waits for the device, as torch says."""
    waits: list[str] = []

    def note(message: object, *more: object, **details: object) -> None:
        del more, details
        if "called a synchronizing CUDA operation" in str(message):  # and not that this mode is a prototype
            waits.append(our_function())

    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _cycles_a_second() -> float:
    """Of the clock by which `torch.cuda._sleep` counts."""
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / (begin.elapsed_time(end) / 1e3))


def _on_device(once: Callable[[], object]) -> tuple[int | None, float | None]:
    """How many operations the device does, and their seconds; None where the profiler sees none."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        once()
        torch.cuda.synchronize()
    seen = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(seen) or None, sum(event.time_range.elapsed_us() for event in seen) / 1e6 or None


def _as_graph(once: Callable[[], object]) -> float:
    """Seconds of a replay, the median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        once()
    seconds = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds))


def _one_bucket(algorithm: Synchronous, dtype: torch.dtype) -> Bucket:
    tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES]
    parameters = {f"p{place}": Parameter(tensor) for place, tensor in enumerate(tensors)}
    [bucket] = algorithm.plan(parameters, frozenset(), 1)  # with the index 0 it would be closed when it has 1 MB
    return bucket


def _fill(bucket: Bucket, gradient_of: Callable[[Tensor], Tensor]) -> None:
    for slot in bucket.slots:
        slot.parameter.grad = gradient_of(slot.parameter)


def _exchange(bucket: Bucket, peers: Peers, algorithm: Synchronous) -> None:
    """All that happens to a bucket from its last gradient to the optimizer's step."""
    parameters = [slot.parameter for slot in bucket.slots]
    bucket.pack(peers.size)
    ticket = bucket.launch(peers, algorithm.collective, Done(), derive_seed(0, next(_STEPS)), "nowhere")
    bucket.take_gradients()
    peers.finish([ticket])
    bucket.unpack(lambda slot: True)
    if bucket.residuals.undecided:
        bucket.residuals.after_backward()
    bucket.residuals.after_step(set(parameters), True)


def _measured(algorithm: Synchronous, dtype: torch.dtype, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a row, on the GPU."""
    device = torch.device("cuda")
    busy = round(_BUSY_SECONDS * _cycles_a_second())
    seconds: list[float] = []

    with no_wire(ranks):
        bucket, peers = _one_bucket(algorithm, dtype), LonelyPeers(device, ranks)
        for _ in range(options.warmup + options.rounds):
            _fill(bucket, torch.randn_like)
            torch.cuda._sleep(busy)
            begin = time.perf_counter()
            _exchange(bucket, peers, algorithm)
            seconds.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        _fill(bucket, torch.randn_like)
        with _watched() as waits:
            _exchange(bucket, peers, algorithm)
        torch.cuda.synchronize()
        _fill(bucket, torch.randn_like)
        launches, on_device = _on_device(lambda: _exchange(bucket, peers, algorithm))
        peers.close()

        bucket, in_stream = _one_bucket(algorithm, dtype), _InStream(device, ranks)

        def once() -> None:
            _fill(bucket, torch.empty_like)
            _exchange(bucket, in_stream, algorithm)

        graph = None
        if not waits:
            try:
                graph = _as_graph(once)
            except RuntimeError as error:  # nothing promises that a graph can hold it
                print(f"no CUDA graph holds {algorithm}: {str(error).splitlines()[0]}")
        in_stream.close()
    host = seconds[options.warmup :]
    return {
        "seconds": host,
        "host_seconds": statistics.median(host),
        "device_seconds": on_device,
        "graph_seconds": graph,
        "launches": launches,
        "waits": sorted(set(waits)),
        **harness.made_with(harness.name_of(device)),
    }


def main(given: Sequence[str]) -> None:
    """Measure every case, as one of 2 and of 8 ranks."""
    parser = harness.arguments("bucket", __doc__, rounds=7, warmup=3)
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and torch sees none here")
    with harness.refusing(parser):
        names = harness.chosen(CASES, options.cases)
    rows, failed = [], []
    for ranks in _SIZES:
        for name in names:
            make, dtype = CASES[name]
            case = f"{name}, rank 1 of {ranks}"
            try:
                found = _measured(make(), dtype, ranks, options)
            except Exception as error:  # the other cases are worth having
                failed.append(f"{case}: {type(error).__name__}: {error}")
                continue
            if found["waits"]:
                failed.append(f"{case}: the host waits for the device in {', '.join(found['waits'])}")
            rows.append(Row(benchmark="bucket", case=case, size="25 MB of fp32", hosts=ranks, **found))
    harness.publish("one bucket without a wire", rows, options.out, failed)
    if failed:
        sys.exit(1)

"""What one bucket of 25 MB costs a GPU and its host, measured on one GPU without a wire.

python -m benchmarks bucket        # on a GPU
python -m benchmarks bucket --dry  # what can be counted without one, as `launches` does

The cases are those of `launches`: pack, exchange as one of 2 or 8 ranks, unpack, the optimizer's step. NCCL's calls are
replaced by nothing, so what is left is our kernels, torch's, and Python.

- host: until all is queued, while the stream is busy with something else for 50 ms.
- on the device: the operations' own times, added up; launches: how many they are.
- as a graph: the same as a CUDA graph, so without the gaps that a slow host leaves.
- waits: where torch says that the host waits for the device. One is an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.launches import (
    CASES,
    LonelyPeers,
    Meter,
    exchange,
    fill,
    measure,
    no_wire,
    one_bucket,
    our_function,
)
from benchmarks.rows import Row
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.buckets.base import Bucket
from ringstrategy.transport.base import Waitable
from ringstrategy.transport.worker import Task

_SIZES = (2, 8)
_BUSY_SECONDS = 0.05  # more than any case queues for
_REPLAYS = 5


class _Done:
    def wait(self) -> None:
        """At once."""


class _InStream(LonelyPeers):
    """Runs exchanges where they are submitted, in the current stream, so that a graph can hold them."""

    def submit(self, task: Task, where: str) -> Waitable:
        """See `Peers.submit`."""
        del where
        task()
        return _Done()

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


def _measured(algorithm: Synchronous, dtype: torch.dtype, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a row, on the GPU."""
    device, meter = torch.device("cuda"), Meter()
    busy = round(_BUSY_SECONDS * _cycles_a_second())
    seconds: list[float] = []

    def step(bucket: Bucket, peers: LonelyPeers) -> None:
        exchange(bucket, peers, algorithm)

    with no_wire(meter, ranks):
        bucket, peers = one_bucket(algorithm, dtype, device), LonelyPeers(device, ranks)
        for _ in range(options.warmup + options.rounds):
            fill(bucket, torch.randn_like)
            torch.cuda._sleep(busy)
            begin = time.perf_counter()
            step(bucket, peers)
            seconds.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        fill(bucket, torch.randn_like)
        with _watched() as waits:
            step(bucket, peers)
        torch.cuda.synchronize()
        fill(bucket, torch.randn_like)
        launches, on_device = _on_device(lambda: step(bucket, peers))
        peers.close()

        bucket, in_stream = one_bucket(algorithm, dtype, device), _InStream(device, ranks)

        def once() -> None:
            fill(bucket, torch.empty_like)
            step(bucket, in_stream)

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
        "device": torch.cuda.get_device_name(device),
    }


def _counted(algorithm: Synchronous, dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """The same fields as far as stand-ins know them."""
    counts = measure(algorithm, dtype, ranks)
    return {"launches": counts.kernels + counts.operations, "waits": sorted(counts.waits), "device": "meta"}


def main(given: Sequence[str]) -> None:
    """Measure every case, as one of 2 and of 8 ranks."""
    parser = harness.arguments("bucket", __doc__, rounds=7, warmup=3)
    parser.add_argument("--dry", action="store_true", help="without a GPU: count, as `launches` does")
    options = parser.parse_args(given)
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("this measures a GPU, and torch sees none here: --dry counts what can be counted without one")
    with harness.refusing(parser):
        names = harness.chosen(CASES, options.cases)
    rows, failed = [], []
    for ranks in _SIZES:
        for name in names:
            make, dtype = CASES[name]
            case = f"{name.replace('`', '')}, rank 1 of {ranks}"
            try:
                found = _counted(make(), dtype, ranks) if options.dry else _measured(make(), dtype, ranks, options)
            except Exception as error:  # the other cases are worth having
                failed.append(f"{case}: {type(error).__name__}: {error}")
                continue
            if found["waits"]:
                failed.append(f"{case}: the host waits for the device in {', '.join(found['waits'])}")
            rows.append(
                Row(
                    benchmark="bucket",
                    case=case,
                    size="25 MB of fp32",
                    hosts=ranks,
                    torch=torch.__version__,
                    commit=harness.commit(),
                    **found,
                )
            )
    harness.publish("one bucket without a wire", rows, options.out, failed)
    if failed:
        sys.exit(1)

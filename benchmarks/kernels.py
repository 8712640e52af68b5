"""The Triton kernels on one GPU, as fractions of a device copy in the same run.

python -m benchmarks kernels --sizes 1 16 64 --rounds 30 --out outputs/kernels.jsonl
python -m benchmarks kernels --dry     # each case once, small, on the CPU; a test judges the results
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.rows import Row
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs

_TENSORS = 300  # that pack gathers
_REPEATS = 10  # of a case in its graph
_MULTIPLE = 2048  # values, of which all sizes are multiples
_DRY = 2 * _MULTIPLE  # values
_CODECS: dict[str, Blocked] = {
    "int8": BlockInt(8),
    "int4": BlockInt(4),
    "int4 stochastic": BlockInt(4, rounding="stochastic"),
    "e4m3": BlockFloat8(),
    "gaussian4": Gaussian(4),
    "sign": Sign(),
}


@dataclass(frozen=True)
class Case:
    """One piece of work, the bytes that it must read and write at least, and what does it."""

    work: str
    bytes_moved: int
    run: Callable[[], object]


def _cases(n: int, device: torch.device) -> tuple[list[Case], Callable[[], object]]:
    """All cases, the copy first, and what makes their buffers as they were."""
    from ringstrategy.kernels.triton.buckets import Places
    from ringstrategy.kernels.triton.decode import decode
    from ringstrategy.kernels.triton.encode import encode
    from ringstrategy.kernels.triton.orthonormal import orthonormalise_
    from ringstrategy.kernels.triton.rotate import rotate_

    original, other = torch.randn(n, device=device), torch.randn(n, device=device)
    values, lost, out = (torch.empty_like(original) for _ in range(3))
    residual, turn = torch.zeros_like(original), signs(1)
    cases = [Case("copy", 8 * n, partial(out.copy_, values))]

    def add(work: str, nbytes: int, run: Callable[[], object]) -> None:
        cases.append(Case(work, nbytes, run))

    for name, codec in _CODECS.items():
        size = codec.nbytes(n, values.dtype)
        payload, wire = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        encode(other, (), payload, codec)
        hop = partial(encode, values, [payload], wire, codec)
        fed_back = partial(hop, residual=residual, lost=residual)
        add(f"encode {name}", 8 * n + size, partial(encode, values, (), wire, codec, lost=lost))
        add(f"decode {name}", 8 * n + size, partial(decode, payload, out, codec, add=True))
        add(f"relay {name}", 8 * n + 2 * size, partial(hop, lost=lost))
        add(f"relay fed back {name}", 12 * n + 2 * size, fed_back)
        others = [payload.clone() for _ in range(3)]
        add(f"reduce 3 {name}", 4 * n + 4 * size, partial(encode, values, others, wire, codec))
        if codec.adds_exactly:
            add(f"relay rotated {name}", 12 * n + 2 * size, partial(fed_back, signs=turn))
            add(f"decode rotated {name}", 4 * n + size, partial(decode, payload, out, codec, signs=turn))

    add("rotate", 8 * n, partial(rotate_, values, turn))

    for name, length, dtype in (
        ("pack", max(64, n // _TENSORS // 64 * 64), torch.float32),
        ("pack odd sizes", n // _TENSORS | 1, torch.float32),
        ("pack bfloat16", max(64, n // _TENSORS // 64 * 64), torch.bfloat16),
    ):
        tensors = [part.to(dtype, copy=True) for part in original.split(length)]
        places = Places([tensor.numel() for tensor in tensors], [dtype] * len(tensors), device)
        nbytes = (dtype.itemsize + 4) * n
        add(name, nbytes, partial(places.pack, tensors, out, scale=0.25))
        add(f"un{name}", nbytes, partial(places.unpack, out, tensors))

    columns = original.view(-1, 2, 1024).clone()
    add("orthonormalise", 8 * n, partial(orthonormalise_, columns))

    def reset() -> None:
        values.copy_(original)
        columns.copy_(original.view_as(columns))
        residual.zero_()
        out.zero_()

    return cases, reset


def _seconds(cases: Sequence[Case], reset: Callable[[], object], options: argparse.Namespace) -> list[list[float]]:
    """Device time of each case in each counted round, all cases once a round in rotated order.

    Each case is a CUDA graph of `_REPEATS` runs, since at small sizes the host needs longer for a launch than the
    device for the work.
    """
    from ringstrategy.kernels.triton import tables

    graphs, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for case in cases:
        with torch.cuda.stream(stream):
            case.run()  # what is compiled, or made once, is so before the capture
        graph = torch.cuda.CUDAGraph()
        # tables of addresses are those that have just been made, as in steps: else a graph makes its own
        with mock.patch.object(tables, "_captures", return_value=False), torch.cuda.graph(graph, stream=stream):
            for _ in range(_REPEATS):
                case.run()
        graphs.append(graph)
    seconds: list[list[float]] = [[] for _ in cases]
    for (graph, own), counts in harness.turns(list(zip(graphs, seconds, strict=True)), options.rounds, options.warmup):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        reset()  # writes more than the caches hold at the larger sizes
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if counts:
            own.append(start.elapsed_time(end) / 1e3 / _REPEATS)
    return seconds


def _asked(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """The copy, and what the user wants to see beside it."""
    works = harness.chosen([case.work for case in cases[1:]], options.cases)
    return [case for case in cases if case is cases[0] or case.work in works]


def _measure(n: int, options: argparse.Namespace) -> None:
    device = torch.device("cpu" if options.dry else "cuda")
    cases, reset = _cases(n, device)
    cases = _asked(cases, options)
    if options.dry:
        for case in cases:
            reset()
            case.run()
        seconds: list[list[float]] = [[] for _ in cases]
    else:
        seconds = _seconds(cases, reset, options)
    name = "Triton's interpreter" if options.dry else harness.name_of(device)
    rows = [_row(case, n, times, name) for case, times in zip(cases, seconds, strict=True)]
    for row in rows:
        row.fraction_of_copy = row.gigabytes_per_second / rows[0].gigabytes_per_second
    harness.publish(f"kernels: {n:,} float32 on {name}", rows, options.out)


def _row(case: Case, n: int, times: list[float], device: str) -> Row:
    import triton

    seconds = statistics.median(times) if times else math.nan
    return Row(
        benchmark="kernels",
        case=case.work,
        elements=n,
        bytes_moved=case.bytes_moved,
        seconds=times,
        seconds_median=seconds,  # on the device
        gigabytes_per_second=case.bytes_moved / seconds / 1e9,
        triton=triton.__version__,
        **harness.made_with(device),
    )


def main(given: Sequence[str]) -> None:
    """Measure every size."""
    parser = harness.arguments("kernels", __doc__, rounds=30, warmup=5)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], help="millions (2**20) of float32")
    parser.add_argument("--dry", action="store_true", help="each case once, small, on the CPU, and nothing is timed")
    options = parser.parse_args(given)
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("this measures a GPU, and torch sees none here: --dry runs each case once on the CPU")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported triton yet
    sizes = [_DRY] if options.dry else [round(size * (1 << 20)) // _MULTIPLE * _MULTIPLE for size in options.sizes]
    with harness.refusing(parser):
        for size in sizes:
            _measure(size, options)

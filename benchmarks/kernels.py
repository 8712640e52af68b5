"""The Triton kernels beside plain torch and torch.compile on one GPU, as fractions of a device copy in the same run.

python -m benchmarks kernels --sizes 1 16 64 --rounds 30 --out benchmarks/results/kernels.jsonl
python -m benchmarks kernels --warm    # only compile the kernels, each codec in a process of its own
python -m benchmarks kernels --dry     # each case once, small, on the CPU: do the kernels agree with their twins?
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from unittest import mock

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.rows import Row
from ringstrategy.codecs import BlockFloat8, BlockInt, Gaussian, Sign
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.rotated import signs
from ringstrategy.kernels import orthonormal
from ringstrategy.kernels.reference import flips

_BLOCK = 256
_TENSORS = 300  # that pack gathers
_REPEATS = 10  # of a case in its graph
_MULTIPLE = 2048  # values, of which all sizes are multiples
_DRY = 2 * _MULTIPLE  # values
_WAYS = ("triton", "eager", "compiled")
_CODECS: dict[str, Blocked] = {
    "int8": BlockInt(8),
    "int4": BlockInt(4),
    "int4 stochastic": BlockInt(4, rounding="stochastic"),
    "e4m3": BlockFloat8(),
    "gaussian4": Gaussian(4),
    "sign": Sign(),
}
_TWINS = {"int8": 8, "int4": 4}  # codecs that are also written in plain torch, below


@dataclass
class Case:
    """One way of doing one piece of work."""

    work: str
    way: str  # "triton", "eager", "compiled" or, for the device copy, "copy"
    bytes_moved: int  # that must be read and written at least
    run: Callable[[], object]
    result: Tensor  # that `run` writes


def torch_encode(values: Tensor, wire: Tensor, lost: Tensor, bits: int) -> None:
    """`BlockInt(bits).encode` in plain torch, for whole blocks and 8 or 4 bits."""
    half = 1 << (bits - 1)
    blocks = values.view(-1, _BLOCK)
    largest = (blocks.abs().amax(1) * (1 / (half - 1))).clamp(min=2.0**-126)
    scale = ((largest.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scale = (scale + (scale - scale))[:, None]
    levels = (blocks * scale.reciprocal()).round().nan_to_num(0.0)
    torch.sub(blocks, levels * scale, out=lost.view(-1, _BLOCK))
    codes = (levels + half).to(torch.uint8)
    if bits == 4:
        codes = codes[:, : _BLOCK // 2] | codes[:, _BLOCK // 2 :] << 4
    headers = 2 * len(blocks)
    wire[:headers].view(torch.bfloat16).copy_(scale[:, 0])
    wire[headers:].copy_(codes.view(-1))


def torch_decode_add(wire: Tensor, out: Tensor, bits: int) -> None:
    """`BlockInt(bits).decode(add=True)` in plain torch, for whole blocks and 8 or 4 bits."""
    headers = 2 * (out.numel() // _BLOCK)
    scale = wire[:headers].view(torch.bfloat16).float()[:, None]
    codes = wire[headers:].view(len(scale), -1)
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], 1)
    out.view(-1, _BLOCK).add_((codes.float() - (1 << (bits - 1))) * scale)


def torch_relay(wire_in: Tensor, values: Tensor, wire: Tensor, lost: Tensor, bits: int) -> None:
    """One hop of a ring in plain torch; the sum is left in `values`."""
    torch_decode_add(wire_in, values, bits)
    torch_encode(values, wire, lost, bits)


def torch_rotate(values: Tensor, factors: Tensor, matrix: Tensor, out: Tensor) -> None:
    """The rotation as a matrix product."""
    torch.matmul(values.view(-1, _BLOCK) * factors, matrix, out=out.view(-1, _BLOCK))


def torch_pack(tensors: list[Tensor], flat: Tensor) -> None:
    """Gather and scale in plain torch."""
    torch.cat(tensors, out=flat)
    flat.mul_(0.25)


def _cases(n: int, device: torch.device, codecs: Collection[str] = _CODECS) -> tuple[list[Case], Callable[[], object]]:
    """All cases of these codecs and of none, over the same buffers, and what makes the buffers as they were."""
    from ringstrategy.kernels.triton.buckets import Places
    from ringstrategy.kernels.triton.decode import decode
    from ringstrategy.kernels.triton.encode import encode
    from ringstrategy.kernels.triton.orthonormal import orthonormalise_
    from ringstrategy.kernels.triton.rotate import rotate_

    original, other = torch.randn(n, device=device), torch.randn(n, device=device)
    values, lost, out = (torch.empty_like(original) for _ in range(3))
    residual, turn = torch.zeros_like(original), signs(1)
    cases = [Case("copy", "copy", 8 * n, partial(out.copy_, values), out)]

    def add(work: str, nbytes: int, result: Tensor, **ways: Callable[[], object]) -> None:
        cases.extend(Case(work, way, nbytes, run, result) for way, run in ways.items())

    for name in codecs:
        codec = _CODECS[name]
        size = codec.nbytes(n, values.dtype)
        payload, wire = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        encode(other, (), payload, codec)
        hop = partial(encode, values, [payload], wire, codec)
        fed_back = partial(hop, residual=residual, lost=residual)
        add(f"encode {name}", 8 * n + size, wire, triton=partial(encode, values, (), wire, codec, lost=lost))
        add(f"decode {name}", 8 * n + size, out, triton=partial(decode, payload, out, codec, add=True))
        add(f"relay {name}", 8 * n + 2 * size, wire, triton=partial(hop, lost=lost))
        add(f"relay fed back {name}", 12 * n + 2 * size, wire, triton=fed_back)
        others = [payload.clone() for _ in range(3)]
        add(f"reduce 3 {name}", 4 * n + 4 * size, wire, triton=partial(encode, values, others, wire, codec))
        if codec.adds_exactly:
            add(f"relay rotated {name}", 12 * n + 2 * size, wire, triton=partial(fed_back, signs=turn))
            add(f"decode rotated {name}", 4 * n + size, out, triton=partial(decode, payload, out, codec, signs=turn))
        if name in _TWINS:
            bits = _TWINS[name]
            for way, made in (("eager", _plain), ("compiled", _compiled)):
                encoded = partial(made(torch_encode), values, wire, lost, bits)
                decoded = partial(made(torch_decode_add), payload, out, bits)
                relayed = partial(made(torch_relay), payload, values, wire, lost, bits)
                add(f"encode {name}", 8 * n + size, wire, **{way: encoded})
                add(f"decode {name}", 8 * n + size, out, **{way: decoded})
                add(f"relay {name}", 8 * n + 2 * size, wire, **{way: relayed})

    factors = flips(turn).to(device)
    matrix = torch.eye(_BLOCK, device=device).view(-1)
    rotate_(matrix, (-1,) * 8)  # all bits are set: keeps the signs
    matrix = matrix.view(_BLOCK, _BLOCK) * 16
    add("rotate", 8 * n, values, triton=partial(rotate_, values, turn))
    for way, made in (("eager", _plain), ("compiled", _compiled)):
        add("rotate", 8 * n, out, **{way: partial(made(torch_rotate), values, factors, matrix, out)})

    for name, length, dtype in (
        ("pack", max(64, n // _TENSORS // 64 * 64), torch.float32),
        ("pack odd sizes", n // _TENSORS | 1, torch.float32),
        ("pack bfloat16", max(64, n // _TENSORS // 64 * 64), torch.bfloat16),
    ):
        tensors = [part.to(dtype, copy=True) for part in original.split(length)]
        places = Places([tensor.numel() for tensor in tensors], [dtype] * len(tensors), device)
        nbytes = (dtype.itemsize + 4) * n
        packed = partial(places.pack, tensors, out, scale=0.25)
        add(name, nbytes, out, triton=packed, eager=partial(torch_pack, tensors, out))
        add(f"un{name}", nbytes, tensors[0], triton=partial(places.unpack, out, tensors))

    columns = original.view(-1, 2, 1024).clone()
    add(
        "orthonormalise",
        8 * n,
        columns,
        triton=partial(orthonormalise_, columns),
        eager=partial(orthonormal.orthonormalise_, columns),
    )

    def reset() -> None:
        values.copy_(original)
        columns.copy_(original.view_as(columns))
        residual.zero_()
        out.zero_()

    return cases, reset


def _plain(function: Callable[..., None]) -> Callable[..., None]:
    return function


@lru_cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=False)


def _errors(cases: Sequence[Case], reset: Callable[[], object]) -> dict[tuple[str, str], float | None]:
    """Share of each case's results that are not those of the eager twin; floats may differ by rounding."""
    truth: dict[str, Tensor] = {}
    results: dict[tuple[str, str], float | None] = {}
    for case in sorted(cases, key=lambda case: case.way != "eager"):
        reset()
        case.run()
        if case.way == "eager":
            truth[case.work] = case.result.clone()
        if case.work in truth:
            near = torch.isclose(case.result.float(), truth[case.work].float(), rtol=1e-5, atol=1e-5)
            same = near if case.result.is_floating_point() else case.result == truth[case.work]
            results[case.work, case.way] = 1 - same.float().mean(dtype=torch.float64).item()
        else:
            results[case.work, case.way] = None
    return results


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
    works = harness.chosen(dict.fromkeys(case.work for case in cases), options.cases)
    return [case for case in cases if case.way == "copy" or (case.work in works and case.way in options.ways)]


def _measure(n: int, options: argparse.Namespace) -> None:
    device = torch.device("cuda")
    cases, reset = _cases(n, device)
    cases = _asked(cases, options)
    errors = _errors(cases, reset)
    seconds = _seconds(cases, reset, options)
    copy = 8 * n / statistics.median(seconds[0])
    eager = {case.work: times for case, times in zip(cases, seconds, strict=True) if case.way == "eager"}
    rows = []
    for case, times in zip(cases, seconds, strict=True):
        middle, base = statistics.median(times), eager.get(case.work)
        rate = case.bytes_moved / middle
        row = _row(case, n, errors, torch.cuda.get_device_name(device))
        row.seconds_median, row.seconds = middle, times  # on the device
        row.gigabytes_per_second, row.fraction_of_copy = rate / 1e9, rate / copy
        row.ratio = None if base is None else statistics.median(b / t for b, t in zip(base, times, strict=True))
        rows.append(row)
    harness.publish(f"kernels: {n:,} float32 on {torch.cuda.get_device_name(device)}", rows, options.out)


def _row(case: Case, n: int, errors: dict[tuple[str, str], float | None], device: str) -> Row:
    import triton

    return Row(
        benchmark="kernels",
        case=f"{case.work}, {case.way}",
        baseline="eager",
        elements=n,
        bytes_moved=case.bytes_moved,
        error=errors[case.work, case.way],  # share of results that are not the eager twin's; None without one
        device=device,
        torch=torch.__version__,
        triton=triton.__version__,
        commit=harness.commit(),
    )


def _dry(options: argparse.Namespace) -> None:
    """Each case once in Triton's interpreter; an error if a kernel's results are not those of its twin."""
    cases, reset = _cases(_DRY, torch.device("cpu"))
    cases = [case for case in _asked(cases, options) if case.way != "compiled"]
    errors = _errors(cases, reset)
    rows = [_row(case, _DRY, errors, "cpu") for case in cases]
    harness.publish(f"kernels: {_DRY:,} float32 in Triton's interpreter", rows, options.out)
    wrong = [row.case for row in rows if row.error]
    if wrong:
        sys.exit(f"not the results of the eager twin: {', '.join(wrong)}")


def _warm(codec: str) -> None:
    """Compile the kernels of a codec, and those of none, so that the disk keeps them."""
    cases, _ = _cases(1 << 20, torch.device("cuda"), [codec])
    for case in cases:
        if case.way == "triton":
            case.run()
    torch.cuda.synchronize()


def main(given: Sequence[str]) -> None:
    """Measure every size."""
    parser = harness.arguments("kernels", __doc__, rounds=30, warmup=5)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64], help="millions (2**20) of float32")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=_WAYS, help="beside the copy")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--warm", action="store_true", help="only compile the kernels")
    how.add_argument("--dry", action="store_true", help="each case once, small, on the CPU, and nothing is timed")
    options = parser.parse_args(given)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported triton yet
        with harness.refusing(parser):
            _dry(options)
        return
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/kernels.py measures a GPU, and torch sees none here: run it where torch.cuda.is_available()"
        )
    if options.warm:
        with ProcessPoolExecutor(len(_CODECS), get_context("spawn")) as processes:
            list(processes.map(_warm, _CODECS))
        return
    with harness.refusing(parser):
        for size in options.sizes:
            _measure(round(size * (1 << 20)) // _MULTIPLE * _MULTIPLE, options)


if __name__ == "__main__":  # also a plain file, on a bare GPU machine
    main(sys.argv[1:])

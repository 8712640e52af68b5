"""The sum of a flat fp32 tensor over all hosts: our collectives beside gloo's all-reduce, in the same run.

python benchmarks/collectives.py --hosts 4 --rate 1gbit --mb 96 --rounds 9 --out benchmarks/results/collectives.jsonl
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
from harness import Case
from torch import Tensor

from ringstrategy import (
    BlockFloat8,
    BlockInt,
    Cast,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Identity,
    Native,
    Peers,
    Ring,
    Rotated,
    Sign,
    TopK,
)
from ringstrategy.collectives import connect, mean_


def _inputs(rank: int, numel: int) -> Tensor:
    """This rank's values: the same in every run, different on every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


def _cases(values: Tensor, inputs: Tensor, peers: Peers, native: Peers, options: argparse.Namespace) -> list[Case]:
    half = torch.empty_like(values, dtype=torch.float16)
    share = 2 * (peers.size - 1) / peers.size * values.numel()  # elements that must leave each host

    def refill() -> None:
        values.copy_(inputs)

    def refill_half() -> None:
        half.copy_(inputs)

    def gloo() -> None:
        dist.all_reduce(values)

    def gloo_half() -> None:
        dist.all_reduce(half)

    def gloo_half_with_casts() -> None:
        half.copy_(values)
        dist.all_reduce(half)
        values.copy_(half)

    def limit(width: int) -> float | None:
        return harness.wire_seconds(share * width, options)

    def our_case(name: str, collective: Collective, codec: Codec, peers: Peers = peers) -> Case:
        def run() -> None:
            mean_(values, peers, collective, codec, seed=0)

        width = codec.nbytes(values.numel(), values.dtype) / values.numel()
        return Case(name, run, lambda: [values], refill, lambda: peers.stats.bytes_sent, limit(width))

    return [
        Case("gloo fp32", gloo, lambda: [values], refill, limit_seconds=limit(4)),
        Case("gloo fp16 tensor", gloo_half, lambda: [half], refill_half, limit_seconds=limit(2)),
        Case("gloo fp16 casts", gloo_half_with_casts, lambda: [values], refill, limit_seconds=limit(2)),
        our_case("ring identity", Ring(), Identity()),
        our_case("direct identity", Direct(), Identity()),
        our_case("native identity", Native(), Identity(), native),
        our_case("ring fp16", Ring(), Cast(torch.float16)),
        our_case("ring bf16", Ring(), Cast(torch.bfloat16)),
        our_case("direct fp16", Direct(), Cast(torch.float16)),
        our_case("ring fp8", Ring(), BlockFloat8()),
        our_case("ring int8", Ring(), BlockInt(8)),
        our_case("direct int8", Direct(), BlockInt(8)),
        our_case("ring int4", Ring(), BlockInt(4)),
        our_case("ring int4 blocks of 1024", Ring(), BlockInt(4, 1024)),
        our_case("direct int4", Direct(), BlockInt(4)),
        our_case("ring rotated int4", Ring(), Rotated(Gaussian(4))),
        our_case("direct rotated int4", Direct(), Rotated(Gaussian(4))),
        our_case("ring rotated int2", Ring(), Rotated(Gaussian(2))),
        our_case("direct rotated int2", Direct(), Rotated(Gaussian(2))),
        our_case("ring sign", Ring(), Sign()),
        our_case("direct sign", Direct(), Sign()),
        our_case("direct rotated sign", Direct(), Rotated(Gaussian(1))),
        our_case("direct topk", Direct(), TopK()),
    ]


def worker(options: argparse.Namespace) -> None:
    """What runs on each host."""
    timeout = timedelta(seconds=options.timeout)
    peers = connect(torch.device("cpu"), timeout)
    native = connect(torch.device("cpu"), timeout)  # of its own: after Native, stats count no bytes any more
    numel = int(options.mb * 2**20 / 4)
    inputs = _inputs(peers.rank, numel)
    values = torch.empty_like(inputs)
    baseline, *others = _cases(values, inputs, peers, native, options)
    cases = [baseline, *(case for case in others if harness.wanted(case.name, options))]

    truth = torch.zeros(numel, dtype=torch.float64)
    for rank in range(peers.size):
        truth += _inputs(rank, numel)
    errors: dict[str, float | None] = {}
    identical: dict[str, bool] = {}
    for case in cases:
        case.prepare()
        case.run()
        [result] = case.result()
        errors[case.name] = harness.max_over_ranks(harness.relative_error(result, truth))
        identical[case.name] = harness.identical_on_all_ranks([result])
    del truth

    measured = harness.interleave(cases, options.rounds, options.warmup)
    peers.close()
    native.close()
    if peers.rank == 0:
        size = f"{options.mb:g} MB of fp32"
        harness.report(harness.rows("collectives", size, cases, measured, errors, identical, options), options)


if __name__ == "__main__":
    parser = harness.arguments("All-reduce of a flat fp32 tensor over throttled hosts.")
    parser.add_argument("--mb", type=float, default=96.0, help="size of the tensor, in 2**20 bytes")
    harness.main(parser, worker)

"""The sum of a flat fp32 tensor over all ranks: our collectives beside gloo's all-reduce, in the same run.

python -m benchmarks collectives --hosts 4 --rate 1gbit --mb 96 --rounds 9
python -m benchmarks collectives --hosts 4 --rate 1gbit --mb 0.0625,1,16,96,256
python -m benchmarks collectives --hosts 4 --processes 2 --rate 1gbit --mb 96  # and Hierarchical, which knows of hosts
python -m benchmarks collectives --hosts 2,3,4,6,8 --rate 100mbit --mb 16 --growth  # over more hosts
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.contenders import reduced
from benchmarks.harness import Case
from ringstrategy import (
    BlockFloat8,
    BlockInt,
    Cast,
    Codec,
    Collective,
    Direct,
    Gaussian,
    Gossip,
    Hierarchical,
    Identity,
    Native,
    Peers,
    Ring,
    Rotated,
    Sign,
    TopK,
)
from ringstrategy.collectives import Summand, mean_
from ringstrategy.cost.model import CodecCost, Link, Machines, Work, exchange_cost
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import connect

_PIECE = 1 << 20  # values that are drawn, and judged, at a time
_RUN_SECONDS = 0.02  # at least, or it is the clock and the barrier that are measured
_GROWING = ("ring identity", "ring int8", "direct int8")  # beside gloo, over more and more hosts
_COPIES_BYTES = 1 << 26  # of the tensors that one run reduces, at most, where one tensor is smaller


@dataclass(frozen=True)
class Way:
    """One way of summing."""

    name: str
    collective: Collective | None  # None: gloo's own all-reduce
    codec: Codec
    casts: bool = True  # from fp32 and back within the time; False: the values are 16 bits wide already


def ways(processes: int) -> list[Way]:
    """All that are measured, the baseline first; with several ranks a host also those that know of hosts."""
    half = Cast(torch.float16)
    by: dict[str, Collective] = {"ring": Ring(), "direct": Direct(), "native": Native()}
    if processes > 1:
        by["hierarchical"] = Hierarchical()
    codecs: list[tuple[str, Codec, str]] = [
        ("identity", Identity(), "ring direct native hierarchical"),
        ("fp16", half, "ring direct hierarchical"),
        ("bf16", Cast(torch.bfloat16), "ring"),
        ("fp8", BlockFloat8(), "ring"),
        ("int8", BlockInt(8), "ring direct hierarchical"),
        ("int4", BlockInt(4), "ring direct hierarchical"),
        ("int4 blocks of 1024", BlockInt(4, 1024), "ring"),
        ("rotated int4", Rotated(Gaussian(4)), "ring direct"),
        ("rotated int2", Rotated(Gaussian(2)), "ring direct hierarchical"),
        ("sign", Sign(), "ring direct hierarchical"),
        ("rotated sign", Rotated(Gaussian(1)), "direct"),
        ("topk", TopK(), "direct"),
    ]
    return [
        Way("gloo fp32", None, Identity()),
        Way("gloo fp16 tensor", None, half, casts=False),
        Way("gloo fp16 casts", None, half),
        *(Way(f"{way} {name}", by[way], codec) for name, codec, found in codecs for way in found.split() if way in by),
    ]


def must_cross(way: Way, numel: int, hosts: int, processes: int) -> float:
    """Bytes that have to leave each host for one sum, by its schedule; gloo is held against the least that there is."""
    if way.collective is None or isinstance(way.collective, Native):
        return reduced(way.codec.nbytes(numel, torch.float32), hosts)
    free = Work(0.0, 0.0)
    costs = {(way.codec, False): CodecCost(free, free, free, free)}
    names = tuple(str(rank // processes) for rank in range(hosts * processes))
    machines = Machines(names, Link(0.0, 1.0), Link(0.0, 0.0), 0.0, costs, 0.0)
    return exchange_cost(machines, way.collective, way.codec, numel).bytes_across


class _Inputs:
    """Every rank's values, the same in every run, different on every rank.

    They are drawn in pieces, so that each rank can know the sum of its own share of the pieces without the others'
    values: the whole sum in fp64 on every rank would not fit beside eight ranks of a quarter gigabyte each.
    """

    def __init__(self, rank: int, ranks: int, numel: int) -> None:
        self.own = torch.empty(numel)
        self._truth: dict[int, Tensor] = {}  # by where it begins
        for index, begin in enumerate(range(0, numel, _PIECE)):
            mine = self.own[begin : begin + _PIECE]
            mine.copy_(_drawn(rank, index, mine.numel()))
            if index % ranks == rank:
                self._truth[begin] = torch.zeros(mine.numel(), dtype=torch.float64)
                for other in range(ranks):
                    self._truth[begin] += _drawn(other, index, mine.numel())

    def error(self, result: Tensor) -> float:
        """|result - truth| / |truth| in fp64; of each piece, the result of the rank that knows its truth counts."""
        squares = torch.zeros(2, dtype=torch.float64)
        for begin, truth in self._truth.items():
            squares[0] += (result[begin : begin + truth.numel()].double() - truth).square().sum()
            squares[1] += truth.square().sum()
        dist.all_reduce(squares)
        return (squares[0] / squares[1]).sqrt().item()


def _drawn(rank: int, index: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 + rank + 100_003 * index))


class Sums:
    """A tensor of one size and the ways of summing it; every rank makes one."""

    def __init__(self, mb: float, peers: Peers, native: Peers, options: argparse.Namespace) -> None:
        self._peers, self._native, self._options = peers, native, options
        self.size = f"{mb:g} MB of fp32"
        self._inputs = _Inputs(peers.rank, peers.size, round(mb * 2**20 / 4))
        self._copies: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.float16: []}

    @property
    def values(self) -> Tensor:
        """This rank's."""
        return self._inputs.own

    def judge(self, case: Case, result: Tensor) -> None:
        """How far a sum is from the truth, and whether all ranks have the same bits."""
        case.error = self._inputs.error(result)
        case.identical = harness.identical_on_all_ranks([result])

    def case(self, way: Way) -> Case:
        """Judged by its first sum, and ready to be timed."""
        dtype = torch.float32 if way.casts else torch.float16
        sum_, stats = self._sum_(way), (self._native if isinstance(way.collective, Native) else self._peers).stats
        result, seconds = self._first(sum_, dtype)
        steps = max(1, min(math.ceil(_RUN_SECONDS / seconds), _COPIES_BYTES // self.values.nbytes))
        crossing = must_cross(way, self.values.numel(), self._options.hosts, self._options.processes)

        def run() -> None:
            for values in self._copies[dtype][:steps]:
                sum_(values)

        case = Case(
            way.name,
            run,
            result=lambda: self._copies[dtype][:1],
            prepare=lambda: self._fresh(steps, dtype),
            bytes_sent=(lambda: None) if way.collective is None else lambda: stats.bytes_sent,
            limit_seconds=harness.wire_seconds(crossing),
            steps=steps,
        )
        self.judge(case, result)
        return case

    def _sum_(self, way: Way) -> Callable[[Tensor], object]:
        collective, codec = way.collective, way.codec
        if collective is not None:
            peers = self._native if isinstance(collective, Native) else self._peers
            return lambda values: mean_(Summand(values, codec), peers, collective)
        if isinstance(codec, Identity) or not way.casts:
            return dist.all_reduce
        half = torch.empty_like(self.values, dtype=torch.float16)

        def with_casts(values: Tensor) -> None:
            half.copy_(values)
            dist.all_reduce(half)
            values.copy_(half)

        return with_casts

    def _fresh(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """This many copies of the values: what has been summed already grows and overflows."""
        copies = self._copies[dtype]
        copies += [torch.empty_like(self.values, dtype=dtype) for _ in range(count - len(copies))]
        for values in copies[:count]:
            values.copy_(self.values)
        return copies[:count]

    def _first(self, sum_: Callable[[Tensor], object], dtype: torch.dtype) -> tuple[Tensor, float]:
        """A sum, and what it took on the slowest rank; a short one is repeated, for the first makes connections."""
        seconds = math.inf
        for _ in range(3):
            [values] = self._fresh(1, dtype)
            dist.barrier()
            begin = time.perf_counter()
            sum_(values)
            seconds = min(seconds, harness.max_over_ranks(time.perf_counter() - begin))
            if seconds >= _RUN_SECONDS:
                break
        return values, seconds


def _mixing(values: Tensor, peers: Peers) -> tuple[Case, Callable[[], Tensor]]:
    """Gossip of one parameter on a ring graph, a mixing a run, and the sum of all ranks' values, which mixing keeps."""
    parameter = nn.Parameter(values.clone())
    algorithm = Gossip(RingGraph(), overlap=False)
    algorithm.setup({"values": parameter}, peers)

    def sum_of_all() -> Tensor:
        algorithm.enter_consensus()
        return parameter.detach() * peers.size

    case = Case(
        "gossip, one mixing",
        run=lambda: algorithm.after_step([parameter]),
        result=lambda: [parameter],
        bytes_sent=lambda: peers.stats.bytes_sent,
        limit_seconds=harness.wire_seconds(algorithm.topology.degree(peers.size) * parameter.nbytes),
    )
    return case, sum_of_all


def worker(options: argparse.Namespace) -> None:
    """What runs on each rank."""
    peers = connect(torch.device("cpu"), harness.TIMEOUT)
    native = connect(torch.device("cpu"), harness.TIMEOUT)  # of its own: after Native, stats count no bytes any more
    known = ways(options.processes)
    names = _GROWING if options.growth else harness.chosen([way.name for way in known], options.cases)
    for mb in options.mb:
        sums = Sums(mb, peers, native, options)
        cases = [sums.case(way) for way in known if way is known[0] or way.name in names]
        mixing, sum_of_all = _mixing(sums.values, peers)
        cases += [mixing] if options.growth else []
        harness.interleave(cases, options.rounds, options.warmup)
        if options.growth:
            sums.judge(mixing, sum_of_all())
        if peers.rank == 0:
            harness.report("scaling" if options.growth else "collectives", sums.size, cases, options)
    peers.close()
    native.close()


def megabytes(text: str) -> list[float]:
    """Sizes of at least one value, comma-separated; argparse tells of a ValueError."""
    sizes = [float(part) for part in text.split(",")]
    if not all(size * 2**20 >= 4 for size in sizes):
        raise ValueError
    return sizes


def main(given: Sequence[str]) -> None:
    """The command."""
    parser = harness.over_hosts("collectives", __doc__)
    size = "size of the tensor in 2**20 bytes, or several: 0.0625,1,16"
    parser.add_argument("--mb", type=megabytes, default=[96.0], help=size)
    growth = "gloo, a few of ours and one mixing of gossip, for several --hosts"
    parser.add_argument("--growth", action="store_true", help=growth)
    harness.run(parser, given, worker)

"""How an all-reduce of fixed bytes scales with the number of ranks: one lab a size, one model fitted through them.

python -m benchmarks scaling --rate 100mbit --sizes 2,3,4,6,8,12,16 --out outputs/scaling.jsonl

What a round costs whatever it carries (alpha), and what a byte costs (beta), are found by least squares, not assumed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.collectives import Sums, ways
from benchmarks.harness import Case
from benchmarks.lab import exit_on_sigterm
from benchmarks.report import growth
from benchmarks.rows import append, read
from ringstrategy import Gossip
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import Peers, connect

_WAYS = ("gloo fp32", "ring identity", "ring int8", "direct int8")
_MIXING = "gossip, one mixing"


def _mixing(values: Tensor, peers: Peers) -> tuple[Case, Callable[[], Tensor]]:
    """Gossip of one parameter on a ring graph, a mixing a run, and the sum of all ranks' values, which mixing keeps."""
    parameter = nn.Parameter(values.clone())
    algorithm = Gossip(RingGraph(), overlap=False)
    algorithm.setup({"values": parameter}, peers)

    def sum_of_all() -> Tensor:
        algorithm.enter_consensus()
        return parameter.detach() * peers.size

    case = Case(
        _MIXING,
        run=lambda: algorithm.after_step([parameter]),
        result=lambda: [parameter],
        bytes_sent=lambda: peers.stats.bytes_sent,
        limit_seconds=harness.wire_seconds(growth.share(_MIXING, peers.size) * parameter.nbytes),
    )
    return case, sum_of_all


def worker(options: argparse.Namespace) -> None:
    """What runs on each rank of each lab."""
    peers = connect(torch.device("cpu"), harness.TIMEOUT)
    sums = Sums(options.mb, peers, peers, options)
    mixing, sum_of_all = _mixing(sums.values, peers)
    cases = [*(sums.case(way) for way in ways(processes=1) if way.name in _WAYS), mixing]
    harness.interleave(cases, options.rounds, options.warmup)
    sums.judge(mixing, sum_of_all())
    peers.close()
    if peers.rank == 0:
        harness.report("scaling", sums.size, cases, options)


def main(given: Sequence[str]) -> None:
    """Drive one lab a size and fit, or be a worker."""
    parser = harness.over_hosts("scaling", __doc__, cases=False)
    parser.add_argument("--mb", type=float, default=16.0, help="size of the tensor, in 2**20 bytes")
    parser.add_argument("--sizes", type=_sizes, default=[2, 3, 4, 6, 8, 12, 16], help="numbers of hosts; not --hosts")
    parser.set_defaults(rate="100mbit")
    if "RANK" in os.environ:
        harness.run(parser, given, worker)
        return
    options = parser.parse_args(given)
    if options.processes != 1:
        parser.error("--processes: what scales here is the number of hosts, each has one rank")
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        collected = Path(folder) / "rows.jsonl"
        with harness.refusing(parser):
            for hosts in options.sizes:
                options.hosts = hosts
                harness.in_lab(options, ["scaling", *given, "--out", str(collected)])
        rows = read(collected)
    sizes = ", ".join(map(str, options.sizes))
    harness.table(
        f"{rows[0].size} at {rows[0].rate}, fitted over the number of hosts",
        ("case", f"seconds at {sizes}", *growth.HEADINGS),
        (
            (case, " ".join(f"{row.seconds_median:.3f}" for row in found), *growth.cells(case, found))
            for case, found in growth.by_case(rows).items()
        ),
        (growth.MODEL,),
    )
    append(rows, options.out)  # all sizes or none: a model through some of them would be another


def _sizes(text: str) -> list[int]:
    """Numbers of hosts, comma-separated."""
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != len(text.split(",")) or len(set(sizes)) < 3 or min(sizes) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}: three sizes of at least 2, such as 2,4,8, or nothing can be fitted"
        )
    return sizes

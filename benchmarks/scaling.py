"""How an all-reduce of fixed bytes scales with the number of ranks: one lab a size, one model fitted through them.

python -m benchmarks scaling --rate 100mbit --sizes 2,3,4,6,8,12,16 --out outputs/scaling.jsonl

What a round costs whatever it carries (alpha), and what a byte costs (beta), are found by least squares, not assumed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.collectives import Sums, ways
from benchmarks.harness import Case
from benchmarks.lab import exit_on_sigterm
from benchmarks.report import growth
from benchmarks.rows import Row, append, read
from ringstrategy import Gossip
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import Peers, connect

BENCHMARK = "scaling"
_WAYS = ("gloo fp32", "ring identity", "ring int8", "direct int8")
_MIXING = "gossip, one mixing"


class _Mixing:
    """A tensor as the one parameter of gossip on a ring graph; each mixing goes on from where the last one left it."""

    def __init__(self, values: Tensor, peers: Peers) -> None:
        self._peers, self._parameter = peers, nn.Parameter(values.clone())
        self._algorithm = Gossip(RingGraph(), overlap=False)
        self._algorithm.setup({"values": self._parameter}, peers)

    def case(self) -> Case:
        """One mixing a run."""
        nbytes = growth.share(_MIXING, self._peers.size) * self._parameter.nbytes
        return Case(
            _MIXING,
            run=lambda: self._algorithm.after_step([self._parameter]),
            result=lambda: [self._parameter],
            bytes_sent=lambda: self._peers.stats.bytes_sent,
            limit_seconds=harness.wire_seconds(nbytes),
        )

    def sum(self) -> Tensor:
        """Of all ranks' values; mixing keeps it."""
        self._algorithm.enter_consensus()
        return self._parameter.detach() * self._peers.size


def worker(options: argparse.Namespace) -> None:
    """What runs on each rank of each lab."""
    peers = connect(torch.device("cpu"), harness.TIMEOUT)
    sums, mixing = Sums(options.mb, peers, peers, options), None
    known = [way for way in ways(processes=1) if way.name in _WAYS]
    names = harness.chosen([*(way.name for way in known), _MIXING], options.cases)
    cases = [sums.case(way) for way in known if way is known[0] or way.name in names]
    if _MIXING in names:
        mixing = _Mixing(sums.values, peers)
        cases.append(mixing.case())
    harness.interleave(cases, options.rounds, options.warmup)
    if mixing is not None:
        sums.judge(cases[-1], mixing.sum())
    peers.close()
    if peers.rank == 0:
        harness.report(BENCHMARK, sums.size, cases, options)


def main(given: Sequence[str]) -> None:
    """Drive one lab a size and fit, or be a worker."""
    parser = harness.over_hosts("scaling", __doc__)
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
    report(rows)
    append(rows, options.out)  # all sizes or none: a model through some of them would be another


def report(rows: Sequence[Row]) -> None:
    """Print the model of each case."""
    sizes = ", ".join(map(str, sorted({row.hosts for row in rows})))
    harness.table(
        f"{rows[0].size} at {rows[0].rate}, fitted over the number of hosts",
        ("case", f"seconds at {sizes}", *growth.HEADINGS),
        (
            (case, " ".join(f"{row.seconds_median:.3f}" for row in found), *growth.cells(case, found))
            for case, found in growth.by_case(rows).items()
        ),
        (growth.MODEL,),
    )


def _sizes(text: str) -> list[int]:
    """Numbers of hosts, comma-separated."""
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != len(text.split(",")) or len(set(sizes)) < 3 or min(sizes) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}: three sizes of at least 2, such as 2,4,8, or nothing can be fitted"
        )
    return sizes

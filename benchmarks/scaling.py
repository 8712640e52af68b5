"""How an all-reduce of fixed bytes scales with the number of ranks: one lab a size, one model fitted through them.

python -m benchmarks scaling --rate 100mbit --sizes 2,3,4,6,8,12,16 --out outputs/scaling.jsonl

What a round costs whatever it carries (alpha), and what a byte costs (beta), are found by least squares, not assumed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.collectives import Sums, ways
from benchmarks.harness import Case
from benchmarks.lab import exit_on_sigterm
from benchmarks.rows import read
from benchmarks.runs import Row
from ringstrategy import Gossip
from ringstrategy.topologies import RingGraph
from ringstrategy.transport import Peers, connect

BENCHMARK = "scaling"
MODEL = (
    "Model: seconds(N) = alpha x rounds(N) + beta x share(N) x bytes, least squares over the sizes. rounds, messages "
    "that must follow each other: 2 (N-1) on a ring, also gloo's, and where each talks to all others in turn, 1 in a "
    "mixing. share, how often a rank sends the values: 2 (N-1)/N in every all-reduce, once to each neighbour in a "
    "mixing. bytes: of the encoded values."
)
GROWTH = "Growth: seconds from 2 to 8 hosts beside what a rank sends, at the size farthest off; 0 % is as 2 (N-1)/N."
HEADINGS = ("alpha us", "beta as Gbit/s", "R^2", "worst residual", "growth")
_WAYS = ("gloo fp32", "ring identity", "ring int8", "direct int8")
_MIXING = "gossip, one mixing"
GROWTH_HOSTS = (2, 8)  # between these, seconds must grow as 2 (N-1)/N
GROWTH_BOUND = 0.10


@dataclass(frozen=True)
class Fit:
    """The model of one case."""

    alpha: float  # seconds a round
    beta: float  # seconds a byte
    nbytes: float  # of the encoded values
    r_squared: float
    worst: float  # the largest |measured / model - 1|

    @property
    def gigabits(self) -> float:
        """Gbit/s that beta comes to."""
        return 8e-9 / self.beta

    def seconds(self, case: str, size: int) -> float:
        """What the model says of so many ranks."""
        return self.alpha * rounds(case, size) + self.beta * share(case, size) * self.nbytes


def rounds(case: str, size: int) -> int:
    """Messages that must follow each other."""
    return 1 if case == _MIXING else 2 * (size - 1)  # Direct's: these are long


def share(case: str, size: int) -> float:
    """How often a rank sends the values."""
    return RingGraph().degree(size) if case == _MIXING else 2 * (size - 1) / size


def fit(case: str, rows: Sequence[Row]) -> Fit:
    """Least squares over the rows, of at least three sizes."""
    assert len({row["hosts"] for row in rows}) > 2
    sizes, nbytes = [row["hosts"] for row in rows], statistics.median(map(encoded_bytes, rows))
    measured = torch.tensor([row["seconds_median"] for row in rows], dtype=torch.float64)
    terms = torch.tensor([[rounds(case, size), share(case, size) * nbytes] for size in sizes], dtype=torch.float64)
    scale = terms.amax(0)  # a handful of rounds beside millions of bytes
    found = torch.linalg.lstsq(terms / scale, measured[:, None]).solution[:, 0] / scale
    model = terms @ found
    unexplained = (measured - model).square().sum() / (measured - measured.mean()).square().sum()
    alpha, beta = found.tolist()
    return Fit(alpha, beta, nbytes, 1 - unexplained.item(), (measured / model - 1).abs().max().item())


def growth(case: str, rows: Sequence[Row]) -> float | None:
    """Seconds from 2 to 8 ranks beside what their bytes grow by, at the size that is farthest off: 1.1 is 10 % more.

    None where one of the two ends was not measured.
    """
    seconds = {row["hosts"]: row["seconds_median"] for row in rows}
    first, last = GROWTH_HOSTS
    if first not in seconds or last not in seconds:
        return None
    found: list[float] = [
        seconds[size] / seconds[first] / (share(case, size) / share(case, first))
        for size in seconds
        if first < size <= last
    ]
    return max(found, key=lambda growth: abs(growth - 1))


def encoded_bytes(row: Row) -> float:
    """What the encoded values take: counted where we send, of gloo the values themselves."""
    if row["bytes_sent"] is None:
        return float(row["size"].split()[0]) * 2**20
    return float(row["bytes_sent"]) / share(row["case"], row["hosts"])


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each case, by rising number of hosts."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["hosts"]):
        found.setdefault(row["case"], []).append(row)
    return found


class _Mixing:
    """A tensor as the one parameter of gossip on a ring graph; each mixing goes on from where the last one left it."""

    def __init__(self, values: Tensor, peers: Peers) -> None:
        self._peers, self._parameter = peers, nn.Parameter(values.clone())
        self._algorithm = Gossip(RingGraph(), overlap=False)
        self._algorithm.setup({"values": self._parameter}, peers)

    def case(self) -> Case:
        """One mixing a run."""
        nbytes = share(_MIXING, self._peers.size) * self._parameter.nbytes
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
    report([asdict(row) for row in rows])
    harness.write(rows, options)  # all sizes or none: a model through some of them would be another


def report(rows: Sequence[Row]) -> None:
    """Print the model of each case."""
    sizes = ", ".join(map(str, sorted({row["hosts"] for row in rows})))
    harness.table(
        f"{rows[0]['size']} at {rows[0]['rate']}, fitted over the number of hosts",
        ("case", f"seconds at {sizes}", *HEADINGS),
        (
            (case, " ".join(f"{row['seconds_median']:.3f}" for row in found), *cells(case, found))
            for case, found in by_case(rows).items()
        ),
        (MODEL, GROWTH),
    )


def cells(case: str, rows: Sequence[Row]) -> list[str]:
    """What stands below `HEADINGS`."""
    model, grown = fit(case, rows), growth(case, rows)
    return [
        f"{1e6 * model.alpha:.0f}",
        f"{model.gigabits:.4f}",
        f"{model.r_squared:.5f}",
        f"{100 * model.worst:.1f} %",
        "-" if grown is None else f"{100 * (grown - 1):+.1f} %",
    ]


def _sizes(text: str) -> list[int]:
    """Numbers of hosts, comma-separated."""
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != len(text.split(",")) or len(set(sizes)) < 3 or min(sizes) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}: three sizes of at least 2, such as 2,4,8, or nothing can be fitted"
        )
    return sizes

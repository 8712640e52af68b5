"""Run interleaved cases on every host, take the slowest rank's time, print a table beside the limit, append JSON rows.

A benchmark started plainly makes its own lab; started by torchrun (or anything else that sets RANK) it measures the
network it finds itself on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab import Lab, LabError, Link, bits_per_second, exit_on_sigterm
from rich.console import Console
from rich.table import Table
from torch import Tensor

COMMIT = "RINGSTRATEGY_BENCH_COMMIT"  # as it was when the driver started
_THROUGHPUT = "RINGSTRATEGY_BENCH_THROUGHPUT"  # bytes a second of the raw TCP stream, handed from driver to workers
_NO_CASES = "none"  # only those that nobody can leave out
_TRIES = 3  # a second in which the machine was busy with something else is no reason to give up


@dataclass
class Case:
    """One way of doing the measured work."""

    name: str
    run: Callable[[], None]
    result: Callable[[], Sequence[Tensor]]  # what must have the same bits on every rank
    prepare: Callable[[], object] = lambda: None  # before each run, not timed
    bytes_sent: Callable[[], int | None] = lambda: None  # counted at the transport so far; None: nobody counts
    limit_seconds: float | None = None  # no run can be faster than this
    steps: int = 1  # how many steps a run is; times and bytes are given for one
    waited: Callable[[], float | None] = lambda: None  # seconds of `Stats.exposed_seconds` so far; None: nobody counts


@dataclass
class Measured:
    """What a case's runs gave, for one step; lists have one entry a counted round."""

    seconds: list[float] = field(default_factory=list)  # the slowest rank's
    waited: list[float] = field(default_factory=list)  # of the rank that waited longest; empty: nobody counts
    bytes_sent: int | None = None  # in the last run, the rank that sent most
    bytes_at_interface: int | None = None  # as the kernel counts it, headers included, of the host that sent most


@dataclass
class Row:
    """One line of a results file."""

    benchmark: str
    case: str
    baseline: str
    seconds_median: float
    seconds: list[float]  # of one step, one entry a round, the slowest rank's
    ratio: float  # median over the rounds of baseline / case, so 2 is twice as fast
    bytes_sent: int | None  # by the rank that sent most, in one step, counted at the transport
    bytes_at_interface: int | None  # by the host that sent most; None on loopback
    waited_seconds: float | None  # of one step, the training thread waited for the exchange, median over the rounds
    steps: int  # that were taken in a row
    error: float | None
    ranks_identical: bool
    limit_seconds: float | None
    hosts: int
    processes: int  # ranks a host
    rate: str
    throughput: float | None  # bytes a second of one raw TCP stream on the same links
    threads: int
    cores: int | None
    size: str
    device: str
    torch: str
    commit: str


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark over hosts takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="ranks a host; between them nothing throttles")
    parser.add_argument("--rate", default="1gbit", help="100mbit, 1gbit, ..., none (no throttle), loopback (no root)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds; each runs every case once")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument(
        "--cases",
        help="cases whose name contains one of these, comma-separated; =ring: that one; none: but the baseline",
    )
    parser.add_argument("--threads", type=int, help="torch threads a rank; default: cores / ranks, at least 1")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a collective gives up")
    parser.add_argument("--out", type=Path, help="append one JSON row a case to this file")
    return parser


def main(parser: argparse.ArgumentParser, worker: Callable[[argparse.Namespace], None]) -> None:
    """Be the driver that makes a lab and starts this script on each host of it, or be one of those workers."""
    options = parser.parse_args()
    if "RANK" in os.environ:
        _work(options, worker)
        return
    exit_on_sigterm()
    try:
        in_lab(options, sys.argv)
    except (LabError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def in_lab(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Make a lab, see that its throttle holds, run a benchmark script with its arguments on each rank of it."""
    with Lab(options.hosts, options.rate, processes=options.processes) as lab:
        carried = (
            check_throttle(lambda: next(lab.links())) if lab.bits_per_second is not None and lab.hosts > 1 else None
        )
        told = {_THROUGHPUT: repr(carried), COMMIT: commit(), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        for rank in range(lab.world_size):
            lab.popen(rank, [sys.executable, *argv], told)
        codes = lab.wait()
    if any(codes):
        sys.exit("; ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code != 0))


def check_throttle(measure: Callable[[], Link]) -> float:
    """Bytes a second that a link carries; a LabError if, at the third try, it is not the network that was asked for."""
    for _ in range(_TRIES):
        link = measure()
        if link.as_asked:
            return link.bytes_per_second
    raise LabError(
        f"{link}, and not 90 to 100 %: times would be of another network. Is this machine busy, or too slow for this "
        "rate? --rate none measures without a throttle"
    )


def share_of_rate(carried: float | None, rate: str) -> float | None:
    """What part of the asked rate so many bytes a second are; None where nothing throttles or nobody measured."""
    bits = bits_per_second(rate)
    return None if bits is None or carried is None else 8 * carried / bits


def _work(options: argparse.Namespace, worker: Callable[[argparse.Namespace], None]) -> None:
    ranks, options.processes = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options.hosts = ranks // options.processes
    if options.threads is None:
        options.threads = max(1, (os.cpu_count() or 1) // ranks)
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    try:
        worker(options)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def throughput() -> float | None:
    """Bytes a second that a raw TCP stream carried before this run; None where nobody measured it."""
    measured = os.environ.get(_THROUGHPUT, "None")
    return None if measured == "None" else float(measured)


def wire_seconds(nbytes: float) -> float | None:
    """The time `nbytes` need to leave a host; None where nothing throttles, or nobody knows."""
    link = throughput()
    return None if link is None else nbytes / link


def wanted(name: str, cases: str | None) -> bool:
    """Whether a user who gives these `--cases` asks for this one."""
    return cases is None or any(_means(part, name) for part in cases.split(","))


def chosen(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Those that the user asked for. A ValueError if a part of `--cases` means none of them, other than `none`."""
    known, cases = list(names), options.cases
    if cases is None:
        return known
    if cases == _NO_CASES:
        return []
    for part in cases.split(","):
        if not any(_means(part, name) for name in known):
            raise ValueError(f"--cases: {part!r} is in no case's name; they are {', '.join(known)}")
    return [name for name in known if wanted(name, cases)]


def _means(part: str, name: str) -> bool:
    return part[1:] == name if part.startswith("=") else part in name


def interleave(cases: Sequence[Case], rounds: int, warmup: int) -> dict[str, Measured]:
    """Run every case once a round, in rotated order, a barrier before each; the slowest rank's time counts."""
    measured = {case.name: Measured() for case in cases}
    for round_ in range(warmup + rounds):
        for place in range(len(cases)):
            case = cases[(place + round_) % len(cases)]
            case.prepare()
            sent, waited, counted = case.bytes_sent(), case.waited(), interface_bytes()
            dist.barrier()
            start = time.perf_counter()
            case.run()
            elapsed = time.perf_counter() - start
            now, waited_now = case.bytes_sent(), case.waited()
            bytes_sent = None if now is None or sent is None else now - sent
            slowest = max_over_ranks(elapsed)  # and by now nothing is left in any queue
            bytes_at_interface = None if counted is None else (interface_bytes() or 0) - counted
            if round_ >= warmup:
                measured[case.name].seconds.append(slowest / case.steps)
                measured[case.name].bytes_sent = _max_count(bytes_sent, case.steps)
                measured[case.name].bytes_at_interface = _max_count(bytes_at_interface, case.steps)
                if waited is not None and waited_now is not None:
                    measured[case.name].waited.append(max_over_ranks(waited_now - waited) / case.steps)
    return measured


def max_over_ranks(value: float) -> float:
    """The largest of the ranks' values, on every rank."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def of_all_ranks(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, in rank order, on every rank; all have equally many."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [theirs.tolist() for theirs in everyone]


def _max_count(count: int | None, steps: int) -> int | None:
    largest = max_over_ranks(-1 if count is None else count)
    return None if largest < 0 else round(largest / steps)


def identical_on_all_ranks(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have the same bits on every rank."""
    digest = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in fp64."""
    return (torch.linalg.vector_norm(value.double() - truth) / torch.linalg.vector_norm(truth)).item()


def rows(
    benchmark: str,
    size: str,
    cases: Sequence[Case],
    measured: dict[str, Measured],
    errors: dict[str, float | None],
    identical: dict[str, bool],
    options: argparse.Namespace,
) -> list[Row]:
    """One row a case; the first case is the baseline."""
    baseline = cases[0].name
    base = measured[baseline].seconds
    revision = commit()
    return [
        Row(
            benchmark=benchmark,
            case=case.name,
            baseline=baseline,
            seconds_median=statistics.median(measured[case.name].seconds),
            seconds=measured[case.name].seconds,
            ratio=statistics.median(b / s for b, s in zip(base, measured[case.name].seconds, strict=True)),
            bytes_sent=measured[case.name].bytes_sent,
            bytes_at_interface=measured[case.name].bytes_at_interface,
            waited_seconds=statistics.median(measured[case.name].waited) if measured[case.name].waited else None,
            steps=case.steps,
            error=errors[case.name],
            ranks_identical=identical[case.name],
            limit_seconds=case.limit_seconds,
            hosts=options.hosts,
            processes=options.processes,
            rate=options.rate,
            throughput=throughput(),
            threads=options.threads,
            cores=os.cpu_count(),
            size=size,
            device="cpu",
            torch=torch.__version__,
            commit=revision,
        )
        for case in cases
    ]


def report(results: Sequence[Row], options: argparse.Namespace, notes: Sequence[str] = ()) -> None:
    """Print the table and append the rows to `--out`; call on rank 0 only."""
    first = results[0]
    ranks = f"{first.hosts} hosts" + (f" x {first.processes} processes" if first.processes > 1 else "")
    share = share_of_rate(first.throughput, first.rate)
    link = "" if first.throughput is None else f", a raw TCP stream carries {first.throughput / 1e6:.1f} MB/s"
    link += "" if share is None else f" ({100 * share:.1f} % of the rate)"
    table = Table(
        title=f"{first.benchmark}: {first.size}, {ranks} at {first.rate}{link}; "
        f"{first.threads} thread(s) a rank on {first.cores} cores",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    times = ("median s", "min..max", "x baseline", "limit s", "waited s")
    for heading in (*times, "MB sent", "MB at nic", "error", "same bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        table.add_row(
            row.case,
            _time(row.seconds_median),
            f"{_time(min(row.seconds))}..{_time(max(row.seconds))}",
            f"{row.ratio:.3f}",
            _time(row.limit_seconds),
            _time(row.waited_seconds),
            shown(row.bytes_sent, "{:.2f}", 1e-6),
            shown(row.bytes_at_interface, "{:.2f}", 1e-6),
            shown(row.error, "{:.1e}"),
            "yes" if row.ranks_identical else "NO",
        )
    console = Console(width=160)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    write(results, options.out)


def write(results: Sequence[Any], out: Path | None) -> None:
    """Append one JSON line a row, if there is a file to append to."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as lines:
        for row in results:
            lines.write(json.dumps(asdict(row)) + "\n")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.{3 if seconds >= 1 else 4 if seconds >= 0.01 else 5}f}"


def shown(value: float | None, form: str, scale: float = 1.0) -> str:
    """Formatted, or - for what was not measured."""
    return "-" if value is None else form.format(value * scale)


def interface_bytes() -> int | None:
    """Bytes this host has sent, as its kernel counts them; None on loopback, which all ranks share."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counters = Path("/proc/self/net/dev")
    if name == "lo" or not counters.exists():
        return None
    for line in counters.read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == name:
            return int(numbers.split()[8])
    return None


def commit() -> str:
    """The commit that was checked out when the run began, marked if files were changed since, other than results."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]

    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "HEAD") or "unknown"
    written = (":(top,exclude)benchmarks/results", ":(top,exclude)docs")  # by measuring and by publishing
    return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written) else head

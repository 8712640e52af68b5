"""Run interleaved cases on every host, take the slowest rank's time, print a table beside the limit, append JSON rows.

A benchmark started plainly makes its own lab; started by torchrun (or anything else that sets RANK) it measures the
network it finds itself on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks.cells import CELLS, told
from benchmarks.lab import Lab, LabError, Link, bits_per_second, exit_on_sigterm
from benchmarks.rows import Row, append

T = TypeVar("T")
COMMIT = "RINGSTRATEGY_BENCH_COMMIT"  # as it was when the driver started
TIMEOUT = timedelta(minutes=10)  # then a collective gives up
_THROUGHPUT = "RINGSTRATEGY_BENCH_THROUGHPUT"  # bytes a second of the raw TCP stream, handed from driver to workers
# By these NCCL takes its ranks on one GPU for ranks of several hosts, if each has an NCCL_HOSTID of its own too.
TWO_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"), "0"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_NO_CASES = "none"  # only those that nobody can leave out
_WRITTEN = r"(?<=<!-- python -m benchmarks {} -->\n).*?(?=<!-- end -->)"
_TRIES = 3  # a second in which the machine was busy with something else is no reason to give up


@dataclass
class Case:
    """One way of doing the measured work, and what it gave: for one step, and lists have one entry a counted round."""

    name: str
    run: Callable[[], object]
    result: Callable[[], Sequence[Tensor]]  # what must have the same bits on every rank
    prepare: Callable[[], object] = lambda: None  # before each run, not timed
    bytes_sent: Callable[[], int | None] = lambda: None  # counted at the transport so far; None: nobody counts
    waited: Callable[[], float | None] = lambda: None  # seconds of `Stats.exposed_seconds` so far; None: nobody counts
    steps: int = 1  # how many steps a run is
    limit_seconds: float | None = None  # no run can be faster than this
    seconds: list[float] = field(default_factory=list)  # the slowest rank's
    waits: list[float] = field(default_factory=list)  # of the rank that waited longest; empty: nobody counts
    sent: int | None = None  # in the last run, the rank that sent most
    at_interface: int | None = None  # as the kernel counts it, headers included, of the host that sent most
    error: float | None = None
    identical: bool = True  # the result's bits on all ranks

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.seconds)

    @property
    def waited_seconds(self) -> float | None:
        """Of a step, the median; None: nobody counts."""
        return statistics.median(self.waits) if self.waits else None

    def faster(self, than: Case) -> float:
        """How many times as fast as another: the median over the rounds."""
        return statistics.median(other / own for other, own in zip(than.seconds, self.seconds, strict=True))


def arguments(
    name: str, description: str | None, *, rounds: int | None = 5, warmup: int = 1, cases: bool = True
) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take; without `rounds` each case runs once; `cases`: one may choose some."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="counted rounds; each runs every case once")
        parser.add_argument("--warmup", type=int, default=warmup, help="rounds that are not counted")
    if cases:
        known = "cases whose name contains one of these, comma-separated; =ring: that one; none: but the baseline"
        parser.add_argument("--cases", help=known)
    parser.add_argument("--out", type=Path, help="append one JSON row a case to this file")
    return parser


def over_hosts(name: str, description: str | None, **how: Any) -> argparse.ArgumentParser:
    """Also with what every benchmark over hosts takes; `how` as of `arguments`."""
    parser = arguments(name, description, **how)
    hosts = "or several, comma-separated, one lab after the other"
    parser.add_argument("--hosts", type=_counts, default=[4], help=hosts)
    parser.add_argument("--processes", type=int, default=1, help="ranks a host; between them nothing throttles")
    parser.add_argument("--rate", default="1gbit", help="100mbit, 1gbit, ..., none (no throttle), loopback (no root)")
    return parser


def _counts(text: str) -> list[int]:
    """Numbers, comma-separated."""
    return [int(part) for part in text.split(",")]


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """What `device_of` and `over` read."""
    shared = "compute on this machine's GPU, which all ranks share, and exchange over this backend; default: CPUs, gloo"
    parser.add_argument("--gpu", choices=["gloo", "nccl"], help=shared)


def run(
    parser: argparse.ArgumentParser,
    given: Sequence[str],
    worker: Callable[[argparse.Namespace], None],
    check: Callable[[argparse.Namespace], object] = lambda options: None,
) -> None:
    """Be the driver that makes a lab and starts this command on each host of it, or be one of those workers.

    `check` raises a ValueError with words for the user if the options make no sense.
    """
    options = parser.parse_args(given)
    with refusing(parser):
        check(options)
    if getattr(options, "gpu", None) is not None and not torch.cuda.is_available():
        sys.exit("--gpu needs a GPU, and torch sees none here")
    if "RANK" in os.environ:
        _work(options, worker)
        return
    exit_on_sigterm()
    with refusing(parser):
        for hosts in options.hosts:
            _in_lab(Lab(hosts, options.rate, processes=options.processes), [parser.prog.split()[-1], *given])


@contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Errors that users can mend end the program with their text."""
    try:
        yield
    except (LabError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _in_lab(made: Lab, command: Sequence[str]) -> None:
    """See that the lab's throttle holds, and run a benchmark with its arguments on each rank of it."""
    with made as lab:
        told = {COMMIT: commit(), **TWO_HOSTS, "NCCL_SOCKET_IFNAME": lab.interface}
        if lab.bits_per_second is not None and lab.hosts > 1:
            told[_THROUGHPUT] = repr(check_throttle(lambda: next(lab.links())))
        for rank in range(lab.world_size):
            lab.popen(rank, [sys.executable, "-m", "benchmarks", *command], {**told, "NCCL_HOSTID": f"host{rank}"})
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


def _work(options: argparse.Namespace, worker: Callable[[argparse.Namespace], None]) -> None:
    ranks, options.processes = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options.hosts = ranks // options.processes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if device_of(options).type == "cuda":
        torch.cuda.set_device(device_of(options))
    dist.init_process_group(over(options), timeout=TIMEOUT)
    try:
        worker(options)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def over(options: argparse.Namespace) -> str:
    """The backend of torch.distributed: gloo, on GPUs (`--gpu`) also NCCL."""
    return "cpu:gloo,cuda:nccl" if getattr(options, "gpu", None) == "nccl" else "gloo"


def device_of(options: argparse.Namespace) -> torch.device:
    """Where a rank computes: on the CPU, with `--gpu` on the one GPU that all share."""
    return torch.device("cpu" if getattr(options, "gpu", None) is None else "cuda:0")


def name_of(device: torch.device) -> str:
    """As a row says it."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def throughput() -> float | None:
    """Bytes a second that a raw TCP stream carried before this run; None where nobody measured it."""
    return float(os.environ[_THROUGHPUT]) if _THROUGHPUT in os.environ else None


def wire_seconds(nbytes: float) -> float | None:
    """The time `nbytes` need to leave a host; None where nothing throttles, or nobody knows."""
    link = throughput()
    return None if link is None else nbytes / link


def wanted(name: str, cases: str) -> bool:
    """Whether a user who gives these `--cases` asks for this one."""
    return any(part[1:] == name if part.startswith("=") else part in name for part in cases.split(","))


def chosen(names: Iterable[str], cases: str | None) -> list[str]:
    """Those that the user asked for. A ValueError if a part of `--cases` means none of them, other than `none`."""
    known = list(names)
    if cases is None:
        return known
    if cases == _NO_CASES:
        return []
    for part in cases.split(","):
        if not any(wanted(name, part) for name in known):
            raise ValueError(f"--cases: {part!r} is in no case's name; they are {', '.join(known)}")
    return [name for name in known if wanted(name, cases)]


def turns(cases: Sequence[T], rounds: int, warmup: int) -> Iterator[tuple[T, bool]]:
    """Every case once a round, in rotated order; beside it, whether its round counts."""
    for round_ in range(warmup + rounds):
        for place in range(len(cases)):
            yield cases[(place + round_) % len(cases)], round_ >= warmup


def interleave(cases: Sequence[Case], rounds: int, warmup: int) -> None:
    """Run every case once a round, a barrier before each; the slowest rank's time counts."""
    for case, counts in turns(cases, rounds, warmup):
        case.prepare()
        before = case.bytes_sent(), case.waited(), interface_bytes()
        dist.barrier()
        _idle()
        start = time.perf_counter()
        case.run()
        _idle()
        slowest = max_over_ranks(time.perf_counter() - start)  # and by now nothing is left in any queue
        after = case.bytes_sent(), case.waited(), interface_bytes()
        sent, waited, counted = map(_more, after, before)
        if counts:
            case.seconds.append(slowest / case.steps)
            case.sent = None if sent is None else round(sent / case.steps)
            case.at_interface = None if counted is None else round(counted / case.steps)
            if waited is not None:
                case.waits.append(waited / case.steps)


def _idle() -> None:
    """Wait for what is queued on the GPU, if one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _more(after: float | None, before: float | None) -> float | None:
    """By how much a count grew on the rank where it grew most; None where nobody counts, on all ranks alike."""
    return None if after is None or before is None else max_over_ranks(after - before)


def max_over_ranks(value: float) -> float:
    """The largest of the ranks' values, on every rank."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def of_all_ranks(mine: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order, on every rank; all have the same size."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return everyone


def identical_on_all_ranks(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have the same bits on every rank."""
    mine = digest(tensors)
    return all(torch.equal(mine, theirs) for theirs in of_all_ranks(mine))


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Of all their bits: 32 bytes."""
    hashed = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in fp64."""
    return float(torch.linalg.vector_norm(value.double() - truth) / torch.linalg.vector_norm(truth))


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What each row says of its run."""
    return {
        "hosts": options.hosts,
        "processes": options.processes,
        "rate": options.rate,
        "throughput": throughput(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        **made_with(name_of(device_of(options))),
    }


def made_with(device: str = "cpu") -> dict[str, Any]:
    """What each row says of the software, and of the device that it was measured on."""
    return {"device": device, "torch": torch.__version__, "commit": commit()}


def report(
    benchmark: str,
    size: str,
    cases: Sequence[Case],
    options: argparse.Namespace,
    notes: Iterable[str] = (),
    more: Callable[[Case], dict[str, Any]] = lambda case: {},
) -> None:
    """Print the table and append a row a case to `--out`; the first case is the baseline. Call it on rank 0 only.

    `more` gives fields of a case's row beside those that all have.
    """
    baseline = cases[0]
    rows = [
        Row(
            benchmark=benchmark,
            case=case.name,
            baseline=baseline.name,
            seconds_median=case.median,
            seconds=case.seconds,
            ratio=case.faster(baseline),
            bytes_sent=case.sent,
            bytes_at_interface=case.at_interface,
            waited_seconds=case.waited_seconds,
            steps=case.steps,
            error=case.error,
            ranks_identical=case.identical,
            limit_seconds=case.limit_seconds,
            size=size,
            **facts(options),
            **more(case),
        )
        for case in cases
    ]
    publish(f"{benchmark}: {size}, {network(options)}", rows, options.out, notes)


def publish(title: str, rows: Sequence[Row], out: Path | None, notes: Iterable[str] = ()) -> None:
    """Print the rows as a table, with notes below it, and append them to the file, if there is one."""
    headings, body = told(rows, CELLS)
    table = Table(
        *(Column(each, "left" if each == "case" else "right", no_wrap=True) for each in headings), title=title
    )
    for line in body:
        table.add_row(*line)
    console = Console(width=180)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)
    append(rows, out)


def table_on(page: str, name: str) -> str:
    """The table that `python -m benchmarks NAME --write` has written. A ValueError if a page has no place for it."""
    begin, end = _place(page, name)
    return page[begin:end]


def _place(page: str, name: str) -> tuple[int, int]:
    found = re.search(_WRITTEN.format(name), page, re.S)
    if found is None:
        raise ValueError(f"the page has no line '<!-- python -m benchmarks {name} -->' with '<!-- end -->' after it")
    return found.span()


def show_or_write(table: str, name: str, page: Path | None) -> None:
    """Print a table of Markdown, or write it to its place on a page."""
    if page is None:
        print(table, end="")
    else:
        text = page.read_text()
        begin, end = _place(text, name)
        page.write_text(text[:begin] + table + text[end:])


def network(options: argparse.Namespace) -> str:
    """In words, with what a raw stream carried and how many cores there are."""
    ranks = f"{options.hosts} hosts" + (f" x {options.processes} processes" if options.processes > 1 else "")
    carried, bits = throughput(), bits_per_second(options.rate)
    link = "" if carried is None else f", a raw TCP stream carries {carried / 1e6:.1f} MB/s"
    link += "" if carried is None or bits is None else f" ({800 * carried / bits:.1f} % of the rate)"
    where = "" if getattr(options, "gpu", None) is None else f", all on one GPU over {options.gpu}"
    cores = f"{torch.get_num_threads()} thread(s) a rank on {os.cpu_count()} cores"
    return f"{ranks} at {options.rate}{link}{where}; {cores}"


def interface_bytes() -> int | None:
    """Bytes this host has sent, as its kernel counts them; None on loopback, which all ranks share."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path("/proc/self/net/dev")
    if name == "lo" or not counter.exists():
        return None
    lines = (line.partition(":") for line in counter.read_text().splitlines())
    return next((int(numbers.split()[8]) for interface, _, numbers in lines if interface.strip() == name), None)


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

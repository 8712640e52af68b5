"""One row schema for all measurements: a row is a line of JSON, and every row that was ever published can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ALONE = "compute alone"  # how the cases begin whose ranks only compute
CAMPAIGN = "campaign.json"  # beside the rows: of each step its command, commit, date, processor and seconds


@dataclass(kw_only=True)
class Row:
    """What one case gave in one run. Seconds, bytes and values are of one step and of the slowest or busiest rank.

    The first block is common to all; a field that a benchmark does not measure keeps its default and is not written.
    """

    benchmark: str
    device: str
    torch: str
    commit: str  # of the code, with "-dirty" where files had been changed
    case: str = ""
    baseline: str = ""  # the case that `ratio` is beside
    size: str = ""  # the tensor or the model, in words
    hosts: int = 1
    processes: int = 1  # ranks a host
    rate: str = "none"  # of each host's link, both ways
    throughput: float | None = None  # bytes a second of one raw TCP stream on the same links, before the run
    threads: int | None = None  # of torch, a rank
    cores: int | None = None
    python: str | None = None

    seconds: list[float] = field(default_factory=list)  # an entry a round
    seconds_median: float = float("nan")
    ratio: float | None = None  # baseline / case, median over the rounds: 2 is twice as fast
    steps: int = 1  # in a row
    bytes_sent: float | None = None  # counted at the transport
    bytes_at_interface: float | None = None  # counted by the kernel, headers included; None on loopback
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of a rank, the mean; by what for; of older rows
    waited_seconds: float | None = None  # for the exchange
    limit_seconds: float | None = None  # no run can be faster
    error: float | None = None  # relative
    ranks_identical: bool | None = None

    predicted_seconds: float | None = None  # by `ringstrategy-plan`
    deviation: float | None = None  # predicted / measured - 1

    target: float = float("nan")  # held-out loss, nats a byte
    seconds_to_target: float | None = None  # None: missed
    steps_to_target: float | None = None
    best_loss: float | None = None
    ratios: dict[str, float | None] = field(default_factory=dict)  # of seconds to the target, beside each of others
    curve: dict[str, list[Any]] = field(default_factory=dict)  # steps, seconds, losses; None where it diverged
    compute_seconds: float | None = None
    most_steps: int | None = None
    every: int | None = None  # steps from one evaluation to the next
    learning_rate: float | None = None
    optimizer: str = ""  # of each rank
    outer: str = ""  # learning rate/momentum of the outer step
    seed: int = 0

    faults: int | None = None  # of a campaign of faults: how many,
    whole: int | None = None  # how many left a checkpoint from which the run went on bit for bit,
    torn: int | None = None  # how many did not,
    hung: int | None = None  # and after how many a rank that was spared did not end by itself
    orphans: int | None = None  # after how many a process was left
    unnamed: int | None = None  # after how many a rank that was spared did not say what happened
    configurations: int | None = None  # drawn at random: how many trained,
    comparisons: int | None = None  # in how many steps they were compared with the exact ones,
    wrong: int | None = None  # and how many configurations broke a law
    bytes_grown: float | None = None  # resident memory of a rank, a step
    threads_grown: int | None = None  # of a rank, in all these steps
    descriptors_grown: int | None = None  # likewise
    payloads: int | None = None  # messages that a codec was given,
    refused: int | None = None  # and how many of them no codec may read: of a wrong length, or at an odd address
    restart_seconds: dict[str, float] = field(default_factory=dict)  # of a restart, its parts in their order; medians

    chaos: dict[str, float] = field(default_factory=dict)  # of learners that are killed: see `benchmarks.chaos`

    codec: str = ""
    operation: str = ""
    gigabytes_per_second: float = float("nan")  # of float32 values, median
    best: float | None = None  # the fastest round
    share_of_copy: float | None = None
    compression: float | None = None  # bytes of values / bytes of wire
    values: int | None = None
    cpu: str | None = None
    elements: int | None = None
    bytes_moved: int | None = None
    fraction_of_copy: float | None = None
    triton: str | None = None

    host_seconds: float | None = None  # of Python and all that it calls, until all is queued
    device_seconds: float | None = None  # of the device's operations, added up
    graph_seconds: float | None = None  # of the same as a CUDA graph: without launches in between
    launches: int | None = None  # kernels, copies and fills on the device
    waits: list[str] | None = None  # functions in which the host waits for the device


def append(rows: Iterable[Row], path: Path | None) -> None:
    """Add a line a row, if there is a file; fields that have their defaults are left out."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    blank = asdict(Row(benchmark="", device="", torch="", commit=""))
    with path.open("a") as file:
        for row in rows:
            told = {name: value for name, value in asdict(row).items() if value != blank[name] and value == value}
            file.write(json.dumps(told) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file; TypeError if one has a field that no row has."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of the campaign's steps, by key."""
    file = folder / CAMPAIGN
    known: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return known


def campaign(folder: Path) -> Iterator[tuple[dict[str, Any], Row]]:
    """Every row of the campaign, behind what is known of its step; steps by key."""
    for key, made in sorted(steps(folder).items()):
        file = folder / f"{key}.jsonl"
        for row in read(file) if file.exists() else ():
            yield made, row

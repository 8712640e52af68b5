"""One line of a results file: what all benchmarks' rows may say, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Row:
    """Times are of one step, and lists have one entry a counted round or, where it says so, a rank.

    What a benchmark does not measure is None.
    """

    benchmark: str
    device: str
    torch: str
    commit: str
    case: str = ""
    baseline: str = ""
    size: str = ""
    ratio: float | None = None  # median over the rounds of baseline / case, so 2 is twice as fast
    seconds_median: float | None = None
    seconds: list[float] | None = None  # the slowest rank's
    bytes_sent: int | None = None  # by the rank that sent most, counted at the transport
    bytes_at_interface: int | None = None  # by the host that sent most, headers included; None on loopback
    waited_seconds: float | list[float] | None = None  # the training thread waited for the exchange
    steps: int | None = None  # that were taken in a row
    error: float | None = None
    ranks_identical: bool | None = None
    limit_seconds: float | None = None
    hosts: int | None = None
    processes: int | None = None  # ranks a host
    rate: str | None = None
    throughput: float | None = None  # bytes a second of one raw TCP stream on the same links
    threads: int | None = None
    cores: int | None = None

    # prediction
    predicted_seconds: float | None = None
    deviation: float | None = None  # of the prediction from the measured median, relative

    # time to accuracy: bytes and waiting are of all steps
    target: float | None = None
    seconds_to_target: float | None = None  # None: not reached within `most_steps`
    steps_to_target: float | None = None
    best_loss: float | None = None
    ratios: dict[str, float | None] | None = None  # as `ratio`, to others of the same run
    curve: dict[str, list[Any]] | None = None  # steps, seconds, losses: one entry an evaluation
    compute_seconds: float | None = None  # of a step without any averaging
    most_steps: int | None = None
    every: int | None = None  # steps from one evaluation to the next
    learning_rate: float | None = None
    seed: int | None = None
    python: str | None = None

    # slow rank: lists have one entry a rank, the median over the rounds
    slow_rank: int | None = None
    slowdown: float | None = None  # its compute takes this many times as long
    steps_per_second: list[float] | None = None
    steps_ahead: list[float] | None = None  # of rank 1, slow or not: the most
    steps_ahead_limit: list[int] | None = None  # no rank can be further ahead; None: all go in step
    kept: float | None = None  # the other ranks' steps a second over those of the same case without the slow rank

    # codecs and kernels
    codec: str | None = None
    operation: str | None = None
    gigabytes_per_second: float | None = None
    best: float | None = None
    share_of_copy: float | None = None
    compression: float | None = None
    values: int | None = None
    cpu: str | None = None
    elements: int | None = None
    bytes_moved: int | None = None
    fraction_of_copy: float | None = None
    triton: str | None = None


def append(rows: Iterable[Row], path: Path | None) -> None:
    """One JSON line a row."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lines:
            lines.writelines(json.dumps(asdict(row)) + "\n" for row in rows)

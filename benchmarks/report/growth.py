"""How an all-reduce of fixed bytes grows with the number of hosts: alpha a round, beta a byte, by least squares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.rows import Row

MODEL = (
    "Model: seconds(N) = alpha x rounds(N) + beta x share(N) x bytes, least squares over the sizes. rounds, messages "
    "that must follow each other: 2 (N-1) in an all-reduce, 1 in a mixing. share, how often a rank sends the values: "
    "2 (N-1)/N in an all-reduce, once to each neighbour in a mixing. bytes: of the encoded values. Growth: seconds "
    "from 2 to 8 hosts beside what a rank sends, at the size farthest off; 0 % is as 2 (N-1)/N."
)
HEADINGS = ("alpha us", "beta as Gbit/s", "worst residual", "growth")
BOUND = 0.10  # of growth, to either side
_FIRST, _LAST = 2, 8  # hosts, between which growth is judged
_MIXING = "gossip"  # how the case begins that mixes on a ring graph


@dataclass(frozen=True)
class Fit:
    """The model of one case."""

    alpha: float  # seconds a round
    beta: float  # seconds a byte
    nbytes: float  # of the encoded values
    worst: float  # the largest |measured / model - 1|

    def seconds(self, case: str, hosts: int) -> float:
        """What the model says of so many hosts."""
        return self.alpha * rounds(case, hosts) + self.beta * share(case, hosts) * self.nbytes


def rounds(case: str, hosts: int) -> int:
    """Messages that must follow each other."""
    return 1 if case.startswith(_MIXING) else 2 * (hosts - 1)


def share(case: str, hosts: int) -> float:
    """How often a rank sends the values."""
    return min(2, hosts - 1) if case.startswith(_MIXING) else 2 * (hosts - 1) / hosts


def fit(case: str, rows: Sequence[Row]) -> Fit:
    """Of rows of at least three sizes."""
    assert len({row.hosts for row in rows}) > 2
    nbytes = statistics.median(encoded_bytes(row) for row in rows)
    measured = np.array([row.seconds_median for row in rows])
    terms = np.array([[rounds(case, row.hosts), share(case, row.hosts) * nbytes] for row in rows])
    scale = terms.max(axis=0)  # a handful of rounds beside millions of bytes
    alpha, beta = (np.linalg.lstsq(terms / scale, measured, rcond=None)[0] / scale).tolist()
    model = terms @ np.array([alpha, beta])
    return Fit(alpha, beta, nbytes, float(np.abs(measured / model - 1).max()))


def growth(case: str, rows: Iterable[Row]) -> float | None:
    """Seconds beside what the bytes grow by, at the size farthest off: 1.1 is 10 % more. None without both ends."""
    seconds = {row.hosts: row.seconds_median for row in rows}
    if not {_FIRST, _LAST} <= seconds.keys():
        return None
    found = [
        seconds[hosts] / seconds[_FIRST] / (share(case, hosts) / share(case, _FIRST))
        for hosts in seconds
        if _FIRST < hosts <= _LAST
    ]
    return max(found, key=lambda grown: abs(grown - 1))


def encoded_bytes(row: Row) -> float:
    """What the encoded values take: counted where we send, of gloo the values themselves."""
    if row.bytes_sent is None:
        return float(row.size.split()[0]) * 2**20
    return row.bytes_sent / share(row.case, row.hosts)


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each case, by rising number of hosts."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.hosts):
        found.setdefault(row.case, []).append(row)
    return found


def cells(case: str, rows: Sequence[Row]) -> list[str]:
    """What stands below `HEADINGS`."""
    if len({row.hosts for row in rows}) < 3:
        return ["-"] * len(HEADINGS)
    model, grown = fit(case, rows), growth(case, rows)
    growing = "-" if grown is None else f"{100 * (grown - 1):+.1f} %"
    return [f"{1e6 * model.alpha:.0f}", f"{8e-9 / model.beta:.4f}", f"{100 * model.worst:.1f} %", growing]

"""Measurements of the machines, kept for the next training as long as they hold on all ranks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringstrategy.algorithms.auto.candidates import brief
from ringstrategy.codecs.base import Codec
from ringstrategy.cost.model import Machines
from ringstrategy.cost.probe import measure
from ringstrategy.transport.agree import all_gather_floats
from ringstrategy.transport.base import Peers


class Measured(NamedTuple):
    """The figures, and by what they were measured."""

    device: str  # its type
    transport: type[Peers]
    machines: Machines

    def holds(self, peers: Peers, codecs: Sequence[tuple[Codec, bool]], device: torch.device) -> bool:
        """Was it made on the same hosts, by the same means, of the same codecs?"""
        same = (self.device, self.transport, self.machines.hosts) == (device.type, type(peers), peers.hosts)
        return same and self.machines.codecs.keys() == set(codecs)

    @property
    def digest(self) -> float:
        """Of the figures; not 0."""
        return 1.0 + int.from_bytes(hashlib.sha256(repr(self.machines).encode()).digest()[:6], "little")


def measure_unless_kept(
    kept: Measured | None, peers: Peers, codecs: Sequence[tuple[Codec, bool]], device: torch.device, largest: int
) -> tuple[Measured, str]:
    """`kept` if all ranks still have the same figures and these hold, else new ones; and which, in words.

    Every rank calls it. One decision and one size of messages for all: a rank that went on alone would leave the others
    waiting for its messages.

    Args:
        kept: from an earlier training, if there was one.
        peers: who exchanges.
        codecs: without or with feedback.
        device: where gradients live.
        largest: bytes of this rank's largest exchange.
    """
    if kept is not None and not kept.holds(peers, codecs, device):
        kept = None
    everyone = all_gather_floats(peers, [float(largest), 0.0 if kept is None else kept.digest])
    longest = max(row[0] for row in everyone)
    if kept is not None and longest <= kept.machines.longest and all(row[1] == kept.digest for row in everyone):
        return kept, "goes by what it measured before"
    begin = time.perf_counter()
    measured = Measured(device.type, type(peers), measure(peers, codecs, device, longest))
    return measured, f"measured for {time.perf_counter() - begin:.2f} s"


def machines_in_words(machines: Machines) -> str:
    """The figures that matter."""
    hosts = len(set(machines.hosts))
    link = machines.across if hosts > 1 else machines.inside
    where = f"{hosts} hosts" if hosts > 1 else "one host"
    rate = f"{1e-6 / link.beta:.1f} MB/s"
    if machines.longest < math.inf:
        rate += f" in messages of {1e-3 * machines.longest:.1f} kB"
    codecs = [
        f"{brief(codec)} {4e-9 / cost.encode.per_value:.1f} GB/s"
        for (codec, _), cost in machines.codecs.items()
        if not codec.lossless and cost.encode.per_value > 0
    ]
    return ", ".join([f"{len(machines.hosts)} ranks on {where}", f"latency {1e6 * link.alpha:.0f} us", rate, *codecs])

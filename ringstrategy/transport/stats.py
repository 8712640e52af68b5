"""Counters of gradient traffic, as seen where bytes are handed to the transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

_counting = threading.Lock()  # over NCCL, control messages are counted in another thread than gradients


def byte_count(count: float | None, digits: int = 4) -> str:
    """In kB, MB, GB (powers of 1000, as network rates are), or - for what cannot be counted."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.{digits}g} {unit}"
        count /= 1000
    return f"{count:.{digits}g} TB"


@dataclass
class Stats:
    """Totals of one rank since its strategy was built.

    Attributes:
        bytes_sent: bytes that training handed to the transport, control messages included; None once a collective was
            used whose bytes cannot be counted (`Native`).
        bytes_received: likewise.
        values_averaged: gradient elements averaged.
        exposed_seconds: the training thread (on a GPU: its stream) waited this long for exchanges; None behind doors
            where torch waits (`ddp_hook`, process groups).
        communication_seconds: exchanges took this long, hidden or not, waiting for slower ranks included.
        steps: steps of optimizers, those that a loss scaler skipped included, with any number of processes; None where
            nobody knows of them (`ddp_hook`, process groups, FSDP2).
        exchanges: backward passes whose gradients were averaged; with gossip: mixings; with `LocalSGD`: exchanges of a
            fragment; of a process group: encoded collectives; with `fsdp`: reduce-scatters.
        steps_skipped: exchanges whose gradients were dropped (`AllReduce(on_nonfinite="skip")`).
        probe_bytes_sent: bytes that `ring_auto` handed to the transport to agree on its choice, and over NCCL what was
            exchanged before the first step, so that no step connects or compiles.
        probe_bytes_received: likewise.
        probe_seconds: training waited this long for that.
    """

    bytes_sent: int | None = 0
    bytes_received: int | None = 0
    values_averaged: int = 0
    exposed_seconds: float | None = 0.0
    communication_seconds: float = 0.0
    steps: int | None = 0
    exchanges: int = 0
    steps_skipped: int = 0
    probe_bytes_sent: int = 0
    probe_bytes_received: int = 0
    probe_seconds: float = 0.0

    probing = False  # no field: it is no total

    def count(self, sent: int, received: int) -> None:
        """Add bytes handed to the transport: to the probe's while it probes, else to training's."""
        with _counting:
            if self.probing:
                self.probe_bytes_sent += sent
                self.probe_bytes_received += received
            elif self.bytes_sent is not None and self.bytes_received is not None:
                self.bytes_sent += sent
                self.bytes_received += received

    def since(self, before: Stats) -> Stats:
        """What came after these."""
        pairs = {field.name: (getattr(self, field.name), getattr(before, field.name)) for field in fields(self)}
        more: dict[str, Any] = {name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()}
        return Stats(**more)

    def summary(self, values: float | None = None) -> str:
        """In words: "sent 900 kB in 40 steps, 22.5 kB a step; training waited 0.3 s for exchanges of 2.1 s".

        Args:
            values: with it, also the share of the bytes that an all-reduce of so many values in float32 sends.
        """
        if self.bytes_sent is None:
            sent = "sent bytes that the backend does not count"
        else:
            share = f", {self.bytes_sent / (4 * values):.2g} of those of float32" if values else ""
            each = (
                f" in {self.steps:,} steps, {byte_count(self.bytes_sent / self.steps, 3)} a step" if self.steps else ""
            )
            sent = f"sent {byte_count(self.bytes_sent, 3)}{each}{share}"
        if self.exposed_seconds is None:
            return sent
        return (
            f"{sent}; training waited {self.exposed_seconds:.2g} s for exchanges of {self.communication_seconds:.2g} s"
        )

    def step(self) -> None:
        """An optimizer has stepped."""
        if self.steps is not None:
            self.steps += 1

    def wait(self, seconds: float) -> None:
        """The training thread has waited for an exchange; what a probe waits for is counted with the probe."""
        if self.exposed_seconds is not None and not self.probing:
            self.exposed_seconds += seconds

    def uncountable(self) -> None:
        """A collective ran whose bytes cannot be counted: report None rather than a wrong number."""
        with _counting:
            self.bytes_sent = self.bytes_received = None

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Within, traffic counts as measurement, not training. No training exchange may be in flight."""
        begin, outer, self.probing = time.perf_counter(), self.probing, True
        try:
            yield
        finally:
            self.probing = outer
            if not outer:
                self.probe_seconds += time.perf_counter() - begin

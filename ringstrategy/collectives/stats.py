"""Counters of gradient traffic, as seen where bytes are handed to the transport."""

from __future__ import annotations

import threading
from dataclasses import dataclass

_counting = threading.Lock()  # over NCCL, control messages are counted in another thread than gradients


@dataclass
class Stats:
    """Totals of one rank since its strategy was built.

    Attributes:
        bytes_sent: bytes handed to the transport, control messages and what `ring_auto` measures with included; None
            once a collective was used whose bytes cannot be counted (`Native`).
        bytes_received: likewise.
        values_averaged: gradient elements averaged.
        exposed_seconds: the training thread (on a GPU: its stream) waited this long for the exchange.
        communication_seconds: exchanges took this long, hidden or not, waiting for slower ranks included.
        steps: backward passes whose gradients were averaged.
    """

    bytes_sent: int | None = 0
    bytes_received: int | None = 0
    values_averaged: int = 0
    exposed_seconds: float = 0.0
    communication_seconds: float = 0.0
    steps: int = 0

    def count(self, sent: int, received: int) -> None:
        """Add bytes handed to the transport."""
        with _counting:
            if self.bytes_sent is not None and self.bytes_received is not None:
                self.bytes_sent += sent
                self.bytes_received += received

    def uncountable(self) -> None:
        """A collective ran whose bytes nobody can count: say None rather than a wrong number."""
        self.bytes_sent = self.bytes_received = None

"""How long an interval must be so that ranks hardly wait for exchanges: two trial exchanges measure it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from ringstrategy.transport.agree import all_gather_floats
from ringstrategy.transport.base import Peers

STEPS = 8  # to each of the two exchanges
LONGEST = 500  # interval that is chosen: the longest with which DiLoCo was published
_WAITS = 0.03  # of computing: what waiting may take
_MARGIN = 1.25  # an interval lasts so many times as long as the exchange that hides in it


class Trial:
    """Exchanges every `STEPS` steps, for which ranks wait. The first, also after resuming, is not timed."""

    def __init__(self) -> None:
        self._waited = 0.0  # seconds
        self._began: tuple[int, float, float] | None = None  # turns, second, and how long it had waited

    @contextmanager
    def waiting(self, peers: Peers) -> Generator[None]:
        """Within, the training thread waits for an exchange."""
        if peers.queues:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        yield
        if peers.queues:
            torch.cuda.synchronize()
        self._waited += time.perf_counter() - begin

    def interval(
        self, turns: Sequence[int], fragments: int, overlap: bool | int, peers: Peers
    ) -> tuple[int, str] | None:
        """The interval and a sentence about it, the same on all ranks; None before the second exchange of all groups.

        Args:
            turns: of each group, without the warm-up.
            fragments: of the model.
            overlap: see `LocalSGD`.
            peers: all ranks, which call it at the same time.
        """
        if not turns or turns[0] < STEPS or turns[0] % STEPS:
            return None
        if self._began is None:
            self._began = turns[0], time.perf_counter(), self._waited
            return None
        began_at, began, waited_before = self._began
        if min(turns) < 2 * STEPS or turns[0] == began_at:  # of several optimizers, another one stepped
            return None
        steps, waited = turns[0] - began_at, self._waited - waited_before
        exchange, compute = waited * STEPS / steps, (time.perf_counter() - began - waited) / steps
        measured = all_gather_floats(peers, [exchange, compute])
        slowest, fastest = max(row[0] for row in measured), min(row[1] for row in measured)
        exchanged = slowest / max(fastest, 1e-9)  # in steps
        needed = _MARGIN * exchanged if overlap is True else max(overlap, (exchanged - fragments * overlap) / _WAITS)
        chosen = min(max(math.ceil(needed), fragments), LONGEST)
        return chosen, (
            f"LocalSGD(interval='auto') takes interval={chosen}: an exchange took {slowest:.3g} s and a step "
            f"{fastest:.3g} s"
        )

"""Bring back what processes that Lightning has spawned or forked know, before they end."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.transport.stats import Stats

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Brings(Protocol):
    """What a strategy has that its parent process is to know."""

    algorithm: Algorithm
    stats: Stats
    left_with_children: bool


class StatsLauncher(_MultiProcessingLauncher):
    """Brings what local rank 0 knows back to the process that called `fit`: statistics, and what was chosen."""

    def __init__(self, strategy: Any, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method)
        self._ring: Brings = strategy

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """In the child that has local rank 0."""
        has_residuals = next(self._ring.algorithm.residuals(), None) is not None
        mine = {"ringstrategy_stats": self._ring.stats, "ringstrategy_residuals": has_residuals}
        # as bytes, since Lightning looks for tensors in what is brought back, and refuses frozen dataclasses there
        mine["ringstrategy_outcome"] = pickle.dumps(self._ring.algorithm.outcome())
        return {**super().get_extra_results(trainer), **mine}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """In the parent."""
        self._ring.stats = extra.pop("ringstrategy_stats")
        self._ring.left_with_children = extra.pop("ringstrategy_residuals")
        self._ring.algorithm.take_outcome(pickle.loads(extra.pop("ringstrategy_outcome")))
        super().update_main_process_results(trainer, extra)

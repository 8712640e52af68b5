"""Bring back what processes that Lightning has spawned or forked know, before they end."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class BringingLauncher(_MultiProcessingLauncher):
    """Also hands something from local rank 0 to the process that called `fit`.

    Args:
        strategy: see `_MultiProcessingLauncher`.
        start_method: see there.
        give: called in the process of local rank 0, when it ends; what it returns can be pickled.
        take: called with that in the process that called `fit`.
    """

    def __init__(
        self,
        strategy: Any,
        start_method: Literal["spawn", "fork", "forkserver"],
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._give, self._take = give, take

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """See `_MultiProcessingLauncher`."""
        # as bytes, since Lightning looks for tensors in what is brought back, and refuses frozen dataclasses there
        return {**super().get_extra_results(trainer), "ringstrategy": pickle.dumps(self._give())}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """See `_MultiProcessingLauncher`."""
        self._take(pickle.loads(extra.pop("ringstrategy")))
        super().update_main_process_results(trainer, extra)

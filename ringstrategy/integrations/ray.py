"""Ray Train: `RingStrategy` in the workers of a `TorchTrainer`, which starts them, and starts them again."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.types import _PATH
from torch.distributed.constants import default_pg_timeout

from ringstrategy.algorithms.base import Algorithm
from ringstrategy.extras import CURE
from ringstrategy.integrations.lightning.for_lightning import RingStrategy

try:
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"RayRingStrategy needs {error.name}: {CURE.format('ray')}", name=error.name) from error


class RayRingStrategy(RingStrategy, RayDDPStrategy):  # type: ignore[misc]  # ray has types, and mypy reads none
    """`RingStrategy` for the training function of Ray's `TorchTrainer`; Ray starts the processes and connects them.

    It brings `RayLightningEnvironment`, so leave that out of the plugins of your Trainer. Ray answers the loss of a
    worker: it starts all of them again (`FailureConfig(max_failures=)`).

    Args:
        algorithm: see `RingStrategy`.
        timeout: see `RingStrategy`. Ray's `TorchConfig(timeout_s=)` says how long its own collectives may wait.
        broadcast_buffers: see `RingStrategy`.
        unknown: a TypeError: Ray's `TorchConfig` and `ScalingConfig`, or your Trainer, say all else.
    """

    def __init__(
        self,
        algorithm: Algorithm | str | None = None,
        *,
        timeout: timedelta | None = default_pg_timeout,
        broadcast_buffers: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(
                f"RayRingStrategy does not take {', '.join(sorted(unknown))}: Ray starts and connects the processes: "
                "give the backend to ray.train.torch.TorchConfig, the number of workers to ScalingConfig, what follows "
                "a loss to FailureConfig(max_failures=), and the rest to your Trainer"
            )
        super().__init__(
            algorithm,
            timeout=timeout,
            broadcast_buffers=broadcast_buffers,
            cluster_environment=RayLightningEnvironment(),
        )

    def _path_and_token(self, filepath: _PATH) -> tuple[_PATH, str]:
        """In a folder of this rank: Ray's callback has one for each, and uploads them all into one checkpoint."""
        path, token = super()._path_and_token(filepath)
        return os.path.join(os.path.dirname(os.fspath(filepath)), os.path.basename(os.fspath(path))), token

"""The strategy and the callbacks for `pytorch_lightning`. `ringstrategy` itself has those for `lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringstrategy.integrations.lightning.classes import trainer_classes

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.for_lightning import (
        CommunicationMonitor,
        Decoupled,
        ReplicaCheck,
        RingStrategy,
    )
else:
    globals().update(trainer_classes("pytorch_lightning", "lightning_fabric", __name__))

__all__ = ["CommunicationMonitor", "Decoupled", "ReplicaCheck", "RingStrategy"]

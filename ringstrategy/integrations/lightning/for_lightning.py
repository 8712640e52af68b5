"""The classes for a Trainer of `lightning.pytorch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringstrategy.integrations.lightning.classes import trainer_classes

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.callbacks import CommunicationMonitorMixin as CommunicationMonitor
    from ringstrategy.integrations.lightning.callbacks import ReplicaCheckMixin as ReplicaCheck
    from ringstrategy.integrations.lightning.decoupled import DecoupledMixin as Decoupled
    from ringstrategy.integrations.lightning.strategy import RingStrategyMixin as RingStrategy
else:
    globals().update(trainer_classes("lightning.pytorch", "lightning.fabric", __name__))

__all__ = ["CommunicationMonitor", "Decoupled", "ReplicaCheck", "RingStrategy"]

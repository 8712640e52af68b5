"""The classes for a Fabric of `lightning.fabric`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringstrategy.integrations.lightning.classes import fabric_classes

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.fabric import RingFabricStrategyMixin as RingFabricStrategy
else:
    globals().update(fabric_classes("lightning.fabric", __name__))

__all__ = ["RingFabricStrategy"]

"""The strategy for Fabric of the package `lightning_fabric`. `ringstrategy` itself has that for `lightning.fabric`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringstrategy.integrations.lightning.classes import fabric_classes
from ringstrategy.integrations.lightning.fabric import consensus, finish

if TYPE_CHECKING:
    from ringstrategy.integrations.lightning.for_fabric import RingFabricStrategy
else:
    globals().update(fabric_classes("lightning_fabric", __name__))

__all__ = ["RingFabricStrategy", "consensus", "finish"]

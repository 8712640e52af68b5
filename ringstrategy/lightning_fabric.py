"""The strategy for Fabric of the package `lightning_fabric`. `ringstrategy` itself has that for `lightning.fabric`."""

from ringstrategy.integrations.lightning.fabric import consensus, finish
from ringstrategy.integrations.lightning.for_lightning_fabric import RingFabricStrategy

__all__ = ["RingFabricStrategy", "consensus", "finish"]

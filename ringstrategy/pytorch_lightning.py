"""The strategy and the callbacks for `pytorch_lightning`. `ringstrategy` itself has those for `lightning`."""

from ringstrategy.integrations.lightning.for_pytorch_lightning import CommunicationMonitor, ReplicaCheck, RingStrategy

__all__ = ["CommunicationMonitor", "ReplicaCheck", "RingStrategy"]

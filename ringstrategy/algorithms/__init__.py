"""Floor 3: what is averaged, and when; an algorithm knows nothing of Lightning."""

from ringstrategy.algorithms.allreduce import AllReduce
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gossip import Gossip
from ringstrategy.algorithms.policy import SmallExact
from ringstrategy.algorithms.powersgd import PowerSGD

__all__ = ["Algorithm", "AllReduce", "Gossip", "PowerSGD", "SmallExact"]

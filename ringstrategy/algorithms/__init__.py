"""Floor 3: what is averaged, and when; an algorithm knows nothing of Lightning."""

from ringstrategy.algorithms.allreduce import AllReduce
from ringstrategy.algorithms.auto import Auto
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.choco import Choco
from ringstrategy.algorithms.gossip import Gossip
from ringstrategy.algorithms.policy import SmallExact
from ringstrategy.algorithms.powersgd import PowerSGD
from ringstrategy.algorithms.push_sum import PushSum

__all__ = ["Algorithm", "AllReduce", "Auto", "Choco", "Gossip", "PowerSGD", "PushSum", "SmallExact"]

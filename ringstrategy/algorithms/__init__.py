"""Algorithms decide what is averaged (gradients or parameters), and when. They know nothing of Lightning."""

from ringstrategy.algorithms.auto import Auto
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.algorithms.gradients.powersgd import PowerSGD
from ringstrategy.algorithms.parameters.choco import Choco
from ringstrategy.algorithms.parameters.gossip import Gossip
from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.algorithms.parameters.push_sum import PushSum
from ringstrategy.algorithms.policy import SmallExact

__all__ = [
    "Algorithm",
    "AllReduce",
    "Auto",
    "Choco",
    "Gossip",
    "LocalSGD",
    "Nesterov",
    "PowerSGD",
    "PushSum",
    "SmallExact",
]

"""Bandwidth-frugal data-parallel training for PyTorch Lightning.

Importing registers the names: `import ringstrategy`, then `Trainer(strategy="ring")`.
"""

from ringstrategy._version import __version__
from ringstrategy.algorithms import Algorithm, AllReduce, Auto, Choco, Gossip, PowerSGD, PushSum, SmallExact
from ringstrategy.callbacks import CommunicationMonitor
from ringstrategy.codecs import (
    BlockFloat8,
    BlockInt,
    Cast,
    Codec,
    Gaussian,
    Identity,
    RandomK,
    Rotated,
    Sign,
    TopK,
)
from ringstrategy.collectives import Collective, Direct, Hierarchical, Native, Peers, Ring, Stats
from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.registry import register
from ringstrategy.strategy import RingStrategy

__all__ = [
    "Algorithm",
    "AllReduce",
    "Auto",
    "BlockFloat8",
    "BlockInt",
    "Cast",
    "Choco",
    "Codec",
    "Collective",
    "CommunicationMonitor",
    "Direct",
    "Gaussian",
    "Gossip",
    "Hierarchical",
    "Identity",
    "Native",
    "PeerLostError",
    "Peers",
    "PlanMismatchError",
    "PowerSGD",
    "PushSum",
    "RandomK",
    "Ring",
    "RingStrategy",
    "Rotated",
    "Sign",
    "SmallExact",
    "Stats",
    "TopK",
    "__version__",
]

register()
del register

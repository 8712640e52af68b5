"""Bandwidth-frugal data-parallel training for PyTorch Lightning.

Importing registers the names: `import ringstrategy`, then `Trainer(strategy="ring")`.
"""

from ringstrategy._version import __version__
from ringstrategy.algorithms import Algorithm, AllReduce
from ringstrategy.callbacks import CommunicationMonitor
from ringstrategy.codecs import Cast, Codec, Identity
from ringstrategy.collectives import Collective, Direct, Native, Peers, Ring, Stats
from ringstrategy.errors import PeerLostError, PlanMismatchError
from ringstrategy.registry import register
from ringstrategy.strategy import RingStrategy

__all__ = [
    "Algorithm",
    "AllReduce",
    "Cast",
    "Codec",
    "Collective",
    "CommunicationMonitor",
    "Direct",
    "Identity",
    "Native",
    "PeerLostError",
    "Peers",
    "PlanMismatchError",
    "Ring",
    "RingStrategy",
    "Stats",
    "__version__",
]

register()
del register

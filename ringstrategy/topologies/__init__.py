"""Who averages with whom: pure functions of rank, size and step."""

from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.complete import Complete
from ringstrategy.topologies.exponential import Exponential, OnePeerExponential
from ringstrategy.topologies.given import FromGraph, FromMatrix
from ringstrategy.topologies.hierarchical import Hierarchical
from ringstrategy.topologies.hypercube import Hypercube
from ringstrategy.topologies.matching import RandomMatching
from ringstrategy.topologies.ring import RingGraph
from ringstrategy.topologies.star import Star
from ringstrategy.topologies.torus import Torus

__all__ = [
    "Complete",
    "Exponential",
    "FromGraph",
    "FromMatrix",
    "Hierarchical",
    "Hypercube",
    "OnePeerExponential",
    "RandomMatching",
    "RingGraph",
    "Star",
    "Topology",
    "Torus",
]

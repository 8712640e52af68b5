"""Who averages with whom: pure functions of rank, size and step."""

from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.exponential import Exponential, OnePeerExponential
from ringstrategy.topologies.given import FromGraph, FromMatrix
from ringstrategy.topologies.graphs import Complete, Hypercube, RingGraph, Star, Torus
from ringstrategy.topologies.hierarchical import Hierarchical
from ringstrategy.topologies.matching import RandomMatching

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

"""The topologies that `simulation` compares."""

from __future__ import annotations

from ringstrategy.topologies import (
    Complete,
    Exponential,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RingGraph,
    Star,
    Topology,
    Torus,
)

SHOWN: list[Topology] = [
    RingGraph(),
    Torus(),
    Hypercube(),
    Exponential(),
    OnePeerExponential(),
    RandomMatching(),
    Hierarchical(2),
    Star(),
    Complete(),
]

"""Average with neighbours through any codec (CHOCO-SGD, Koloskova et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.averager import Runtime
from ringstrategy.algorithms.parameters.decentralized import Decentralized, Mixing
from ringstrategy.algorithms.parameters.exchange import Piece
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.block_int import BlockInt
from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.graphs import RingGraph


class Choco(Decentralized):
    """Ranks keep copies of their neighbours' parameters, and send by how much their own differ from what others hold.

    Each mixing: q_i = codec(x_i - copy_i); copy_j += q_j, on j and on all its neighbours alike, bit for bit; x_i
    becomes x_i + gain times the sum over its neighbours j of W[i, j] (copy_j - copy_i). What a codec loses stays in
    x_i - copy_i and is sent later. Copies begin as the exact mean of all ranks, once at the first step.

    Memory: one copy of the parameters in the dtype of sums for each neighbour, and one of this rank's own.

    Args:
        topology: who mixes with whom; static and symmetric, since copies must follow every change.
        codec: any.
        gain: how far to go towards the copies' mean (the paper's gamma), 0 < gain <= 1. With `BlockInt` and `Gaussian`
            of 2 bits and more, rotated or not, 1 converges; a coarser codec needs less, `TopK` far less,
            or ranks drift apart: look at the consensus distance.
        interval: see `Gossip`.
        overlap: see `Gossip`.
        consensus: see `Decentralized`.
        local: see `Synchronous`.
        unit: see `Gossip`.
        uneven: see `Decentralized`.
    """

    def __init__(  # noqa: PLR0913
        self,
        topology: Topology | None = None,
        codec: Codec | None = None,
        gain: float = 1.0,
        interval: int = 1,
        overlap: bool | int = True,
        consensus: bool = True,
        local: Local | None = None,
        unit: Unit = "step",
        uneven: str = "error",
    ) -> None:
        topology = RingGraph() if topology is None else topology
        codec = BlockInt(8) if codec is None else codec
        mixing, schedule = Copies(topology, codec, gain), Schedule(interval, overlap, unit)
        super().__init__(mixing, schedule, consensus, local, uneven)
        if not (topology.static and topology.symmetric and topology.doubly_stochastic):
            raise ValueError(
                f"Choco keeps copies of its neighbours, so its topology must be one symmetric matrix for all steps, "
                f"and {topology} is not: take RingGraph(), Torus(), Hypercube() or FromGraph(edges)"
            )
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 < gain <= 1:
            raise ValueError(f"gain is a number, 0 < gain <= 1, got {gain!r}")
        self.gain = float(gain)


class Copies(Mixing):
    """What others do not know yet travels; copies of parameters, which follow it alike on all ranks, are mixed."""

    algorithm = "Choco"

    def begin(self, group: Group, runtime: Runtime) -> None:
        """All copies are the mean of all ranks."""
        neighbours = runtime.exchange.sources(self.topology, runtime.peers, 0)
        for flat in group.flats:
            mean = self.mass(flat)
            runtime.exchange.average_(mean, runtime.peers, "for the mean from which copies start")
            for whose in (None, *neighbours):
                flat.memory[_copy(whose)] = mean.clone()

    def seen_dtype(self, values: torch.dtype) -> torch.dtype:
        """That of the copies."""
        return values

    def fill(self, flat: Flat) -> None:
        """What others do not yet know: by how much the parameters differ from this rank's copy."""
        flat.gather_sum(flat.memory[_copy(None)], -1.0)

    def write(self, piece: Piece, wire: Tensor) -> Tensor:
        """It, encoded."""
        own_seed = derive_seed(piece.seed, piece.peers.rank)
        self.codec.hop([], piece.values, wire, seed=piece.seed, own_seed=own_seed, offset=piece.begin)
        return wire

    def read(self, piece: Piece, whose: int | None, wire: Tensor) -> Tensor:
        """The copy, which follows."""
        copy = piece.of(piece.vector.memory[_copy(whose)])
        self.codec.deliver(wire, copy, seed=piece.seed, add=True)
        return copy


def _copy(whose: int | None) -> str:
    return "copy" if whose is None else f"copy of {whose}"

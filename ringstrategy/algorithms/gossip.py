"""Average parameters with neighbours (D-PSGD, Lian et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ringstrategy.algorithms.decentralized import Decentralized, Flat, Group
from ringstrategy.algorithms.local import Local, told
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import cut
from ringstrategy.collectives.peers import Handle, Peers, Waitable
from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.ring import RingGraph

PIECE = 1 << 21  # values sent at once, while those before are added


class Gossip(Decentralized):
    """x_i becomes x_i + sum over its neighbours j of W[i, j] (x_j - x_i), which is row i of W x. See `Decentralized`.

    With a cast, both x_j and x_i in that sum are as they were sent, so that the mean over ranks stays.

    Args:
        topology: who mixes with whom; rows and columns of its matrix sum to 1.
        codec: `Identity()`, or `Cast(...)`: half the bytes. Others would lose more of the parameters than a step adds.
        interval: see `Decentralized`, as for the arguments not named here.
        overlap: see `Decentralized`.
        consensus: see `Decentralized`.
        local: see `Synchronous`.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        codec: Codec | None = None,
        interval: int = 1,
        overlap: bool = True,
        consensus: bool = True,
        local: Local | None = None,
    ) -> None:
        super().__init__(RingGraph() if topology is None else topology, interval, overlap, consensus, local)
        self.codec = Identity() if codec is None else codec
        if not self.topology.doubly_stochastic:
            raise ValueError(
                f"the rows of {self.topology}'s matrix do not sum to 1, so mixing by it would not average: "
                "make them (FromGraph(edges) finds such weights)"
            )
        if not isinstance(self.codec, Identity | Cast):
            raise ValueError(
                f"codec is Identity() or Cast(...), got {codec!r}: parameters sent in fewer bits would never agree"
            )

    def __repr__(self) -> str:
        """The arguments."""
        return (
            f"Gossip(topology={self.topology}, codec={self.codec}, interval={self.interval}, overlap={self.overlap}, "
            f"consensus={self.consensus}, local={told(self.local)})"
        )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See `Decentralized.check_dtype`."""
        self.codec.check(dtype)

    def start(self, group: Group) -> Waitable:
        """See `Decentralized.start`."""
        peers, mixing = self._peers, group.mixings
        assert peers is not None
        for flat in group.flats:
            flat.gather()
        return peers.submit(partial(self._exchange, peers, group, mixing), f"at mixing {mixing}")

    def _exchange(self, peers: Peers, group: Group, mixing: int) -> None:
        row = self.topology.weights(peers.rank, peers.size, mixing)
        weights = {peer: weight for peer, weight in row.items() if peer != peers.rank}
        targets = [
            peer
            for peer in range(peers.size)
            if peer != peers.rank and peers.rank in self.topology.weights(peer, peers.size, mixing)
        ]
        for number, flat in enumerate(group.flats):
            exchange_(flat, peers, self.codec, weights, targets, derive_seed(0, mixing, number, peers.rank))


def exchange_(
    flat: Flat, peers: Peers, codec: Codec, weights: Mapping[int, float], targets: list[int], seed: int
) -> None:
    """Send `flat.values` to `targets`, and fill `flat.correction` from what the ranks in `weights` sent."""
    pieces = cut(0, flat.numel, -(-flat.numel // PIECE), codec.block)
    dtype, device = flat.values.dtype, flat.values.device

    def memory(name: str, k: int, nbytes: int) -> Tensor:
        return peers.scratch(f"gossip.{name}.{k % 2}", nbytes, device)[:nbytes]

    def post(k: int) -> tuple[Tensor, dict[int, Tensor], Handle]:
        begin, end = pieces[k]
        nbytes = codec.nbytes(end - begin, dtype)
        wire = codec.raw(flat.values[begin:end])
        if wire is None:
            wire = memory("leaving", k, nbytes)
            codec.encode(flat.values[begin:end], wire, seed=seed, offset=begin)
        arriving = {peer: memory(f"arriving.{peer}", k, nbytes) for peer in weights}
        return wire, arriving, peers.post(dict.fromkeys(targets, wire), arriving)

    flat.correction.zero_()
    under_way = [post(k) for k in range(min(1, len(pieces)))]
    for k, (begin, end) in enumerate(pieces):
        if k + 1 < len(pieces):
            under_way.append(post(k + 1))
        wire, arriving, handle = under_way.pop(0)
        handle.wait()
        own = flat.values[begin:end]
        if not codec.lossless:
            own = memory("own", 0, own.nbytes).view(dtype)
            codec.decode(wire, own)
        theirs = memory("theirs", 0, own.nbytes).view(dtype)
        for peer, weight in weights.items():
            codec.decode(arriving[peer], theirs)
            correct_(flat.correction[begin:end], own, theirs, weight)


def correct_(correction: Tensor, own: Tensor, theirs: Tensor, weight: float) -> None:
    """correction += weight * (theirs - own), in the dtype of sums. Overwrites `theirs`."""
    difference = theirs.to(correction.dtype)
    difference.sub_(own)
    correction.add_(difference, alpha=weight)

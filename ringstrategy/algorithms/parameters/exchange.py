"""How a rank exchanges values: it mixes them with its neighbours', or takes the mean over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.parameters.group import Vector, row_of
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.collectives.base import Collective, Summand, cut, mean_
from ringstrategy.collectives.by_size import BySize
from ringstrategy.kernels import operations
from ringstrategy.kernels.sample import same, sample
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.agree import all_gather
from ringstrategy.transport.base import Handle, Peers
from ringstrategy.transport.trace import span

PIECE = 1 << 21  # values sent at once, while those before are added
_DIGEST = 8  # bytes


@dataclass(frozen=True)
class Piece:
    """A run [begin, end) of a vector that travels in one message; `seed` is everyone's for this mixing."""

    vector: Vector
    begin: int
    end: int
    peers: Peers
    seed: int

    def of(self, flat: Tensor) -> Tensor:
        """That run of a tensor as long as the vector."""
        return flat[self.begin : self.end]

    @property
    def values(self) -> Tensor:
        """The values to mix."""
        return self.of(self.vector.values)


class Mixed(Protocol):
    """What an exchange with neighbours asks of a `Mixing`, which see."""

    topology: Topology
    codec: Codec
    gain: float

    def write(self, piece: Piece, wire: Tensor) -> Tensor:
        """Encode the values of the piece."""

    def read(self, piece: Piece, whose: int | None, wire: Tensor) -> Tensor:
        """The values that all ranks see in these bytes."""


class Exchange:
    """What an algorithm of parameters does with other ranks; the simulator has another, with all ranks in one process.

    Attributes:
        ranks: whose values lie in the vectors, one after the other.
    """

    ranks = 1

    def sources(self, topology: Topology, peers: Peers, step: int) -> dict[int, float]:
        """The other ranks whose values arrive, and their weights."""
        row = topology.weights(peers.rank, peers.size, step)
        return {peer: weight for peer, weight in row.items() if peer != peers.rank}

    def mix(self, mixing: Mixed, vector: Vector, peers: Peers, step: int, seed: int) -> None:
        """Set the correction to gain times row `rank` of W x - x, where x are the values that all ranks decode.

        As a sum of weight * (theirs - own): what ranks agree about is then not rounded away.
        """
        topology, codec, values = mixing.topology, mixing.codec, vector.values
        weights, row = self.sources(topology, peers, step), topology.weights(peers.rank, peers.size, step)
        surplus = 0.0 if topology.doubly_stochastic else sum(row.values()) - 1
        targets = _targets(topology, peers, step)
        cuts = cut(0, values.numel(), -(-values.numel() // PIECE), codec.block)
        pieces = [Piece(vector, begin, end, peers, seed) for begin, end in cuts]

        def post(k: int) -> tuple[Tensor, dict[int, Tensor], Handle]:
            nbytes = codec.nbytes(len(pieces[k].values), values.dtype)

            def memory(name: str) -> Tensor:
                return peers.scratch(f"gossip.{name}.{k % 2}", nbytes, values.device)[:nbytes]

            with span("encode"):
                wire = mixing.write(pieces[k], memory("leaving"))
            arriving = {peer: memory(f"arriving.{peer}") for peer in weights}
            with span("send"):
                return wire, arriving, peers.post(dict.fromkeys(targets, wire), arriving)

        gains = [mixing.gain * weight for weight in weights.values()]
        under_way = [post(0)]
        for k, piece in enumerate(pieces):
            if k + 1 < len(pieces):
                under_way.append(post(k + 1))
            wire, arriving, handle = under_way.pop(0)
            with span("wait"):
                handle.wait()
            with span("decode and mix"):
                own, correction = mixing.read(piece, None, wire), piece.of(vector.correction)
                theirs = [mixing.read(piece, peer, arrived) for peer, arrived in arriving.items()]
                operations.mix.on(values.device)(own, theirs, gains, correction)
                if surplus:
                    correction.add_(own, alpha=mixing.gain * surplus)

    def connect(self, topology: Topology, peers: Peers, step: int, device: torch.device) -> None:
        """Exchange a byte with the neighbours of `step`: NCCL connects a pair at its first message."""
        sources, targets = self.sources(topology, peers, step), _targets(topology, peers, step)
        arriving = {peer: torch.empty(1, dtype=torch.uint8, device=device) for peer in sources}
        peers.post(dict.fromkeys(targets, torch.zeros(1, dtype=torch.uint8, device=device)), arriving).wait()

    def means_(self, summands: Sequence[Summand], peers: Peers, collective: Collective) -> None:
        """Replace the values of each by their mean over all ranks, with the same bits on all of them.

        In the communication thread. All travel in the same messages, if the collective can do that.

        Args:
            summands: this rank's values, and residuals in the scale of the mean; at least one.
            peers: all ranks.
            collective: the schedule.
        """
        for each in summands:
            each.values.div_(peers.size)
        first = max(summands, key=lambda each: each.codec.nbytes(each.values.numel(), each.values.dtype))
        others = [each for each in summands if each is not first]
        calls = [(first, others)]
        if not collective.carries_extras(peers):
            calls = [(each, []) for each in summands]
        for one, riders in calls:
            mean_(one, peers, collective, riders=riders)

    def common(self, tensors: Sequence[Tensor], peers: Peers, where: str) -> Tensor:
        """All their values in a row, in the dtype of sums: their mean over all ranks, if any differs between ranks.

        The training thread waits.
        """
        row = row_of(tensors)
        if differing(tensors, peers, Digests(), where):
            self.average_(row, peers, where)
        return row

    def average_(self, flat: Tensor, peers: Peers, where: str) -> None:
        """Replace by the mean over all ranks, with the same bits on all of them; the training thread waits."""
        flat /= peers.size
        peers.finish([peers.submit(lambda: mean_(Summand(flat, Identity()), peers, BySize()), where)])

    def from_rank_0(self, row: Tensor, peers: Peers) -> Tensor:
        """Whole numbers of which the mean over ranks is what rank 0 gives for them, exactly."""
        return row * peers.size if peers.rank == 0 else torch.zeros_like(row)


def _targets(topology: Topology, peers: Peers, step: int) -> list[int]:
    """The other ranks that read this one's values."""
    others = (peer for peer in range(peers.size) if peer != peers.rank)
    return [peer for peer in others if peers.rank in topology.weights(peer, peers.size, step)]


class Digests:
    """Digests of tensors. Frozen parameters may be large: theirs are kept until torch or a sample tells of a change."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[int, Tensor, bytes]] = {}

    def of(self, tensor: Tensor) -> bytes:
        """8 bytes."""
        if tensor.requires_grad or not isinstance(tensor, Parameter) or tensor.is_inference():
            return _digest(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        version, seen, digest = self._kept.get(key, (-1, None, b""))
        now = sample(tensor.detach())
        if seen is None or version != tensor._version or not same(seen, now):
            digest = _digest(tensor)
            self._kept[key] = tensor._version, now, digest
        return digest


def differing(tensors: Sequence[Tensor], peers: Peers, digests: Digests, where: str) -> list[Tensor]:
    """The tensors whose bits differ between ranks. All ranks call it with equally many tensors, and wait."""
    if not tensors:
        return []
    mine = torch.frombuffer(bytearray(b"".join(map(digests.of, tensors))), dtype=torch.uint8)
    everyone: list[Tensor] = []
    work = peers.control.submit(lambda: everyone.append(all_gather(peers.control, mine)()), where)
    peers.control.finish([work])
    table = everyone[0].view(-1, len(tensors), _DIGEST)
    equal = (table == table[0]).all(-1).all(0).tolist()
    return [tensor for tensor, is_equal in zip(tensors, equal, strict=True) if not is_equal]


def _digest(tensor: Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=_DIGEST).digest()

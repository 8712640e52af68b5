"""Run the algorithms themselves with many simulated ranks, whose values are the rows of one tensor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.exchange import Exchange, Mixed, Piece
from ringstrategy.algorithms.parameters.group import Vector, row_of
from ringstrategy.algorithms.parameters.local_sgd import LocalSGD
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import Collective, Summand, cut
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.base import Done, Handle, Peers
from ringstrategy.transport.worker import Task

NAME = "all ranks"  # of the parameter; seeds depend on it


class AllInOne(Exchange):
    """Vectors hold the values of all ranks, one after the other; nothing travels, but bytes are counted.

    Sums are those of `Exchange`, in its order and dtype. A codec that draws numbers draws others than real ranks would
    (stochastic rounding); all else is as it would be.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def sources(self, topology: Topology, peers: Peers, step: int) -> dict[int, float]:
        """None: the other ranks hold the same copy of a rank as the rank itself."""
        return {}

    @override
    def mix(self, mixing: Mixed, vector: Vector, peers: Peers, step: int, seed: int) -> None:
        topology, codec, gain = mixing.topology, mixing.codec, mixing.gain
        piece = Piece(vector, 0, vector.values.numel(), peers, seed)
        nbytes = codec.nbytes(piece.end, piece.values.dtype)
        wire = mixing.write(piece, peers.scratch("simulator", nbytes, piece.values.device)[:nbytes])
        seen = mixing.read(piece, None, wire).view(self.ranks, -1).to(vector.correction.dtype)
        correction = vector.correction.zero_().view(self.ranks, -1)
        when = 0 if topology.static else step
        terms = _terms(topology, self.ranks, when)
        for weight, ranks, sources in terms:
            difference = seen[sources].sub_(seen[ranks])
            correction[ranks] = correction[ranks].add_(difference, alpha=gain * weight)
        if not topology.doubly_stochastic:
            correction.addcmul_(seen, _surplus(topology, self.ranks, when).to(seen.dtype), value=gain)
        sent = sum(len(sources) for _, _, sources in terms) * codec.nbytes(seen.shape[1], piece.values.dtype)
        peers.stats.count(sent, sent)

    def means_(self, summands: Sequence[Summand], peers: Peers, collective: Collective) -> None:
        """See `Exchange.means_`: as `Direct` does it, whatever the collective."""
        del collective
        for each in summands:
            self._mean_(each.values, peers, each.codec, each.residual, each.seed)

    def _mean_(self, flat: Tensor, peers: Peers, codec: Codec, residual: Tensor | None, seed: int) -> None:
        ranks, rows = self.ranks, flat.view(self.ranks, -1)
        rows /= ranks
        sent = 2 * (ranks - 1) * codec.nbytes(rows.shape[1], flat.dtype)
        peers.stats.count(sent, sent)
        if codec.lossless:
            if residual is not None:
                flat.add_(residual)
                residual.zero_()
            rows.copy_(rows.double().sum(0).to(rows.dtype).expand_as(rows))
            return
        # each rank owns a part, of which it encodes the sum instead of its own values
        owners = cut(0, rows.shape[1], ranks, codec.block)
        kept = torch.zeros_like(flat) if residual is None else residual
        held = zip(rows, kept.view(ranks, -1), owners, strict=True)
        own = [row[begin:end] + rest[begin:end] for row, rest, (begin, end) in held]
        self._encode(flat, flat, codec, kept, seed)
        for row, rest, (begin, end), part in zip(rows, kept.view(ranks, -1), owners, own, strict=True):
            row[begin:end] = part
            rest[begin:end] = 0
        total = rows.sum(0)
        lost = torch.zeros_like(total)
        self._encode(total, total, codec, lost, derive_seed(seed, ranks))
        for rest, (begin, end) in zip(kept.view(ranks, -1), owners, strict=True):
            rest[begin:end] = lost[begin:end]
        rows.copy_(total.expand_as(rows))

    @staticmethod
    def _encode(values: Tensor, out: Tensor, codec: Codec, residual: Tensor, seed: int) -> None:
        """Write what others decode of values + residual to `out`; the residual becomes what is lost."""
        wire = torch.empty(codec.nbytes(values.numel(), values.dtype), dtype=torch.uint8)
        codec.hop([], values.clone(), wire, residual=residual, lost=residual, seed=seed, own_seed=seed)
        codec.deliver(wire, out, seed=seed)

    @override
    def common(self, tensors: Sequence[Tensor], peers: Peers, where: str) -> Tensor:
        row = row_of(tensors)
        self.average_(row, peers, where)
        return row

    @override
    def average_(self, flat: Tensor, peers: Peers, where: str) -> None:
        rows = flat.view(self.ranks, -1)
        rows.copy_(rows.double().mean(0).to(rows.dtype).expand_as(rows))


@lru_cache(4)
def _terms(topology: Topology, size: int, step: int) -> list[tuple[float, Tensor, Tensor]]:
    """W without its diagonal as (weight, ranks, sources): first the first neighbours of all ranks, then the second."""
    terms: dict[tuple[int, float], list[tuple[int, int]]] = {}
    for rank in range(size):
        row = topology.weights(rank, size, step)
        others = [(source, weight) for source, weight in row.items() if source != rank]
        for place, (source, weight) in enumerate(others):
            terms.setdefault((place, weight), []).append((rank, source))
    result = []
    for (_, weight), pairs in sorted(terms.items(), key=lambda term: term[0][0]):
        ranks, sources = torch.tensor(pairs).unbind(1)
        result.append((weight, ranks, sources))
    return result


@lru_cache(4)
def _surplus(topology: Topology, size: int, step: int) -> Tensor:
    """(size, 1): by how much rows of W miss 1."""
    surplus = [[sum(topology.weights(rank, size, step).values()) - 1] for rank in range(size)]
    return torch.tensor(surplus, dtype=torch.float64)


class _Everyone(Peers):
    """All ranks at once, so that there is nobody to send to."""

    @property
    def control(self) -> Peers:
        """Stands for all ranks, so they always agree."""
        return _Everyone(0, 1)

    def post(self, sends: object, recvs: object) -> Handle:
        """Never."""
        raise NotImplementedError

    def all_reduce_(self, values: Tensor) -> None:
        """Never."""
        raise NotImplementedError

    def submit(self, task: Task, where: str) -> Done:
        """Now."""
        task()
        return Done()

    def close(self) -> None:
        """Nothing is open."""


class Simulation:
    """An algorithm that averages parameters among `size` ranks, whose parameters are the rows of one tensor.

    Args:
        algorithm: copied.
        start: (size, dim) float32 or float64, the ranks' parameters; dim is a multiple of the codec's block.

    Attributes:
        values: (size, dim), the ranks' parameters now.
        bytes_sent: by a rank in all mixings so far, on average over the ranks.
    """

    def __init__(self, algorithm: Decentralized | LocalSGD, start: Tensor) -> None:
        size, dim = start.shape
        if not isinstance(algorithm.codec, Codec):
            raise ValueError(f"a simulated model is one parameter: pass one codec, not the policy {algorithm.codec}")
        if dim % algorithm.codec.block:
            raise ValueError(
                f"{dim} values a rank are not whole blocks of {algorithm.codec}, so blocks would run over ranks: "
                f"take a multiple of {algorithm.codec.block}, or a codec with a smaller block"
            )
        self.algorithm = copy.deepcopy(algorithm)
        self.algorithm.exchange = AllInOne(size)
        self._peers = _Everyone(0, size)
        self._parameter = Parameter(start.clone())
        self.algorithm.setup({NAME: self._parameter}, self._peers)
        self.algorithm.bind({self._parameter})  # shared parameters and slow weights are those of the start

    @property
    def values(self) -> Tensor:
        """See the class."""
        return self._parameter.data

    @property
    def bytes_sent(self) -> float:
        """See the class."""
        return (self._peers.stats.bytes_sent or 0) / len(self.values)

    def step(self, change: Tensor) -> None:
        """Add what each rank's optimizer would, (size, dim), and mix if it is time to."""
        self.values.add_(change)
        self.algorithm.after_step({self._parameter})

    def mean(self) -> Tensor:
        """Shape (dim,): the mean of all ranks, as validation would see it."""
        self.algorithm.enter_consensus()
        seen = self.values.double().mean(0).to(self.values.dtype)  # of equal rows, unless nothing was mixed so far
        self.algorithm.leave_consensus()
        return seen

    def consensus_distance(self) -> float:
        """Mean over ranks of the squared distance from the mean."""
        return float((self.values - self.mean()).double().square().sum(1).mean())


class AllReduced:
    """What a `Simulation` is compared with: all ranks take the mean change, and send what a ring all-reduce sends."""

    def __init__(self, start: Tensor) -> None:
        self.values, self.bytes_sent = start.clone(), 0.0

    def step(self, change: Tensor) -> None:
        """See `Simulation.step`."""
        self.values.add_(change.mean(0))
        self.bytes_sent += 2 * (1 - 1 / len(change)) * change[0].nbytes

    def mean(self) -> Tensor:
        """See `Simulation.mean`."""
        return self.values[0]

    def consensus_distance(self) -> float:
        """They never differ."""
        return 0.0

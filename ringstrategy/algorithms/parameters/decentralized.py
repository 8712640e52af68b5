"""Decentralized averaging: now and then each rank mixes its parameters with those of its neighbours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.parameters.averager import Averager, Runtime, warm_up_codec
from ringstrategy.algorithms.parameters.exchange import Piece
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.algorithms.parameters.schedule import Schedule
from ringstrategy.algorithms.policy import Local
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.kernels import operations
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.base import Peers


class Decentralized(Periodic):
    """Every rank steps with its own gradients; every few steps of an optimizer its parameters are mixed.

    Parameters of one optimizer are mixed together, after its own steps, also after one that a loss scaler skipped.
    Validation, test, checkpoints and what training returns see the exact mean over ranks, also of the `running_mean`
    and `running_var` of norms, and rank 0's other buffers; then each rank's own values come back, and training goes on
    as if nobody had looked. Optimizer state is never mixed. A checkpoint
    has a file of each rank's own parameters, optimizers and whatever the algorithm keeps beside it, from which the same
    number of ranks goes on bit for bit; another number starts from the mean, as do ranks whose optimizer gets more
    parameters.

    Args:
        mixing: what is mixed, with whom, and how it travels.
        schedule: when.
        consensus: False: each rank validates, and ends with, its own parameters. Checkpoints hold the mean even so.
        local: see `Synchronous`.
        uneven: see `Algorithm`. With "join" a rank without data mixes, and does not step.
    """

    def __init__(self, mixing: Mixing, schedule: Schedule, consensus: bool, local: Local | None, uneven: str) -> None:
        super().__init__(schedule, mixing, consensus, local, uneven)
        self.mixing = mixing

    @property
    def topology(self) -> Topology:
        """Who mixes with whom."""
        return self.mixing.topology

    @property
    def codec(self) -> Codec:
        """How values travel."""
        return self.mixing.codec

    @override
    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        self.mixing.check(peers.size)
        super().setup(parameters, peers, sparse=sparse)

    @torch.no_grad()
    @override
    def start(self) -> None:
        if self._runtime is not None and not self.entered:
            for group in self._groups:
                if not group.steps:
                    self.mixing.start(group)


class Mixing(Averager):
    """Mixes the values of each vector of a group with those of the neighbours: see `Exchange.mix`.

    Args:
        topology: who mixes with whom.
        codec: how values travel.
        gain: factor of the difference to neighbours.

    Attributes:
        algorithm: that mixes so, for messages.
    """

    algorithm: str

    def __init__(self, topology: Topology, codec: Codec, gain: float = 1.0) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a Topology such as ringstrategy.topologies.RingGraph(), got {topology!r}")
        if not isinstance(codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        self.topology, self.codec, self.gain = topology, codec, gain

    @property
    def keeper(self) -> str:
        """What is mixed, and with whom."""
        return f"{self.algorithm} over {self.topology}"

    def check(self, size: int) -> None:
        """Raise a ValueError with the cure if so many ranks cannot mix so."""
        self.topology.check(size)

    def start(self, group: Group) -> None:
        """Training begins: since `begin`, other weights may have been loaded."""

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of mixed values, for parameters of `dtype`."""
        return sums_dtype(dtype)

    def seen_dtype(self, values: torch.dtype) -> torch.dtype:
        """The dtype of what is read where `values` were written: that of the wire."""
        dtype = self.codec.summable(values)
        assert dtype is not None, "a codec whose bytes are no values needs another `read`"
        return dtype

    @abstractmethod
    def fill(self, flat: Flat) -> None:
        """Fill `flat.values` with the values to mix."""

    def write(self, piece: Piece, wire: Tensor) -> Tensor:
        """Encode the values of the piece; `wire` is memory for the bytes."""
        raw = self.codec.raw(piece.values)
        if raw is not None:
            return raw
        own_seed = derive_seed(piece.seed, piece.peers.rank)  # this rank's own noise
        self.codec.encode(piece.values, wire, seed=own_seed, offset=piece.begin)
        return wire

    def read(self, piece: Piece, whose: int | None, wire: Tensor) -> Tensor:
        """The values that all ranks see in these bytes; `whose`: their rank, None: this one. Once a wire."""
        return wire.view(self.seen_dtype(piece.values.dtype))

    @override
    def group(self, parameters: Mapping[str, Parameter], runtime: Runtime) -> Group:
        warm_up_codec(self.codec, parameters)
        group = Group(parameters, self.values_dtype, lambda name, parameter: self.codec)
        for flat in group.flats:
            operations.warm_up_mix.on(flat.device)(self.seen_dtype(flat.dtype))
        return group

    def gather(self, group: Group, runtime: Runtime, *, first: bool) -> None:
        """The values to mix."""
        for flat in group.flats:
            self.fill(flat)

    def meet(self, group: Group, runtime: Runtime, number: int) -> None:
        """Mix them."""
        for place, vector in enumerate(group.vectors):
            seed = derive_seed(group.seed, number, place)
            runtime.exchange.mix(self, vector, runtime.peers, number, seed)

    def apply(self, group: Group, runtime: Runtime) -> None:
        """Add the corrections to the parameters."""
        for flat in group.flats:
            flat.add(flat.correction)

    def seen(self, group: Group, runtime: Runtime, *, replaced: bool = False) -> Iterable[tuple[Flat, Tensor]]:
        """The exact mean of all ranks."""
        return runtime.view.means(group, Flat.row if replaced else self.mass)

    @override
    def rehearse(self, group: Group, runtime: Runtime) -> None:
        peers = runtime.peers
        corrections = [vector.correction for vector in group.vectors]
        for vector in group.vectors:
            vector.correction = torch.empty_like(vector.correction)
        for flat in group.flats:
            flat.values.zero_()

        def work() -> None:
            self.meet(group, runtime, 0)
            for step in range(1, self.topology.period(peers.size)):
                runtime.exchange.connect(self.topology, peers, step, group.flats[0].device)

        with peers.stats.probe():
            peers.submit(work, "while setting up").wait()
        for vector, correction in zip(group.vectors, corrections, strict=True):
            vector.correction = correction

"""Decentralized averaging: now and then each rank mixes its parameters with those of its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from ringstrategy.algorithms.local import Local
from ringstrategy.algorithms.parameters.exchange import Piece
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.periodic import Periodic, row_of_parameters, warm_up_codec
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.collectives.base import sums_dtype
from ringstrategy.kernels import operations
from ringstrategy.topologies.base import Topology
from ringstrategy.transport.base import Peers


class Decentralized(Periodic):
    """Every rank steps with its own gradients; every `interval` steps of an optimizer its parameters are mixed.

    Parameters of one optimizer are mixed together, after its own steps, also after one that a loss scaler skipped.
    Validation, test, checkpoints and what training returns see the exact mean over ranks, also of the `running_mean`
    and `running_var` of norms, and rank 0's other buffers; then each rank's own values come back, and training goes on
    as if nobody had looked. Optimizer state is never mixed. A checkpoint
    has a file of each rank's own parameters, optimizers and whatever the algorithm keeps beside it, from which the same
    number of ranks goes on bit for bit; another number starts from the mean, as do ranks whose optimizer gets more
    parameters.

    Subclasses define how values become bytes and back (`write`, `read`), and how corrections are used (`apply`).

    Args:
        topology: who mixes with whom.
        codec: how values travel.
        interval: optimizer steps from one mixing to the next. More: fewer bytes, ranks drift further apart.
        overlap: True: send while the next `interval` steps are computed, and apply what came as a correction at their
            end: the wire then costs no time while it is faster than they are. Its price: corrections come late, so the
            largest stable learning rate is lower and more steps may be needed, the more so with long intervals. False:
            wait for it at once. A number from 1 to `interval`: apply it after so many steps (DaSGD, Zhou et al. 2020),
            best so few that their compute is just longer than the exchange. 1 is one step, not True.
        consensus: False: each rank validates, and ends with, its own parameters. Checkpoints hold the mean even so.
        local: see `Synchronous`.
        unit: "step", or "epoch": the interval counts epochs.
        uneven: see `Algorithm`. With "join" a rank without data mixes, and does not step.
    """

    gain = 1.0  # of the difference to neighbours

    def __init__(
        self,
        topology: Topology,
        codec: Codec,
        interval: int,
        overlap: bool | int,
        consensus: bool,
        local: Local | None,
        unit: Unit,
        uneven: str,
    ) -> None:
        super().__init__(consensus, local, uneven)
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a Topology such as ringstrategy.topologies.RingGraph(), got {topology!r}")
        if not isinstance(codec, Codec):
            raise TypeError(f"codec is a Codec such as ringstrategy.Identity(), got {codec!r}")
        Schedule(interval, overlap, unit)  # refuses what these cannot be
        self.topology, self.codec, self.interval, self.unit = topology, codec, interval, unit
        self.overlap = overlap

    @property
    def schedule(self) -> Schedule:
        """See `Periodic.schedule`."""
        return Schedule(self.interval, self.overlap, self.unit)

    @property
    def late(self) -> int:
        """See `Schedule`."""
        return self.schedule.late

    # What subclasses say

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of mixed values, for parameters of `dtype`."""
        return sums_dtype(dtype)

    def seen_dtype(self, values: torch.dtype) -> torch.dtype:
        """The dtype of what is read where `values` were written: that of the wire."""
        dtype = self.codec.summable(values)
        assert dtype is not None, "a codec whose bytes are no values needs another `read`"
        return dtype

    def fill(self, flat: Flat) -> None:
        """Fill `flat.values` with the values to mix."""
        flat.gather()

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

    def apply(self, group: Group) -> None:
        """Add the corrections to the parameters."""
        for flat in group.flats:
            flat.add(flat.correction)

    # See `Periodic`

    def setup(self, parameters: Mapping[str, Parameter], peers: Peers, *, sparse: frozenset[str] = frozenset()) -> None:
        """See `Algorithm.setup`."""
        self.topology.check(peers.size)
        super().setup(parameters, peers, sparse=sparse)

    def group(self, parameters: Mapping[str, Parameter]) -> Group:
        """See `Periodic.group`."""
        warm_up_codec(self.codec, parameters)
        group = Group(parameters, self.values_dtype, lambda name, parameter: self.codec)
        for flat in group.flats:
            operations.warm_up_mix.on(flat.device)(self.seen_dtype(flat.dtype))
        return group

    def gather(self, group: Group) -> None:
        """The values to mix."""
        for flat in group.flats:
            self.fill(flat)

    def meet(self, group: Group, peers: Peers, number: int) -> None:
        """Mix them."""
        for place, vector in enumerate(group.vectors):
            self.exchange.mix(self, vector, peers, number, derive_seed(group.seed, number, place))

    def seen(self, group: Group, *, replaced: bool = False) -> Iterable[tuple[Flat, Tensor]]:
        """The exact mean of all ranks."""
        assert self._view is not None
        return self._view.means(group, row_of_parameters if replaced else self.mass)

    def rehearse(self, group: Group, peers: Peers) -> None:
        """See `Periodic.rehearse`."""
        corrections = [vector.correction for vector in group.vectors]
        for vector in group.vectors:
            vector.correction = torch.empty_like(vector.correction)
        for flat in group.flats:
            flat.values.zero_()

        def work() -> None:
            self.meet(group, peers, 0)
            device = group.flats[0].device
            for step in range(1, self.topology.period(peers.size)):
                self.exchange.connect(self.topology, peers, step, device)

        with peers.stats.probe():
            peers.submit(work, "while setting up").wait()
        for vector, correction in zip(group.vectors, corrections, strict=True):
            vector.correction = correction

    @property
    def keeper(self) -> str:
        """The algorithm and topology."""
        return f"{type(self).__name__} over {self.topology}"

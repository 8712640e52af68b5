"""Average parameters with neighbours (D-PSGD, Lian et al. 2017), corrected for unequal data (exact diffusion)."""

from __future__ import annotations

import torch

from ringstrategy.algorithms.local import Local
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.schedule import Unit
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.identity import Identity
from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.ring import RingGraph


class Gossip(Decentralized):
    """x_i becomes x_i + sum over its neighbours j of W[i, j] (x_j - x_i), which is row i of W x. See `Decentralized`.

    With a cast, both x_j and x_i in that sum are as they were sent, so that the mean over ranks stays.

    Args:
        topology: who mixes with whom; rows and columns of its matrix sum to 1.
        codec: `Identity()`, or `Cast(...)`: half the bytes. For fewer: `Choco`.
        interval: see `Decentralized`, as for the arguments not named here.
        overlap: see `Decentralized`.
        consensus: see `Decentralized`.
        local: see `Synchronous`.
        unit: see `Decentralized`.
        unequal_data: undo the pull of each rank's own data (exact diffusion, Yuan et al. 2019; D2, Tang et al. 2018),
            for the same bytes; one more vector of memory, with overlap two. With an interval of 1 and SGD, ranks then
            end where the mean of their losses is least; without, short of it. With longer intervals they end nearer.
            Needs a topology that is static and symmetric, and mixes half as far at once.
        uneven: see `Decentralized`.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        codec: Codec | None = None,
        interval: int = 1,
        overlap: bool | int = True,
        consensus: bool = True,
        local: Local | None = None,
        unit: Unit = "step",
        unequal_data: bool = False,
        uneven: str = "error",
    ) -> None:
        topology = RingGraph() if topology is None else topology
        codec = Identity() if codec is None else codec
        super().__init__(topology, codec, interval, overlap, consensus, local, unit, uneven)
        if not isinstance(codec, Identity | Cast):
            raise ValueError(
                f"codec is Identity() or Cast(...), got {codec!r}: parameters sent in fewer bits would never agree. "
                "Choco(codec=...) sends their differences"
            )
        if not topology.doubly_stochastic:
            raise ValueError(
                f"the rows of {topology}'s matrix do not sum to 1, so mixing by it would not average: make them "
                "(FromGraph(edges) finds such weights), or use PushSum(topology)"
            )
        if not isinstance(unequal_data, bool):
            raise TypeError(f"unequal_data is True or False, got {unequal_data!r}")
        if unequal_data and not isinstance(overlap, bool):
            raise ValueError(
                f"unequal_data is for overlap=True or False: its correction knows no other delay, got {overlap}"
            )
        if unequal_data and not (topology.static and topology.symmetric):
            raise ValueError(f"unequal_data needs the same symmetric matrix at each step, but {topology} has others")
        self.unequal_data = unequal_data
        self.gain = 0.5 if unequal_data else 1.0

    @property
    def keeper(self) -> str:
        """A group and the tensors that this algorithm keeps for it."""
        kept = f" for unequal data, overlap={self.overlap}" if self.unequal_data else ""
        return super().keeper + kept

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The parameters' dtype; the dtype of sums if `unequal_data`."""
        return super().values_dtype(dtype) if self.unequal_data else dtype

    def begin(self, group: Group) -> None:
        """Nothing was corrected so far, and nothing has moved."""
        for flat in group.flats if self.unequal_data else ():
            flat.memory["corrected"] = torch.zeros_like(flat.correction)
            if self.overlap:
                flat.gather(into=flat.memory.setdefault("before", torch.empty_like(flat.correction)))

    def fill(self, flat: Flat) -> None:
        """The parameters; for unequal data, where they would be after as much again as was corrected last."""
        super().fill(flat)
        if self.unequal_data and self.overlap:  # the last correction is in what they have moved by since the last time
            before = flat.memory["before"]
            flat.values.add_(torch.sub(flat.values, before, out=before))
            flat.gather(into=before)
        elif self.unequal_data:  # it was applied after they were sent
            flat.values.add_(flat.memory["corrected"])

    def apply(self, group: Group) -> None:
        """The correction; for unequal data, with all before once more."""
        for flat in group.flats:
            flat.add(flat.memory["corrected"].add_(flat.correction) if self.unequal_data else flat.correction)

"""Average parameters with neighbours (D-PSGD, Lian et al. 2017), corrected for unequal data (exact diffusion)."""

from __future__ import annotations

import torch

from ringstrategy.algorithms.parameters.averager import Runtime
from ringstrategy.algorithms.parameters.decentralized import Decentralized, Mixing
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local
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
        interval: optimizer steps from one mixing to the next. More: fewer bytes, ranks drift further apart.
        overlap: True: send while the next `interval` steps are computed, and apply what came as a correction at their
            end: the wire then costs no time while it is faster than they are. Its price: corrections come late, so the
            largest stable learning rate is lower and more steps may be needed, the more so with long intervals. False:
            wait for it at once. A number from 1 to `interval`: apply it after so many steps (DaSGD, Zhou et al. 2020),
            best so few that their compute is just longer than the exchange. 1 is one step, not True.
        consensus: see `Decentralized`.
        local: see `Synchronous`.
        unit: "step", or "epoch": the interval counts epochs.
        unequal_data: undo the pull of each rank's own data (exact diffusion, Yuan et al. 2019; D2, Tang et al. 2018),
            for the same bytes; one more vector of memory, with overlap two. With an interval of 1 and SGD, ranks then
            end where the mean of their losses is least; without, short of it. With longer intervals they end nearer.
            Needs a topology that is static and symmetric, and mixes half as far at once.
        uneven: see `Decentralized`.
    """

    def __init__(  # noqa: PLR0913
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
        schedule = Schedule(interval, overlap, unit)
        mixing = Diffusion(topology, codec, late=bool(overlap)) if unequal_data else Averaging(topology, codec)
        super().__init__(mixing, schedule, consensus, local, uneven)
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


class Averaging(Mixing):
    """Parameters as they are."""

    algorithm = "Gossip"

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The parameters'."""
        return dtype

    def fill(self, flat: Flat) -> None:
        """The parameters."""
        flat.gather()


class Diffusion(Mixing):
    """Exact diffusion: parameters extrapolated by the last correction; each correction is applied again ever after.

    Args:
        topology: static and symmetric.
        codec: see `Gossip`.
        late: are corrections applied an interval after the parameters were sent?
    """

    algorithm = "Gossip(unequal_data=True)"

    def __init__(self, topology: Topology, codec: Codec, *, late: bool) -> None:
        super().__init__(topology, codec, gain=0.5)
        self.late = late

    @property
    def keeper(self) -> str:
        """It keeps one vector more if corrections are late."""
        return f"{super().keeper}, late={self.late}"

    def begin(self, group: Group, runtime: Runtime) -> None:
        """Nothing was corrected so far, and nothing has moved."""
        for flat in group.flats:
            flat.memory["corrected"] = torch.zeros_like(flat.correction)
            if self.late:
                flat.gather(into=flat.memory.setdefault("before", torch.empty_like(flat.correction)))

    def fill(self, flat: Flat) -> None:
        """The parameters plus the last correction: where they would be if it came once more."""
        flat.gather()
        if self.late:  # the last correction is in what they have moved by since the last time
            before = flat.memory["before"]
            flat.values.add_(torch.sub(flat.values, before, out=before))
            flat.gather(into=before)
        else:  # it was applied after they were sent
            flat.values.add_(flat.memory["corrected"])

    def apply(self, group: Group, runtime: Runtime) -> None:
        """The correction, with all before once more."""
        for flat in group.flats:
            flat.add(flat.memory["corrected"].add_(flat.correction))

"""Average parameters with neighbours (D-PSGD, Lian et al. 2017), for unequal data, and with outer momentum (NoLoCo)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch.nn import Parameter
from typing_extensions import override

from ringstrategy.algorithms.parameters.averager import Runtime
from ringstrategy.algorithms.parameters.decentralized import Decentralized, Mixing
from ringstrategy.algorithms.parameters.group import Flat, Group
from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local
from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.cast import Cast
from ringstrategy.codecs.identity import Identity
from ringstrategy.kernels import operations
from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.graphs import RingGraph

_MOST_CHECKED = 256  # ranks: more take long
_MIXINGS = 200  # until what grows has shown


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
        outer: each rank keeps slow weights, which go towards what mixing gives by a step of this optimizer; from there
            it trains on (NoLoCo, Kolehmainen et al. 2025, arXiv:2506.10911; GASLoC, 2026, arXiv:2606.11081). For long
            intervals, for the same bytes; two more vectors of memory, with overlap three. `Complete()` with it is
            DiLoCo, and `Nesterov(1, 0)` is as None.
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
        outer: Nesterov | None = None,
    ) -> None:
        topology = RingGraph() if topology is None else topology
        codec = Identity() if codec is None else codec
        schedule = Schedule(interval, overlap, unit)
        mixing: Mixing = Averaging(topology, codec)
        if outer is not None:
            mixing = SlowWeights(topology, codec, outer, late=bool(overlap))
        elif unequal_data:
            mixing = Diffusion(topology, codec, late=bool(overlap))
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
        if unequal_data and outer is not None:
            raise ValueError("unequal_data and outer each move the parameters in their own way: leave one of them out")
        self.unequal_data, self.outer = unequal_data, outer

    @override
    def argument(self, name: str) -> str:
        return repr(self.outer) if name == "outer" else super().argument(name)


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
            kinds = ["corrected", *(["before"] if self.late else [])]
            flat.memory = {kind: torch.zeros_like(flat.correction) for kind in kinds}
        self.start(group)

    @override
    def start(self, group: Group) -> None:
        for flat in group.flats if self.late else ():
            flat.gather(into=flat.memory["before"])

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


class SlowWeights(Averaging):
    """Each rank has slow weights, which step towards what mixing gives; then its parameters are set to them.

    With x what ranks send, s and m a rank's slow weights and momentum: g = s - W x; m = mu m + g; s -= lr (g + mu m).

    Args:
        topology: see `Gossip`.
        codec: see `Gossip`.
        outer: lr and mu.
        late: are corrections applied some steps after the parameters were sent? A rank keeps these steps.
    """

    algorithm = "Gossip(outer=...)"

    def __init__(self, topology: Topology, codec: Codec, outer: Nesterov, *, late: bool) -> None:
        super().__init__(topology, codec)
        if not isinstance(outer, Nesterov):
            raise TypeError(f"outer is ringstrategy.Nesterov(lr, momentum) or None, got {outer!r}")
        self.outer, self.late = outer, late
        self._checked = False

    @property
    def keeper(self) -> str:
        """It keeps one vector more if corrections are late."""
        return f"{super().keeper}, late={self.late}"

    @override
    def check(self, size: int) -> None:
        """ValueError if differences between ranks would grow; a warning if so many are left of more (elastic training).

        Looked at up to 256 ranks.
        """
        super().check(size)
        if 1 < size <= _MOST_CHECKED and not self._growth(size) <= 1 + 1e-9:
            said = (
                f"by {self.outer} over {self.topology} differences between {size} ranks grow: take a smaller lr or "
                "momentum, such as Nesterov(0.7, 0.5)"
            )
            if not self._checked:
                raise ValueError(said)
            warnings.warn(said, stacklevel=2)
        self._checked = True

    def _growth(self, size: int) -> float:
        """By what factor differences in slow weights and momentum grow in a mixing, in the long run."""
        lr, mu = self.outer.lr, self.outer.momentum
        slow = torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        momentum, grown = torch.zeros_like(slow), 0.0
        for step in range(_MIXINGS):
            if step == 0 or not self.topology.static:
                rows = [(i, j, w) for i in range(size) for j, w in self.topology.weights(i, size, step).items()]
                ranks, sources, weights = map(torch.tensor, zip(*rows, strict=True))
            mixed = torch.zeros_like(slow).index_add_(0, ranks, slow[sources] * weights.double()[:, None])
            gradient = slow - mixed
            momentum = mu * momentum + gradient
            slow = slow - lr * (gradient + mu * momentum)
            slow, momentum = slow - slow.mean(0), momentum - momentum.mean(0)
            norm = float(torch.cat([slow, momentum]).norm()) or 1e-300
            slow, momentum = slow / norm, momentum / norm
            grown += math.log(norm) if step >= _MIXINGS // 4 else 0.0
        return math.exp(grown / (_MIXINGS - _MIXINGS // 4))

    @override
    def group(self, parameters: Mapping[str, Parameter], runtime: Runtime) -> Group:
        group = super().group(parameters, runtime)
        for flat in group.flats:
            operations.warm_up_nesterov.on(flat.device)()
        return group

    @override
    def begin(self, group: Group, runtime: Runtime) -> None:
        for flat in group.flats:
            kinds = ["slow", "momentum", *(["sent"] if self.late else [])]
            flat.memory = {kind: torch.zeros_like(flat.correction) for kind in kinds}
        self.start(group)

    @override
    def start(self, group: Group) -> None:
        for flat in group.flats:
            flat.gather(into=flat.memory["slow"])

    @override
    def fill(self, flat: Flat) -> None:
        super().fill(flat)
        if self.late:
            flat.memory["sent"].copy_(flat.values)

    @override
    def apply(self, group: Group, runtime: Runtime) -> None:
        for flat in group.flats:
            slow, momentum = flat.memory["slow"], flat.memory["momentum"]
            sent = flat.memory["sent"] if self.late else flat.values
            gradient = flat.correction.neg_().sub_(sent).add_(slow)
            lr, mu = float(self.outer.lr), float(self.outer.momentum)
            operations.nesterov_.on(flat.device)([slow], [gradient], [momentum], lr, mu)
            if self.late:
                flat.add(torch.sub(slow, sent, out=gradient))
            else:
                flat.write(slow)

"""Averaging over directed graphs (push-sum, Kempe et al. 2003; stochastic gradient push, Assran et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.averager import Runtime
from ringstrategy.algorithms.parameters.decentralized import Decentralized, Mixing
from ringstrategy.algorithms.parameters.group import Flat, Group, Vector, cut_like
from ringstrategy.algorithms.parameters.schedule import Schedule, Unit
from ringstrategy.algorithms.policy import Local
from ringstrategy.codecs.identity import Identity
from ringstrategy.topologies.base import Topology
from ringstrategy.topologies.exponential import OnePeerExponential


class PushSum(Decentralized):
    """Numerators x and weights w, at first 1, are mixed alike; a rank's parameters are x / w.

    Right for any topology whose columns sum to 1, whatever its rows do: each rank says how it shares out what it has.
    A step of the optimizer moves x by as much as it moves the parameters. Validation uses the mean of x, which
    mixing keeps. Where rows sum to 1 too, weights stay 1 and this is `Gossip`.

    Args:
        topology: who mixes with whom. The default is that of stochastic gradient push.
        interval: see `Gossip`.
        overlap: see `Gossip`.
        consensus: see `Decentralized`.
        local: see `Synchronous`.
        unit: see `Gossip`.
        uneven: see `Decentralized`.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        interval: int = 1,
        overlap: bool | int = True,
        consensus: bool = True,
        local: Local | None = None,
        unit: Unit = "step",
        uneven: str = "error",
    ) -> None:
        topology = OnePeerExponential() if topology is None else topology
        schedule = Schedule(interval, overlap, unit)
        super().__init__(Numerators(topology, Identity()), schedule, consensus, local, uneven)


class Numerators(Mixing):
    """x travels, in a vector of each flat, and w beside it."""

    algorithm = "PushSum"

    def begin(self, group: Group, runtime: Runtime) -> None:
        """The parameters are x, the numerators over the weight."""
        for flat in group.flats:
            flat.memory["excess"] = torch.zeros_like(flat.correction)  # x minus the parameters
        ones = torch.ones(runtime.exchange.ranks, dtype=torch.float64, device=group.flats[0].device)
        group.others["weight"] = Vector.of(ones)

    def mass(self, flat: Flat) -> Tensor:
        """x."""
        return super().mass(flat).add_(flat.memory["excess"])

    def fill(self, flat: Flat) -> None:
        """x."""
        flat.gather_sum(flat.memory["excess"])

    def apply(self, group: Group, runtime: Runtime) -> None:
        """Divide the new x by the new w."""
        weight = group.others["weight"]
        divisor = weight.values.add_(weight.correction)[:, None]
        for flat in group.flats:
            excess = flat.memory["excess"].add_(flat.correction)
            numerators, quotients = cut_like(excess, flat.parameters), flat.values
            torch._foreach_add_(numerators, flat.parameters)
            # in one launch; the simulator has every rank's part of one parameter before the next parameter
            like = flat.parameters if len(divisor) > 1 else [excess]
            for numerator, quotient in zip(cut_like(excess, like), cut_like(quotients, like), strict=True):
                shape = len(divisor), -1
                torch.div(numerator.view(shape), divisor.to(excess.dtype), out=quotient.view(shape))
            torch._foreach_copy_(flat.parameters, cut_like(quotients, flat.parameters))
            torch._foreach_sub_(numerators, flat.parameters)

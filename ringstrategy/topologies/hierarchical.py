"""All within a host, few between hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from ringstrategy.topologies.base import Topology, uniform
from ringstrategy.topologies.exponential import OnePeerExponential


@dataclass(frozen=True)
class Hierarchical(Topology):
    """In turn: at even steps all ranks of a host average, at odd steps those with one place on all hosts gossip.

    So the slow network between hosts carries each host's mean, in `devices` parts.

    Args:
        devices: ranks of each host, consecutive ones.
        between: the topology among hosts; its step advances at every second one.
    """

    devices: int
    between: Topology = field(default_factory=OnePeerExponential)
    static = False

    def __post_init__(self) -> None:
        if type(self.devices) is not int or self.devices < 1:
            raise ValueError(f"devices is how many ranks a host has, at least 1, got {self.devices!r}")
        if not isinstance(self.between, Topology):
            raise TypeError(f"between is a Topology such as OnePeerExponential(), got {self.between!r}")

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """If hosts are."""
        return self.between.symmetric

    @property
    def doubly_stochastic(self) -> bool:  # type: ignore[override]
        """If hosts are."""
        return self.between.doubly_stochastic

    @override
    def check(self, size: int) -> None:
        if size % self.devices:
            raise ValueError(f"{size} ranks do not make hosts of {self.devices}: Hierarchical(devices=) must divide it")
        self.between.check(size // self.devices)

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        host, place = divmod(rank, self.devices)
        if step % 2 == 0:
            return uniform(rank, range(host * self.devices, (host + 1) * self.devices))
        hosts = self.between.weights(host, size // self.devices, step // 2)
        return {other * self.devices + place: weight for other, weight in hosts.items()}

    @override
    def period(self, size: int) -> int:
        return 2 * self.between.period(size // self.devices)

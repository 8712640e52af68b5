"""Exponential graphs: hops of 1, 2, 4, ... (Assran et al. 2019; Ying et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ringstrategy.topologies.base import Topology, uniform


def _hops(size: int) -> int:
    """How many powers of two are less than `size`."""
    return (size - 1).bit_length()


@dataclass(frozen=True)
class Exponential(Topology):
    """Rank r takes equal parts of itself and of r - 1, r - 2, r - 4, ...: log2(size) messages a step, at every step."""

    symmetric = False

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, [(rank - (1 << hop)) % size for hop in range(_hops(size))])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """At step t rank r takes half of itself and half of r - 2**(t mod log2(size)): one message a step.

    Where size is a power of two, any log2(size) steps in a row average exactly.
    """

    static = False
    symmetric = False

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, [(rank - (1 << step % self.period(size))) % size])

    @override
    def period(self, size: int) -> int:
        return max(1, _hops(size))

"""Random pairs, new at each step (Boyd et al. 2006)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override

from ringstrategy.codecs.base import derive_seed
from ringstrategy.topologies.base import Topology, uniform

_LOOKED_AT = 16  # steps, for its spectral gap


@dataclass(frozen=True)
class RandomMatching(Topology):
    """Ranks meet in pairs drawn at random, the same on all ranks; of an odd number one stays alone for the step.

    Args:
        seed: other pairs.
    """

    seed: int = 0
    static = False

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise ValueError(f"seed is a whole number, got {self.seed!r}")

    @override
    def weights(self, rank: int, size: int, step: int) -> dict[int, float]:
        return uniform(rank, [_partners(self.seed, size, step)[rank]])

    def period(self, size: int) -> int:
        """It never repeats."""
        return 1 if size == 1 else _LOOKED_AT


@lru_cache(16)
def _partners(seed: int, size: int, step: int) -> list[int]:
    """Of every rank; its own number if it stays alone."""
    order = sorted(range(size), key=lambda rank: derive_seed(0, seed, step, rank))
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return partners

"""A seeded random rotation around another codec, after which any values look normally distributed (DRIVE, EDEN)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.blocked import Blocked
from ringstrategy.codecs.gaussian import Gaussian
from ringstrategy.kernels import operations
from ringstrategy.kernels.layout import ROTATED, Signs

if TYPE_CHECKING:
    from ringstrategy.kernels.operations import Launches


@dataclass(frozen=True)
class Rotated(Codec):
    """Rotate the bucket once before the collective and back once after; every hop works in rotated space.

    Each 256 values get random signs and an orthonormal Hadamard transform (Vargaftik et al. 2021, 2022). One large
    value then spreads over its whole block, so few levels suffice; the seed is a new one each step, so errors average
    out. Costs two passes of 16 additions a value. The last numel % 256 values are not rotated: buckets have none such.

    The ranks turn back what they decoded, and must get the same bits on any processor, in whatever order it adds: so
    the inner codec's decoded values must add up exactly.

    Args:
        codec: what carries the rotated values: `Gaussian`, `Sign` or `BlockInt`, in blocks of a multiple of 256.
    """

    codec: Codec = field(default_factory=Gaussian)
    needs_kernels = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Rotated takes a codec such as Gaussian(bits=4), got {self.codec!r}")
        if not self.codec.adds_exactly or self.codec.block % ROTATED:
            raise ValueError(
                f"Rotated cannot turn {self.codec} back with the same bits on every machine: "
                f"use Gaussian, Sign or BlockInt, with a block that is a multiple of {ROTATED}"
            )

    @property
    def block(self) -> int:  # type: ignore[override]
        """The inner codec's."""
        return self.codec.block

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The inner codec's."""
        return self.codec.nbytes(numel, dtype)

    def check(self, dtype: torch.dtype) -> None:
        """The inner codec's."""
        self.codec.check(dtype)

    def warm_up(self, device: torch.device) -> None:
        """The inner codec's."""
        self.codec.warm_up(device)

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """The inner codec's."""
        self.codec.encode(values, wire, lost=lost, seed=seed, offset=offset)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """The inner codec's."""
        self.codec.decode(wire, out, add=add)

    @override
    def hop(
        self,
        arrived: Sequence[Tensor],
        values: Tensor,
        wire: Tensor,
        *,
        residual: Tensor | None = None,
        lost: Tensor | None = None,
        seed: int,
        own_seed: int,
        offset: int = 0,
    ) -> None:
        how: dict[str, Any] = {
            "residual": residual,
            "lost": lost,
            "seed": seed,
            "own_seed": own_seed,
            "offset": offset,
        }
        if isinstance(self.codec, Blocked) and self.codec.fuses(values, rotated=True):
            self.codec.hop(arrived, values, wire, signs=signs(seed), **how)
        else:
            super().hop(arrived, values, wire, **how)

    @override
    def deliver(self, wire: Tensor, out: Tensor, *, seed: int, add: bool = False) -> None:
        if isinstance(self.codec, Blocked) and self.codec.fuses(out, rotated=True):
            self.codec.deliver(wire, out, signs=signs(seed), seed=seed, add=add)
        else:
            super().deliver(wire, out, seed=seed, add=add)

    @override
    def launches(self, values: Tensor, seed: int) -> Launches | None:
        return self.codec.launches(values, seed, signs=signs(seed)) if isinstance(self.codec, Blocked) else None

    def prepare_(self, values: Tensor, seed: int) -> None:
        """y = H (x * sign) / 16."""
        operations.rotate_.on(values.device)(values, signs(seed), inverse=False)

    def restore_(self, values: Tensor, seed: int) -> None:
        """x = (H y / 16) * sign."""
        operations.rotate_.on(values.device)(values, signs(seed), inverse=True)


@lru_cache(maxsize=8)
def signs(seed: int) -> Signs:
    """The signs of a seed, as numbers that kernels take: a tensor would have to be copied to the device."""
    words = (derive_seed(seed, word) & 0xFFFFFFFF for word in range(ROTATED // 32))
    return tuple((word ^ 0x80000000) - 0x80000000 for word in words)

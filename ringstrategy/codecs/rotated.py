"""A seeded random rotation around another codec, after which any values look normally distributed (DRIVE, EDEN)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec, derive_seed
from ringstrategy.codecs.gaussian import Gaussian
from ringstrategy.codecs.scratch import scratch

LENGTH = 256  # values that are rotated together
_TILE = 1 << 18
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rotated(Codec):
    """Rotate the bucket once before the collective and back once after; every hop works in rotated space.

    Each 256 values get random signs and an orthonormal Hadamard transform (Vargaftik et al. 2021, 2022). One large
    value then spreads over its whole block, so few levels suffice; the seed is a new one each step, so errors average
    out. Costs two passes of 16 additions a value. The last numel % 256 values are not rotated: buckets have none such.

    The ranks turn back what they decoded, and must get the same bits on any processor, in whatever order it adds: so
    the inner codec's decoded values must add up exactly.

    Args:
        codec: what carries the rotated values: `Gaussian`, `Sign`, or `BlockInt` with absmax, in blocks of a multiple
            of 256.
    """

    codec: Codec = field(default_factory=Gaussian)
    needs_kernels = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Rotated takes a codec such as Gaussian(bits=4), got {self.codec!r}")
        if not self.codec.adds_exactly or self.codec.block % LENGTH:
            raise ValueError(
                f"Rotated cannot turn {self.codec} back with the same bits on every machine: "
                f"use Gaussian, Sign, or BlockInt(scale='absmax'), with a block that is a multiple of {LENGTH}"
            )

    @property
    def block(self) -> int:  # type: ignore[override]
        """The inner codec's."""
        return self.codec.block

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """The inner codec's."""
        return self.codec.error_feedback

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The inner codec's."""
        return self.codec.nbytes(numel, dtype)

    def check(self, dtype: torch.dtype) -> None:
        """The inner codec's."""
        self.codec.check(dtype)

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """The inner codec's."""
        self.codec.encode(values, wire, lost=lost, seed=seed, offset=offset)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """The inner codec's."""
        self.codec.decode(wire, out, add=add)

    def reduce(
        self,
        wires: Sequence[Tensor],
        values: Tensor,
        wire_out: Tensor,
        *,
        lost: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """The inner codec's."""
        self.codec.reduce(wires, values, wire_out, lost=lost, seed=seed, offset=offset)

    def prepare_(self, values: Tensor, seed: int) -> None:
        """y = H (x * sign) / 16."""
        if values.device.type == "cuda":
            from ringstrategy.kernels.triton.rotate import rotate_

            rotate_(values, signs(seed, values.device), inverse=False)
            return
        flips = signs(seed) / 16
        for tile in _tiles(values):
            _hadamard(tile.mul_(flips), tile)

    def restore_(self, values: Tensor, seed: int) -> None:
        """x = (H y / 16) * sign."""
        if values.device.type == "cuda":
            from ringstrategy.kernels.triton.rotate import rotate_

            rotate_(values, signs(seed, values.device), inverse=True)
            return
        flips = signs(seed) / 16
        for tile in _tiles(values):
            _hadamard(tile, tile)
            tile.mul_(flips)


@lru_cache(maxsize=8)
def signs(seed: int, device: torch.device = _CPU) -> Tensor:
    """The 256 signs of a seed: float32, each 1 or -1; shared, so not to be written to."""
    words = [derive_seed(seed, word) for word in range(LENGTH // 32)]
    of_all = [1.0 if words[i // 32] >> (i % 32) & 1 else -1.0 for i in range(LENGTH)]
    with torch.inference_mode(False):
        return torch.tensor(of_all, dtype=torch.float32, device=device)


def _tiles(values: Tensor) -> tuple[Tensor, ...]:
    whole = values.numel() // LENGTH * LENGTH
    tiles: tuple[Tensor, ...] = values[:whole].view(-1, LENGTH).split(_TILE // LENGTH)
    return tiles


def _hadamard(source: Tensor, target: Tensor) -> None:
    """target = source H for rows of 256; may be the same tensor."""
    if not _products_are_float32():
        _butterflies(source, target)
        return
    matrix = _matrix(source.dtype)
    # H of 256 is the Kronecker product of H of 16 with itself
    half = torch.matmul(source.view(-1, 16, 16), matrix, out=scratch("rotated", (len(source), 16, 16), source.dtype))
    torch.matmul(matrix, half, out=target.view(-1, 16, 16))


def _products_are_float32() -> bool:
    """False where a user lets matrix products round their factors to bfloat16 or TF32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's answer where the newer names, such as torch.backends.fp32_precision, were used
        return False


def _butterflies(source: Tensor, target: Tensor) -> None:
    """The same by additions alone."""
    target.copy_(source)
    run = 1
    while run < LENGTH:
        pairs = target.view(-1, LENGTH // (2 * run), 2, run)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        difference = first - second
        first.add_(second)
        second.copy_(difference)
        run *= 2


@lru_cache
def _matrix(dtype: torch.dtype) -> Tensor:
    """Sylvester's Hadamard matrix of order 16."""
    matrix = torch.ones(1, 1, dtype=dtype, device=_CPU)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype, device=_CPU)
    for _ in range(4):
        matrix = torch.kron(pair, matrix)
    return matrix

"""Whole numbers of 2 to 8 bits with a scale per block (QSGD, Alistarh et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import derive_seed
from ringstrategy.codecs.blocked import Blocked, bounding_scale, check_bits, check_block
from ringstrategy.kernels.layout import Arithmetic

_PERIOD = 1 << 19  # places that share a key; each has a hash of its own


@dataclass(frozen=True)
class BlockInt(Blocked):
    """q = round(x / s) in `bits` bits; s = max|x| / (2**(bits-1) - 1) of its block, in bfloat16, rounded up.

    `bits`/8 bytes an element and 2 a block. An element is off by at most s/2 (nearest), or by less than s (stochastic).

    Args:
        bits: 2 to 8; fewer: fewer bytes, coarser.
        block: values that share a scale, a multiple of 8; smaller: closer, more bytes.
        rounding: "nearest", ties to even; or "stochastic": unbiased, as QSGD's, with a mean error
            of one rounding that is 1.4 times as large.
    """

    bits: int = 8
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    adds_exactly = True  # whole numbers below 2**7, times 8 significant bits

    def __post_init__(self) -> None:
        check_bits(self.bits, 2, 8)
        check_block(self.block)
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is 'nearest' or 'stochastic', got {self.rounding!r}")

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """See `Blocked.arithmetic`. Whole numbers around 0."""
        half, stochastic = 1 << (self.bits - 1), self.rounding == "stochastic"
        return Arithmetic(
            "int", self.block, self.bits, 1 / (half - 1), bias=-half, highest=half - 1, stochastic=stochastic
        )

    @override
    def quantize(self, blocks: Tensor, seed: int, place: int) -> tuple[Tensor, Tensor]:
        how = self.arithmetic
        scale = bounding_scale(blocks, how)
        levels = blocks * (1 / scale)
        if self.rounding == "stochastic":
            levels = levels + noise(seed, place, blocks.numel()).view_as(blocks)
        levels = levels.round().clamp(-how.highest, how.highest)
        return (levels - how.bias).to(torch.uint8), scale

    @override
    def noise(self, seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int] | None:
        return keys(seed, place, numel) if self.rounding == "stochastic" else None


def noise(seed: int, place: int, numel: int) -> Tensor:
    """Numbers uniform in [-1/2, 1/2] for the values from `place` on: float32 (numel,).

    Element p of a period gets (hash(p) xor key) times an odd number, both random, drawn from (seed, period): so each
    element's noise is uniform over the seeds, exactly, and so is the difference of two elements' (multiplicative
    hashing), up to multiples of a power of two that is small unless the hashes agree in many low bits.
    """
    hashes, xors, odds, first = keys(seed, place, numel)
    at = torch.arange(first, first + numel, device="cpu")
    period = at // _PERIOD
    return ((hashes[at % _PERIOD] ^ xors[period]) * odds[period]).float() * 2.0**-32


def keys(seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """What `noise` is made of: the hashes, the keys and the odd numbers of the periods, int32, from that of `place` on,
    and where in it `place` lies.
    """
    first = place // _PERIOD
    random = [derive_seed(seed, period) for period in range(first, (place + max(numel, 1) - 1) // _PERIOD + 1)]
    words = [(_signed(each & 0xFFFFFFFF), _signed(derive_seed(each, 1) & 0xFFFFFFFF | 1)) for each in random]
    xors, odds = torch.tensor(words, dtype=torch.int32, device="cpu").T.contiguous()
    return _hashes(), xors, odds, place - first * _PERIOD


@lru_cache(maxsize=1)
def _hashes() -> Tensor:
    """The murmur3 finalizer of 0, 1, 2, ...: int32 (_PERIOD,)."""
    bits = torch.arange(_PERIOD, dtype=torch.int64, device="cpu")
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits.to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word

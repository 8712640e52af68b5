"""Uniform noise that is a function of (seed, place) alone, for stochastic rounding on a CPU at memory speed."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.codecs.base import derive_seed

_PERIOD = 1 << 18  # places that share a key; each has a hash of its own


def add_noise_(values: Tensor, seed: int, place: int) -> None:
    """Add to each float32 value (contiguous; the first is at `place`) a number uniform in [-1/2, 1/2].

    Element p of a period gets (hash(p) xor key) through a bijective mixer,
    with one random key a period, drawn from (seed, period): so each element's noise is uniform over the seeds, exactly,
    and neighbours' differ.
    """
    flat, begin = values.view(-1), 0
    while begin < flat.numel():
        period, inside = divmod(place + begin, _PERIOD)
        end = min(flat.numel(), begin + _PERIOD - inside)
        noise = _hashes()[inside : inside + end - begin] ^ _signed(derive_seed(seed, period) & 0xFFFFFFFF)
        noise.mul_(_signed(0x9E3779B1))
        noise.bitwise_xor_(noise >> 15)
        noise.mul_(_signed(0x85EBCA77))
        flat[begin:end].add_(noise.float(), alpha=2.0**-32)
        begin = end


@lru_cache(maxsize=1)
def _hashes() -> Tensor:
    """The murmur3 finalizer of 0, 1, 2, ...: int32 (_PERIOD,)."""
    bits = torch.arange(_PERIOD, dtype=torch.int64)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits.to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word

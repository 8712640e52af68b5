"""Uniform noise that is a function of (seed, place) alone, for stochastic rounding."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.codecs.base import derive_seed

_PERIOD = 1 << 19  # places that share a key; each has a hash of its own


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

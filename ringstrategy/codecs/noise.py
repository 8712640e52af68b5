"""Uniform noise that is a function of (seed, place) alone, for stochastic rounding on a CPU at memory speed."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ringstrategy.codecs.base import derive_seed
from ringstrategy.kernels.scratch import scratch

_PERIOD = 1 << 19  # places that share a key; each has a hash of its own


def add_noise_(values: Tensor, seed: int, place: int) -> None:
    """Add to each float32 value (contiguous; the first is at `place`) a number uniform in [-1/2, 1/2].

    Element p of a period gets (hash(p) xor key) times an odd number, both random, drawn from (seed, period): so each
    element's noise is uniform over the seeds, exactly, and so is the difference of two elements' (multiplicative
    hashing), up to multiples of a power of two that is small unless the hashes agree in many low bits.
    """
    flat, begin = values.view(-1), 0
    while begin < flat.numel():
        period, inside = divmod(place + begin, _PERIOD)
        end = min(flat.numel(), begin + _PERIOD - inside)
        random = derive_seed(seed, period)
        noise = scratch("noise", (end - begin,), torch.int32)
        torch.bitwise_xor(_hashes()[inside : inside + end - begin], _signed(random & 0xFFFFFFFF), out=noise)
        noise.mul_(_signed(derive_seed(random, 1) & 0xFFFFFFFF | 1))
        flat[begin:end].add_(scratch("float noise", (end - begin,)).copy_(noise), alpha=2.0**-32)
        begin = end


def keys(seed: int, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same noise, for others to add: the hashes, the key and the odd number of each period, int32, from the one of
    `place` on, and where in it `place` lies.
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

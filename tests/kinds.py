"""Whose kernels tests run: Numba's on a CPU, Triton's on a GPU or, if TRITON_INTERPRET=1, in its interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ringstrategy.codecs import Codec
from ringstrategy.kernels import operations
from ringstrategy.kernels.threads import use_threads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
KIND = "cuda" if DEVICE.type == "cuda" or INTERPRETED else "cpu"
IN_TORCH = "torch"  # a kind without kernels
CPU = torch.device("cpu")
OVERFLOWS = 2.0**128 - 2.0**119  # the least that is infinite as bfloat16


@contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """All operations are done by kernels of this kind."""
    with mock.patch.object(operations, "kind_of", return_value=kind):
        yield


@pytest.fixture(autouse=True)
def bfloat16_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 to bfloat16, where devices round to nearest even."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.primitive_bitwidth == 16:
            return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return np.array(data, np.uint16).astype(np.uint32) << 16

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Kernels of a CPU run on so many."""
    use_threads(count)
    try:
        yield
    finally:
        use_threads(1)


def by_turns(cases: list[Any], quick: int = 1) -> list[Any]:
    """In the interpreter, which is slow, all but the first cases run at night."""
    marks = [pytest.mark.nightly] if INTERPRETED else []
    return [pytest.param(case, marks=marks if place >= quick else [], id=str(case)) for place, case in enumerate(cases)]


def awkward(numel: int, block: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU: heavy-tailed values, and by turns a block of each kind that needs thought."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).mul(20).sub(10).exp()
    limits = torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32)
    tiny, huge = limits.smallest_normal, limits.max / 2
    values = wide.clamp(-huge / 64, huge / 64).to(dtype)
    for place, part in enumerate(values.split(block)):
        kind, middle = (place + seed) % 16, len(part) // 2
        if kind in (1, 3):
            part.fill_(-0.0 if kind == 1 else -0.75)
        elif kind == 5:
            part.copy_(torch.randint(-2, 3, part.shape, generator=generator))  # ties
        elif kind == 6:
            part.copy_(torch.randn(part.shape, generator=generator) * tiny / 8)
        elif kind == 7:
            part.zero_()
            part[middle : middle + 1] = tiny / 4
        elif kind in (8, 9, 10, 11, 12):
            part[middle : middle + 1] = (torch.nan, torch.inf, -torch.inf, OVERFLOWS, -huge)[kind - 8]
        elif kind == 13:
            part.copy_(part.sign() * huge)
        elif kind == 14:
            part[::2] = 0
        elif kind == 15:
            part.abs_()
    return values


def random_message(codec: Codec, numel: int, seed: int) -> Tensor:
    """Bytes that nobody encoded."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (codec.nbytes(numel, torch.float32),), dtype=torch.uint8, generator=generator)


class Guarded:
    """A tensor on a device, with the strides that it has, within memory of which nothing else may change.

    Its place is `shift` values behind a multiple of 64 bytes.
    """

    def __init__(self, given: Tensor, device: torch.device = CPU, shift: int = 0) -> None:
        self._begin = 64 // given.element_size() + shift
        steps = zip(given.shape, given.stride(), strict=True)
        self._end = self._begin + (1 + sum((count - 1) * step for count, step in steps) if given.numel() else 0)
        self._memory = torch.full((self._end + self._begin,), 77, device=device).to(given.dtype)
        self.tensor = self._memory.as_strided(given.shape, given.stride(), self._begin).copy_(given)

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        around = torch.cat([self._memory[: self._begin], self._memory[self._end :]])
        assert same(around, torch.full_like(around, 77))
        return self.tensor.cpu()


def same(one: Tensor, other: Tensor) -> bool:
    """Equal values, or both NaN; of zeros the sign counts too."""
    one, other = one.contiguous(), other.contiguous()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    if one.is_floating_point():
        one, other = (each.cpu().nan_to_num(nan=0.5, posinf=torch.inf, neginf=-torch.inf) for each in (one, other))
    return torch.equal(one.cpu().view(words), other.cpu().view(words))


Fed = tuple[torch.dtype | None, bool]  # the residual's dtype; does what is lost have a place of its own?


def residual_of(numel: int, dtype: torch.dtype) -> Tensor:
    """What `hop` feeds back."""
    return awkward(numel, numel or 1, 32, dtype).clamp(-1000, 1000)


def hop(
    kind: str, codec: Codec, numel: int, dtype: torch.dtype, fed: Fed, count: int, offset: int
) -> tuple[Tensor, Tensor]:
    """The message, and what was lost."""
    (residual, apart), device = fed, DEVICE if kind == KIND else CPU
    put = partial(Guarded, device=device)
    with kernels_of(IN_TORCH):
        arrived = [torch.empty(codec.nbytes(numel, torch.float32), dtype=torch.uint8) for _ in range(count)]
        for seed, message in enumerate(arrived, start=1):
            codec.encode(awkward(numel, codec.block, 3 * seed), message, seed=seed)
    with kernels_of(kind):
        given = put(awkward(numel, codec.block, 16, dtype))
        rest = None if residual is None else put(residual_of(numel, residual))
        lost = rest if rest is not None and not apart else put(torch.full((numel,), 3.0, dtype=residual or dtype))
        wire = put(random_message(codec, numel, 1))
        codec.hop(
            [put(message).tensor for message in arrived],
            given.tensor,
            wire.tensor,
            residual=None if rest is None else rest.tensor,
            lost=lost.tensor,
            seed=5,
            own_seed=6,
            offset=offset,
        )
        return wire.read(), lost.read()


def delivered(kind: str, codec: Codec, wire: Tensor, there: Tensor, *, add: bool) -> Tensor:
    """The values in a message, written to what is `there`, or added to it."""
    device = DEVICE if kind == KIND else CPU
    with kernels_of(kind):
        out = Guarded(there, device)
        codec.deliver(Guarded(wire, device).tensor, out.tensor, seed=5, add=add)
        return out.read()

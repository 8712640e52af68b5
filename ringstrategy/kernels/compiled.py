"""Numba's kernels as an engine: what they are given of a codec and of a message, and what is left to the reference."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringstrategy.kernels import reference
from ringstrategy.kernels.layout import Arithmetic, BlockFormat, parts
from ringstrategy.kernels.scratch import scratch

_log = logging.getLogger(__name__)
_ANNOUNCED_SECONDS = 1.0
_NO_NOISE = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)

Arrays = tuple[Any, Any, Any]  # of a message: codes, scales as uint16, least values


class Compiled:
    """Compiled for this CPU. Values that are not float32 go to the reference, and all do where Numba does not work."""

    def encode(
        self,
        values: Tensor,
        wires: Sequence[Tensor],
        wire: Tensor,
        form: BlockFormat,
        *,
        lost: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """See `Engine.encode`."""
        kernels = _kernels() if values.dtype == torch.float32 else None
        if kernels is None:
            reference.encode(values, wires, wire, form, lost=lost, seed=seed, offset=offset)
            return
        numel, known = values.numel(), _known(form)
        for received in wires[:-1]:
            values = scratch("sum", (numel,)).copy_(values) if received is wires[0] else values
            self.decode(received, values, form, add=True)
        message = _arrays(wire, numel, form)
        last = _arrays(wires[-1], numel, form) if wires else message
        noise = form.noise(seed, offset, numel)
        hashes, xors, odds = (_NO_NOISE,) * 3 if noise is None else (part.numpy() for part in noise[:3])
        kernels.encode(
            _array(values),
            *message,
            bool(wires),
            *last,
            _NO_VALUES if lost is None else _array(lost),
            *known,
            noise is not None,
            *(hashes, xors, odds, np.uint64(0 if noise is None else noise[3])),
        )

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, add: bool = False) -> None:
        """See `Engine.decode`."""
        kernels = _kernels() if out.dtype == torch.float32 else None
        if kernels is None:
            reference.decode(wire, out, form, add=add)
            return
        _, block, bits, spacing, bias, table, *_ = _known(form)
        kernels.decode(*_arrays(wire, out.numel(), form), _array(out), add, block, bits, spacing, bias, table)

    def rotate_(self, values: Tensor, signs: Tensor, *, inverse: bool = False) -> None:
        """See `Engine.rotate_`."""
        kernels = _kernels() if values.dtype == torch.float32 else None
        if kernels is None:
            reference.rotate_(values, signs, inverse=inverse)
        else:
            kernels.rotate(_array(values), _array(signs / 16), inverse)

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        _kernels()

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """None: each gradient is copied by torch."""


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    """The kernels, compiled or read from the disk; None where Numba does not work, with a warning."""
    begin = time.monotonic()
    try:
        from ringstrategy.kernels import cpu

        cpu.compile_all()
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(
            f"Numba does not work here ({type(error).__name__}: {str(error).splitlines()[0]}), so codecs run several "
            "times slower on this CPU, with the same bytes: python -m pip install --upgrade numba",
            stacklevel=2,
        )
        return None
    spent = time.monotonic() - begin
    if spent > _ANNOUNCED_SECONDS:
        _log.info("compiled the codecs for this CPU in %.1f s; they are kept on disk for the next time", spent)
    return cpu


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _arrays(wire: Tensor, numel: int, form: BlockFormat) -> Arrays:
    """The parts of a message; its length was checked."""
    *heads, codes = parts(numel, form.block, form.bits, form.headers)
    message = _array(wire)
    leasts = message[: heads[0]].view(np.float32) if len(heads) > 1 else _NO_VALUES
    return message[sum(heads) : sum(heads) + codes], message[sum(heads[:-1]) : sum(heads)].view(np.uint16), leasts


@lru_cache(256)
def _known(form: BlockFormat) -> tuple[Any, ...]:
    """The arguments of `cpu.encode` that say how the codec rounds, from its kind to `too_large`."""
    how: Arithmetic = form.arithmetic()
    table = _NO_VALUES
    if how.kind in ("e4m3", "e5m2"):
        numbers = torch.empty(1, 256, dtype=torch.float32, device="cpu")
        form.load(torch.arange(256, dtype=torch.uint8, device="cpu")[None], numbers)
        table = numbers[0].clone().numpy()
    from ringstrategy.kernels import cpu

    bias = form.shift - (form.spacing << (form.bits - 1))
    real = (float(form.spacing), float(bias), table, float(how.highest), how.factor, how.smallest, how.too_large)
    return (
        cpu.KINDS.index(how.kind),
        np.uint64(form.block),
        np.uint64(form.bits),
        *(each if each is table else np.float32(each) for each in real),
    )

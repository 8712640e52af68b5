"""Values rounded to a 16-bit floating-point dtype on the wire; every sum is still taken in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ringstrategy.codecs.base import Codec
from ringstrategy.codecs.identity import Identity
from ringstrategy.kernels import operations

_WIRE_DTYPES = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Codec):
    """wire = values rounded to nearest even in `dtype`; 2 bytes an element.

    float16 has 11 significant bits and overflows to infinity beyond 65504; bfloat16 has 8 and the range of float32.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`, or their names.
    """

    dtype: torch.dtype

    def __init__(self, dtype: torch.dtype | str) -> None:
        wire_dtype = _WIRE_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if wire_dtype not in _WIRE_DTYPES.values():
            raise ValueError(f"Cast takes torch.float16 or torch.bfloat16 (or 'float16', 'bfloat16'), got {dtype!r}")
        object.__setattr__(self, "dtype", wire_dtype)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return 2 * numel

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """Round to nearest even."""
        self.check_wire(wire, values)
        rounded = wire.view(self.dtype)
        rounded.copy_(values)
        if lost is not None:
            operations.lose.on(values.device)(values, rounded, lost)

    @override
    def warm_up(self, device: torch.device) -> None:
        operations.warm_up_lose.on(device)(self.dtype)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Widen, or widen and add."""
        self.check_wire(wire, out)
        rounded = wire.view(self.dtype)
        out.add_(rounded) if add else out.copy_(rounded)

    def summable(self, dtype: torch.dtype) -> torch.dtype | None:
        """The wire's dtype: the backend then sums in it."""
        return self.dtype


def wire_of(codec: Codec, dtype: torch.dtype) -> Codec:
    """How sums of values of `dtype` travel: without a codec those of 16-bit values in 16 bits, rounded at each send."""
    return Cast(dtype) if codec == Identity() and dtype in _WIRE_DTYPES.values() else codec

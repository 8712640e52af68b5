"""The codec that changes nothing: the wire carries the values' own bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringstrategy.codecs.base import Codec
from ringstrategy.kernels import operations


@dataclass(frozen=True)
class Identity(Codec):
    """wire = values; 4 bytes an element for float32. Collectives send and receive in place, without a copy."""

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire."""
        return numel * dtype.itemsize

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """Copy; nothing is lost."""
        self.check_wire(wire, values)
        wire.view(values.dtype).copy_(values)
        if lost is not None:
            lost.zero_()

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Copy or add."""
        self.check_wire(wire, out)
        values = wire.view(out.dtype)
        out.add_(values) if add else out.copy_(values)

    def add(self, wires: Sequence[Tensor], out: Tensor) -> None:
        """In one pass where the device can."""
        for wire in wires:
            self.check_wire(wire, out)
        operations.add_.on(out.device)(out, [wire.view(out.dtype) for wire in wires])

    def raw(self, values: Tensor) -> Tensor | None:
        """The values' own bytes."""
        return values.view(torch.uint8)

    def summable(self, dtype: torch.dtype) -> torch.dtype | None:
        """The values' own dtype."""
        return dtype

    def check(self, dtype: torch.dtype) -> None:
        """Carries every dtype that a gradient can have."""

    @property
    def lossless(self) -> bool:
        """Always."""
        return True

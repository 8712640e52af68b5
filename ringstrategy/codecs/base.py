"""The contract of a codec: values to bytes of a size known beforehand, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ringstrategy.kernels.operations import Launches

WIRE_FORMAT = 3  # of all codecs and control messages; compared at setup. Goes up when bytes of one that exists change


def derive_seed(seed: int, *indices: int) -> int:
    """A 63-bit seed that depends on all its arguments and on nothing else (splitmix64 over them in turn)."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    for index in indices:
        state = (state ^ (index & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class Codec(ABC):
    """Stateless and pure: the same arguments give the same bytes, on every rank and in every rerun.

    `values`, `out` and `lost` are flat floating-point tensors of one dtype and length; `wire` is a flat uint8 tensor of
    `nbytes(len(values))`. Implementations are frozen dataclasses: equal codecs compare equal and print their arguments.
    """

    block: int = 1  # chunks and segments are cut on multiples of it
    hop_by_hop: bool = True  # can a partial sum be encoded again at each hop of a ring?
    adds_exactly: bool = False  # do any 256 decoded values of one block add up in float32 without rounding?

    needs_kernels: bool = False  # are CUDA tensors left to the Triton kernels?

    @abstractmethod
    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire for `numel` values of `dtype`."""

    @abstractmethod
    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        """Write `values` to `wire`, and `values - decoded` to `lost`.

        A block with a NaN or an infinity decodes to something non-finite and leaves its part of `lost` untouched.
        `offset` is the place of the first value in its bucket, so that cutting into segments changes no byte; `seed`
        is this rank's own for this step and bucket.
        """

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write (or with `add`, add) the values in `wire` to `out`."""

    def add(self, wires: Sequence[Tensor], out: Tensor) -> None:
        """Add the values in each of the wires to `out`, in this order."""
        for wire in wires:
            self.decode(wire, out, add=True)

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
        """This rank's part of a sum, prepared and added to what arrived (in that order), becomes `wire`.

        Codecs that can do it in one pass do.

        Args:
            arrived: wires of the same values of other ranks, or of partial sums.
            values: may be used as scratch.
            wire: to be written; shares no memory with `arrived`.
            residual: is added to the values first; any float dtype.
            lost: receives what encoding loses, in parameter space, rounded to its dtype; may be the residual. From a
                block that is not finite it gets the residual; without a residual it stays as it was there.
            seed: everyone's, of `prepare_`.
            own_seed: of this rank's encode.
            offset: place of the first value in its bucket.
        """
        for message in (*arrived, wire):
            self.check_wire(message, values)  # before anything is written
        if residual is not None:
            values.add_(residual)
        self.prepare_(values, seed)
        rest = lost
        if lost is not None:
            before = lost if residual is None else residual  # what the encode leaves as it was comes back as this
            if lost.dtype != values.dtype:
                rest = before.to(values.dtype, copy=True)
            elif before.data_ptr() != lost.data_ptr():
                lost.copy_(before)
        if rest is not None:
            self.prepare_(rest, seed)
        self.add(arrived, values)
        self.encode(values, wire, lost=rest, seed=own_seed, offset=offset)
        if lost is not None and rest is not None:
            self.restore_(rest, seed)
            if rest is not lost:
                lost.copy_(rest)

    def deliver(self, wire: Tensor, out: Tensor, *, seed: int, add: bool = False) -> None:
        """Write the sum in `wire` to `out`, or add it to that, as it is outside the collective."""
        if not add or type(self).restore_ is Codec.restore_:  # nothing to turn back before it is added
            self.decode(wire, out, add=add)
            self.restore_(out, seed)
            return
        decoded = torch.empty_like(out)
        self.decode(wire, decoded)
        self.restore_(decoded, seed)
        out.add_(decoded)

    def launches(self, values: Tensor, seed: int) -> Launches | None:
        """What does `hop` and `deliver` for several parts of such values at once, where launches cost; else None.

        Args:
            values: all of them.
            seed: everyone's, of `prepare_`.
        """
        del values, seed
        return None

    def prepare_(self, values: Tensor, seed: int) -> None:
        """Transform a run of whole blocks before it is encoded (a rotation): linear, the same on all ranks.

        What it does must not depend on where the run begins; `seed` is everyone's for this step and bucket.
        """

    def restore_(self, values: Tensor, seed: int) -> None:
        """Undo `prepare_`."""

    def warm_up(self, device: torch.device) -> None:
        """Do what the first encode on this device would wait for, such as compiling."""

    def raw(self, values: Tensor) -> Tensor | None:
        """The bytes of `values` themselves (no copy) if they are the wire format, else None."""
        return None

    def summable(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype as which wire bytes can be added by a backend's own all-reduce, or None if they cannot."""
        return None

    def check(self, dtype: torch.dtype) -> None:
        """Raise a TypeError with the cure if values of `dtype` cannot be carried."""
        if not dtype.is_floating_point:
            raise TypeError(
                f"{self} cannot carry {dtype}; pass codec=Identity() for such parameters, or make them local"
            )

    def check_wire(self, wire: Tensor, values: Tensor) -> None:
        """Raise unless `wire` can hold just `values`, which can be carried: a peer's bytes are read only after this."""
        self.check(values.dtype)
        nbytes = self.nbytes(values.numel(), values.dtype)
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,) or not wire.is_contiguous():
            raise ValueError(
                f"{self} needs a flat, contiguous uint8 tensor of {nbytes} bytes for {values.numel()} values, "
                f"got {wire.dtype} of shape {tuple(wire.shape)}; size it with nbytes()"
            )

    @property
    def lossless(self) -> bool:
        """True if decoding gives back every bit."""
        return False


def check_carried(codec: Codec, name: str, dtype: torch.dtype) -> None:
    """See `Codec.check`; the error names the parameter."""
    try:
        codec.check(dtype)
    except TypeError as error:
        raise TypeError(f"parameter {name}: {error}") from error

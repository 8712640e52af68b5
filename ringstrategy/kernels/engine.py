"""Which engine does the arithmetic of codecs and mixings on a device: the one place that knows. All look alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ringstrategy.kernels import add, cast, mix, nesterov, orthonormal, sparse
from ringstrategy.kernels.layout import ROTATED, BlockFormat, Part, Signs, SparseFormat

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.buckets import Places, Source


class Launches(Protocol):
    """Encodes and decodes several parts of a float32 bucket in one launch, in one format and with one rotation."""

    @property
    def gathers(self) -> bool:
        """Can `encode` have a source?"""

    def encode(
        self,
        values: Tensor,
        parts: Sequence[Part],
        arrived: Sequence[Tensor] = (),
        *,
        source: Source | None,
        residual: Tensor | None,
        lost: Tensor | None,
        seed: int,
    ) -> None:
        """Do what `Engine.encode` does for each part.

        Args:
            values: float32 (n,), the whole bucket; they stay as they are.
            parts: of the bucket, with the messages to be written.
            arrived: messages of the only part, to be added, if there is one part.
            source: where the values lie, if not in `values`.
            residual: of any float dtype (n,).
            lost: of any float dtype (n,).
            seed: of stochastic rounding.
        """

    def decode(self, parts: Sequence[Part], out: Tensor) -> None:
        """Write the values in the parts' messages to their places in the bucket `out`, float32 (n,)."""


class Engine(Protocol):
    """Arithmetic on the tensors of one kind of device; the same bytes on all of them."""

    def encode(
        self,
        values: Tensor,
        wires: Sequence[Tensor],
        wire: Tensor,
        form: BlockFormat,
        *,
        residual: Tensor | None = None,
        signs: Signs | None = None,
        lost: Tensor | None,
        seed: int,
        offset: int,
    ) -> None:
        """Write the sum of `values` and then `wires`, added in that order, to `wire`; and what that loses to `lost`.

        Args:
            values: floating-point (n,); stay as they are.
            wires: messages of n values in the same format, uint8.
            wire: uint8, for n values.
            form: of the messages.
            residual: of any float dtype, added to the values; only where the engine `fuses`.
            signs: of a rotation of values and residual; what is lost is turned back. Only where it `fuses`.
            lost: like `values`, or where the engine `fuses` of any float dtype; None: nobody wants to know. From a
                block that is not finite it gets the residual; without a residual it stays as it was there.
            seed: of stochastic rounding.
            offset: place of the first value in its bucket, at the edge of a block.
        """

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool) -> None:
        """Write the values in `wire`, turned back by `signs` where the engine `fuses`, to `out`, or add them to it."""

    def fuses(self, form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
        """Can a residual be added to such values, and these be `rotated`, in the pass that encodes or decodes them?"""

    def launches(self, form: BlockFormat, signs: Signs | None) -> Launches | None:
        """For buckets that this engine `fuses`, several parts at once; None: each part is as quick by itself."""

    def rotate_(self, values: Tensor, signs: Signs, *, inverse: bool) -> None:
        """y = H (x * signs / 16) for each whole 256 values in place, or inversely x = (H y) * signs / 16."""

    def warm_up(self, form: BlockFormat) -> None:
        """Do what the first call for this format would wait for."""

    def encode_sparse(
        self, values: Tensor, kept: Tensor, places: Tensor, form: SparseFormat, *, lost: Tensor | None
    ) -> None:
        """Write some values of each block to `kept`, and all of the block less those to `lost`.

        A block with a value that is not finite, or a kept one that is not finite as bfloat16, gives k times NaN and the
        first k places, and leaves its part of `lost` as it was.

        Args:
            values: floating-point (n,); stay as they are. A short last block counts as filled up with zeros.
            kept: bfloat16 (blocks, k), to be written.
            places: in each block. Strided: of the first one, int64 (blocks, 1). Else of all, uint8 or int16
                (blocks, k), to be written: of the largest magnitudes, of equal ones the first, in ascending order.
            form: how many are kept, and which.
            lost: like `values`; None: nobody wants to know.
        """

    def decode_sparse(self, kept: Tensor, places: Tensor, out: Tensor, form: SparseFormat, *, add: bool) -> None:
        """Write what `encode_sparse` kept to `out`, or add it to it; a block with a NaN becomes all NaN.

        Places outside a block (only a broken peer sends them) are taken modulo its length; values at one place add up.
        """

    def warm_up_sparse(self, form: SparseFormat) -> None:
        """Do what the first call for this format would wait for."""

    def lose(self, values: Tensor, rounded: Tensor, lost: Tensor) -> None:
        """Write `values - rounded`, float16 or bfloat16, to `lost` wherever that is finite. All are (n,)."""

    def warm_up_cast(self, dtype: torch.dtype) -> None:
        """Do what the first `lose` of values rounded to this dtype would wait for."""

    def add_(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Add the parts, like `out` of any dtype and length, in this order; each sum is rounded to that dtype."""

    def mix(self, own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Write the sum of weight * (theirs - own), added in that order, to `out`.

        Args:
            own: floating-point (n,), perhaps narrower than `out`.
            theirs: like `own`.
            weights: one for each of them.
            out: (n,); its dtype is that of differences, products and sums.
        """

    def warm_up_mix(self, dtype: torch.dtype) -> None:
        """Do what the first `mix` of values of this dtype would wait for."""

    def nesterov_(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """For each tensor: momenta = momentum * momenta + gradients; values -= lr * (gradients + momentum * momenta).

        All are contiguous and alike. Each operation is rounded to their dtype.
        """

    def warm_up_nesterov(self) -> None:
        """Do what the first `nesterov_` would wait for."""

    def orthonormalise_(self, columns: Tensor) -> None:
        """Gram-Schmidt, modified, over columns of shape (matrices, rank, length): equal bits on equal processors.

        A column that is zero or depends on those before it becomes zero; a NaN or an infinity makes its column NaN.
        """

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """512 values of each, the same places each time: float64 (tensors, 512).

        0 where a tensor has fewer, for what is not finite, and for None, but not all are None.
        """

    def stepped_parts(
        self,
        then: Tensor,
        tensors: Sequence[Tensor | None],
        late: Tensor | None,
        scale: Tensor | None,
        stepped: Tensor | bool,
    ) -> Tensor:
        """Of each tensor the part that it still holds of what `sample` gave `then`: float64 (tensors,), 1 for None.

        That is <now, then> / <then, then>, at least 0; for a tensor that was zero, this of all together.

        Args:
            then: as `sample` gave it.
            tensors: like those; None: not asked for.
            late: the largest part of late for each, float64 (tensors,): parts are relative to it, and it follows. None:
                they are not, and at most 1.
            scale: a number on the device, by which parts are multiplied before they are compared with it; None: 1.
            stepped: false: all parts are 0. A boolean on the device where only that knows.
        """

    def go_(self, now: Tensor, before: Tensor, edges: Sequence[int], parts: Tensor) -> None:
        """now = before + part * (now - before), exact at 0 and 1, between each two edges, for which there is a part."""

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places | None:
        """Where gradients lie in a float32 bucket, so that one launch moves all; None: this engine copies each."""


@cache
def _triton(module: str) -> Any:
    """Of the Triton kernels, imported when it is first needed."""
    return import_module(f"ringstrategy.kernels.triton.{module}")


class _TritonLaunches:
    def __init__(self, form: BlockFormat, signs: Signs | None) -> None:
        self._form, self._signs = form.arithmetic, signs

    @property
    def gathers(self) -> bool:
        return bool(_triton("formats").GATHERS)

    def encode(
        self,
        values: Tensor,
        parts: Sequence[Part],
        arrived: Sequence[Tensor] = (),
        *,
        source: Source | None,
        residual: Tensor | None,
        lost: Tensor | None,
        seed: int,
    ) -> None:
        _triton("encode").encode_parts(
            values, parts, arrived, _triton("formats").of(self._form),
            source=source, residual=residual, signs=self._signs, lost=lost, seed=seed,
        )  # fmt: skip

    def decode(self, parts: Sequence[Part], out: Tensor) -> None:
        _triton("decode").decode_parts(parts, out, _triton("formats").of(self._form), signs=self._signs)


class _Triton:
    """Triton's kernels, imported when they are first needed."""

    def encode(
        self,
        values: Tensor,
        wires: Sequence[Tensor],
        wire: Tensor,
        form: BlockFormat,
        *,
        residual: Tensor | None = None,
        signs: Signs | None = None,
        lost: Tensor | None,
        seed: int,
        offset: int,
    ) -> None:
        """See `Engine.encode`."""
        _triton("encode").encode(
            values, wires, wire, _triton("formats").of(form.arithmetic),
            residual=residual, signs=signs, lost=lost, seed=seed, offset=offset,
        )  # fmt: skip

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool) -> None:
        """See `Engine.decode`."""
        _triton("decode").decode(wire, out, _triton("formats").of(form.arithmetic), signs=signs, add=add)

    def rotate_(self, values: Tensor, signs: Signs, *, inverse: bool) -> None:
        """See `Engine.rotate_`."""
        _triton("rotate").rotate_(values, signs, inverse=inverse)

    def fuses(self, form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
        """Rotations of blocks of 256, 512, 1024, ... values, unless a short block at the end is rotated in part."""
        if values.dtype != torch.float32:
            return False
        if not rotated:
            return True
        rotates: bool = _triton("formats").of(form.arithmetic).rotates
        return rotates and values.numel() % form.block < ROTATED

    def launches(self, form: BlockFormat, signs: Signs | None) -> Launches:
        """See `Engine.launches`."""
        return _TritonLaunches(form, signs)

    def warm_up(self, form: BlockFormat) -> None:
        """Raise a ValueError if blocks are too large for the kernels.

        It compiles nothing. Triton does so at the first launch for a shape, which is one of zeros: see
        `Bucket.warm_up`.
        """
        _triton("formats").of(form.arithmetic)

    def encode_sparse(
        self, values: Tensor, kept: Tensor, places: Tensor, form: SparseFormat, *, lost: Tensor | None
    ) -> None:
        """In torch; see `Engine.encode_sparse`."""
        sparse.encode(values, kept, places, form, lost=lost)

    def decode_sparse(self, kept: Tensor, places: Tensor, out: Tensor, form: SparseFormat, *, add: bool) -> None:
        """In torch; see `Engine.decode_sparse`."""
        sparse.decode(kept, places, out, form, add=add)

    def warm_up_sparse(self, form: SparseFormat) -> None:
        """Nothing."""

    def lose(self, values: Tensor, rounded: Tensor, lost: Tensor) -> None:
        """In torch; see `Engine.lose`."""
        cast.lose(values, rounded, lost)

    def warm_up_cast(self, dtype: torch.dtype) -> None:
        """Nothing."""

    def add_(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """See `Engine.add_`: one launch for several parts of float32."""
        if out.dtype != torch.float32 or len(parts) < 2:
            add.add_(out, parts)
            return
        _triton("add").add_(out, parts)

    def mix(self, own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """In torch; see `Engine.mix`."""
        mix.mix(own, theirs, weights, out)

    def warm_up_mix(self, dtype: torch.dtype) -> None:
        """Nothing."""

    def nesterov_(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """In torch; see `Engine.nesterov_`."""
        nesterov.nesterov_(values, gradients, momenta, lr, momentum)

    def warm_up_nesterov(self) -> None:
        """Nothing."""

    def orthonormalise_(self, columns: Tensor) -> None:
        """See `Engine.orthonormalise_`: one program a matrix, of float32."""
        if columns.dtype != torch.float32:
            orthonormal.orthonormalise_(columns)
            return
        _triton("orthonormal").orthonormalise_(columns, orthonormal.DEPENDENT)

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """See `Engine.sample`: one launch."""
        sampled: Tensor = _triton("feedback").sample(tensors)
        return sampled

    def stepped_parts(
        self,
        then: Tensor,
        tensors: Sequence[Tensor | None],
        late: Tensor | None,
        scale: Tensor | None,
        stepped: Tensor | bool,
    ) -> Tensor:
        """See `Engine.stepped_parts`: two launches."""
        parts: Tensor = _triton("feedback").stepped_parts(then, tensors, late, scale, stepped)
        return parts

    def go_(self, now: Tensor, before: Tensor, edges: Sequence[int], parts: Tensor) -> None:
        """See `Engine.go_`: one launch."""
        _triton("feedback").go_(now, before, edges, parts)

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places:
        """See `Engine.lay_out`."""
        places: Places = _triton("buckets").Places(numels, dtypes, device)
        return places


_CUDA: Engine = _Triton()


@cache
def _cpu() -> Engine:
    """Imported when it is first needed."""
    from ringstrategy.kernels.compiled import Compiled

    return Compiled()


def engine(device: torch.device) -> Engine:
    """The engine for tensors on this device."""
    return _CUDA if device.type == "cuda" else _cpu()

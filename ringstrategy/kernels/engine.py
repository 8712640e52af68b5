"""Which engine does the arithmetic of codecs and mixings on a device: the one place that knows. All look alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ringstrategy.kernels import cast, mix, orthonormal, sparse
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
            lost: float32 (n,).
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
            lost: like `values`; None: nobody wants to know.
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

    def orthonormalise_(self, columns: Tensor) -> None:
        """Gram-Schmidt, modified, over columns of shape (matrices, rank, length): equal bits on equal processors.

        A column that is zero or depends on those before it becomes zero; a NaN or an infinity makes its column NaN.
        """

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places | None:
        """Where gradients lie in a float32 bucket, so that one launch moves all; None: this engine copies each."""


class _TritonLaunches:
    def __init__(self, form: BlockFormat, signs: Signs | None) -> None:
        self._form, self._signs = form.arithmetic, signs

    @property
    def gathers(self) -> bool:
        from ringstrategy.kernels.triton.formats import GATHERS

        return bool(GATHERS)

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
        from ringstrategy.kernels.triton.encode import encode_parts
        from ringstrategy.kernels.triton.formats import of

        encode_parts(
            values, parts, arrived, of(self._form),
            source=source, residual=residual, signs=self._signs, lost=lost, seed=seed,
        )  # fmt: skip

    def decode(self, parts: Sequence[Part], out: Tensor) -> None:
        from ringstrategy.kernels.triton.decode import decode_parts
        from ringstrategy.kernels.triton.formats import of

        decode_parts(parts, out, of(self._form), signs=self._signs)


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
        from ringstrategy.kernels.triton.encode import encode
        from ringstrategy.kernels.triton.formats import of

        encode(
            values, wires, wire, of(form.arithmetic),
            residual=residual, signs=signs, lost=lost, seed=seed, offset=offset,
        )  # fmt: skip

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool) -> None:
        """See `Engine.decode`."""
        from ringstrategy.kernels.triton.decode import decode
        from ringstrategy.kernels.triton.formats import of

        decode(wire, out, of(form.arithmetic), signs=signs, add=add)

    def rotate_(self, values: Tensor, signs: Signs, *, inverse: bool) -> None:
        """See `Engine.rotate_`."""
        from ringstrategy.kernels.triton.rotate import rotate_

        rotate_(values, signs, inverse=inverse)

    def fuses(self, form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
        """Rotations of blocks of 256, 512, 1024, ... values, unless a short block at the end is rotated in part."""
        from ringstrategy.kernels.triton.formats import of

        if values.dtype != torch.float32:
            return False
        return not rotated or (of(form.arithmetic).rotates and values.numel() % form.block < ROTATED)

    def launches(self, form: BlockFormat, signs: Signs | None) -> Launches:
        """See `Engine.launches`."""
        return _TritonLaunches(form, signs)

    def warm_up(self, form: BlockFormat) -> None:
        """Raise a ValueError if blocks are too large for the kernels. Triton compiles for each shape, when it comes."""
        from ringstrategy.kernels.triton.formats import of

        of(form.arithmetic)

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

    def mix(self, own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """In torch; see `Engine.mix`."""
        mix.mix(own, theirs, weights, out)

    def warm_up_mix(self, dtype: torch.dtype) -> None:
        """Nothing."""

    def orthonormalise_(self, columns: Tensor) -> None:
        """See `Engine.orthonormalise_`: one program a matrix, of float32."""
        if columns.dtype != torch.float32:
            orthonormal.orthonormalise_(columns)
            return
        from ringstrategy.kernels.triton.orthonormal import orthonormalise_

        orthonormalise_(columns, orthonormal.DEPENDENT)

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places:
        """See `Engine.lay_out`."""
        from ringstrategy.kernels.triton.buckets import Places

        return Places(numels, dtypes, device)


_CUDA: Engine = _Triton()


@cache
def _cpu() -> Engine:
    """Imported when it is first needed."""
    from ringstrategy.kernels.compiled import Compiled

    return Compiled()


def engine(device: torch.device) -> Engine:
    """The engine for tensors on this device."""
    return _CUDA if device.type == "cuda" else _cpu()

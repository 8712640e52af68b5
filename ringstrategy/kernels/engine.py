"""Which engine does the arithmetic of codecs on a device: the one place that knows. All have one signature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ringstrategy.kernels import cast, orthonormal, sparse
from ringstrategy.kernels.layout import BlockFormat, SparseFormat

if TYPE_CHECKING:
    from ringstrategy.kernels.triton.buckets import Places


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
        signs: Tensor | None = None,
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
            residual: like `values`, added to them; only where the engine `fuses`.
            signs: of a rotation of values and residual, (256,); what is lost is turned back. Only where it `fuses`.
            lost: like `values`; None: nobody wants to know.
            seed: of stochastic rounding.
            offset: place of the first value in its bucket, at the edge of a block.
        """

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Tensor | None = None, add: bool) -> None:
        """Write the values in `wire`, turned back by `signs` where the engine `fuses`, to `out`, or add them to it."""

    def fuses(self, form: BlockFormat, dtype: torch.dtype) -> bool:
        """Can values of `dtype` be rotated, and a residual added, in the same pass as they are encoded or decoded?"""

    def rotate_(self, values: Tensor, signs: Tensor, *, inverse: bool) -> None:
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

    def orthonormalise_(self, columns: Tensor) -> None:
        """Gram-Schmidt, modified, over columns of shape (matrices, rank, length): equal bits on equal processors.

        A column that is zero or depends on those before it becomes zero; a NaN or an infinity makes its column NaN.
        """

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> Places | None:
        """Where gradients lie in a float32 bucket, so that one launch moves all; None: this engine copies each."""


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
        signs: Tensor | None = None,
        lost: Tensor | None,
        seed: int,
        offset: int,
    ) -> None:
        """See `Engine.encode`."""
        assert residual is signs is None, "it does not fuse"
        from ringstrategy.kernels.triton import encode as kernels
        from ringstrategy.kernels.triton.formats import of

        known = of(form.arithmetic)
        if not wires:
            kernels.encode(values, wire, known, lost=lost, seed=seed, offset=offset)
        elif len(wires) == 1:  # needs no table of addresses
            kernels.relay(wires[0], values, wire, known, lost=lost, seed=seed, offset=offset)
        else:
            kernels.reduce(wires, values, wire, known, lost=lost, seed=seed, offset=offset)

    def decode(self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Tensor | None = None, add: bool) -> None:
        """See `Engine.decode`."""
        assert signs is None, "it does not fuse"
        from ringstrategy.kernels.triton.decode import decode
        from ringstrategy.kernels.triton.formats import of

        decode(wire, out, of(form.arithmetic), add=add)

    def rotate_(self, values: Tensor, signs: Tensor, *, inverse: bool) -> None:
        """See `Engine.rotate_`."""
        from ringstrategy.kernels.triton.rotate import rotate_

        rotate_(values, signs, inverse=inverse)

    def fuses(self, form: BlockFormat, dtype: torch.dtype) -> bool:
        """Not yet."""
        return False

    def warm_up(self, form: BlockFormat) -> None:
        """Nothing: Triton compiles for each shape, when it comes."""

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

"""Numba's kernels as an engine: what they are given of a codec and of a message, and on how many cores they run."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringstrategy.kernels import add, cast, feedback, mix, nesterov, orthonormal, reference, sparse
from ringstrategy.kernels.layout import BlockFormat, Signs, SparseFormat
from ringstrategy.kernels.threads import in_parts

if TYPE_CHECKING:
    from ringstrategy.kernels import cpu, cpu_sparse

_log = logging.getLogger(__name__)
_ANNOUNCED_SECONDS = 1.0
_NO_NOISE = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)
_NO_MESSAGES = np.empty(0, np.uint64)


class Compiled:
    """Compiled for this CPU and each codec that runs on it. Where Numba does not work, all goes to the reference.

    Values of 16 bits are widened, and what is lost is rounded; of float64, what is lost is float64.
    """

    def encode(
        self,
        values: Tensor,
        wires: Sequence[Tensor],
        wire: Tensor,
        form: BlockFormat,
        *,
        residual: Tensor | None = None,
        signs: Signs | None = None,
        lost: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """See `Engine.encode`."""
        kernels = _kernels(form)
        if kernels is None:
            reference.encode(values, wires, wire, form, lost=lost, seed=seed, offset=offset)
            return
        if values.dtype != torch.float32:
            self._encode_others(values, wires, wire, form, lost, seed, offset)
            return
        assert all(each.shape == values.shape for each in (residual, lost) if each is not None)
        if lost is not None and lost.dtype != values.dtype:
            rest = (lost if residual is None else residual).to(values.dtype, copy=True)
            added = None if residual is None else rest
            self.encode(
                values, wires, wire, form, residual=added, signs=signs, lost=rest, seed=seed, offset=offset
            )  # fmt: skip
            lost.copy_(rest)
            return
        noise = form.noise(seed, offset, values.numel())
        hashes, xors, odds = (_NO_NOISE,) * 3 if noise is None else (part.numpy() for part in noise[:3])
        given = (
            _array(values),
            _NO_VALUES if residual is None else _array(residual.to(values.dtype)),
            _flips(signs),
            np.array([arrived.data_ptr() for arrived in wires], np.uint64) if wires else _NO_MESSAGES,
            _array(wire),
            _NO_VALUES if lost is None else _array(lost),
        )
        how = hashes, xors, odds, np.uint64(0 if noise is None else noise[3])
        _run(kernels.encode, form.block, values.numel(), given, how)

    def _encode_others(
        self,
        values: Tensor,
        wires: Sequence[Tensor],
        wire: Tensor,
        form: BlockFormat,
        lost: Tensor | None,
        seed: int,
        offset: int,
    ) -> None:
        wide = values.float()
        rest = None if lost is None else lost.float()
        self.encode(wide, wires, wire, form, lost=rest, seed=seed, offset=offset)
        if lost is None or rest is None:
            return
        if values.dtype != torch.float64:
            lost.copy_(rest)
            return
        decoded = torch.empty_like(wide)  # of a block that is not finite all is NaN
        self.decode(wire, decoded, form)
        lost.copy_(torch.where(decoded.isnan(), lost, rest + (values - wide)))

    def decode(
        self, wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool = False
    ) -> None:
        """See `Engine.decode`."""
        kernels = _kernels(form)
        if kernels is None:
            reference.decode(wire, out, form, add=add)
        elif out.dtype != torch.float32:
            decoded = torch.empty_like(out, dtype=torch.float32)
            self.decode(wire, decoded, form)
            out.add_(decoded) if add else out.copy_(decoded)
        else:
            _run(kernels.decode, form.block, out.numel(), (_array(wire), _array(out), add, _flips(signs)))

    def rotate_(self, values: Tensor, signs: Signs, *, inverse: bool = False) -> None:
        """See `Engine.rotate_`."""
        rotate = _rotate() if values.dtype == torch.float32 else None
        if rotate is None:
            reference.rotate_(values, signs, inverse=inverse)
        else:
            rotate(_array(values), _flips(signs), inverse)

    def fuses(self, form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
        """See `Engine.fuses`."""
        del rotated
        return values.dtype == torch.float32 and _kernels(form) is not None

    def launches(self, form: BlockFormat, signs: Signs | None) -> None:
        """None: a call costs nothing beside its work."""

    def warm_up(self, form: BlockFormat) -> None:
        """See `Engine.warm_up`."""
        _kernels(form)

    def encode_sparse(
        self, values: Tensor, kept: Tensor, places: Tensor, form: SparseFormat, *, lost: Tensor | None = None
    ) -> None:
        """See `Engine.encode_sparse`; values that are not float32 go to the reference."""
        kernels = _sparse_kernels(form) if values.dtype == torch.float32 else None
        if kernels is None:
            sparse.encode(values, kept, places, form, lost=lost)
            return
        left = _NO_VALUES if lost is None else _array(lost)
        given = _array(values).view(np.int32), *_message(kept, places), left
        _run(kernels.encode, form.block, values.numel(), given)

    def decode_sparse(
        self, kept: Tensor, places: Tensor, out: Tensor, form: SparseFormat, *, add: bool = False
    ) -> None:
        """See `Engine.decode_sparse`; values that are not float32 go to the reference."""
        kernels = _sparse_kernels(form) if out.dtype == torch.float32 else None
        if kernels is None:
            sparse.decode(kept, places, out, form, add=add)
            return
        given = *_message(kept, places), _array(out), add
        _run(kernels.decode, form.block, out.numel(), given)

    def warm_up_sparse(self, form: SparseFormat) -> None:
        """See `Engine.warm_up_sparse`."""
        _sparse_kernels(form)

    def lose(self, values: Tensor, rounded: Tensor, lost: Tensor) -> None:
        """See `Engine.lose`; values that are not float32 go to the reference."""
        kernel = _lose(rounded.dtype) if values.dtype == torch.float32 else None
        if kernel is None:
            cast.lose(values, rounded, lost)
            return
        given = _array(values), _array(rounded.view(torch.int16)), _array(lost)
        _run(kernel, 1, values.numel(), given)

    def warm_up_cast(self, dtype: torch.dtype) -> None:
        """See `Engine.warm_up_cast`."""
        _lose(dtype)

    def add_(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """In torch; see `Engine.add_`."""
        add.add_(out, parts)

    def mix(self, own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """See `Engine.mix`; sums that are not float32 go to the reference."""
        kernel = _mix(own.dtype) if out.dtype == torch.float32 else None
        if kernel is None:
            mix.mix(own, theirs, weights, out)
            return
        for each in (own, *theirs):
            assert each.is_contiguous()
            assert (each.dtype, each.shape) == (own.dtype, out.shape)
        addresses = np.array([values.data_ptr() for values in theirs], np.uint64)
        mine = _array(own if own.dtype == torch.float32 else own.view(torch.int16))
        given = mine, addresses, np.array(weights, np.float32), _array(out)
        _run(kernel, 1, out.numel(), given)

    def warm_up_mix(self, dtype: torch.dtype) -> None:
        """See `Engine.warm_up_mix`."""
        _mix(dtype)

    def nesterov_(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """See `Engine.nesterov_`; what is not float32 goes to the reference."""
        kernel = _nesterov() if all(each.dtype == torch.float32 for each in values) else None
        if kernel is None:
            nesterov.nesterov_(values, gradients, momenta, lr, momentum)
            return
        for value, gradient, kept in zip(values, gradients, momenta, strict=True):
            assert all((each.dtype, each.shape) == (value.dtype, value.shape) for each in (gradient, kept))
            given = (*(_array(each.view(-1)) for each in (value, gradient, kept)), np.float32(lr), np.float32(momentum))
            _run(kernel, 1, value.numel(), given)

    def warm_up_nesterov(self) -> None:
        """See `Engine.warm_up_nesterov`."""
        _nesterov()

    def orthonormalise_(self, columns: Tensor) -> None:
        """See `Engine.orthonormalise_`: in torch, with the same bits on every CPU."""
        orthonormal.orthonormalise_(columns)

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """See `Engine.sample`: in torch."""
        return feedback.sample(tensors)

    def stepped_parts(
        self,
        then: Tensor,
        tensors: Sequence[Tensor | None],
        late: Tensor | None,
        scale: Tensor | None,
        stepped: Tensor | bool,
    ) -> Tensor:
        """See `Engine.stepped_parts`: in torch."""
        return feedback.stepped_parts(then, tensors, late, scale, stepped)

    def go_(self, now: Tensor, before: Tensor, edges: Sequence[int], parts: Tensor) -> None:
        """See `Engine.go_`: in torch."""
        feedback.go_(now, before, edges, parts)

    def lay_out(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        """None: each gradient is copied by torch."""


def _run(kernel: Callable[..., None], block: int, numel: int, given: Sequence[Any], how: Sequence[Any] = ()) -> None:
    """A kernel for all blocks of so many values, on several cores if they are many."""
    in_parts(block, numel, lambda first, last: kernel(*given, np.uint64(first), np.uint64(last), *how))


def _announced(make: Callable[[], Any]) -> Any:
    """What `make` makes of kernels; None where Numba does not work, with a warning."""
    begin = time.monotonic()
    try:
        made = make()
    except Exception as error:  # whatever a compiler may raise
        _warn(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return None
    spent = time.monotonic() - begin
    if spent > _ANNOUNCED_SECONDS:
        _log.info("compiled a codec for this CPU in %.1f s; it is kept on disk for the next time", spent)
    return made


@cache
def _warn(error: str) -> None:
    warnings.warn(
        f"Numba does not work here ({error}), so codecs run many times slower on this CPU, with the same bytes: "
        "python -m pip install --upgrade numba",
        stacklevel=2,
    )


@lru_cache(256)
def _kernels(form: BlockFormat) -> cpu.Kernels | None:
    """Compiled, or read from the disk."""

    def make() -> cpu.Kernels:
        from ringstrategy.kernels import cpu

        made = cpu.kernels(_known(form))
        values, nothing = np.zeros(0, np.float32), np.uint64(0)
        message, keys = np.zeros(0, np.uint8), np.zeros(0, np.int32)
        given = values, values, values, _NO_MESSAGES, message, values, nothing, nothing, keys, keys, keys, nothing
        made.encode(*given)
        made.decode(message, values, False, values, nothing, nothing)
        return made

    made: cpu.Kernels | None = _announced(make)
    return made


@cache
def _rotate() -> Callable[..., None] | None:
    def make() -> Any:
        from ringstrategy.kernels.cpu import rotate

        rotate(np.zeros(0, np.float32), np.zeros(256, np.float32), False)
        return rotate

    made: Callable[..., None] | None = _announced(make)
    return made


@lru_cache(256)
def _sparse_kernels(form: SparseFormat) -> cpu_sparse.Kernels | None:
    def make() -> cpu_sparse.Kernels:
        from ringstrategy.kernels import cpu_sparse

        made, nothing, bits = cpu_sparse.kernels(form), np.uint64(0), np.zeros(0, np.int16)
        places = np.zeros(0, np.uint8 if form.block <= 256 else np.uint16)
        made.encode(np.zeros(0, np.int32), bits, places, _NO_VALUES, nothing, nothing)
        made.decode(bits, places, _NO_VALUES, False, nothing, nothing)
        return made

    made: cpu_sparse.Kernels | None = _announced(make)
    return made


@cache
def _lose(dtype: torch.dtype) -> Callable[..., None] | None:
    """Of values that were rounded to `dtype`."""

    def make() -> Any:
        from ringstrategy.kernels import cpu_cast

        kernel = cpu_cast.lose_float16 if dtype == torch.float16 else cpu_cast.lose_bfloat16
        kernel(_NO_VALUES, np.zeros(0, np.int16), _NO_VALUES, np.uint64(0), np.uint64(0))
        return kernel

    made: Callable[..., None] | None = _announced(make)
    return made


@cache
def _mix(dtype: torch.dtype) -> Callable[..., None] | None:
    """Of values of `dtype`; None also for float64."""

    def make() -> Any:
        from ringstrategy.kernels import cpu_mix

        kernel, nothing = cpu_mix.mixing(str(dtype).removeprefix("torch.")), np.uint64(0)
        own = _NO_VALUES if dtype == torch.float32 else np.zeros(0, np.int16)
        kernel(own, _NO_MESSAGES, _NO_VALUES, _NO_VALUES, nothing, nothing)
        return kernel

    made: Callable[..., None] | None = None if dtype == torch.float64 else _announced(make)
    return made


@cache
def _nesterov() -> Callable[..., None] | None:
    def make() -> Any:
        from ringstrategy.kernels.cpu_nesterov import nesterov as kernel

        nothing = np.uint64(0)
        kernel(_NO_VALUES, _NO_VALUES, _NO_VALUES, np.float32(0), np.float32(0), nothing, nothing)
        return kernel

    made: Callable[..., None] | None = _announced(make)
    return made


def _known(form: BlockFormat) -> cpu.Format:
    from ringstrategy.kernels import cpu

    how = form.arithmetic
    table: tuple[float, ...] = ()
    if how.kind in ("e4m3", "e5m2"):
        table = tuple(form.numbers(torch.arange(256, dtype=torch.uint8, device="cpu")).tolist())
    return cpu.Format(
        kind=cpu.KINDS.index(how.kind),
        block=np.uint64(how.block),
        bits=np.uint64(how.bits),
        spacing=np.float32(how.spacing),
        bias=np.float32(how.bias),
        table=table,
        highest=np.float32(how.highest),
        factor=np.float32(how.factor),
        smallest=np.float32(how.smallest),
        too_large=np.float32(how.too_large),
        stochastic=how.stochastic,
    )


def _flips(signs: Signs | None) -> Any:
    return _NO_VALUES if signs is None else _array(reference.flips(signs))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _message(kept: Tensor, places: Tensor) -> tuple[Any, Any]:
    """A sparse message's parts, flat: bits of bfloat16 as int16, and places without a sign."""
    at = _array(places.view(-1))
    return _array(kept.view(torch.int16).view(-1)), at.view(np.uint16) if at.dtype == np.int16 else at

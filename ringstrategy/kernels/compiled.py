"""Numba's kernels: what they are given of a codec and of a message, and on how many cores they run.

Each is compiled for this CPU when it is first needed. Where Numba does not work, and for dtypes that no kernel is for,
the function in torch does it. The operations are those of `ringstrategy.kernels.operations`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringstrategy.kernels import reference, sparse
from ringstrategy.kernels.layout import BlockFormat, Signs, SparseFormat
from ringstrategy.kernels.threads import in_parts

if TYPE_CHECKING:
    from ringstrategy.kernels.jit import Kernels

_log = logging.getLogger(__name__)
_ANNOUNCED_SECONDS = 1.0
_NO_NOISE = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)
_NO_MESSAGES = np.empty(0, np.uint64)
_NOTHING = np.uint64(0)  # no blocks
P = ParamSpec("P")
R = TypeVar("R")


class UnknownKindError(ValueError):
    """A codec's `Arithmetic` is of a kind that no kernel knows."""


def encode(
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
    """See `reference.encode`. Values of 16 bits are widened, and what is lost is rounded."""
    kernels = block_kernels(form)
    if kernels is None:
        reference.encode(values, wires, wire, form, residual=residual, signs=signs, lost=lost, seed=seed, offset=offset)
        return
    if values.dtype != torch.float32:
        assert residual is None, "only where it `fuses`"
        assert signs is None, "likewise"
        _encode_others(values, wires, wire, form, lost, seed, offset)
        return
    assert all(each.shape == values.shape for each in (residual, lost) if each is not None)
    if lost is not None and lost.dtype != values.dtype:
        rest = (lost if residual is None else residual).to(values.dtype, copy=True)
        added = None if residual is None else rest
        encode(values, wires, wire, form, residual=added, signs=signs, lost=rest, seed=seed, offset=offset)
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
    encode(wide, wires, wire, form, lost=rest, seed=seed, offset=offset)
    if lost is None or rest is None:
        return
    if values.dtype != torch.float64:
        lost.copy_(rest)
        return
    decoded = torch.empty_like(wide)  # of a block that is not finite all is NaN
    decode(wire, decoded, form)
    lost.copy_(torch.where(decoded.isnan(), lost, rest + (values - wide)))


def decode(wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool = False) -> None:
    """See `reference.decode`."""
    kernels = block_kernels(form)
    if kernels is None:
        reference.decode(wire, out, form, signs=signs, add=add)
    elif out.dtype != torch.float32:
        assert signs is None, "only where it `fuses`"
        decoded = torch.empty_like(out, dtype=torch.float32)
        decode(wire, decoded, form)
        out.add_(decoded) if add else out.copy_(decoded)
    else:
        _run(kernels.decode, form.block, out.numel(), (_array(wire), _array(out), add, _flips(signs)))


def rotate_(values: Tensor, signs: Signs, *, inverse: bool = False) -> None:
    """See `reference.rotate_`."""
    rotate = rotate_kernel() if values.dtype == torch.float32 else None
    if rotate is None:
        reference.rotate_(values, signs, inverse=inverse)
    else:
        rotate(_array(values), _flips(signs), inverse)


def fuses(form: BlockFormat, values: Tensor, *, rotated: bool) -> bool:
    """Float32."""
    del rotated
    return values.dtype == torch.float32 and block_kernels(form) is not None


def encode_sparse(
    values: Tensor, kept: Tensor, places: Tensor, form: SparseFormat, *, lost: Tensor | None = None
) -> None:
    """See `sparse.encode`."""
    kernels = sparse_kernels(form) if values.dtype == torch.float32 else None
    if kernels is None:
        sparse.encode(values, kept, places, form, lost=lost)
        return
    left = _NO_VALUES if lost is None else _array(lost)
    _run(kernels.encode, form.block, values.numel(), (_array(values).view(np.int32), *_message(kept, places), left))


def decode_sparse(kept: Tensor, places: Tensor, out: Tensor, form: SparseFormat, *, add: bool = False) -> None:
    """See `sparse.decode`."""
    kernels = sparse_kernels(form) if out.dtype == torch.float32 else None
    if kernels is None:
        sparse.decode(kept, places, out, form, add=add)
        return
    _run(kernels.decode, form.block, out.numel(), (*_message(kept, places), _array(out), add))


def lose(values: Tensor, rounded: Tensor, lost: Tensor) -> None:
    """See `reference.lose`."""
    kernel = lose_kernel(rounded.dtype) if values.dtype == torch.float32 else None
    if kernel is None:
        reference.lose(values, rounded, lost)
        return
    _run(kernel, 1, values.numel(), (_array(values), _array(rounded.view(torch.int16)), _array(lost)))


def mix(own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """See `reference.mix`."""
    kernel = mix_kernel(own.dtype) if out.dtype == torch.float32 else None
    if kernel is None:
        reference.mix(own, theirs, weights, out)
        return
    for each in (own, *theirs):
        assert each.is_contiguous()
        assert (each.dtype, each.shape) == (own.dtype, out.shape)
    addresses = np.array([values.data_ptr() for values in theirs], np.uint64)
    mine = _array(own if own.dtype == torch.float32 else own.view(torch.int16))
    _run(kernel, 1, out.numel(), (mine, addresses, np.array(weights, np.float32), _array(out)))


def nesterov_(values: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], lr: float, momentum: float) -> None:
    """See `reference.nesterov_`."""
    kernel = nesterov_kernel() if all(each.dtype == torch.float32 for each in values) else None
    if kernel is None:
        reference.nesterov_(values, gradients, momenta, lr, momentum)
        return
    for value, gradient, kept in zip(values, gradients, momenta, strict=True):
        assert all((each.dtype, each.shape) == (value.dtype, value.shape) for each in (gradient, kept))
        given = (*(_array(each.view(-1)) for each in (value, gradient, kept)), np.float32(lr), np.float32(momentum))
        _run(kernel, 1, value.numel(), given)


def _run(kernel: Callable[..., None], block: int, numel: int, given: Sequence[Any], how: Sequence[Any] = ()) -> None:
    """A kernel for all blocks of so many values, on several cores if they are many."""
    in_parts(block, numel, lambda first, last: kernel(*given, np.uint64(first), np.uint64(last), *how))


def _compiles(make: Callable[P, R]) -> Callable[P, R | None]:
    """Make kernels once, as a call without values compiles them or reads them from disk.

    None where Numba does not work, with a warning.
    """

    @lru_cache(256)
    @wraps(make)
    def made(*what: P.args, **how: P.kwargs) -> R | None:
        begin = time.monotonic()
        try:
            kernels = make(*what, **how)
        except UnknownKindError:
            raise
        except Exception as error:  # whatever a compiler may raise
            _warn(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        spent = time.monotonic() - begin
        if spent > _ANNOUNCED_SECONDS:
            _log.info("compiled a codec for this CPU in %.1f s; it is kept on disk for the next time", spent)
        return kernels

    return made  # type: ignore[return-value]  # the cache takes what can be hashed


@cache
def _warn(error: str) -> None:
    warnings.warn(
        f"Numba does not work here ({error}), so codecs run many times slower on this CPU, with the same bytes: "
        "python -m pip install --upgrade numba",
        stacklevel=2,
    )


@_compiles
def block_kernels(form: BlockFormat) -> Kernels:
    """To encode and decode in this format."""
    from ringstrategy.kernels import cpu

    how = form.arithmetic
    if how.kind not in cpu.KINDS:
        raise UnknownKindError(
            f"no kernel knows codes of kind {how.kind!r}, only {', '.join(cpu.KINDS)}: derive the codec from Codec, or "
            "add the kind to kernels/cpu.py and triton_kernels/formats.py"
        )
    are_floats = how.kind in ("e4m3", "e5m2")
    codes = torch.arange(256 if are_floats else 0, dtype=torch.uint8, device="cpu")
    made = cpu.kernels(how, tuple(form.numbers(codes).tolist()))
    message, keys = np.zeros(0, np.uint8), np.zeros(0, np.int32)
    no_values = _NO_VALUES, _NO_VALUES, _NO_VALUES
    made.encode(*no_values, _NO_MESSAGES, message, _NO_VALUES, _NOTHING, _NOTHING, keys, keys, keys, _NOTHING)
    made.decode(message, _NO_VALUES, False, _NO_VALUES, _NOTHING, _NOTHING)
    return made


@_compiles
def rotate_kernel() -> Callable[..., None]:
    """To rotate float32."""
    from ringstrategy.kernels.cpu import rotate

    rotate(_NO_VALUES, np.zeros(256, np.float32), False)
    return rotate


@_compiles
def sparse_kernels(form: SparseFormat) -> Kernels:
    """To encode and decode in this format."""
    from ringstrategy.kernels import cpu_sparse

    made, bits = cpu_sparse.kernels(form), np.zeros(0, np.int16)
    places = np.zeros(0, np.uint8 if form.block <= 256 else np.uint16)
    made.encode(np.zeros(0, np.int32), bits, places, _NO_VALUES, _NOTHING, _NOTHING)
    made.decode(bits, places, _NO_VALUES, False, _NOTHING, _NOTHING)
    return made


@_compiles
def lose_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """Of values that were rounded to `dtype`."""
    from ringstrategy.kernels import cpu_elementwise

    kernel = cpu_elementwise.lose_float16 if dtype == torch.float16 else cpu_elementwise.lose_bfloat16
    kernel(_NO_VALUES, np.zeros(0, np.int16), _NO_VALUES, _NOTHING, _NOTHING)
    return kernel


@_compiles
def mix_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """Of values of `dtype`; None for float64."""
    if dtype == torch.float64:
        return None
    from ringstrategy.kernels import cpu_elementwise

    kernel = cpu_elementwise.mixing(str(dtype).removeprefix("torch."))
    kernel(
        _NO_VALUES if dtype == torch.float32 else np.zeros(0, np.int16),
        _NO_MESSAGES,
        _NO_VALUES,
        _NO_VALUES,
        _NOTHING,
        _NOTHING,
    )
    return kernel


@_compiles
def nesterov_kernel() -> Callable[..., None]:
    """Of float32."""
    from ringstrategy.kernels.cpu_elementwise import nesterov

    nesterov(_NO_VALUES, _NO_VALUES, _NO_VALUES, np.float32(0), np.float32(0), _NOTHING, _NOTHING)
    return nesterov


def _flips(signs: Signs | None) -> Any:
    return _NO_VALUES if signs is None else _array(reference.flips(signs))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _message(kept: Tensor, places: Tensor) -> tuple[Any, Any]:
    """A sparse message's parts, flat: bits of bfloat16 as int16, and places without a sign."""
    at = _array(places.view(-1))
    return _array(kept.view(torch.int16).view(-1)), at.view(np.uint16) if at.dtype == np.int16 else at

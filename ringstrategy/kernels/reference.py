"""Block codecs and the rotation in plain torch: what each kernel must do, and what runs where Numba cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringstrategy.kernels.layout import HEADER_BYTES, PLANES, ROTATED, Arithmetic, BlockFormat, Signs, round_up

_NAN = 0x7FC0  # as bfloat16: torch's own conversion gives NaN other bits on other processors
DEPENDENT = 1e-3  # a column with less than this left beside the columns before it is noise: it is dropped for a step


@torch.inference_mode()  # tensors made in this mode may be written to in it only
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
    """Write the sum of `values` and then `wires`, added in that order, to `wire`; and what that loses to `lost`.

    Sums are float32; what is lost has all the digits of the values.

    Args:
        values: floating-point (n,); stay as they are.
        wires: messages of n values in the same format, uint8.
        wire: uint8, for n values.
        form: of the messages.
        residual: of any float dtype, added to the values; only where the device `fuses`.
        signs: of a rotation of values and residual; what is lost is turned back. Only where it `fuses`.
        lost: like `values`, or where the device `fuses` of any float dtype; None: nobody wants to know. From a block
            that is not finite it gets the residual; without a residual it stays as it was there.
        seed: of stochastic rounding.
        offset: place of the first value in its bucket, at the edge of a block.
    """
    assert residual is None
    assert signs is None
    how, total = form.arithmetic, values.float()
    for arrived in wires:
        total = total + _decoded(arrived, values.numel(), form)
    for run in _runs(wire, values.numel(), how):
        codes, scale = form.quantize(total[run.begin : run.end].view(-1, run.length), seed, offset + run.begin)
        broken = scale.isnan()  # then the same bytes, whatever the bits of the NaN and whatever else the block holds
        run.scale.view(torch.int16).copy_(torch.where(broken, _NAN, scale.view(torch.int32) >> 16))
        codes = pad(codes.masked_fill(broken, how.zero), (0, round_up(run.length) - run.length), value=how.zero)
        run.packed.copy_(pack(codes, how.bits))
    if lost is not None:
        decoded = _decoded(wire, values.numel(), form)  # all NaN where a block is not finite, and nowhere else
        beyond_float32 = values - values.float()
        lost.copy_(torch.where(decoded.isnan(), lost, total - decoded + beyond_float32))


@torch.inference_mode()  # as `encode`
def decode(wire: Tensor, out: Tensor, form: BlockFormat, *, signs: Signs | None = None, add: bool = False) -> None:
    """Write the values in `wire`, turned back by `signs` where the device `fuses`, to `out`, or add them to it."""
    assert signs is None
    decoded = _decoded(wire, out.numel(), form)
    out.add_(decoded) if add else out.copy_(decoded)


def _decoded(wire: Tensor, numel: int, form: BlockFormat) -> Tensor:
    """The values in a message, float32 (numel,)."""
    how, values = form.arithmetic, torch.empty(numel, dtype=torch.float32, device="cpu")
    for run in _runs(wire, numel, how):
        blocks = form.numbers(unpack(run.packed, how.bits)[:, : run.length]) * run.scale.float()
        values[run.begin : run.end] = blocks.view(-1)
    return values


class _Run(NamedTuple):
    """Blocks of one length in a message: the places of their values, and views of their bytes."""

    begin: int
    end: int
    length: int
    scale: Tensor  # bfloat16 (blocks, 1)
    packed: Tensor  # uint8 (blocks, length rounded up to a multiple of 8 * bits / 8)


def _runs(wire: Tensor, numel: int, how: Arithmetic) -> Iterator[_Run]:
    """The whole blocks of a message of `numel` values, and the short one at its end."""
    blocks, whole = -(-numel // how.block), numel // how.block
    scales, codes = wire.split_with_sizes([blocks * HEADER_BYTES, round_up(numel) * how.bits // 8])
    for first, last, length in (0, whole, how.block), (whole, blocks, numel % how.block):
        if first == last:
            continue
        begin, width = first * how.block, round_up(length) * how.bits // 8
        at = begin * how.bits // 8
        yield _Run(
            begin,
            begin + (last - first) * length,
            length,
            scales.view(torch.bfloat16)[first:last, None],
            codes[at : at + (last - first) * width].view(-1, width),
        )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits, uint8 (blocks, length), as bytes in planes, uint8 (blocks, length * bits / 8)."""
    planes, low = [], 0
    for width in PLANES[bits]:
        runs = (codes >> low & (1 << width) - 1).chunk(8 // width, 1)
        planes.append(torch.stack([run << (k * width) for k, run in enumerate(runs)]).sum(0, dtype=torch.uint8))
        low += width
    return torch.cat(planes, 1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`."""
    planes = packed.split([packed.shape[1] * width // bits for width in PLANES[bits]], 1)
    parts, low = [], 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        runs = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        parts.append(torch.cat(runs, 1) << low)
        low += width
    return torch.stack(parts).sum(0, dtype=torch.uint8)


@torch.inference_mode()  # as `encode`
def rotate_(values: Tensor, signs: Signs, *, inverse: bool = False) -> None:
    """y = H (x * signs / 16) for each whole 256 values in place, or inversely x = (H y) * signs / 16.

    In float32, or float64. The last numel % 256 values stay as they are.
    """
    rows = values[: values.numel() // ROTATED * ROTATED].view(-1, ROTATED)
    wide = rows.to(torch.promote_types(values.dtype, torch.float32))
    rows.copy_(_hadamard(wide) * flips(signs) if inverse else _hadamard(wide * flips(signs)))


@lru_cache(maxsize=8)
def flips(signs: Signs) -> Tensor:
    """The signs / 16: float32 (256,); shared, so not to be written to."""
    of_all = [1 / 16 if signs[i // 32] >> (i % 32) & 1 else -1 / 16 for i in range(ROTATED)]
    with torch.inference_mode(False):
        return torch.tensor(of_all, dtype=torch.float32, device="cpu")


def _hadamard(rows: Tensor) -> Tensor:
    """Rows of 256 times Sylvester's matrix, by additions alone: a matrix product may round to TF32 or bfloat16."""
    for half in (1, 2, 4, 8, 16, 32, 64, 128):
        one, other = rows.view(-1, ROTATED // (2 * half), 2, half).unbind(2)
        rows = torch.stack([one + other, one - other], 2)
    return rows.view(-1, ROTATED)


def add_(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Add the parts, like `out` of any dtype and length, in this order; each sum is rounded to that dtype."""
    for part in parts:
        out.add_(part)


def lose(values: Tensor, rounded: Tensor, lost: Tensor) -> None:
    """Write `values - rounded`, float16 or bfloat16, to `lost` wherever that is finite. All are (n,)."""
    rest = values - rounded
    lost.copy_(torch.where(rest.isfinite(), rest, lost))


def mix(own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Write the sum of weight * (theirs - own), added in that order, to `out`.

    Args:
        own: floating-point (n,), perhaps narrower than `out`.
        theirs: like `own`.
        weights: one for each of them.
        out: (n,); its dtype is that of differences, products and sums.
    """
    out.zero_()
    own = own.to(out.dtype)
    for values, weight in zip(theirs, weights, strict=True):
        out.add_(values.to(out.dtype).sub(own).mul_(weight))


def nesterov_(values: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], lr: float, momentum: float) -> None:
    """For each tensor: momenta = momentum * momenta + gradients; values -= lr * (gradients + momentum * momenta).

    All are contiguous and alike. Each operation is rounded to their dtype.
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    steps = list(torch._foreach_mul(momenta, momentum))
    torch._foreach_add_(steps, gradients)
    torch._foreach_mul_(steps, lr)
    torch._foreach_sub_(values, steps)


def orthonormalise_(columns: Tensor) -> None:
    """Gram-Schmidt, modified, over columns of shape (matrices, rank, length): the same bits on every CPU.

    A column that is zero or depends on those before it becomes zero; a NaN or an infinity makes its column NaN.
    """
    largest = columns.abs().amax(-1, keepdim=True)
    columns.div_(largest + (largest == 0))  # squares neither overflow nor vanish
    norm = _dot(columns, columns).sqrt_()
    columns.div_(norm + (norm == 0))
    for place in range(1, columns.shape[1]):
        before, rest = columns[:, place - 1 : place], columns[:, place:]
        rest.sub_(_dot(rest, before) * before)
        column = columns[:, place : place + 1]
        norm = _dot(column, column).sqrt_()
        dependent = norm < DEPENDENT
        column.div_(norm + dependent).mul_(~dependent)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, which is kept: halves are added elementwise until one is left."""
    # no torch dot or sum: their order of addition may differ on another CPU
    products = one * other
    while (length := products.shape[-1]) > 1:
        half = (length + 1) // 2
        products[..., : length - half].add_(products[..., half:])
        products = products[..., :half]
    return products

"""Block codecs and the rotation in plain torch: what each compiled engine must do, and what runs where Numba cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringstrategy.kernels.layout import HEADER_BYTES, PLANES, ROTATED, Arithmetic, BlockFormat, Signs, round_up

_NAN = 0x7FC0  # as bfloat16: torch's own conversion gives NaN other bits on other processors


@torch.inference_mode()  # tensors made in this mode may be written to in it only
def encode(
    values: Tensor,
    wires: Sequence[Tensor],
    wire: Tensor,
    form: BlockFormat,
    *,
    lost: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """See `Engine.encode`. Sums are float32; what is lost has all the digits of the values."""
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
def decode(wire: Tensor, out: Tensor, form: BlockFormat, *, add: bool = False) -> None:
    """See `Engine.decode`."""
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
    """See `Engine.rotate_`. In float32, or float64; the last numel % 256 values stay as they are."""
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

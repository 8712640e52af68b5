"""The arithmetic of `TopK` in torch, on any device: the reference for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ringstrategy.kernels.layout import SparseFormat

_NAN = 0x7FC0  # as bfloat16


def encode(values: Tensor, kept: Tensor, places: Tensor, form: SparseFormat, *, lost: Tensor | None = None) -> None:
    """See `Engine.encode_sparse`."""
    blocks = _in_blocks(values, form.block)  # few operations: on a GPU each is a launch
    ordered = blocks.abs().sort(dim=1, descending=True, stable=True)  # of equal ones the first; NaN before all
    chosen = ordered.indices[:, : form.k].sort(dim=1).values
    rounded = blocks.gather(1, chosen).to(torch.bfloat16)
    broken = ~(ordered.values[:, :1].to(torch.bfloat16) < torch.inf)
    kept.copy_(rounded)
    kept.view(torch.int16).masked_fill_(broken, _NAN)
    places.copy_(torch.where(broken, torch.arange(form.k, device=places.device), chosen))
    if lost is not None:
        rest = blocks.scatter_add(1, chosen, -rounded.to(blocks.dtype))
        rest = torch.where(broken, _in_blocks(lost, form.block), rest)
        lost.copy_(rest.view(-1)[: lost.numel()])


def decode(kept: Tensor, places: Tensor, out: Tensor, form: SparseFormat, *, add: bool = False) -> None:
    """See `Engine.decode_sparse`."""
    chosen = places.long() if form.block == 256 else places.long() % form.block  # one launch less where all fit
    blocks = out.new_zeros(len(kept), form.block)
    blocks.scatter_add_(1, chosen, kept.to(out.dtype))
    blocks.masked_fill_(kept.isnan().any(1, keepdim=True), torch.nan)
    values = blocks.view(-1)[: out.numel()]
    out.add_(values) if add else out.copy_(values)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """View the flat `values` as rows of `block`, or copy them into such, the last filled up with zeros."""
    if values.numel() % block == 0:
        return values.view(-1, block)
    padded = values.new_zeros(-(-values.numel() // block), block)
    padded.view(-1)[: values.numel()] = values
    return padded

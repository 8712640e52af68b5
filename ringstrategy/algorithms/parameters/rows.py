"""Tensors in a row: group them by what they are, make one of many, and cut it again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from ringstrategy.collectives.base import sums_dtype

Item = TypeVar("Item")


def by_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by dtype and device, in order."""
    return by_kind(tensors, kind_of)


def by_kind(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> Iterable[list[Item]]:
    """Group the items by what `kind` says of them, in order."""
    kinds: dict[Hashable, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return kinds.values()


def kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Its dtype and device."""
    return tensor.dtype, tensor.device


def cut_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` as tensors of these shapes, one after the other."""
    runs = flat.split([tensor.numel() for tensor in like])
    return [run.view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


def in_flats(tensors: Sequence[Tensor], change_: Callable[[Tensor], None]) -> list[Tensor]:
    """Copy the tensors into one flat tensor of each dtype and device, and call `change_` with each of these.

    Returns, for each tensor, the view of a flat one that has its shape.
    """
    views: dict[int, Tensor] = {}
    for places in by_kind(range(len(tensors)), lambda place: kind_of(tensors[place])):
        alike = [tensors[place] for place in places]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        change_(flat)
        views |= zip(places, cut_like(flat, alike), strict=True)
    return [views[place] for place in range(len(tensors))]


def words_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, of any dtypes, as numbers of 32 bits: flat, float64."""
    runs = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    whole = torch.cat([*runs, runs[0].new_zeros(-sum(map(len, runs)) % 4)])
    return whole.view(torch.int32).double()


def cut_words(words: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of these dtypes and shapes whose `words_of` these are."""
    whole = words.to(torch.int32).view(torch.uint8)
    ends = list(accumulate(tensor.nbytes for tensor in like))
    runs = [whole[end - tensor.nbytes : end].clone() for end, tensor in zip(ends, like, strict=True)]
    return [run.view(tensor.dtype).view(tensor.shape) for run, tensor in zip(runs, like, strict=True)]


def row_of(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all their values, in the dtype of sums."""
    return torch.cat([tensor.detach().reshape(-1).to(sums_dtype(tensor.dtype)) for tensor in tensors])

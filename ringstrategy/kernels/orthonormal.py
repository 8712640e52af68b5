"""Gram-Schmidt in torch, with the same bits on every CPU."""

from __future__ import annotations

from torch import Tensor

DEPENDENT = 1e-3  # a column with less than this left beside the columns before it is noise: it is dropped for a step


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

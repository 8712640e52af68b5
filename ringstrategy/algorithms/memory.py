"""Tensors that lie in each other's memory: several names for one value, which must be averaged once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


def check_memory(what: str, tensor: Tensor) -> None:
    """ValueError with the cure unless it is dense, with memory for each element; `what` names it."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} is sparse ({tensor.layout}), and only dense tensors can be exchanged: use to_dense()")
    if any(size > 1 and not stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{what} has several elements in one place of memory, because it was expanded, and an exchange would write "
            "there several times: give each memory of its own with contiguous()"
        )


def check_width(what: str, tensor: Tensor) -> None:
    """ValueError with the cure for float8, which neither torch's sums nor gloo know; `what` names the tensor."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        raise ValueError(
            f"{what} is of {tensor.dtype}, which can be neither added nor sent: keep it in torch.bfloat16 and cast it "
            "where it is used"
        )


def firsts(parameters: Mapping[str, Parameter]) -> dict[Parameter, Parameter]:
    """For each parameter the first one that is the same memory, which may be itself.

    ValueError if two have only a part of their memory in common.
    """
    names, values = list(parameters), list(parameters.values())
    first = {parameter: parameter for parameter in values}
    for pair in in_one_memory(values):
        one, other = sorted(pair)
        if not _is_same(values[one], values[other]):
            raise ValueError(
                f"parameters {names[one]} and {names[other]} have a part of their memory in common, which would be "
                f"averaged twice: give each memory of its own (parameter.data = parameter.data.clone()), or make one "
                "parameter of both and take views of it in forward"
            )
        first[values[other]] = first[values[one]]
    return first


def apart(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie neither in the memory of `others` nor in that of an earlier or a larger one of their own."""
    order = [*others, *sorted(tensors, key=Tensor.numel, reverse=True)]
    covered = {id(order[max(pair)]) for pair in in_one_memory(order)}
    return [tensor for tensor in tensors if id(tensor) not in covered]


def in_one_memory(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Places of each two that have an element's memory in common."""
    extents = sorted((*_extent(tensor), place) for place, tensor in enumerate(tensors) if _has_memory(tensor))
    reaching: list[tuple[int, int, int]] = []
    for extent in extents:
        reaching = [earlier for earlier in reaching if earlier[1] > extent[0]]
        for earlier in reaching:
            if _meet(tensors[earlier[2]], tensors[extent[2]]):
                yield earlier[2], extent[2]
        reaching.append(extent)


def _has_memory(tensor: Tensor) -> bool:
    """Not an empty one, nor one on the meta device."""
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() != 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and of the byte behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _is_same(one: Tensor, other: Tensor) -> bool:
    kinds = [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in (one, other)]
    return kinds[0] == kinds[1]


def _meet(one: Tensor, other: Tensor) -> bool:
    """Do two tensors whose extents overlap share a byte? Columns by turns do not."""
    if _is_same(one, other):
        return True
    extents = _extent(one), _extent(other)
    begin, end = min(extents)[0], max(last for _, last in extents)
    used = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    first, second = (
        used.as_strided(
            (*tensor.shape, tensor.element_size()),
            (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
            tensor.data_ptr() - begin,
        )
        for tensor in (one, other)
    )
    first.fill_(True)
    return bool(second.any())

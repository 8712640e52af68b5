"""The operations that wait, through which gradients flow back: each gradient makes the way of its value in reverse.

Its factor is Horovod's, so that a port trains as before. With N ranks, and measured by the gradient of the sum of all
ranks' losses, that of `allgather` and `broadcast` is 1/N of it, that of `reducescatter` is N times it, and those of
`allreduce` and `alltoall` are equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringstrategy.integrations.horovod import operations
from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Average, ReduceOp, Reduction, Sum, reduction


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average of all ranks' tensors, or what `op` says, in a new tensor. Differentiable for Average and Sum.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: an older form of `op`: True is Average, False is Sum.
        name: see `operations`.
        compression: a codec, for floating-point averages and sums. Sums are taken in float32. No error feedback.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`. Of integers the average is rounded down.
        prescale_factor: each rank's tensor is multiplied by it.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks.

    Raises:
        PlanMismatchError: on all ranks, if they differ in shape, dtype or arguments, or not all take part.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors, which travel together."""
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    _check_differentiable(tensors, how.op)
    return list(_of(_AllReduce, name, how, process_set, *tensors))


def _check_differentiable(tensors: Sequence[Tensor], op: ReduceOp) -> None:
    if op not in (Average, Sum) and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(f"{op.value} is not differentiable: pass tensor.detach(), or use Average or Sum")


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' rows behind each other, in the order of ranks. Differentiable.

    Args:
        tensor: its first dimension may differ between ranks, the others not.
        name: see `operations`.
        process_set: the ranks.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors, as one operation."""
    return list(_of(_AllGather, name, process_set, *tensors))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of one rank, in a new tensor on each. Differentiable.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose; counted among all ranks, for a process set too.
        name: see `operations`.
        process_set: the ranks.
    """
    sent: Tensor = _of(_Broadcast, tensor, root_rank, name, process_set)
    return sent


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows to each rank, and from each the rows for this one, in the order of ranks. Differentiable.

    Args:
        tensor: its first dimension may differ between ranks, the others not.
        splits: how many rows each rank gets; None: all as many.
        name: see `operations`.
        process_set: the ranks.

    Returns:
        The rows; with `splits` also how many came from each rank, int32.
    """
    rows, received = _of(_AllToAll, tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the average of all ranks' tensors, or of what `op` says. Differentiable for Average and Sum.

    The first ranks get one row more if they cannot all get as many.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors, as one operation."""
    how = reduction(op, None, compression, prescale_factor, postscale_factor)
    _check_differentiable(tensors, how.op)
    return list(_of(_ReduceScatter, name, how, process_set, *tensors))


def _of(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: Reduction, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.process_set = how, process_set
        return _reduced(tensors, name, how, process_set)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_reduced(gradients, None, ctx.how, ctx.process_set)


def _reduced(
    tensors: Sequence[Tensor], name: str | None, how: Reduction, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = operations.reduce(tensors, None, name, how, process_set, tuple).wait()
    return result


def _averaged(tensors: Sequence[Tensor], process_set: ProcessSet) -> tuple[Tensor, ...]:
    return _reduced(tensors, None, reduction(Average, None, Compression.none, 1.0, 1.0), process_set)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        def noted(outputs: list[Tensor], rows: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
            ctx.process_set, ctx.rows = process_set, rows
            return tuple(outputs)

        result: tuple[Tensor, ...] = operations.gather("allgather", tensors, name, process_set, noted).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        moved = [place for place, gradient in enumerate(gradients) if gradient.is_floating_point()]
        means, rank = _averaged([gradients[place] for place in moved], ctx.process_set), ctx.process_set.rank()
        mine: list[Tensor | None] = [None] * len(gradients)
        for place, mean in zip(moved, means, strict=True):
            mine[place] = mean.split(ctx.rows[place])[rank]
        return None, None, *mine


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.process_set = process_set
        ctx.is_root = process_set.members.ranks[process_set.rank()] == root_rank
        result: Tensor = operations.broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (mean,) = _averaged(gradients, ctx.process_set)
        return mean if ctx.is_root else torch.zeros_like(mean), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        ctx.process_set = process_set
        size = process_set.size()
        leaving = operations.splits_of(tensor, splits, size)
        arrived, ctx.received = operations.alltoall_async(tensor, leaving, name, process_set).wait()
        ctx.mark_non_differentiable(ctx.received)
        return arrived, ctx.received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back, _ = operations.alltoall_async(gradients[0], ctx.received, None, ctx.process_set).wait()
        return back, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, how: Reduction, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = how.before * how.after * (process_set.size() if how.op is Sum else 1)
        result: tuple[Tensor, ...] = operations.scatter(tensors, name, how, process_set, tuple).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wholes = operations.grouped_allgather_async(gradients, None, ctx.process_set).wait()
        return None, None, None, *(whole * ctx.factor for whole in wholes)

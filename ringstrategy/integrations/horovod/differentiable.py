"""The operations that wait, through which gradients flow back: each gradient makes the way of its value in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringstrategy.integrations.horovod import operations
from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Average, ReduceOp, Sum, reduction


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
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    arguments = (name, how.op, how.before, how.after, process_set, compression)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _reduced(tensor, *arguments)
    if how.op not in (Average, Sum):
        raise ValueError(f"{how.op.value} is not differentiable: pass tensor.detach(), or use Average or Sum")
    reduced: Tensor = _of(_AllReduce, tensor, *arguments)
    return reduced


def _reduced(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    before: float,
    after: float,
    process_set: ProcessSet,
    compression: object,
) -> Tensor:
    result: Tensor = operations.allreduce_async(
        tensor, None, name, op, before, after, process_set, compression=compression
    ).wait()
    return result


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
    """`allreduce` of several tensors, which travel together. Not differentiable."""
    outputs: list[Tensor] = operations.grouped_allreduce_async(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, compression=compression
    ).wait()
    return outputs


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' rows behind each other, in the order of ranks. Differentiable.

    Args:
        tensor: its first dimension may differ between ranks, the others not.
        name: see `operations`.
        process_set: the ranks.
    """
    gathered: Tensor = _of(_AllGather, tensor, name, process_set)
    return gathered


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
    op: ReduceOp = Average,
    name: str | None = None,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the average of all ranks' tensors, or of what `op` says. Differentiable for Average and Sum.

    The first ranks get one row more if they cannot all get as many.
    """
    how = reduction(op, None, compression, prescale_factor, postscale_factor)
    if tensor.requires_grad and torch.is_grad_enabled() and how.op not in (Average, Sum):
        raise ValueError(f"{how.op.value} is not differentiable: pass tensor.detach(), or use Average or Sum")
    own: Tensor = _of(_ReduceScatter, tensor, how.op, name, process_set, how.before, how.after, compression)
    return own


def _of(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return _reduced(tensor, name, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _reduced(gradients[0], None, *ctx.arguments), *[None] * (1 + len(ctx.arguments))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.process_set, ctx.rows = process_set, len(tensor) if tensor.dim() else 0
        result: Tensor = operations.allgather_async(tensor, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = operations.allgather_async(torch.tensor([ctx.rows]), None, ctx.process_set).wait().tolist()
        total = _reduced(gradients[0], None, Sum, 1.0, 1.0, ctx.process_set, Compression.none)
        return total.split(rows)[ctx.process_set.rank()], None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.process_set = process_set
        ctx.is_root = process_set.members.ranks[process_set.rank()] == root_rank
        result: Tensor = operations.broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = _reduced(gradients[0], None, Sum, 1.0, 1.0, ctx.process_set, Compression.none)
        return total if ctx.is_root else torch.zeros_like(total), None, None, None


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
        ctx: Any,
        tensor: Tensor,
        op: ReduceOp,
        name: str | None,
        process_set: ProcessSet,
        before: float,
        after: float,
        compression: object,
    ) -> Tensor:
        ctx.process_set = process_set
        ctx.factor = before * after / (process_set.size() if op is Average else 1)
        result: Tensor = operations.reducescatter_async(
            tensor, op, name, process_set, before, after, compression=compression
        ).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole: Tensor = operations.allgather_async(gradients[0], None, ctx.process_set).wait()
        return whole * ctx.factor, None, None, None, None, None, None

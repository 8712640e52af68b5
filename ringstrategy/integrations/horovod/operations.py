"""Operations between ranks: all-reduce, all-gather, broadcast, all-to-all, reduce-scatter, barrier.

Each has a name. Operations of one name belong together, in whatever order ranks submit them; those without a name are
counted, so ranks must submit them in the same order. The forms with `_async` return a `Handle` at once, for
`synchronize` and `poll`; their tensor must not change until then. Those with `_` put the result into the tensor.

Gradients flow back through the forms without either: each makes the way of its value in reverse. Its factor is
Horovod's, so that a port trains as before. With N ranks, and measured by the gradient of the sum of all ranks' losses,
that of `allgather` and `broadcast` is 1/N of it, that of `reducescatter` is N times it, and those of `allreduce` and
`alltoall` are equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ringstrategy.algorithms.parameters.group import in_flats
from ringstrategy.integrations.horovod.call import Call, begins, grouped, has_parts, waits
from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.members import Members
from ringstrategy.integrations.horovod.named import Handle, Result
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Average, ReduceOp, Reduction, Sum, reduction

Given = Tensor | Sequence[Tensor]  # for one tensor a user gets a tensor, and for several ones a list


def poll(handle: Handle[Any]) -> bool:
    """Whether the operation has ended, so that `synchronize` returns at once."""
    return handle.done()


def synchronize(handle: Handle[Result]) -> Result:
    """Wait for the operation; returns its result, or raises its error."""
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    Call[Any]("barrier", [], None, process_set).submit(lambda said: None).wait()


# Each operation: its arguments, in Horovod's places, what it does, and how its gradients flow back


def _reduce(given: Given, name: str | None, how: Reduction, process_set: ProcessSet) -> Call[Any]:
    """Those of one dtype travel together."""
    (tensors, result), members = _several(given), process_set.members
    same = _checked(how, tensors)

    def run(said: object) -> list[Tensor]:
        return in_flats(tensors, lambda flat: how.reduce_(flat, members))

    def adjoint(gradients: Sequence[Tensor], said: object) -> list[Tensor]:
        reduced: list[Tensor] = _reduce(gradients, None, how, process_set).begin().wait()
        return reduced

    flows = adjoint if how.op in (Average, Sum) else None
    return Call("allreduce", tensors, name, process_set, same, None, run, result, flows)


def _allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[Tensor]:
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
    return _reduce(tensor, name, how, process_set)


def _allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Call[Tensor]:
    return _allreduce(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set)


def _reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call[Tensor]:
    """This rank's rows of the average of all ranks' tensors, or of what `op` says. Differentiable for Average and Sum.

    The first ranks get one row more if they cannot all get as many.
    """
    how = reduction(op, None, compression, prescale_factor, postscale_factor)
    (tensors, result), members = _several(tensor), process_set.members
    same = _checked(how, tensors)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter shares out rows, and this tensor has no dimension: give it one")

    def scattered(whole: Tensor) -> Tensor:
        rows = _shares(len(whole), members.size)
        chunks = whole.new_zeros((members.size, rows[0], *whole.shape[1:]))
        for chunk, share in zip(chunks, whole.split(rows), strict=True):
            chunk[: len(share)] = share
        own = how.scatter_(chunks.view(members.size, -1), members)
        return own.view(chunks.shape[1:])[: rows[members.rank]]

    def run(said: object) -> list[Tensor]:
        return [*map(scattered, tensors)]

    def adjoint(gradients: Sequence[Tensor], said: object) -> list[Tensor]:
        factor = how.before * how.after * (process_set.size() if how.op is Sum else 1)
        return [whole * factor for whole in grouped_allgather_async(gradients, None, process_set).wait()]

    flows = adjoint if how.op in (Average, Sum) else None
    return Call("reducescatter", tensors, name, process_set, same, None, run, result, flows)


def _reducescatter_(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: object = Compression.none,
) -> Call[Tensor]:
    return _reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)


def _allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Call[Tensor]:
    """All ranks' rows behind each other, in the order of ranks. Differentiable.

    Args:
        tensor: its first dimension may differ between ranks, the others not.
        name: see `operations`.
        process_set: the ranks.
    """
    (tensors, result), members = _several(tensor), process_set.members
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather puts rows behind each other, and this tensor has no dimension: pass tensor[None]")

    def run(said: list[list[int]]) -> list[Tensor]:
        rows = zip(*said, strict=True)
        return [torch.cat(members.gather(tensor, each)) for tensor, each in zip(tensors, rows, strict=True)]

    def adjoint(gradients: Sequence[Tensor], said: list[list[int]]) -> list[Tensor | None]:
        flowing = [gradient for gradient in gradients if has_parts(gradient)]
        means = iter(grouped_allreduce_async(flowing, process_set=process_set).wait())
        rows = zip(*said, strict=True)
        return [
            next(means).split(each)[members.rank] if has_parts(gradient) else None
            for gradient, each in zip(gradients, rows, strict=True)
        ]

    same, own = ", ".join(_shown(tensor, rows=False) for tensor in tensors), [len(tensor) for tensor in tensors]
    return Call("allgather", tensors, name, process_set, same, own, run, result, adjoint)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[Tensor]:
    """The tensor of one rank, in a new tensor on each. Differentiable.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose; counted among all ranks, for a process set too.
        name: see `operations`.
        process_set: the ranks.
    """
    (tensors, result), members = _several(tensor), process_set.members
    check_root(root_rank, members)

    def run(said: object) -> list[Tensor]:
        return in_flats(tensors, lambda flat: members.broadcast_(flat, root_rank))

    def adjoint(gradients: Sequence[Tensor], said: object) -> list[Tensor]:
        is_root = members.ranks[members.rank] == root_rank
        means = grouped_allreduce_async(gradients, process_set=process_set).wait()
        return [mean if is_root else torch.zeros_like(mean) for mean in means]

    same = f"from rank {root_rank}, {', '.join(map(_shown, tensors))}"
    return Call("broadcast", tensors, name, process_set, same, None, run, result, adjoint)


def _alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call[Any]:
    """Rows to each rank, and from each the rows for this one, in the order of ranks. Differentiable.

    Args:
        tensor: its first dimension may differ between ranks, the others not.
        splits: how many rows each rank gets; None: all as many.
        name: see `operations`.
        process_set: the ranks.

    Returns:
        The rows; with `splits` also how many came from each rank, int32.
    """
    members = process_set.members
    leaving = _leaving(tensor, splits, members.size)

    def run(said: list[list[int]]) -> list[Tensor]:
        arriving = [rows[members.rank] for rows in said]
        arrived = members.all_to_all(tensor.resolve_conj().contiguous(), leaving, arriving)
        return [arrived, torch.tensor(arriving, dtype=torch.int32)]

    def adjoint(gradients: Sequence[Tensor], said: list[list[int]]) -> list[Tensor]:
        back = _alltoall(gradients[0], [rows[members.rank] for rows in said], None, process_set)
        return [back.begin().wait()[0]]

    result: Any = itemgetter(0) if splits is None else tuple
    return Call("alltoall", [tensor], name, process_set, _shown(tensor, rows=False), leaving, run, result, adjoint)


# What users call: the forms of each

allreduce, grouped_allreduce = waits(_allreduce), waits(grouped(_allreduce))
allreduce_, grouped_allreduce_ = waits(_allreduce_, in_place=True), waits(grouped(_allreduce_), in_place=True)
allreduce_async, grouped_allreduce_async = begins(_allreduce_), begins(grouped(_allreduce_))
allreduce_async_ = begins(_allreduce_, in_place=True)
grouped_allreduce_async_ = begins(grouped(_allreduce_), in_place=True)
reducescatter, grouped_reducescatter = waits(_reducescatter), waits(grouped(_reducescatter))
reducescatter_async, grouped_reducescatter_async = begins(_reducescatter_), begins(grouped(_reducescatter_))
gather = grouped(_allgather)
allgather, grouped_allgather = waits(_allgather), waits(gather)
allgather_async, grouped_allgather_async = begins(_allgather), begins(gather)
send = grouped(_broadcast)
broadcast, broadcast_ = waits(_broadcast), waits(_broadcast, in_place=True)
broadcast_async, broadcast_async_ = begins(_broadcast), begins(_broadcast, in_place=True)
alltoall, alltoall_async = waits(_alltoall), begins(_alltoall)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Begin the `Sum` or `Average` of sparse COO tensors of one shape; ranks may differ in which rows they have.

    The result is not coalesced. `synchronize` waits for it; so does a call of the handle, as with Horovod's.
    """
    if not tensor.is_sparse or op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async takes a sparse tensor and hvd.Average or hvd.Sum, got {op}")
    if op is Average and not tensor.is_floating_point():
        raise ValueError(f"sparse_allreduce_async averages floating-point tensors, got {tensor.dtype}: use hvd.Sum")
    size = process_set.size()

    def summed(gathered: Sequence[Tensor]) -> Tensor:
        indices, values = gathered
        return torch.sparse_coo_tensor(indices.t(), values / size if op is Average else values, tensor.shape)

    rows: Call[Any] = gather([tensor._indices().t().contiguous(), tensor._values()], name, process_set)
    same = f"{op.value} of {tuple(tensor.shape)}, {rows.same}"
    return replace(rows, kind="sparse_allreduce", same=same, result=summed).begin()


# Checks, and what ranks compare


def _several(given: Given) -> tuple[Sequence[Tensor], Any]:
    """The tensors, and what makes a user's result of those that they become."""
    return ([given], itemgetter(0)) if isinstance(given, Tensor) else (given, list)


def _checked(how: Reduction, tensors: Sequence[Tensor]) -> str:
    """What ranks compare of a reduction that is possible."""
    for tensor in tensors:
        how.check(tensor)
    return f"{how}, {', '.join(map(_shown, tensors))}"


def _shown(tensor: Tensor, *, rows: bool = True) -> str:
    shape = [*map(str, tensor.shape)] if rows else ["rows", *map(str, tensor.shape[1:])]
    return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(shape)}) on {tensor.device.type}"


def _shares(rows: int, size: int) -> list[int]:
    """How many rows each rank gets: the first ones get one more if they cannot all get as many."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _leaving(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """How many rows each rank gets. ValueError with the cure if that cannot be."""
    if tensor.dim() == 0:
        raise ValueError("alltoall shares out rows, and this tensor has no dimension: give it one")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(
                f"alltoall shares {len(tensor)} rows out to {size} ranks alike, which does not come out even: pass "
                "splits=, how many rows each rank gets"
            )
        return [len(tensor) // size] * size
    rows = [int(each) for each in splits]
    if len(rows) != size or min(rows) < 0 or sum(rows) != len(tensor):
        raise ValueError(f"splits says how many of {len(tensor)} rows each of {size} ranks gets, got {rows}")
    return rows


def check_root(root_rank: int, members: Members) -> None:
    """ValueError unless it is one of the ranks."""
    if root_rank not in members.ranks:
        raise ValueError(f"root_rank is one of the ranks {members.ranks}, got {root_rank}")

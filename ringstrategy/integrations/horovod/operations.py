"""Operations between ranks: all-reduce, all-gather, broadcast, all-to-all, reduce-scatter, barrier.

Each has a name. Operations of one name belong together, in whatever order ranks submit them; those without a name are
counted, so ranks must submit them in the same order. The forms with `_async` return a `Handle` at once, for
`synchronize` and `poll`; their tensor must not change until then. Those with `_` put the result into the tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.members import Members
from ringstrategy.integrations.horovod.named import Handle, Operation
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Average, ReduceOp, Reduction, Sum, reduction
from ringstrategy.integrations.memory import memory_of

Run = Callable[[list[Any]], Any]


def poll(handle: Handle) -> bool:
    """Has the operation ended, so that `synchronize` returns at once?"""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for the operation; returns its result, or raises its error."""
    return handle.wait()


# All-reduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `allreduce`."""
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    return reduce([tensor], None, name, how, process_set, lambda outputs: outputs[0])


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `allreduce_`."""
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    return reduce([tensor], [tensor], name, how, process_set, lambda outputs: outputs[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Tensor:
    """As `allreduce`, into the tensor itself."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, compression=compression
    )
    return _tensor(handle)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `grouped_allreduce`."""
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    return reduce(tensors, None, name, how, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `grouped_allreduce_`."""
    how = reduction(op, average, compression, prescale_factor, postscale_factor)
    return reduce(tensors, tensors, name, how, process_set, list)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: object = Compression.none,
) -> list[Tensor]:
    """As `grouped_allreduce`, into the tensors themselves."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, compression=compression
    )
    outputs: list[Tensor] = handle.wait()
    return outputs


def reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    name: str | None,
    how: Reduction,
    process_set: ProcessSet,
    result: Callable[[Sequence[Tensor]], Any],
) -> Handle:
    """Begin to reduce; tensors of one dtype travel together. `outputs`: where the results go, None: to new tensors."""
    for tensor in tensors:
        how.check(tensor)
    members = process_set.members

    def run(said: list[Any]) -> Any:
        into = [torch.empty_like(tensor) for tensor in tensors] if outputs is None else outputs
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
        for places in kinds.values():
            flat = torch.cat([tensors[place].reshape(-1) for place in places])
            how.reduce_(flat, members)
            for place, values in zip(places, flat.split([tensors[place].numel() for place in places]), strict=True):
                memory_of(into[place]).copy_(values.view(tensors[place].shape))
        return result(into)

    said = f"{how}, {', '.join(map(_shown, tensors))}"
    return submit("allreduce", name, said, None, tensors, members, run)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `reducescatter`."""
    how = reduction(op, None, compression, prescale_factor, postscale_factor)
    return scatter([tensor], name, how, process_set, lambda outputs: outputs[0])


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: object = Compression.none,
) -> Handle:
    """Begin `grouped_reducescatter`."""
    how = reduction(op, None, compression, prescale_factor, postscale_factor)
    return scatter(tensors, name, how, process_set, list)


def scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    how: Reduction,
    process_set: ProcessSet,
    result: Callable[[Sequence[Tensor]], Any],
) -> Handle:
    """Begin to reduce, so that each rank gets its rows; `result`: what becomes of them."""
    members = process_set.members
    for tensor in tensors:
        how.check(tensor)
        if tensor.dim() == 0:
            raise ValueError("reducescatter shares out rows, and this tensor has no dimension: give it one")

    def scattered(tensor: Tensor) -> Tensor:
        rows = shares(len(tensor), members.size)
        chunks = tensor.new_zeros((members.size, rows[0], *tensor.shape[1:]))
        for chunk, share in zip(chunks, tensor.split(rows), strict=True):
            chunk[: len(share)] = share
        own = how.scatter_(chunks.view(members.size, -1), members)
        return own.view(chunks.shape[1:])[: rows[members.rank]].clone()

    shown = f"{how}, {', '.join(map(_shown, tensors))}"
    return submit("reducescatter", name, shown, None, tensors, members, lambda said: result([*map(scattered, tensors)]))


def shares(rows: int, size: int) -> list[int]:
    """How many rows each rank gets: the first ones get one more if they cannot all get as many."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


# All-gather, broadcast, all-to-all


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin `allgather`."""
    return gather("allgather", [tensor], name, process_set, lambda outputs, rows: outputs[0])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `grouped_allgather`."""
    return gather("allgather", tensors, name, process_set, lambda outputs, rows: outputs)


def gather(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[list[Tensor], list[tuple[int, ...]]], Any],
    same: str = "",
) -> Handle:
    """Begin to gather the rows of all ranks.

    Args:
        kind: of the operation.
        tensors: of each the rows.
        name: see `submit`.
        process_set: the ranks.
        result: what becomes of them, and of how many rows came from each rank, by tensor.
        same: what ranks must say alike, besides what the rows are.
    """
    members = process_set.members
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather puts rows behind each other, and this tensor has no dimension: pass tensor[None]")

    def run(said: list[list[int]]) -> Any:
        rows = list(zip(*said, strict=True))
        return result(
            [torch.cat(members.gather(tensor, each)) for tensor, each in zip(tensors, rows, strict=True)], rows
        )

    shown = ", ".join([same] * bool(same) + [_shown(tensor, rows=False) for tensor in tensors])
    return submit(kind, name, shown, [len(tensor) for tensor in tensors], tensors, members, run)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin the `Sum` or `Average` of sparse COO tensors of one shape; ranks may differ in which rows they have.

    The result is not coalesced. `synchronize` waits for it; so does a call of the handle, as with Horovod's.
    """
    if not tensor.is_sparse or op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async takes a sparse tensor and hvd.Average or hvd.Sum, got {op}")
    if op is Average and not tensor.is_floating_point():
        raise ValueError(f"sparse_allreduce_async averages floating-point tensors, got {tensor.dtype}: use hvd.Sum")
    size = process_set.size()

    def summed(gathered: list[Tensor], rows: object) -> Tensor:
        del rows
        indices, values = gathered
        return torch.sparse_coo_tensor(indices.t(), values / size if op is Average else values, tensor.shape)

    parts = [tensor._indices().t().contiguous(), tensor._values()]
    same = f"{op.value} of {tuple(tensor.shape)}"
    return gather("sparse_allreduce", parts, name, process_set, summed, same)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `broadcast`."""
    return _broadcast(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `broadcast_`."""
    return _broadcast(tensor, True, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `broadcast`, into the tensor itself."""
    return _tensor(broadcast_async_(tensor, root_rank, name, process_set))


def _broadcast(tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
    members = process_set.members
    check_root(root_rank, members)

    def run(said: list[Any]) -> Tensor:
        values = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
        members.broadcast_(values, root_rank)
        if in_place:
            memory_of(tensor).copy_(values)
        return tensor if in_place else values

    said = f"from rank {root_rank}, {_shown(tensor)}"
    return submit("broadcast", name, said, None, [tensor], members, run)


def check_root(root_rank: int, members: Members) -> None:
    """ValueError unless it is one of the ranks."""
    if root_rank not in members.ranks:
        raise ValueError(f"root_rank is one of the ranks {members.ranks}, got {root_rank}")


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `alltoall`."""
    members = process_set.members
    leaving = splits_of(tensor, splits, members.size)

    def run(said: list[list[int]]) -> Any:
        arriving = [rows[members.rank] for rows in said]
        arrived = members.all_to_all(tensor.resolve_conj().contiguous(), leaving, arriving)
        return arrived if splits is None else (arrived, torch.tensor(arriving, dtype=torch.int32))

    return submit("alltoall", name, _shown(tensor, rows=False), leaving, [tensor], members, run)


def splits_of(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    submit("barrier", None, "", None, [], process_set.members, lambda said: None).wait()


# What all have in common


def submit(
    kind: str, name: str | None, same: str, own: Any, tensors: Sequence[Tensor], members: Members, run: Run
) -> Handle:
    """Begin an operation, see `Operation`. On GPUs it begins after what is queued, and ends when it is done."""
    for tensor in tensors:
        members.check_device(tensor.device)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    queued = [torch.cuda.current_stream(device).record_event() for device in devices]

    @torch.no_grad()
    def after(said: list[Any]) -> Any:
        for event in queued:
            event.synchronize()
        result = run(said)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return result

    if name is None:
        counter = _unnamed.setdefault(members, itertools.count())
        name = f"{kind}.noname.{next(counter)}"
    return members.operations.submit(Operation(name, f"{kind}: {same}", own, after))


def _shown(tensor: Tensor, *, rows: bool = True) -> str:
    shape = [*map(str, tensor.shape)] if rows else ["rows", *map(str, tensor.shape[1:])]
    return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(shape)}) on {tensor.device.type}"


def _tensor(handle: Handle) -> Tensor:
    result: Tensor = handle.wait()
    return result


# how many operations of some members had no name
_unnamed: WeakKeyDictionary[Members, itertools.count[int]] = WeakKeyDictionary()

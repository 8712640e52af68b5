"""Give all ranks one rank's parameters, optimizer state or objects; gather and average what is not a tensor."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ringstrategy.integrations.horovod.call import Call
from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.operations import (
    allgather_async,
    allreduce,
    check_root,
    grouped_allreduce_async,
    send,
)
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import ReduceOp


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the values of one.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`, with the same names on all ranks. What is no tensor
            in it stays as it is.
        root_rank: whose values; counted among all ranks.
        process_set: the ranks.
    """
    if isinstance(params, Tensor) or not isinstance(params, Mapping | Iterable):
        raise ValueError(
            f"params is model.state_dict() or model.named_parameters(), got {type(params).__name__}: use "
            "hvd.broadcast_ for one tensor, or hvd.broadcast_object"
        )
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("params is model.state_dict() or model.named_parameters(), not model.parameters()")
    named = {name: value for name, value in pairs if isinstance(value, Tensor)}
    call = send([*named.values()], root_rank, None, process_set)
    replace(call, kind="broadcast_parameters", same=f"{call.same}, {', '.join(named)}").begin_().wait()


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: object = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the state and the options of one rank's optimizer, such as its learning rates.

    Args:
        optimizer: wrapped or not; the same on all ranks.
        root_rank: whose; counted among all ranks.
        model: changes nothing; Horovod needs it for some optimizers.
        process_set: the ranks.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be given to other ranks: use another optimizer")
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if process_set.members.ranks[process_set.rank()] != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """One rank's object, on all ranks; it is pickled.

    Args:
        obj: of the root rank; of others anything.
        root_rank: whose; counted among all ranks.
        name: see `operations`.
        process_set: the ranks.
    """
    members = process_set.members
    check_root(root_rank, members)
    root = members.ranks.index(root_rank)
    mine = _pickled(obj) if members.rank == root else torch.empty(0, dtype=torch.uint8)

    def run(lengths: list[int]) -> Tensor:
        whole = mine if members.rank == root else torch.empty(lengths[root], dtype=torch.uint8)
        members.broadcast_(whole, root_rank)
        return whole

    call = Call[Any]("broadcast_object", [mine], name, process_set, f"from rank {root_rank}", len(mine))
    pickled = call.submit(run).wait()
    return obj if members.rank == root else pickle.loads(pickled.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All ranks' objects, on each of them, in the order of ranks; they are pickled."""
    pickled = io.BytesIO(allgather_async(_pickled(obj), name, process_set).wait().numpy().tobytes())
    return [pickle.load(pickled) for _ in range(process_set.size())]


def average_gradients(
    gradients: Sequence[Tensor | None],
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor | None]:
    """The averages of what `torch.autograd.grad` returns, as Horovod's DistributedGradientTape gives them.

    Error feedback needs a place to stay, and here is none: compressed gradients are rounded without it.

    Args:
        gradients: of the same shapes on all ranks; None where all ranks have None.
        op: `Average` or `Sum`.
        name: see `operations`.
        compression: a codec.
        process_set: the ranks.
    """
    there = [gradient for gradient in gradients if gradient is not None]
    averages = iter(
        grouped_allreduce_async(there, None, name, op, 1.0, 1.0, process_set, compression=compression).wait()
    )
    return [None if gradient is None else next(averages) for gradient in gradients]


def average_metrics(
    metrics: Mapping[str, float | Tensor], process_set: ProcessSet = global_process_set
) -> dict[str, float]:
    """The average of each metric over the ranks, which have the same names; exact to float64."""
    names = sorted(metrics)
    values = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64)
    averages = allreduce(values, name=f"metrics {', '.join(names)}", process_set=process_set).tolist()
    by_name = dict(zip(names, averages, strict=True))
    return {name: by_name[name] for name in metrics}


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)

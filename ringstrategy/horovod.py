"""Horovod's API for PyTorch over this package's ring: change one import of a Horovod script.

import ringstrategy.horovod as hvd      # was: import horovod.torch as hvd
"""

from importlib import import_module
from typing import Any

from ringstrategy.errors import PeerLostError as HorovodInternalError
from ringstrategy.integrations.horovod import elastic
from ringstrategy.integrations.horovod.batch_norm import SyncBatchNorm
from ringstrategy.integrations.horovod.compression import Compression
from ringstrategy.integrations.horovod.joining import join
from ringstrategy.integrations.horovod.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from ringstrategy.integrations.horovod.optimizer import DistributedOptimizer
from ringstrategy.integrations.horovod.process_sets import ProcessSet, global_process_set
from ringstrategy.integrations.horovod.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from ringstrategy.integrations.horovod.schedules import LearningRateWarmup
from ringstrategy.integrations.horovod.values import (
    allgather_object,
    average_gradients,
    average_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ringstrategy.integrations.horovod.world import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
    tell,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LearningRateWarmup",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_gradients",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "tell",
]


def __getattr__(name: str) -> Any:
    if name == "callbacks":  # only they need Lightning
        return import_module("ringstrategy.integrations.horovod.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""How the processes of a run become the ranks of the default process group, and how they part."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ringstrategy.failure.board import has_agent_store
from ringstrategy.membership.rendezvous import store_of_attempt
from ringstrategy.transport.exposure import guarded_store

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


def meet(
    environment: ClusterEnvironment,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    connect: Callable[..., None],
) -> None:
    """Make the default process group, unless it is there or this process is alone. All ranks call it.

    As Lightning does it, but ranks may start later than `timeout`, torchrun may restart them, and rank 0's store
    listens at the address of the run alone.

    Args:
        environment: knows the ranks.
        backend: of the group.
        device: of this rank.
        timeout: how long a rank may stay silent, once all are there.
        connect: Lightning's `_init_dist_connection`.
    """
    rank, size = environment.global_rank(), environment.world_size()
    if dist.is_initialized() or size == 1:
        return
    start = max(timeout, default_pg_timeout)
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    make = store_of_attempt if has_agent_store() else guarded_store
    connect(
        environment,
        backend,
        store=make(rank, size, start),
        timeout=start,
        device_id=None if device.type == "cpu" else device,
    )
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    dist.distributed_c10d._get_default_store().set_timeout(timeout)


def disconnect_at_exit() -> None:
    """Without it gloo's threads may abort a process that ends right after a collective."""
    stay_connected_at_exit()
    atexit.register(disconnect)


def stay_connected_at_exit() -> None:
    """Take that back after an error: disconnecting would wait for peers that may not come."""
    atexit.unregister(disconnect)


def disconnect() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()

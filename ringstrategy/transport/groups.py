"""Process groups of some ranks, under names that no group had before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def new_group(
    ranks: Sequence[int] | None, timeout: timedelta, backend: str | None = None, options: object = None
) -> dist.ProcessGroup:
    """`dist.new_group`, of these ranks of the default group, and called by them alone, equally often.

    Up to torch 2.13 `use_local_synchronization` names a group by its ranks and by how many groups the process has. So
    after another one was closed it has the same name, under which the store still has the other's addresses; and ranks
    with different numbers of groups never meet.

    Args:
        ranks: None: all.
        timeout: of its collectives, and to connect.
        backend: None: that of the default group.
        options: of the backend.
    """
    group: dist.ProcessGroup
    if ranks is None:
        group = dist.new_group(None, timeout, backend, options)
        return group
    default = c10d._get_default_group()
    usual, base = c10d._world.pg_map[default]
    members = {rank: place for place, rank in enumerate(sorted(ranks))}
    place, which = members[dist.get_rank()], ",".join(map(str, members))
    # counted in the store, so that it is the same on all ranks of this store
    name = f"ringstrategy/group/{which}/{base.add(f'ringstrategy/groups/{which}/{place}', 1)}"
    group, _ = c10d._new_process_group_helper(
        len(members),
        place,
        list(members),
        dist.Backend(backend or usual),
        base,
        name,  # type: ignore[arg-type]  # from torch 2.13 on a type of its own for a string
        backend_options=options,
        timeout=timeout,
        device_id=default.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = members
    return group

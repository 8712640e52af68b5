"""`join`: a rank that has no more batches goes on in the exchanges of the others, and counts nothing there."""

from __future__ import annotations

from typing import Any

from ringstrategy.integrations.horovod.call import Call
from ringstrategy.integrations.horovod.process_sets import global_process_set
from ringstrategy.integrations.horovod.values import broadcast_optimizer_state, broadcast_parameters
from ringstrategy.integrations.horovod.world import world


def join(device: int = -1) -> int:
    """Return when all ranks have called it: the rank that came last.

    Meanwhile a rank that came early takes part in the exchanges of an optimizer whose algorithm says
    `uneven="join"`: `DistributedOptimizer(..., algorithm=AllReduce(uneven="join"))`. The mean is over the ranks that
    have data. (Horovod divides by the number of all ranks.) At the end all ranks get the parameters and the optimizer
    state of the rank that came last. Without such an optimizer ranks must have as many batches.

    Args:
        device: changes nothing; Horovod allocates zeros there.

    Raises:
        ValueError: several optimizers join, so it is not known whose exchange comes next; or it averages parameters.
    """
    del device
    optimizers = [each for each in world().optimizers if each.session.uneven.is_open]
    if len(optimizers) > 1:
        raise ValueError(
            f"{len(optimizers)} optimizers have uneven='join', and hvd.join() knows only one: give all ranks the same "
            "number of batches, or step all parameters by one optimizer"
        )
    ticket = global_process_set.members.ticket("join")
    for optimizer in optimizers:
        optimizer._exchange.idle()
    tickets = Call[Any]("join", [], None, global_process_set, own=ticket).submit(list).wait()
    last = max(range(len(tickets)), key=tickets.__getitem__)
    for optimizer in optimizers:
        broadcast_parameters(optimizer._exchange.module.named, last)
        broadcast_optimizer_state(optimizer, last)
    return last

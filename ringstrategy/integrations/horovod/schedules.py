"""A learning rate that grows from that of one rank to that of all, as Horovod's callback has it (Goyal et al. 2017)."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ringstrategy.integrations.horovod.world import world


def warmup_factor(step: int, steps: int, size: int) -> float:
    """By what to multiply the rate of all ranks: 1/size at step 0, 1 from step `steps` on, a line between."""
    return 1.0 if step >= steps else (1 + step * (size - 1) / steps) / size


class LearningRateWarmup(LambdaLR):
    """A scheduler of torch; give the optimizer the rate for all ranks, `lr=0.01 * hvd.size()`.

    Args:
        optimizer: wrapped or not.
        steps: after so many calls of `step` the rate is the optimizer's.
        size: how many ranks there are; None: all of them.
    """

    def __init__(self, optimizer: Optimizer, steps: int, size: int | None = None) -> None:
        ranks = world().size if size is None else size
        if steps < 1 or ranks < 1:
            raise ValueError(f"steps and size are whole numbers >= 1, got steps={steps}, size={ranks}")
        super().__init__(optimizer, lambda step: warmup_factor(step, steps, ranks))

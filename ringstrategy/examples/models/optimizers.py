"""What every model here takes as `optimizer`: a torch optimizer that waits only for its parameters."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch

MakeOptimizer: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)

"""What every model here takes as `optimizer`: one that waits only for its parameters and their names."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch

MakeOptimizer: TypeAlias = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)

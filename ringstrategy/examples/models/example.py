"""What every model here shares: an optimizer that waits only for parameters and their names, and logs of its loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import lightning as L
import torch
from torch import Tensor

MakeOptimizer: TypeAlias = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)


class Example(L.LightningModule, ABC):
    """Logs `train_loss` every step, and `val_loss` (averaged over the ranks) every validation."""

    def __init__(self, optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.make_optimizer = optimizer

    @abstractmethod
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Of the batch, in the mean."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log and return the loss of the batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean loss over all ranks."""
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer given at birth, over all parameters."""
        return self.make_optimizer(self.named_parameters())

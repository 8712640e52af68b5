"""Linear regression by gradient descent: small enough to check every weight by hand."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy.examples.models.optimizers import SGD, MakeOptimizer


class Linear(L.LightningModule):
    """`features` weights, no bias, all zero at the start; mean squared error."""

    def __init__(self, features: int = 4, optimizer: MakeOptimizer = SGD) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.make_optimizer = optimizer
        self.weights = nn.Parameter(torch.zeros(features))

    def forward(self, rows: Tensor) -> Tensor:
        """(batch, features) rows to (batch,) predictions."""
        return rows @ self.weights

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of the batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean squared error over all ranks."""
        self.log("val_loss", self._loss(batch), batch_size=len(batch[0]), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer given at birth, over the weights."""
        return self.make_optimizer(self.named_parameters())

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, targets = batch
        return F.mse_loss(self(rows), targets)

"""Linear regression by gradient descent: small enough to check every weight by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy.examples.models.example import SGD, Example, MakeOptimizer


class Linear(Example):
    """`features` weights, no bias, all zero at the start; mean squared error."""

    def __init__(self, features: int = 4, optimizer: MakeOptimizer = SGD) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        self.weights = nn.Parameter(torch.zeros(features))

    def forward(self, rows: Tensor) -> Tensor:
        """(batch, features) rows to (batch,) predictions."""
        return rows @ self.weights

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error of the batch."""
        rows, targets = batch
        return F.mse_loss(self(rows), targets)

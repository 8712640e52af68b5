"""What both image classifiers share: cross-entropy, accuracy, an optimizer."""

from abc import ABC, abstractmethod

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from ringstrategy.examples.models.optimizers import MakeOptimizer


class Classifier(L.LightningModule, ABC):
    """Logs `train_loss` every step, `val_loss` and `val_accuracy` (averaged over the ranks) every validation."""

    def __init__(self, optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.make_optimizer = optimizer

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, height, width) images to (batch, classes) logits."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean loss and the share of right answers."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, batch_size=len(labels), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer given at birth, over all parameters."""
        return self.make_optimizer(self.named_parameters())

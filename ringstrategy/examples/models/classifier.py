"""What both image classifiers share: cross-entropy and accuracy."""

from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy.examples.models.example import Example


class Classifier(Example):
    """Logs `val_accuracy` (averaged over the ranks) beside the losses."""

    layers: nn.Sequential

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, height, width) images to (batch, classes) logits."""
        logits: Tensor = self.layers(images)
        return logits

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean loss and the share of right answers."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, batch_size=len(labels), sync_dist=True, prog_bar=True)

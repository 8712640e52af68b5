"""A small convolutional network for 8x8 images."""

from torch import nn

from ringstrategy.examples.models.classifier import Classifier
from ringstrategy.examples.models.example import ADAMW, MakeOptimizer


class CNN(Classifier):
    """Two 3x3 convolutions, each halving the image, and one linear layer."""

    def __init__(
        self,
        classes: int = 10,
        channels: int = 32,
        optimizer: MakeOptimizer = ADAMW,
    ) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 2 * 2, classes),
        )

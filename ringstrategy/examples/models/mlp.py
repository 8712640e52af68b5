"""A multi-layer perceptron for small images."""

from itertools import pairwise

from torch import nn

from ringstrategy.examples.models.classifier import Classifier
from ringstrategy.examples.models.example import ADAMW, MakeOptimizer


class MLP(Classifier):
    """`layers` hidden layers of `width` units with ReLU; the image is flattened first."""

    def __init__(
        self,
        inputs: int = 64,
        classes: int = 10,
        width: int = 256,  # wider: more gradient bytes a step
        layers: int = 2,
        optimizer: MakeOptimizer = ADAMW,
    ) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        widths = [inputs, *[width] * layers]
        hidden: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            hidden += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], classes))

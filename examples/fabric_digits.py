"""A loop of Lightning Fabric: only `import ringstrategy` and the strategy's name are new.

python examples/fabric_digits.py            # two processes on this machine
python examples/fabric_digits.py gossip     # ranks with parameters of their own, and their mean
"""

import sys

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy  # registers the names


def main() -> None:
    """Train for five epochs."""
    fabric = Fabric(strategy=sys.argv[1] if len(sys.argv) > 1 else "ring_int8", accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    training = DataLoader(TensorDataset(images[:1440], labels[:1440]), 32, shuffle=True)
    validation = DataLoader(TensorDataset(images[1440:], labels[1440:]), 32)
    training, validation = fabric.setup_dataloaders(training, validation)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for _ in range(5):
        for inputs, targets in training:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    ringstrategy.finish(model)  # for local SGD: counts its last steps
    with ringstrategy.consensus(model), torch.no_grad():  # for gossip: the mean of all ranks
        right = torch.stack([(model(inputs).argmax(1) == targets).float().mean() for inputs, targets in validation])
    accuracy = fabric.all_reduce(right.mean())
    fabric.print(accuracy.item(), getattr(fabric.strategy, "stats", ""))


if __name__ == "__main__":
    main()

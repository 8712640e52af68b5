"""LightningCLI: name the strategy on the command line, or describe all its parts in a file.

python examples/cli.py fit --trainer.strategy ring_int8 --trainer.devices 2 --trainer.max_epochs 1
python examples/cli.py fit --config examples/cli.yaml
"""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

import ringstrategy  # noqa: F401  # registers the names

if __name__ == "__main__":
    LightningCLI(DemoModel, BoringDataModule)

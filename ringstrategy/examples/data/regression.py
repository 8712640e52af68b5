"""Linear regression with known true coefficients. Every rank uses its whole shard in each step."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

MEANS = (0.0, 1.0, 2.0, 3.0)
COEFFICIENTS = (5.0, 3.0, 2.0, 1.0)


class Regression(L.LightningDataModule):
    """`rows` rows of 4 features (means 0 to 3, unit variance); target = 5, 3, 2, 1 times the features, no noise.

    One batch an epoch: rank r takes rows r, r + ranks, r + 2 ranks, ... So the averaged gradient is that of all rows,
    when `rows` is a multiple of the number of ranks (otherwise Lightning's sampler repeats some rows).
    """

    def __init__(self, rows: int = 1000, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows: Tensor = torch.randn(rows, len(MEANS), generator=generator) + torch.tensor(MEANS)
        self.targets: Tensor = self.rows @ torch.tensor(COEFFICIENTS)

    def train_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        """All rows in one batch; Lightning's sampler leaves each rank its share."""
        return DataLoader(TensorDataset(self.rows, self.targets), batch_size=len(self.rows))

    def val_dataloader(self) -> "DataLoader[tuple[Tensor, ...]]":
        """The same rows: the loss says how near the weights are."""
        return self.train_dataloader()

"""Scikit-learn's handwritten digits: 1,797 grey images of 8x8, ships with the library, no download."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningDataModule):
    """Batches of ((batch, 1, 8, 8) float32 images in 0..1, (batch,) int64 labels)."""

    def __init__(
        self,
        batch_size: int = 32,  # on each rank
        validation_images: int = 360,
        seed: int = 0,  # of the split; the order of training batches follows the run's own seed
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_images = validation_images
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Split once; the same images on every rank (Lightning's sampler then shares them out)."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        validation, training = order[: self.validation_images], order[self.validation_images :]
        self.training = TensorDataset(images[training], labels[training])
        self.validation = TensorDataset(images[validation], labels[validation])

    def train_dataloader(self) -> "DataLoader[tuple[torch.Tensor, ...]]":
        """Shuffled."""
        return DataLoader(self.training, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> "DataLoader[tuple[torch.Tensor, ...]]":
        """In order."""
        return DataLoader(self.validation, self.batch_size, num_workers=self.num_workers)

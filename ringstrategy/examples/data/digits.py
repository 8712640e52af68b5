"""Scikit-learn's handwritten digits: 1,797 grey images of 8x8, ships with the library, no download."""

import os

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Digits(L.LightningDataModule):
    """Batches of ((batch, 1, 8, 8) float32 images in 0..1, (batch,) int64 labels).

    With a skew each rank keeps its own images for the whole run, equally many on all, and up to one less than there
    are ranks are left out.
    """

    def __init__(
        self,
        batch_size: int = 32,  # on each rank
        validation_images: int = 360,
        seed: int = 0,  # of the split; the order of training batches follows the run's own seed
        num_workers: int = 0,
        skew: float = 0.0,  # this share of each rank's images is a run of neighbouring labels; 1: few labels a rank
    ) -> None:
        super().__init__()
        if not 0 <= skew <= 1:
            raise ValueError(f"skew is a share of each rank's images: 0 (labels as they come) to 1, got {skew!r}")
        self.batch_size = batch_size
        self.validation_images = validation_images
        self.seed = seed
        self.num_workers = num_workers
        self.skew = skew

    def setup(self, stage: str) -> None:
        """Split once; the same images on every rank (Lightning's sampler then shares them out)."""
        from sklearn.datasets import load_digits  # takes a second, and pandas with it

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        validation, training = order[: self.validation_images], order[self.validation_images :]
        self.training = TensorDataset(images[training], labels[training])
        self.validation = TensorDataset(images[validation], labels[validation])

    def train_dataloader(self) -> "DataLoader[tuple[torch.Tensor, ...]]":
        """Shuffled."""
        if not self.skew:
            return DataLoader(self.training, self.batch_size, shuffle=True, num_workers=self.num_workers)
        rank, ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        mine = Subset(self.training, shard(self.training.tensors[1], self.skew, rank, ranks, self.seed).tolist())
        # Lightning shares out whatever has another kind of sampler; this one shuffles a rank's own, anew each epoch
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) + rank
        shuffled: DistributedSampler[int] = DistributedSampler(mine, num_replicas=1, rank=0, seed=seed)
        return DataLoader(mine, self.batch_size, sampler=shuffled, num_workers=self.num_workers)

    def val_dataloader(self) -> "DataLoader[tuple[torch.Tensor, ...]]":
        """In order."""
        return DataLoader(self.validation, self.batch_size, num_workers=self.num_workers)


def shard(labels: Tensor, skew: float, rank: int, ranks: int, seed: int) -> Tensor:
    """Which of the labelled rows are this rank's: the share `skew` of them by label, the rest at random."""
    size = len(labels) // ranks
    sorted_size = round(skew * size)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_label, at_random = order[: ranks * sorted_size], order[ranks * sorted_size : ranks * size]
    by_label = by_label[labels[by_label].argsort(stable=True)]
    return torch.cat([by_label.view(ranks, sorted_size)[rank], at_random.view(ranks, size - sorted_size)[rank]])

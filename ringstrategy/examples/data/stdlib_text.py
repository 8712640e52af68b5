"""The source text of Python's own standard library, as bytes: real text on every machine, no download."""

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def read_stdlib_text(max_bytes: int) -> Tensor:
    """The first `max_bytes` of all library modules in the order of their paths, a uint8 tensor."""
    library = Path(sysconfig.get_path("stdlib"))
    pieces: list[bytes] = []
    missing = max_bytes
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            pieces.append(path.read_bytes()[:missing])
            missing -= len(pieces[-1])
        if missing == 0:
            break
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Item i is the `context` bytes from starts[i] on, and the same window one byte later; both int64."""

    def __init__(self, text: Tensor, starts: Tensor, context: int) -> None:
        self.text, self.starts, self.context = text, starts, context

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StdlibText(L.LightningDataModule):
    """Random windows of the first part of the text to train on, windows side by side of the rest to validate on."""

    def __init__(
        self,
        batch_size: int = 16,  # on each rank
        context: int = 128,  # bytes a window; at most the model's
        windows: int = 8192,  # random training windows, over all ranks; more: a longer epoch
        max_bytes: int = 4_000_000,
        validation_bytes: int = 65_536,
        seed: int = 0,  # of the windows' places
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if max_bytes - validation_bytes <= context + 1 or validation_bytes <= context + 1:
            raise ValueError(
                f"context={context} does not fit: max_bytes={max_bytes} must hold validation_bytes={validation_bytes}"
                " and a training part, each longer than one window"
            )
        self.batch_size = batch_size
        self.context = context
        self.windows = windows
        self.max_bytes = max_bytes
        self.validation_bytes = validation_bytes
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Read the text and place the windows; the same on every rank (Lightning's sampler then shares them out)."""
        text = read_stdlib_text(self.max_bytes)
        training, validation = text[: -self.validation_bytes], text[-self.validation_bytes :]
        generator = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(len(training) - self.context, (self.windows,), generator=generator)
        self.training = Windows(training, starts, self.context)
        self.validation = Windows(
            validation, torch.arange(0, len(validation) - self.context, self.context), self.context
        )

    def train_dataloader(self) -> "DataLoader[tuple[Tensor, Tensor]]":
        """Shuffled."""
        return DataLoader(self.training, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> "DataLoader[tuple[Tensor, Tensor]]":
        """In order."""
        return DataLoader(self.validation, self.batch_size, num_workers=self.num_workers)

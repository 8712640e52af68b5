"""`torch.compile` by blocks: gradients travel during backward. Compiled as a whole, a model has them all at its end.

python examples/compiled.py            # each block is compiled
python examples/compiled.py whole      # the model is compiled as a whole: nothing overlaps
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import AllReduce, BlockInt, RingStrategy

BACKEND = "aot_eager"  # needs no C++ compiler here; without `backend=` torch compiles for speed


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Eight blocks. (An `nn.Sequential` in its place would be compiled part by part.)"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for block in self.blocks:
            x = block(x)
        return x


class Deep(L.LightningModule):
    """A stack that learns the identity, from batches so large that backward takes a while."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.stack = Stack()
        for part in [self.stack] if whole else self.stack.blocks:
            part.compile(backend=BACKEND)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        return (self.stack(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Train for three steps, and say when buckets left in the last one."""
    whole = sys.argv[1:] == ["whole"]
    algorithm = AllReduce(BlockInt(8), bucket_mb=0.5)
    trainer = L.Trainer(
        strategy=RingStrategy(algorithm),
        accelerator="cpu",
        devices=2,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Deep(whole), DataLoader(TensorDataset(torch.randn(12288, 128)), 4096))
    if trainer.is_global_zero:
        launches = trainer.strategy.algorithm.launches
        (_, first), (_, last) = launches[0], launches[-1]
        print(f"the first of {len(launches)} buckets left {1e3 * first:.0f} ms after backward began,", end=" ")
        print(f"{first / last:.0%} of the way to the last")


if __name__ == "__main__":
    main()

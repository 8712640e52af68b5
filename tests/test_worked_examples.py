"""Worked examples whose numbers were published beside the systems that this project follows, to 1e-5."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy.app.data.regression import Regression
from ringstrategy.app.models.linear import Linear
from ringstrategy.app.models.optimizers import SGD

CLOSE = {"rtol": 0, "atol": 1e-5}


def fit(model: L.LightningModule, *data: Any, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        strategy="ring",
        accelerator="cpu",
        devices=dist.get_world_size(),
        use_distributed_sampler=False,
        barebones=True,
        **options,
    )
    trainer.fit(model, *data)
    return trainer


# One dense layer on two ranks: Horovod's example of an averaged gradient

LOCAL_ROWS = [(2.0128188, 2.7977395), (0.75015247, 1.4605565)]
MEAN_ROWS = (1.3814857, 2.129148)


def kernel(rows: tuple[float, float]) -> Tensor:
    """Rows of the 2x3 kernel, in the layout of `nn.Linear.weight` (3x2)."""
    return torch.tensor(rows).expand(3, 2)


class Dense(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        for parameter in self.layer.parameters():
            nn.init.constant_(parameter, 1.0 - dist.get_rank())

    def train_dataloader(self) -> DataLoader[Any]:
        rows = np.random.RandomState(self.global_rank).random_sample((4, 2)).astype(np.float32)
        return DataLoader(TensorDataset(torch.from_numpy(rows)), batch_size=4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        local = torch.autograd.grad(self.layer(batch[0]).sum(), self.layer.weight)[0]
        assert torch.allclose(local, kernel(LOCAL_ROWS[dist.get_rank()]), **CLOSE)
        return self.layer(batch[0]).sum()

    def on_after_backward(self) -> None:
        assert torch.allclose(self.layer.weight.grad, kernel(MEAN_ROWS), **CLOSE)
        assert torch.allclose(self.layer.bias.grad, torch.full((3,), 4.0), **CLOSE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def _dense() -> None:
    dist.init_process_group("gloo")
    model = Dense()
    trainer = fit(model, max_epochs=1)
    assert trainer.strategy.stats.bytes_sent  # type: ignore[attr-defined]
    # both follow rank 0's weights, which were ones
    assert torch.allclose(model.layer.weight, kernel((-0.3814857, -1.129148)), **CLOSE)
    assert torch.allclose(model.layer.bias, torch.full((3,), -3.0), **CLOSE)
    dist.barrier()


def test_two_ranks_that_start_different_average_their_gradients_and_follow_rank_0(ranks: Pool) -> None:
    ranks(2, _dense)


# Linear regression: ranks and accumulation over shards


def descend(epochs: int) -> Tensor:
    """Gradient descent on one node in float64."""
    data = Regression()
    rows, targets, weights = data.rows.double(), data.targets.double(), torch.zeros(4, dtype=torch.float64)
    for _ in range(epochs):
        weights -= 0.01 * 2 * rows.T @ (rows @ weights - targets) / len(rows)
    return weights


def _regression(epochs: int, accumulate: int) -> Tensor:
    dist.init_process_group("gloo")
    data, shards = Regression(), dist.get_world_size() * accumulate
    model = Linear(optimizer=lambda parameters: SGD(parameters, lr=0.01))
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batches = DataLoader(TensorDataset(data.rows[mine], data.targets[mine]), batch_size=1000 // shards)
    trainer = fit(model, batches, max_epochs=epochs, accumulate_grad_batches=accumulate)
    assert trainer.global_step == epochs
    dist.barrier()
    return model.weights.detach().double()


@pytest.mark.parametrize(
    ("size", "accumulate", "epochs"), [(2, 2, 25), pytest.param(4, 1, 400, marks=pytest.mark.nightly)]
)
def test_ranks_with_a_share_of_the_rows_each_are_one_with_all(
    ranks: Pool, size: int, accumulate: int, epochs: int
) -> None:
    data, expected = Regression(), descend(epochs)
    assert data.rows.shape == (1000, 4)
    assert torch.allclose(data.rows.mean(0), torch.arange(4.0), atol=0.15)
    assert torch.equal(data.targets, data.rows @ torch.tensor([5.0, 3.0, 2.0, 1.0]))
    for weights in ranks(size, _regression, epochs, accumulate):
        assert torch.allclose(weights, expected, **CLOSE)
    close = torch.tensor([5.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert epochs < 400 or torch.allclose(expected, close, atol=0.5)

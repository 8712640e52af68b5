"""Worked examples whose numbers were published beside the systems that this project follows, to 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from pool import Pool
from test_strategy import check_replicas, fit, world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy.horovod as hvd
from ringstrategy.examples.data.regression import Regression
from ringstrategy.examples.models.linear import Linear
from ringstrategy.examples.models.optimizers import SGD

# One dense layer on two ranks: Horovod's example of an averaged gradient

LOCAL_ROWS = [(2.0128188, 2.7977395), (0.75015247, 1.4605565)]
MEAN_ROWS = (1.3814857, 2.129148)


def inputs(rank: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(rank).random_sample((4, 2)).astype(np.float32))


def kernel(rows: tuple[float, float]) -> Tensor:
    """Rows of the 2x3 kernel, in the layout of `nn.Linear.weight` (3x2)."""
    return torch.tensor(rows).expand(3, 2)


def dense(value: float) -> nn.Linear:
    layer = nn.Linear(2, 3)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


@on_ranks(2)
def test_two_ranks_that_start_different_average_their_gradients() -> None:
    hvd.init()
    rank = hvd.rank()
    layer, x = dense(1.0 - rank), inputs(rank)

    def check(found: Tensor, *expected: Any) -> None:
        torch.testing.assert_close(found, *expected, rtol=0, atol=1e-5)

    check(torch.autograd.grad(layer(x).sum(), layer.weight)[0], kernel(LOCAL_ROWS[rank]))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 1.0), layer.named_parameters())
    layer(x).sum().backward()
    optimizer.synchronize()
    check(layer.weight.grad, kernel(MEAN_ROWS))
    check(layer.bias.grad, torch.full((3,), 4.0))
    with optimizer.skip_synchronize():
        optimizer.step()
    after = [(-0.3814857, -1.129148), (-1.3814857, -2.129148)]
    check(layer.weight.data, kernel(after[rank]))
    check(layer.bias.data, torch.full((3,), -3.0 - rank))
    hvd.broadcast_parameters(layer.state_dict(), 0)
    check(layer.weight.data, kernel(after[0]))
    check(layer.bias.data, torch.full((3,), -3.0))
    hvd.shutdown()


# Linear regression on four nodes, and accumulation over shards


def descend(epochs: int) -> Tensor:
    """Gradient descent on one node in float64."""
    data = Regression()
    rows, targets, weights = data.rows.double(), data.targets.double(), torch.zeros(4, dtype=torch.float64)
    for _ in range(epochs):
        weights -= 0.01 * 2 * rows.T @ (rows @ weights - targets) / len(rows)
    return weights


def _regression(epochs: int, accumulate: int) -> Tensor:
    data, size = Regression(), world()
    model = Linear(optimizer=lambda parameters: SGD(parameters, lr=0.01))
    batches = DataLoader(TensorDataset(data.rows, data.targets), batch_size=1000 // (size * accumulate))
    trainer = fit("ring", model, data=batches, max_epochs=epochs, accumulate_grad_batches=accumulate)
    assert trainer.global_step == epochs
    if size > 1:
        check_replicas(trainer)
    return model.weights.detach().double()


@pytest.mark.parametrize(("size", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_shards_of_nodes_or_of_accumulation_are_the_full_batch(ranks: Pool, size: int, accumulate: int) -> None:
    expected = descend(25)
    for weights in ranks(size, _regression, 25, accumulate):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-5)

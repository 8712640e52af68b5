"""Worked examples whose numbers were published beside the systems that this project follows, to 1e-5."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_strategy import check_replicas, fit, same_everywhere, world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import AllReduce
from ringstrategy.examples.data.regression import Regression
from ringstrategy.examples.models.linear import Linear
from ringstrategy.examples.models.optimizers import SGD
from ringstrategy.transport.connect import connect

CLOSE = {"rtol": 0, "atol": 1e-5}

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


def _ranks_that_start_different() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = dense(1.0 - rank)
    x = inputs(rank)
    local = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    assert torch.allclose(local, kernel(LOCAL_ROWS[rank]), **CLOSE)

    algorithm, optimizer = AllReduce(), torch.optim.SGD(layer.parameters(), 1.0)
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    algorithm.setup(dict(layer.named_parameters()), peers)
    loss = layer(x).sum()
    algorithm.before_backward(loss)
    loss.backward()
    algorithm.after_backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert torch.allclose(layer.weight.grad, kernel(MEAN_ROWS), **CLOSE)
    assert torch.allclose(layer.bias.grad, torch.full((3,), 4.0), **CLOSE)
    assert same_everywhere(layer.weight.grad)
    assert peers.stats.bytes_sent

    optimizer.step()
    after = [(-0.3814857, -1.129148), (-1.3814857, -2.129148)]
    assert torch.allclose(layer.weight, kernel(after[rank]), **CLOSE)
    assert torch.allclose(layer.bias, torch.full((3,), -3.0 - rank), **CLOSE)

    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    assert torch.allclose(layer.weight, kernel(after[0]), **CLOSE)
    assert torch.allclose(layer.bias, torch.full((3,), -3.0), **CLOSE)
    algorithm.close()
    peers.close()


def test_two_ranks_that_start_different_average_their_gradients(ranks: Pool) -> None:
    ranks(2, _ranks_that_start_different)


class Dense(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = dense(1.0 - dist.get_rank() if dist.is_initialized() else 1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(inputs(self.global_rank)), batch_size=4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()

    def on_after_backward(self) -> None:
        assert torch.allclose(self.layer.weight.grad, kernel(MEAN_ROWS), **CLOSE)
        assert torch.allclose(self.layer.bias.grad, torch.full((3,), 4.0), **CLOSE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def _under_the_strategy() -> None:
    dist.init_process_group("gloo")
    model = Dense()
    assert not same_everywhere(model.layer.weight)
    trainer = L.Trainer(
        strategy="ring",
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        use_distributed_sampler=False,
        barebones=True,
    )
    trainer.fit(model)
    check_replicas(trainer)
    assert torch.allclose(model.layer.weight, kernel((-0.3814857, -1.129148)), **CLOSE)
    assert torch.allclose(model.layer.bias, torch.full((3,), -3.0), **CLOSE)


def test_under_the_strategy_both_ranks_follow_rank_zeros_weights(ranks: Pool) -> None:
    ranks(2, _under_the_strategy)


# Linear regression on four nodes, and accumulation over shards


def descend(shards: int, epochs: int) -> Tensor:
    """Gradient descent on one node in float64; the error of each shard is weighted by its share of the rows."""
    data = Regression()
    weights = torch.zeros(4, dtype=torch.float64)
    for _ in range(epochs):
        gradient = torch.zeros_like(weights)
        for rows, targets in zip(data.rows.double().chunk(shards), data.targets.double().chunk(shards), strict=True):
            share = len(rows) / len(data.rows)
            gradient += share * 2 * rows.T @ (rows @ weights - targets) / len(rows)
        weights -= 0.01 * gradient
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


def test_the_means_of_the_features_are_those_of_the_example() -> None:
    data = Regression()
    assert data.rows.shape == (1000, 4)
    assert torch.allclose(data.rows.mean(0), torch.arange(4.0), atol=0.15)
    assert torch.allclose(data.rows.std(0), torch.ones(4), atol=0.1)
    assert torch.equal(data.targets, data.rows @ torch.tensor([5.0, 3.0, 2.0, 1.0]))


@pytest.mark.slow
def test_four_nodes_with_a_quarter_of_the_rows_each_are_one_with_all(ranks: Pool) -> None:
    alone = descend(1, 400)
    assert torch.allclose(descend(4, 400), alone, rtol=0, atol=1e-12)
    results = ranks(4, _regression, 400, 1)
    for weights in results:
        assert torch.equal(weights, results[0])
        assert torch.allclose(weights, alone, **CLOSE)
    assert torch.allclose(alone, torch.tensor([5.0, 3.0, 2.0, 1.0], dtype=torch.float64), atol=0.5)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 4), (2, 2)])
def test_accumulation_over_shards_is_the_full_batch(ranks: Pool, size: int, accumulate: int) -> None:
    expected = descend(1, 25)
    for weights in ranks(size, _regression, 25, accumulate):
        assert torch.allclose(weights, expected, **CLOSE)

"""What every registered name promises, whatever it does to the bytes: one test runs them all through a Trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import LocalSGD, RingStrategy
from ringstrategy.names import STRATEGIES


class _Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def _rows() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(1024, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs @ torch.randn(16, 4, generator=generator)).argmax(1)), batch_size=8)


def _fit(name: str, devices: int) -> tuple[L.Trainer, _Classifier]:
    model = _Classifier()
    trainer = L.Trainer(
        strategy=name,
        accelerator="cpu",
        devices=devices,
        max_steps=60,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=devices > 1,
    )
    trainer.fit(model, _rows())
    return trainer, model


def _train_all(size: int) -> dict[str, int]:
    sent = {}
    for name in STRATEGIES:
        trainer, model = _fit(name, size)
        strategy = trainer.strategy
        assert isinstance(strategy, RingStrategy)
        assert strategy.world_size == dist.get_world_size() == size > 1
        algorithm = strategy.algorithm
        interval = algorithm.interval if isinstance(algorithm, LocalSGD) else 1
        assert isinstance(interval, int)
        parts = algorithm.fragments if isinstance(algorithm, LocalSGD) else 1
        assert 60 // interval <= strategy.stats.steps <= -(-60 // interval) * parts
        for parameter in model.parameters():
            others = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(others, parameter.detach())
            assert all(torch.equal(other, parameter) for other in others), name
        fell = torch.tensor([sum(model.losses[:5]) / 5, sum(model.losses[-10:]) / 10])
        dist.all_reduce(fell)
        assert fell[1] < 0.9 * fell[0], (name, fell)
        assert strategy.stats.bytes_sent is not None
        sent[name] = strategy.stats.bytes_sent
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_every_name_trains_identical_replicas_and_sends_what_it_says(ranks: Pool, size: int) -> None:
    sent = ranks(size, _train_all, size, limit=120)[0]
    exact = sent["ring"]
    fewer = {"ring_fp16": 1.9, "ring_bf16": 1.9, "ring_int8": 3.5, "ring_fp8": 3.5, "ring_int4": 6, "ring_int2": 9}
    for name, factor in {**fewer, "ring_sign": 12, "ring_topk": 14, "ring_powersgd": 4}.items():
        assert sent[name] < exact / factor, (name, exact / sent[name])
    assert set(sent) == set(STRATEGIES)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_one_process_trains_as_without_a_strategy(name: str) -> None:
    trainer, ours = _fit(name, 1)
    _, plain = _fit("auto", 1)
    assert isinstance(trainer.strategy, RingStrategy)
    assert trainer.strategy.stats.bytes_sent == 0
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))

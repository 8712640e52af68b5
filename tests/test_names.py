"""The registered names: their YAML twins, and what each promises whatever it does to the bytes."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import LocalSGD, RingStrategy
from ringstrategy.app.refusals import check_arguments
from ringstrategy.names import STRATEGIES

YAMLS = {path.stem for path in (Path(__file__).parents[1] / "configs" / "strategy").glob("*.yaml")} - {"ddp"}


def test_every_name_has_a_yaml_that_builds_what_it_means() -> None:
    assert set(STRATEGIES) == YAMLS
    with initialize_config_module("ringstrategy.configs", version_base="1.3"):
        for name in STRATEGIES:
            config = compose("train", [f"strategy={name}"])
            check_arguments(config)
            from_yaml, from_table = instantiate(config.strategy), StrategyRegistry.get(name)
            assert isinstance(from_yaml, RingStrategy)
            assert repr(from_yaml) == repr(from_table)
            assert from_yaml._timeout == from_table._timeout
            assert from_yaml._start_method == from_table._start_method == "popen"


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


def _fit(name: str, devices: int, steps: int) -> tuple[L.Trainer, _Classifier]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(1024, 16, generator=generator)
    labels = (inputs @ torch.randn(16, 4, generator=generator)).argmax(1)
    model = _Classifier()
    trainer = L.Trainer(
        strategy=name,
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=devices > 1,
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs, labels), batch_size=8))
    return trainer, model


def _train_all(size: int) -> dict[str, int]:
    sent = {}
    for name in STRATEGIES:
        trainer, model = _fit(name, size, 60)
        strategy = trainer.strategy
        assert isinstance(strategy, RingStrategy)
        assert strategy.world_size == dist.get_world_size() == size > 1
        algorithm = strategy.algorithm
        interval = algorithm.interval if isinstance(algorithm, LocalSGD) else 1
        assert isinstance(interval, int)
        parts = algorithm.fragments if isinstance(algorithm, LocalSGD) else 1
        assert strategy.stats.steps == trainer.global_step == 60
        assert 60 // interval <= strategy.stats.exchanges <= -(-60 // interval) * parts
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


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.nightly)])
def test_every_name_trains_identical_replicas_and_sends_what_it_says(ranks: Pool, size: int) -> None:
    sent = ranks(size, _train_all, size)[0]
    exact = sent["ring"]
    fewer = {"ring_fp16": 1.9, "ring_bf16": 1.9, "ring_int8": 3.5, "ring_fp8": 3.5, "ring_int4": 6, "ring_int2": 9}
    for name, factor in {**fewer, "ring_sign": 12, "ring_topk": 14, "ring_powersgd": 4}.items():
        assert sent[name] < exact / factor, (name, exact / sent[name])
    assert set(sent) == set(STRATEGIES)


def test_one_process_trains_as_without_a_strategy() -> None:
    _, plain = _fit("auto", 1, 20)
    for name in STRATEGIES:
        trainer, ours = _fit(name, 1, 20)
        assert isinstance(trainer.strategy, RingStrategy)
        assert trainer.strategy.stats.bytes_sent == 0
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)), name

"""The registered names: their YAML twins, and what each promises whatever it does to the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from pool import Pool
from test_strategy import Net, check_replicas, fit, net, rows
from torch import nn

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


def _train_all(size: int) -> dict[str, int]:
    sent = {}
    every = next(iter(rows(240 * size, batch_size=240 * size)))
    for name in STRATEGIES:
        model = net(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 3))
        before = float(model.loss(every))
        trainer = fit(name, model, data=rows(240 * size), max_epochs=1)
        check_replicas(trainer)
        assert float(model.loss(every)) < 0.9 * before, name
        stats, algorithm = trainer.strategy.stats, trainer.strategy.algorithm
        is_local_sgd = isinstance(algorithm, LocalSGD)
        interval, parts = (algorithm.interval, algorithm.fragments) if is_local_sgd else (1, 1)
        assert stats.steps == trainer.global_step == 60
        assert 60 // interval <= stats.exchanges <= -(-60 // interval) * parts
        sent[name] = stats.bytes_sent
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
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    plain = fit("auto", Net(), **options).lightning_module
    for name in STRATEGIES:
        trainer = fit(name, Net(), **options)
        assert isinstance(trainer.strategy, RingStrategy)
        assert trainer.strategy.stats.bytes_sent == 0
        assert all(map(torch.equal, trainer.lightning_module.parameters(), plain.parameters())), name

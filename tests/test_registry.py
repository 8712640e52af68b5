"""The registered names, their YAML twins, and what importing does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry

from ringstrategy import RingStrategy
from ringstrategy.integrations.lightning.register import START_METHODS
from ringstrategy.names import STRATEGIES

YAMLS = {path.stem for path in (Path(__file__).parents[1] / "configs" / "strategy").glob("*.yaml")} - {"ddp"}


def test_every_name_has_a_yaml_and_every_yaml_a_name() -> None:
    assert set(STRATEGIES) == YAMLS


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_the_yaml_builds_what_the_name_means(name: str) -> None:
    with initialize_config_module("ringstrategy.configs", version_base="1.3"):
        config = compose("train", [f"strategy={name}"])
    from_yaml, from_table = instantiate(config.strategy), StrategyRegistry.get(name)
    assert isinstance(from_yaml, RingStrategy)
    assert repr(from_yaml) == repr(from_table)
    assert from_yaml._timeout == from_table._timeout
    assert from_yaml._start_method == from_table._start_method == "popen"


@pytest.mark.parametrize("suffix", START_METHODS)
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_each_name_has_lightnings_start_methods(name: str, suffix: str) -> None:
    strategy = StrategyRegistry.get(name + suffix)
    assert isinstance(strategy, RingStrategy)
    assert strategy._start_method == START_METHODS[suffix]
    assert repr(strategy.algorithm) == repr(STRATEGIES[name]())
    assert strategy.algorithm is not StrategyRegistry.get(name + suffix).algorithm

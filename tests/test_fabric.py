"""Lightning Fabric over this package, on real processes: beside torch DDP, and what each of Fabric's calls promises."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy import (
    AllReduce,
    BlockInt,
    Choco,
    Gossip,
    PowerSGD,
    PushSum,
    RingFabricStrategy,
    consensus,
)
from ringstrategy.algorithms import Algorithm
from ringstrategy.integrations.lightning.register import START_METHODS
from ringstrategy.names import STRATEGIES

pytestmark = pytest.mark.timeout(120)
MINUTE = timedelta(minutes=1)
LOSSY = ["ring_bf16", "ring_fp8", "ring_int8", "ring_int4", "ring_sign", "ring_topk", "ring_powersgd"]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def batches(count: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Other ones on each rank."""
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def momentum(module: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr, momentum=0.9)


@contextmanager
def fabric_with(strategy: Any, **how: Any) -> Iterator[Fabric]:
    """Of the ranks of the pool, which has set what torchrun would."""
    if isinstance(strategy, Algorithm):
        strategy = RingFabricStrategy(strategy, timeout=MINUTE)
    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], TORCHELASTIC_RUN_ID="test")
    environment = TorchElasticEnvironment()
    del os.environ["TORCHELASTIC_RUN_ID"]  # there is no agent to end with
    devices = environment.world_size()
    plugins = [environment, *how.pop("plugins", [])]
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins, **how)
    fabric.launch()
    try:
        yield fabric
    finally:
        if isinstance(fabric.strategy, RingFabricStrategy):
            fabric.strategy.close()


def values(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def everyones(flat: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return rows


def train(
    fabric: Fabric, model: nn.Module, optimizer: Any, data: Iterator[tuple[Tensor, Tensor]], *, every: int = 1
) -> None:
    """A step after `every` batches, clipped."""
    for i, (inputs, targets) in enumerate(data):
        steps = (i + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not steps):
            fabric.backward(F.mse_loss(model(inputs), targets) / every)
        if steps:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


def _trained(strategy: Any, every: int) -> tuple[list[Tensor], int]:
    with fabric_with(strategy) as fabric:
        model = net(seed=dist.get_rank())
        model, optimizer = fabric.setup(model, momentum(model))
        train(fabric, model, optimizer, batches(6), every=every)
        sent = getattr(fabric.strategy, "stats", None)
        return values(model), 0 if sent is None else sent.bytes_sent


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_without_a_codec_it_is_ddp(ranks: Pool, size: int, every: int) -> None:
    theirs = ranks(size, _trained, "ddp", every)
    ours = ranks(size, _trained, "ring", every)
    assert min(sent for _, sent in ours) > 0
    for (mine, _), (ddp, _) in zip(ours, theirs, strict=True):
        for value, other in zip(mine, ddp, strict=True):
            if size == 2:
                assert torch.equal(value, other)
            else:
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


# By name


@pytest.mark.parametrize("suffix", START_METHODS)
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_each_name_is_fabrics_too(name: str, suffix: str) -> None:
    strategy = STRATEGY_REGISTRY.get(name + suffix)
    assert isinstance(strategy, RingFabricStrategy)
    assert strategy._start_method == START_METHODS[suffix]
    assert repr(strategy.algorithm) == repr(STRATEGIES[name]())


# All ranks


def _replicas(name: str) -> tuple[list[Tensor], Tensor, int, int]:
    with fabric_with(name) as fabric:
        model = net(seed=dist.get_rank())
        model, optimizer = fabric.setup(model, momentum(model))
        start = parameters(model)
        train(fabric, model, optimizer, batches(6), every=2)
        with consensus(model):
            everyone = everyones(parameters(model))
        strategy = fabric.strategy
        assert isinstance(strategy, RingFabricStrategy)
        return everyone, start, strategy.stats.bytes_sent or 0, strategy.stats.steps


@pytest.mark.parametrize("name", [*LOSSY, "ring_auto", "gossip", "gossip_int8", "push_sum"])
def test_all_ranks_see_the_same_bits(ranks: Pool, name: str) -> None:
    outcomes = ranks(3, _replicas, name)
    for everyone, start, sent, steps in outcomes:
        assert all(torch.equal(each, everyone[0]) for each in everyone)
        assert sent > 0
        assert steps == 3
        assert not torch.equal(everyone[0], start)


# Accumulating


def _accumulates() -> None:
    with fabric_with("ring_int8") as fabric:
        model = net()
        model, optimizer = fabric.setup(model, momentum(model))
        strategy = fabric.strategy
        assert isinstance(strategy, RingFabricStrategy)
        (one, two, three) = batches(3)
        fabric.backward(F.mse_loss(model(one[0]), one[1]))
        sent = strategy.stats.bytes_sent
        optimizer.zero_grad()
        with fabric.no_backward_sync(model):
            fabric.backward(F.mse_loss(model(two[0]), two[1]))
            with pytest.raises(RuntimeError, match="no_backward_sync"):
                optimizer.step()
        # the buffers before the forward travel over torch's own group
        assert strategy.stats.bytes_sent == sent
        fabric.backward(F.mse_loss(model(three[0]), three[1]))
        assert strategy.stats.bytes_sent is not None
        assert sent is not None
        assert strategy.stats.bytes_sent > sent
        optimizer.step()


def test_a_backward_that_accumulates_sends_nothing(ranks: Pool) -> None:
    ranks(2, _accumulates)


# Saving and resuming

FAMILIES: dict[str, Callable[[], Algorithm]] = {
    "feedback": lambda: AllReduce(BlockInt(4), error_feedback=True),
    "powersgd": lambda: PowerSGD(),
    "gossip": lambda: Gossip(interval=3, overlap=2),
    "choco": lambda: Choco(interval=2),
    "push_sum": lambda: PushSum(interval=2),
}


def _started(fabric: Fabric, seed: int) -> dict[str, Any]:
    model = net(seed)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    return {"model": model, "optimizer": optimizer, "step": 0}


def _resumes(family: str, folder: str) -> None:
    path = Path(folder) / "run.ckpt"
    with fabric_with(FAMILIES[family]()) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(4))
        state["step"] = 4
        fabric.save(path, state)
        if isinstance(FAMILIES[family](), AllReduce):
            fabric.save(path, state)  # its second save replaces the files of the first
        train(fabric, state["model"], state["optimizer"], batches(4, first=4))
        fabric.strategy.teardown()
        through = values(state["model"])
    with fabric_with(FAMILIES[family]()) as fabric:
        state = _started(fabric, 5)
        rest = fabric.load(path, state)
        assert rest == {}
        assert state["step"] == 4
        train(fabric, state["model"], state["optimizer"], batches(4, first=4))
        strategy = fabric.strategy
        assert isinstance(strategy, RingFabricStrategy)
        strategy.close()
        assert all(map(torch.equal, values(state["model"]), through))
    if dist.get_rank() == 0:
        assert len(list(Path(f"{path}.ringstrategy").iterdir())) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_bit_for_bit(ranks: Pool, tmp_path: Path, family: str) -> None:
    ranks(2, _resumes, family, str(tmp_path))


def _saves_the_mean(path: str) -> None:
    with fabric_with(Gossip(interval=4)) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(3))
        mean = torch.stack(everyones(parameters(state["model"]))).mean(0)
        own = parameters(state["model"])
        assert not torch.equal(own, mean)
        fabric.save(path, state, filter={"model": lambda name, _: not name.startswith("1.")})
        assert torch.equal(own, parameters(state["model"]))
        with consensus(state["model"]):
            torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-7)
            seen = {name: value.clone() for name, value in state["model"].state_dict().items()}
        assert torch.equal(own, parameters(state["model"]))
        saved = torch.load(path, weights_only=True)["model"]
        assert saved.keys() == {name for name in seen if not name.startswith("1.")}
        assert all(torch.equal(value, seen[name]) for name, value in saved.items())


def test_with_gossip_a_checkpoint_and_consensus_are_the_mean(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _saves_the_mean, str(tmp_path / "run.ckpt"))

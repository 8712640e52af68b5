"""Lightning Fabric over this package, on real processes: beside torch DDP, and what each of Fabric's calls promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy import (
    AllReduce,
    BlockInt,
    Choco,
    Direct,
    Gossip,
    LocalSGD,
    Nesterov,
    PeerLostError,
    PlanMismatchError,
    PowerSGD,
    PushSum,
    RingFabricStrategy,
    consensus,
    finish,
)
from ringstrategy.algorithms import Algorithm
from ringstrategy.integrations.lightning.register import START_METHODS
from ringstrategy.names import STRATEGIES

pytestmark = pytest.mark.timeout(120)
MINUTE = timedelta(minutes=1)
LOSSY = ["ring_int8", "ring_int4", "ring_sign", "ring_powersgd", "ring_auto", "gossip", "gossip_int8"]
MORE = ["ring_fp16", "ring_bf16", "ring_fp8", "ring_int2", "ring_topk", "gossip_exponential", "push_sum"]


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


def _replicas(name: str | Algorithm) -> tuple[list[Tensor], Tensor, int, int]:
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


@pytest.mark.parametrize(
    "name",
    [
        *LOSSY,
        pytest.param(LocalSGD(1, Nesterov(), BlockInt(4), Direct()), id="local_sgd"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE),
    ],
)
def test_all_ranks_see_the_same_bits(ranks: Pool, name: str | Algorithm) -> None:
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
    "local_sgd": lambda: LocalSGD(2, Nesterov(), BlockInt(4), Direct(), fragments=2, overlap=1, error_feedback=True),
    "eager": lambda: LocalSGD(3, Nesterov(), overlap=True, eager=True),
}


def _started(fabric: Fabric, seed: int) -> dict[str, Any]:
    model = net(seed)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    return {"model": model, "optimizer": optimizer, "step": 0}


def _resumes(family: str, folder: str, within: bool = False) -> None:
    path = Path(folder) / "run.ckpt"
    with fabric_with(FAMILIES[family]()) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(4))
        state["step"] = 4
        with consensus(state["model"]) if within else nullcontext():
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


@pytest.mark.parametrize("family", ["gossip", "local_sgd"])
def test_saving_within_consensus_saves_each_ranks_own_too(ranks: Pool, tmp_path: Path, family: str) -> None:
    ranks(2, _resumes, family, str(tmp_path), True)


def _loads_before_the_first_step(dry_run: str) -> None:
    """Weights are loaded after `setup`, and there may be a forward before or after that. Steps are of length 0."""
    with fabric_with(LocalSGD(2, Nesterov(0.7, 0.9))) as fabric:
        model = net(dist.get_rank())
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.0))
        [(inputs, _)] = batches(1)
        if dry_run == "before":
            model(inputs)
        model.load_state_dict(net(7).state_dict())
        expected = parameters(net(7))
        if dry_run != "before":
            with consensus(model):
                assert torch.equal(parameters(model), expected)
                if dry_run == "within":
                    model(inputs)
        train(fabric, model, optimizer, batches(4))
        finish(model)
        torch.testing.assert_close(parameters(model), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dry_run", ["never", "before", "within"])
def test_weights_may_be_loaded_until_the_first_step(ranks: Pool, dry_run: str) -> None:
    ranks(2, _loads_before_the_first_step, dry_run)


def _steps_and_swaps(algorithm: Algorithm) -> None:
    with fabric_with(algorithm) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(3))
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.fill_(5.0 + dist.get_rank())  # as if they were a moving average
        with consensus(state["model"], replaced=True):
            assert parameters(state["model"]).unique().tolist() == [5.5]
        with (
            consensus(state["model"]),
            pytest.raises(RuntimeError, match=r"leave `with consensus\(\.\.\.\)` before"),
        ):
            train(fabric, state["model"], state["optimizer"], batches(1))


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(2, Nesterov())], ids=["gossip", "local_sgd"])
def test_consensus_shows_the_mean_of_other_weights_and_refuses_steps(ranks: Pool, algorithm: Algorithm) -> None:
    ranks(2, _steps_and_swaps, algorithm)


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


def _loads_plain_weights(algorithm: Algorithm, path: str, raw: bool) -> None:
    with fabric_with(algorithm) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(4))
        weights = net(7).state_dict()
        if fabric.is_global_zero:
            torch.save(weights if raw else {"model": weights}, path)
        fabric.barrier()
        if raw:
            fabric.load_raw(path, state["model"])
        else:
            fabric.load(path, {"model": state["model"]})
        with consensus(state["model"]):
            assert torch.equal(parameters(state["model"]), parameters(net(7)))
        if algorithm.replicates:  # the loaded weights are the shared ones, until the next agreement
            train(fabric, state["model"], state["optimizer"], batches(1))
            with consensus(state["model"]):
                assert torch.equal(parameters(state["model"]), parameters(net(7)))
            return
        state["optimizer"].param_groups[0].update(lr=0.0)
        for _ in range(4):
            for parameter in state["model"].parameters():
                parameter.grad = torch.zeros_like(parameter)
            state["optimizer"].step()
        assert torch.equal(parameters(state["model"]), parameters(net(7)))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [Gossip(), LocalSGD(2, Nesterov(), overlap=1), LocalSGD(2, Nesterov(), overlap=True, eager=True)],
    ids=["gossip", "local_sgd", "eager"],
)
def test_what_belongs_to_other_weights_is_dropped_with_them(
    ranks: Pool, tmp_path: Path, algorithm: Algorithm, raw: bool
) -> None:
    ranks(2, _loads_plain_weights, algorithm, str(tmp_path / "plain.ckpt"), raw)


def _finishes(algorithm: Algorithm) -> None:
    with fabric_with(algorithm) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(5))
        own = parameters(state["model"])
        mean = torch.stack(everyones(own)).mean(0)
        with consensus(state["model"]):
            assert not torch.allclose(parameters(state["model"]), mean), "the last step is in nothing that ranks share"
            with pytest.raises(RuntimeError, match="call finish before or after"):
                finish(state["model"])
        finish(state["model"])
        torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-6)
        with consensus(state["model"]):
            torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-6)
        train(fabric, state["model"], state["optimizer"], batches(6))
        assert not torch.allclose(parameters(state["model"]), mean)
        finish(state["model"])
        one, other = everyones(parameters(state["model"]))
        assert torch.equal(one, other), "training may go on, and end again"


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGD(4, Nesterov()), LocalSGD(4, Nesterov(), BlockInt(4), Direct(), fragments=2, overlap=1)],
    ids=["plain", "streaming"],
)
def test_finish_counts_the_steps_after_the_last_agreement(ranks: Pool, algorithm: Algorithm) -> None:
    ranks(2, _finishes, algorithm)


def _finishes_with(strategy: str) -> None:
    with fabric_with(strategy) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(2))
        own = parameters(state["model"])
        finish(state["model"])
        assert torch.equal(own, parameters(state["model"]))


@pytest.mark.parametrize("strategy", ["ring", "gossip", "ddp"])
def test_finish_changes_nothing_with_other_strategies(ranks: Pool, strategy: str) -> None:
    ranks(2, _finishes_with, strategy)


def test_finish_needs_what_fabric_has_set_up() -> None:
    with pytest.raises(TypeError, match=r"finish needs the model that fabric\.setup returned"):
        finish(net())


# Several models


def _adversaries(strategy: Any, names_models: bool) -> tuple[list[Tensor], int]:
    """Two losses, each through both models."""
    with fabric_with(strategy) as fabric:
        torch.manual_seed(dist.get_rank())
        generator = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 6))
        critic = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 1))
        generator, makes = fabric.setup(generator, momentum(generator, 0.02))
        critic = fabric.setup_module(critic)
        judges = fabric.setup_optimizers(momentum(critic, 0.02))
        of_critic = {"model": critic} if names_models else {}
        of_generator = {"model": generator} if names_models else {}
        for real, _ in batches(4):
            fake = generator(real[:, :4])
            judges.zero_grad()
            fabric.backward(F.softplus(critic(fake.detach()) - critic(real)).mean(), **of_critic)
            judges.step()
            makes.zero_grad()
            fabric.backward(-critic(fake).mean(), **of_generator)
            makes.step()
        sent = fabric.strategy.stats.bytes_sent if isinstance(fabric.strategy, RingFabricStrategy) else 0
        return [*values(generator), *values(critic)], sent


def _penalized(strategy: Any) -> list[Tensor]:
    """A gradient penalty, of gradients that are no parameters'."""
    with fabric_with(strategy) as fabric:
        torch.manual_seed(dist.get_rank())
        critic = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1))
        critic, optimizer = fabric.setup(critic, momentum(critic, 0.02))
        for inputs, _ in batches(3):
            inputs.requires_grad_()
            score = critic(inputs).mean()
            (slope,) = torch.autograd.grad(score, inputs, create_graph=True)
            optimizer.zero_grad()
            fabric.backward(score + (slope.norm() - 1).square())
            optimizer.step()
        return values(critic)


def test_a_gradient_penalty_trains_as_with_ddp(ranks: Pool) -> None:
    for ours, theirs in zip(ranks(2, _penalized, "ring"), ranks(2, _penalized, "ddp"), strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("names_models", [False, True])
def test_several_models_train_as_with_ddp(ranks: Pool, names_models: bool) -> None:
    theirs = ranks(2, _adversaries, "ddp", names_models)
    ours = ranks(2, _adversaries, "ring", names_models)
    for (mine, _), (ddp, _) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, ddp))


def test_a_named_model_sends_only_its_own_gradients(ranks: Pool) -> None:
    (_, by_graph), (_, by_name) = (ranks(2, _adversaries, "ring_int8", named)[0] for named in (False, True))
    assert 0 < by_name < 0.8 * by_graph


def _several_resume(family: str, path: str) -> None:
    algorithm = FAMILIES[family]

    def start(fabric: Fabric, seed: int) -> dict[str, Any]:
        one, two = net(seed), nn.Linear(3, 3)
        model, first = fabric.setup(one, momentum(one))
        head, second = fabric.setup(two, torch.optim.AdamW(two.parameters(), 0.01))
        return {"model": model, "head": head, "first": first, "second": second, "rank": fabric.global_rank}

    def go_on(fabric: Fabric, state: dict[str, Any], data: Iterator[tuple[Tensor, Tensor]]) -> list[Tensor]:
        for inputs, targets in data:
            fabric.backward(F.mse_loss(state["head"](state["model"](inputs)), targets))
            for name in ("first", "second"):
                state[name].step()
                state[name].zero_grad()
        return [*values(state["model"]), *values(state["head"])]

    with fabric_with(algorithm()) as fabric:
        state = start(fabric, 0)
        go_on(fabric, state, batches(3))
        fabric.save(path, state)
        saved = values(state["head"])
        through = go_on(fabric, state, batches(3, first=3))
    with fabric_with(algorithm()) as fabric:
        state = start(fabric, 5)
        fabric.load(path, {"head": state["head"]})
        assert all(map(torch.equal, values(state["head"]), saved))
        fabric.load(path, state)
        assert state["rank"] == (fabric.global_rank if algorithm().decentralized else 0)
        assert all(map(torch.equal, go_on(fabric, state, batches(3, first=3)), through))


@pytest.mark.parametrize("family", ["feedback", "gossip", "local_sgd"])
def test_several_models_go_on_bit_for_bit(ranks: Pool, tmp_path: Path, family: str) -> None:
    ranks(2, _several_resume, family, str(tmp_path / "run.ckpt"))


# Precision


def train_scaled(fabric: Fabric, model: nn.Module, optimizer: Any, data: Iterator[tuple[Tensor, Tensor]]) -> None:
    """As `train`, and a scaler skips steps that are not finite."""
    for inputs, targets in data:
        output = model(inputs)
        fabric.backward(F.mse_loss(output, targets.to(output.dtype)))
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()


def _in_precision(strategy: Any, precision: str) -> list[Tensor]:
    plugins = [_scaled(2.0**26)] if precision == "16-mixed" else []
    with fabric_with(strategy, plugins=plugins, precision=None if plugins else precision) as fabric:
        model = net()
        model, optimizer = fabric.setup(model, momentum(model))
        train_scaled(fabric, model, optimizer, batches(14 if plugins else 4))  # the first steps overflow
        return values(model)


@pytest.mark.parametrize(
    "precision", ["16-mixed", "bf16-mixed", "bf16-true", pytest.param("64-true", marks=pytest.mark.slow)]
)
def test_precisions_are_those_of_ddp(ranks: Pool, precision: str) -> None:
    theirs, ours = (ranks(2, _in_precision, strategy, precision) for strategy in ("ddp", "ring"))
    for mine, ddp in zip(ours, theirs, strict=True):
        for value, other in zip(mine, ddp, strict=True):
            torch.testing.assert_close(value, other)
    start = values(net())
    assert not torch.equal(ours[0][0].double(), start[0].double())
    lossy = ranks(2, _in_precision, "ring_int8", precision)
    assert torch.equal(lossy[0][0], lossy[1][0])


def _scaled(scale: float) -> MixedPrecision:
    """Fabric has no scaler for a CPU by itself."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2))


def _skips_on_one_rank(algorithm: Algorithm) -> tuple[list[Tensor], int]:
    with fabric_with(algorithm, plugins=[_scaled(1.0 if os.environ["RANK"] == "0" else 2.0**26)]) as fabric:
        model = net()
        model, optimizer = fabric.setup(model, momentum(model))
        train_scaled(fabric, model, optimizer, batches(6))
        steps = fabric.strategy.stats.steps
        with consensus(model):
            return [value for value in values(model) if value.is_floating_point()], steps


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(1, average_optimizer=True)], ids=["gossip", "local_sgd"])
def test_ranks_go_on_where_a_scaler_skips_a_step_of_one(ranks: Pool, algorithm: Algorithm) -> None:
    (one, steps), (other, others) = ranks(2, _skips_on_one_rank, algorithm)
    assert steps == others == 6
    assert all(map(torch.equal, one, other))


def _resumes_scaled(path: str) -> float:
    with fabric_with(FAMILIES["feedback"](), plugins=[_scaled(2.0**16)]) as fabric:
        state = _started(fabric, 0) | {"precision": fabric.strategy.precision}
        train_scaled(fabric, state["model"], state["optimizer"], batches(5))
        fabric.save(path, state)
        train_scaled(fabric, state["model"], state["optimizer"], batches(5, first=5))
        through = values(state["model"])
    with fabric_with(FAMILIES["feedback"](), plugins=[_scaled(1.0)]) as fabric:
        state = _started(fabric, 5) | {"precision": fabric.strategy.precision}
        fabric.load(path, state)
        train_scaled(fabric, state["model"], state["optimizer"], batches(5, first=5))
        assert all(map(torch.equal, values(state["model"]), through))
    saved = torch.load(path, weights_only=True)["ringstrategy"]["model"]["residual_sum"]
    return max(float(value.abs().max()) for value in saved.values())


def test_residuals_are_saved_without_the_loss_scale(ranks: Pool, tmp_path: Path) -> None:
    assert all(0 < largest < 1 for largest in ranks(2, _resumes_scaled, str(tmp_path / "run.ckpt")))


# Fabric's other calls, and one process


def _collects() -> None:
    with fabric_with("ring_int4") as fabric:
        model = net()
        model, optimizer = fabric.setup(model, momentum(model))
        train(fabric, model, optimizer, batches(2))
        rank, size = fabric.global_rank, fabric.world_size
        assert fabric.all_reduce(torch.tensor([rank + 0.125]), reduce_op="sum").item() == size * (size - 1) / 2 + 0.375
        assert fabric.all_gather(torch.tensor(rank)).tolist() == list(range(size))
        assert fabric.broadcast({"rank": rank}, src=1) == {"rank": 1}
        fabric.barrier()
        for inputs, targets in batches(2):
            fabric.backward(F.mse_loss(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, clip_val=0.001)
            assert max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None) < 0.0011
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), consensus(model):
            model.eval()
            (inputs, _) = next(batches(1))
            everyone = everyones(model(inputs[:1] * 0 + 1).flatten())
        assert all(torch.equal(each, everyone[0]) for each in everyone)  # buffers too


def test_fabrics_collectives_work_between_steps(ranks: Pool) -> None:
    ranks(3, _collects)


def test_one_process_trains_as_without_a_strategy(tmp_path: Path) -> None:
    trained = []
    for strategy in ("auto", RingFabricStrategy(AllReduce(BlockInt(4)))):
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        state = _started(fabric, 0)
        rank_data = torch.Generator().manual_seed(1)
        for _ in range(3):
            inputs, targets = torch.randn(8, 6, generator=rank_data), torch.randn(8, 3, generator=rank_data)
            fabric.backward(F.mse_loss(state["model"](inputs), targets))
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        fabric.save(tmp_path / "one.ckpt", state)
        fabric.load(tmp_path / "one.ckpt", state)
        trained.append(values(state["model"]))
        if isinstance(fabric.strategy, RingFabricStrategy):
            assert fabric.strategy.stats.bytes_sent == 0
            assert fabric.strategy.stats.steps == 3
            fabric.strategy.teardown()
    if dist.is_initialized():
        dist.destroy_process_group()
    assert all(map(torch.equal, *trained))


# Errors


def _refuses() -> None:
    with fabric_with("ring") as fabric:
        model = net()
        with pytest.raises(RuntimeError, match=r"fabric\.setup\(model, optimizer\) first"):
            fabric.backward(model(torch.randn(2, 6)).sum())
        with pytest.raises(TypeError, match=r"call model, optimizer = fabric\.setup"), consensus(model):
            pass
        ring, optimizer = fabric.setup(model, momentum(model))
        ring(torch.randn(4, 6)).sum().backward()
        with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss, model=model\)"):
            optimizer.step()
        with pytest.raises(ValueError, match="set that up, or call"):
            fabric.setup(nn.Sequential(model, nn.Linear(3, 3)))
        fabric.setup(other := nn.Linear(2, 2), momentum(other))
        with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss, model=model\)"):
            fabric.backward(nn.Linear(2, 2)(torch.ones(2)).sum())
        with pytest.raises(ValueError, match="the key 'ringstrategy'"):
            fabric.save("never.ckpt", {"ringstrategy": 1})
        with pytest.raises(ValueError, match="LBFGS"):
            fabric.setup_optimizers(torch.optim.LBFGS(model.parameters()))
        with pytest.raises(PlanMismatchError, match=r"lr=0\.1.* where rank 0 has .*lr=0\.05"):
            fabric.setup_optimizers(momentum(model, 0.05 * (1 + fabric.global_rank)))


def test_what_cannot_be_right_is_refused(ranks: Pool) -> None:
    ranks(2, _refuses)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"algorithm": AllReduce(uneven="join")}, ValueError, "all ranks the same number of batches"),
        ({"algorithm": Gossip(unit="epoch")}, ValueError, "unit='step'"),
        ({"algorithm": BlockInt(8)}, TypeError, "a codec or a collective goes into it"),
        ({"codec": BlockInt(8)}, TypeError, r"RingFabricStrategy\(AllReduce\(codec=...\)\)"),
        ({"bucket_cap_mb": 5}, TypeError, r"RingFabricStrategy\(AllReduce\(bucket_mb=...\)\)"),
        ({"timeout": 5}, TypeError, "timedelta"),
    ],
)
def test_wrong_arguments_name_the_cure(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RingFabricStrategy(**arguments)


def _loses_a_rank(name: str, how: str) -> str:
    with fabric_with(name) as fabric:
        model = net()
        model, optimizer = fabric.setup(model, momentum(model))
        train(fabric, model, optimizer, batches(2))
        if dist.get_rank() == 1 and how == "dies":
            os._exit(1)
        try:
            if dist.get_rank() == 1 and how == "tells":
                raise KeyError("no such sample")
            train(fabric, model, optimizer, batches(2 if dist.get_rank() == 1 and how == "has fewer batches" else 8))
            fabric.barrier()
        except PeerLostError as error:
            return f"{error.rank}: {error}"
        except KeyError as error:
            strategy = fabric.strategy
            assert isinstance(strategy, RingFabricStrategy)
            strategy.tell(error)
        return ""


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("ring_int8", "dies", "closed without a word"),
        ("gossip", "dies", "closed without a word"),
        ("ring_int8", "tells", "KeyError: 'no such sample'"),
        (
            "ring_int8",
            "has fewer batches",
            r"it went on to fabric\.barrier\(\) after 4 batches .* same number of batch",
        ),
    ],
)
def test_survivors_name_the_rank_that_was_lost(ranks: Pool, name: str, how: str, said: str) -> None:
    outcomes = ranks.outcomes(3, _loses_a_rank, name, how)
    for rank in (0, 2):
        told, failure = outcomes[rank]
        assert failure is None, failure
        assert told.startswith("1: lost rank 1")
        assert re.search(said, told), told


class WithMethod(nn.Module):
    """Its statistics change in a method that is not its forward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = net(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.layers(inputs), targets)


def _by_method(strategy: Any) -> list[Tensor]:
    with fabric_with(strategy) as fabric:
        model = WithMethod(fabric.global_rank)
        model, optimizer = fabric.setup(model, momentum(model))
        model.mark_forward_method("loss")
        for inputs, targets in batches(3):
            fabric.backward(model.loss(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        return values(model)


def _compiled(strategy: Any) -> list[Tensor]:
    with fabric_with(strategy) as fabric:
        model = net(fabric.global_rank)
        optimizer = momentum(model)
        model, optimizer = fabric.setup(torch.compile(model, backend="eager"), optimizer)
        train(fabric, model, optimizer, batches(4), every=2)
        with consensus(model):
            return values(model)


@pytest.mark.parametrize("task", [_by_method, pytest.param(_compiled, marks=pytest.mark.slow)])
def test_marked_methods_and_compiled_models_train_as_with_ddp(ranks: Pool, task: Callable[..., Any]) -> None:
    for ours, theirs in zip(ranks(2, task, "ring"), ranks(2, task, "ddp"), strict=True):
        assert all(map(torch.equal, ours, theirs))


def _validates(strategy: Any) -> list[Tensor]:
    """Two epochs, each with an evaluation; with rank 0's statistics."""
    outputs = []
    with fabric_with(strategy) as fabric:
        model = net(fabric.global_rank)
        model, optimizer = fabric.setup(model, momentum(model))
        for epoch in range(2):
            model.train()
            train(fabric, model, optimizer, batches(2, first=2 * epoch))
            model.eval()
            with torch.no_grad():
                outputs += [model(inputs) for inputs, _ in batches(2)]
        return [*outputs, *values(model)]


def test_an_evaluation_is_that_of_ddp(ranks: Pool) -> None:
    for ours, theirs in zip(ranks(2, _validates, "ring"), ranks(2, _validates, "ddp"), strict=True):
        assert all(map(torch.equal, ours, theirs))


def _steps_by_closure(strategy: Any) -> list[Tensor]:
    with fabric_with(strategy) as fabric:
        model = net(fabric.global_rank)
        model, optimizer = fabric.setup(model, momentum(model))
        for inputs, targets in batches(3):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), targets)
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        if isinstance(fabric.strategy, RingFabricStrategy):
            assert fabric.strategy.stats.steps == 3
        with consensus(model):
            return values(model)


def test_closures_step_as_with_ddp(ranks: Pool) -> None:
    for ours, theirs in zip(ranks(2, _steps_by_closure, "ring"), ranks(2, _steps_by_closure, "ddp"), strict=True):
        assert all(map(torch.equal, ours, theirs))
    for strategy in ("gossip", LocalSGD(1)):
        means = ranks(2, _steps_by_closure, strategy)
        assert all(map(torch.equal, *[[value for value in mean if value.is_floating_point()] for mean in means]))


def _grows(strategy: Any) -> list[Tensor]:
    """A layer unfreezes, and another one joins."""
    with fabric_with(strategy) as fabric:
        model = net(fabric.global_rank)
        model[0].requires_grad_(False)
        ring, optimizer = fabric.setup(model, momentum(model))
        train(fabric, ring, optimizer, batches(2))
        model[0].requires_grad_(True)
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": model[4].parameters()})
        train(fabric, ring, optimizer, batches(3))
        assert model[0].weight.grad is None
        with consensus(ring):
            return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "strategy",
    [
        "ring_int8",
        LocalSGD(2, Nesterov(), BlockInt(4), Direct(), fragments=2, overlap=1),
        LocalSGD(2, Nesterov(), overlap=True, eager=True),
    ],
    ids=["ring_int8", "local_sgd", "eager"],
)
def test_layers_may_unfreeze_and_join(ranks: Pool, strategy: str | Algorithm) -> None:
    one, other = ranks(2, _grows, strategy)
    assert len(one) == 8
    assert all(map(torch.equal, one, other))
    assert not torch.equal(one[0], net()[0].weight)


# Another number of ranks, and processes that Fabric starts itself


def _saves_for_others(family: str, path: str) -> None:
    with fabric_with(FAMILIES[family]()) as fabric:
        state = _started(fabric, 0)
        train(fabric, state["model"], state["optimizer"], batches(3))
        fabric.save(path, state)


def _loads_from_others(family: str, path: str) -> tuple[Tensor, Tensor]:
    with fabric_with(FAMILIES[family]()) as fabric:
        state = _started(fabric, 5)
        fabric.load(path, state)
        (algorithm,) = (model.session.algorithm for model in fabric.strategy._models)
        held = algorithm.residuals() if isinstance(algorithm, AllReduce) else ()
        residuals = [value.double().flatten() for _, value in sorted(held, key=lambda pair: pair[0])]
        loaded = parameters(state["model"])
        train(fabric, state["model"], state["optimizer"], batches(2))
        return loaded, torch.cat(residuals) if residuals else torch.zeros(1)


@pytest.mark.parametrize("family", ["feedback", "gossip", "local_sgd"])
def test_another_number_of_ranks_goes_on(ranks: Pool, tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "run.ckpt")
    ranks(2, _saves_for_others, family, path)
    loaded = ranks(3, _loads_from_others, family, path)
    checkpoint = torch.load(path, weights_only=True)
    flat = torch.cat([checkpoint["model"][name].double().flatten() for name, _ in net().named_parameters()])
    assert all(torch.equal(mine, flat) for mine, _ in loaded)
    if family == "feedback":
        total = checkpoint["ringstrategy"]["model"]["residual_sum"]
        expected = torch.cat([total[name].double().flatten() for name in sorted(total)])
        assert expected.any()
        torch.testing.assert_close(torch.stack([mine for _, mine in loaded]).sum(0), expected, rtol=1e-6, atol=1e-9)


SCRIPT = """
import sys, torch
from torch import nn
from lightning.fabric import Fabric
import ringstrategy

def train(fabric, fails):
    torch.manual_seed(fabric.global_rank)
    model = nn.Linear(8, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(6):
        if fails and fabric.global_rank == 1 and step == 3:
            raise KeyError("no such sample")
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
    with ringstrategy.consensus(model):
        rows = fabric.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return rows.tolist(), fabric.strategy.stats

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    (one, other), stats = fabric.launch(train, sys.argv[2] == "fails")
    assert one == other and stats.steps == 6 and stats.bytes_sent > 0
    fabric.print("trained")
"""


def _started_by_fabric(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    inherited = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_int8", "ring_int8_spawn", "gossip_notebook"])
def test_fabric_starts_the_processes(tmp_path: Path, name: str) -> None:
    done = _started_by_fabric(tmp_path, name, "trains")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_int8", "ring_int8_spawn"])
def test_an_exception_of_one_rank_reaches_the_others(tmp_path: Path, name: str) -> None:
    done = _started_by_fabric(tmp_path, name, "fails")
    assert done.returncode != 0
    assert "KeyError: 'no such sample'" in done.stderr
    if name == "ring_int8":  # torch ends the others at once that it has spawned
        assert "lost rank 1" in done.stderr
        assert "it stopped with KeyError: 'no such sample'" in done.stderr

"""Lightning Fabric over this package, on real processes: beside torch DDP, and what each of Fabric's calls promises."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from on_ranks import on_ranks
from pool import Pool
from test_session import MINUTE, batches, gathered, values
from test_session import model as net
from test_strategy import alone
from torch import Tensor, nn
from torch.nn import functional as F

import ringstrategy as ring
from ringstrategy import AllReduce, BlockInt, Direct, Gossip, LocalSGD, Nesterov, RingFabricStrategy, consensus, finish
from ringstrategy.algorithms.base import Algorithm


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


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.01)


def started(fabric: Fabric, seed: int = 0, made: Callable[..., Any] = adamw) -> dict[str, Any]:
    model = net(seed)
    model, optimizer = fabric.setup(model, made(model))
    return {"model": model, "optimizer": optimizer}


def go_on(fabric: Fabric, state: dict[str, Any], count: int, first: int = 0) -> None:
    """Clipped, and a scaler skips steps that are not finite."""
    for inputs, targets in batches(count, first):
        output = state["model"](inputs)
        fabric.backward(F.mse_loss(output, targets.to(output.dtype)))
        fabric.clip_gradients(state["model"], state["optimizer"], max_norm=0.5, error_if_nonfinite=False)
        state["optimizer"].step()
        state["optimizer"].zero_grad()


# Beside torch DDP


class WithMethod(nn.Sequential):
    """Its statistics change in a method that is not its forward."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self[0](inputs), targets)


def _validates(fabric: Fabric) -> list[Tensor]:
    """Two epochs, each with an evaluation; with rank 0's statistics. The loss is a method of the model."""
    outputs = []
    model = WithMethod(net(fabric.global_rank))
    model, optimizer = fabric.setup(model, momentum(model))
    model.mark_forward_method("loss")
    for epoch in range(2):
        model.train()
        for inputs, targets in batches(2, first=2 * epoch):
            fabric.backward(model.loss(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for inputs, _ in batches(1 + fabric.global_rank):  # ranks may evaluate on as many batches as they have
                outputs.append(model(inputs))
    return [*outputs, *values(model)]


def _by_closure(fabric: Fabric) -> list[Tensor]:
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


def _adversaries(fabric: Fabric, named: bool) -> list[Tensor]:
    """Two losses, each through both models; one with a penalty for gradients that are no parameters'."""
    torch.manual_seed(dist.get_rank())
    generator = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 6))
    critic = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1))
    generator, makes = fabric.setup(generator, momentum(generator, 0.02))
    critic = fabric.setup_module(critic)
    judges = fabric.setup_optimizers(momentum(critic, 0.02))
    for real, _ in batches(4):
        fake = generator(real[:, :4])
        judges.zero_grad()
        score = critic(real.requires_grad_())
        (slope,) = torch.autograd.grad(score.mean(), real, create_graph=True)
        penalty = (slope.norm() - 1).square()
        fabric.backward(F.softplus(critic(fake.detach()) - score).mean() + penalty, model=critic if named else None)
        judges.step()
        makes.zero_grad()
        fabric.backward(-critic(fake).mean(), model=generator if named else None)
        makes.step()
    return [*values(generator), *values(critic)]


def _in_precision(fabric: Fabric) -> list[Tensor]:
    state = started(fabric, made=momentum)
    go_on(fabric, state, 14)  # where there is a scaler, the first steps overflow
    return values(state["model"])


def scaled() -> dict[str, Any]:
    """Fabric has no scaler for a CPU by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


PROGRAMS: dict[str, tuple[Callable[[Fabric], list[Tensor]], Callable[[], dict[str, Any]]]] = {
    "evaluations": (_validates, dict),
    "closures": (_by_closure, dict),
    "several models": (partial(_adversaries, named=False), dict),
    "several models, named": (partial(_adversaries, named=True), dict),
    "16-mixed": (_in_precision, scaled),
    "bf16-true": (_in_precision, lambda: {"precision": "bf16-true"}),
}


def _runs(name: str, strategy: Any) -> tuple[list[Tensor], int]:
    program, how = PROGRAMS[name]
    with fabric_with(strategy, **how()) as fabric:
        ended = program(fabric)
        sent = fabric.strategy.stats.bytes_sent if isinstance(fabric.strategy, RingFabricStrategy) else 0
        return ended, sent


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_programs_equal_ddp(name: str) -> None:
    (ours, sent), (theirs, _) = _runs(name, "ring"), _runs(name, "ddp")
    assert sent > 0
    assert all(map(torch.equal, ours, theirs))


@on_ranks(2)
def test_programs_with_a_codec_or_parameters_of_their_own() -> None:
    """Through a codec, or with parameters of their own, ranks share what consensus shows."""
    for name, strategy in (("closures", "gossip"), ("closures", LocalSGD(1)), ("16-mixed", "ring_int8")):
        for value in _runs(name, strategy)[0]:
            if value.is_floating_point() and (name == "closures" or value.dim() > 1):
                assert torch.equal(*gathered([value])), strategy
    by_graph, by_name = (_runs(name, "ring_int8")[1] for name in ("several models", "several models, named"))
    assert 0 < by_name < 0.8 * by_graph, "a named model sends only its own gradients"


# Saving, looking and resuming

FAMILIES: dict[str, Callable[[], Algorithm]] = {
    "feedback": lambda: AllReduce(BlockInt(4), error_feedback=True),
    "gossip": lambda: Gossip(interval=3, overlap=2),
    "local_sgd": lambda: LocalSGD(2, Nesterov(), BlockInt(4), Direct(), fragments=2, overlap=1, error_feedback=True),
}


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_several_models_are_saved_as_consensus_shows_them_and_go_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    """And each rank's own beside that; within consensus too."""
    path, part = tmp_path / "run.ckpt", tmp_path / "part.ckpt"
    algorithm = FAMILIES[family]
    decentralized = algorithm().decentralized

    def start(fabric: Fabric, seed: int) -> dict[str, Any]:
        one, two = net(seed), nn.Linear(3, 3)
        model, first = fabric.setup(one, momentum(one))
        head, second = fabric.setup(two, adamw(two))
        return {"model": model, "head": head, "first": first, "second": second, "rank": fabric.global_rank}

    def trained(fabric: Fabric, state: dict[str, Any], first: int) -> list[Tensor]:
        for inputs, targets in batches(3, first):
            fabric.backward(F.mse_loss(state["head"](state["model"](inputs)), targets))
            for name in ("first", "second"):
                state[name].step()
                state[name].zero_grad()
        return [*values(state["model"]), *values(state["head"])]

    with fabric_with(algorithm()) as fabric:
        state = start(fabric, 0)
        trained(fabric, state, 0)
        own, head = parameters(state["model"]), values(state["head"])
        fabric.save(part, state, filter={"model": lambda name, _: not name.startswith("1.")})
        assert torch.equal(own, parameters(state["model"]))
        with consensus(state["model"]), consensus(state["head"]):
            fabric.save(path, state)
            shown = {name: value.clone() for name, value in state["model"].state_dict().items()}
            assert torch.equal(own, parameters(state["model"])) != decentralized
            if family == "gossip":
                mean = torch.stack(gathered([own])).mean(0)
                torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-7)
        assert torch.equal(own, parameters(state["model"]))
        through = trained(fabric, state, 3)
    saved, filtered = (torch.load(each, weights_only=True)["model"] for each in (path, part))
    assert filtered.keys() == {name for name in saved if not name.startswith("1.")}
    if decentralized:  # else ranks have buffers of their own, and those of rank 0 are saved
        assert all(torch.equal(value, shown[name]) for name, value in [*saved.items(), *filtered.items()])
    with fabric_with(algorithm()) as fabric:
        state = start(fabric, 5)
        fabric.load(path, {"head": state["head"], "second": state["second"]})  # from its file alone
        assert all(map(torch.equal, values(state["head"]), head))
        moments = [each["exp_avg"] for each in state["second"].optimizer.state.values()]
        assert torch.equal(*gathered(moments)) != decentralized, "where ranks differ, each has its own optimizer"
        assert fabric.load(path, state) == {}
        assert state["rank"] == (fabric.global_rank if decentralized else 0)
        assert all(map(torch.equal, trained(fabric, state, 3), through))


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(2, Nesterov(), overlap=1)], ids=["gossip", "local_sgd"])
@on_ranks(2)
def test_what_belongs_to_other_weights_is_dropped_with_them(algorithm: Algorithm, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    weights = net(7).state_dict()
    for raw in (False, True):
        with fabric_with(algorithm) as fabric:
            state = started(fabric)
            go_on(fabric, state, 4)
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
                go_on(fabric, state, 1)
                with consensus(state["model"]):
                    assert torch.equal(parameters(state["model"]), parameters(net(7)))
                continue
            state["optimizer"].param_groups[0].update(lr=0.0)
            for _ in range(4):
                for parameter in state["model"].parameters():
                    parameter.grad = torch.zeros_like(parameter)
                state["optimizer"].step()
            assert torch.equal(parameters(state["model"]), parameters(net(7)))


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGD(4, Nesterov()), LocalSGD(4, Nesterov(), BlockInt(4), Direct(), fragments=2, overlap=1)],
    ids=["plain", "streaming"],
)
@on_ranks(2)
def test_finish_counts_the_steps_after_the_last_agreement(algorithm: Algorithm) -> None:
    for strategy in ("ring", "gossip", "ddp"):  # where it changes nothing
        with fabric_with(strategy) as fabric:
            state = started(fabric)
            go_on(fabric, state, 2)
            own = parameters(state["model"])
            finish(state["model"])
            assert torch.equal(own, parameters(state["model"])), strategy
    with fabric_with(algorithm) as fabric:
        state = started(fabric)
        go_on(fabric, state, 5)
        own = parameters(state["model"])
        mean = torch.stack(gathered([own])).mean(0)
        with consensus(state["model"]):
            assert not torch.allclose(parameters(state["model"]), mean), "the last step is in nothing that ranks share"
            with pytest.raises(RuntimeError, match="call finish before or after"):
                finish(state["model"])
        finish(state["model"])
        torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-6)
        with consensus(state["model"]):
            torch.testing.assert_close(parameters(state["model"]), mean, rtol=0, atol=1e-6)
        go_on(fabric, state, 6)
        assert not torch.allclose(parameters(state["model"]), mean)
        finish(state["model"])
        assert torch.equal(*gathered([parameters(state["model"])])), "training may go on, and end again"
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.fill_(5.0 + dist.get_rank())  # as if they were a moving average
        with consensus(state["model"], replaced=True):
            assert parameters(state["model"]).unique().tolist() == [5.5]
        with consensus(state["model"]), pytest.raises(RuntimeError, match=r"leave `with consensus\(\.\.\.\)` before"):
            go_on(fabric, state, 1)


def _saves_for_others(family: str, path: str) -> None:
    with fabric_with(FAMILIES[family]()) as fabric:
        go_on(fabric, state := started(fabric), 3)
        fabric.save(path, state)


def _loads_from_others(family: str, path: str, again: str | None) -> tuple[Tensor, Tensor]:
    """The parameters, and what is in residuals."""
    with fabric_with(FAMILIES[family]()) as fabric:
        fabric.load(path, state := started(fabric, 5))
        if again is not None:
            fabric.save(again, state)
        (algorithm,) = (model.session.algorithm for model in fabric.strategy._models)
        held = dict(algorithm.residuals()) if isinstance(algorithm, AllReduce) else {}
        residuals = torch.cat([torch.zeros(1), *(held[name].flatten() for name in sorted(held))]).double()
        loaded = parameters(state["model"])
        go_on(fabric, state, 2)
        return loaded, residuals


@pytest.mark.parametrize("family", ["feedback", "gossip", "local_sgd"])
def test_another_number_of_ranks_goes_on(ranks: Pool, tmp_path: Path, family: str) -> None:
    """From 3 ranks to 2; and to 1, which has no residuals and carries them on, and from there to 2."""
    path, through = str(tmp_path / "run.ckpt"), str(tmp_path / "through.ckpt")
    ranks(3, _saves_for_others, family, path)
    checkpoint = torch.load(path, weights_only=True)
    flat = torch.cat([checkpoint["model"][name].double().flatten() for name, _ in net().named_parameters()])
    alone = ranks(1, _loads_from_others, family, path, through)
    loaded = ranks(2, _loads_from_others, family, through, None)
    assert all(torch.equal(mine, flat) for mine, _ in [*alone, *loaded])
    for mine, _ in ranks(2, _loads_from_others, family, path, None):
        assert torch.equal(mine, flat)
    if family == "feedback":
        total = checkpoint["ringstrategy"]["model"]["residual_sum"]
        expected = torch.cat([torch.zeros(1), *(total[name].flatten() for name in sorted(total))]).double()
        assert expected.any()
        torch.testing.assert_close(torch.stack([mine for _, mine in loaded]).sum(0), expected, rtol=1e-6, atol=1e-9)


# Fabric's other calls, and errors


@on_ranks(2)
def test_what_is_not_set_up_is_refused() -> None:
    with fabric_with("ring") as fabric:
        model = net()
        with pytest.raises(RuntimeError, match=r"fabric\.setup\(model, optimizer\) first"):
            fabric.backward(model(torch.randn(2, 6)).sum())
        with pytest.raises(TypeError, match=r"call model, optimizer = fabric\.setup"), consensus(model):
            pass
        wrapped, optimizer = fabric.setup(model, momentum(model))
        wrapped(torch.randn(4, 6)).sum().backward()
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
        with pytest.raises(ring.PlanMismatchError, match=r"lr=0\.1.* where rank 0 has .*lr=0\.05"):
            fabric.setup_optimizers(momentum(model, 0.05 * (1 + fabric.global_rank)))


@on_ranks(2)
def test_steps_without_the_mean_are_refused() -> None:
    with fabric_with("ring_int8") as fabric:
        model = net()
        model[3].bias.ring_local = True
        model, optimizer = fabric.setup(model, momentum(model))
        with pytest.raises(ValueError, match="clipping by norm looks at all gradients"):
            go_on(fabric, {"model": model, "optimizer": optimizer}, 1)

        def accumulates() -> Tensor:
            with fabric.no_backward_sync(model):
                fabric.backward(loss := model(torch.ones(4, 6)).sum())
            return loss

        optimizer.zero_grad()
        for step in (lambda: (accumulates(), optimizer.step()), lambda: optimizer.step(accumulates)):
            with pytest.raises(RuntimeError, match="no_backward_sync"):
                step()


def _loses_a_rank(how: str) -> str:
    with fabric_with("ring_int8") as fabric:
        state, odd = started(fabric), dist.get_rank() == 1
        go_on(fabric, state, 2)
        try:
            if odd and how == "tells":
                raise KeyError("no such sample")
            go_on(fabric, state, 2 if odd else 8)
            fabric.barrier()
        except ring.PeerLostError as error:
            return f"{error.rank}: {error}"
        except KeyError as error:
            fabric.strategy.tell(error)
        return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tells", "KeyError: 'no such sample'"),
        ("has fewer batches", r"it went on to fabric\.barrier\(\) after 4 batches .* same number of batch"),
    ],
)
def test_survivors_hear_why_a_rank_was_lost(ranks: Pool, how: str, said: str) -> None:
    outcomes = ranks.outcomes(3, _loses_a_rank, how)
    for rank in (0, 2):
        told, failure = outcomes[rank]
        assert failure is None, failure
        assert told.startswith("1: lost rank 1")
        assert re.search(said, told), told


# Processes that Fabric starts itself


def _steps(fabric: Fabric) -> Any:
    os.environ["RANK"] = str(fabric.global_rank)
    go_on(fabric, state := started(fabric), 6)
    with consensus(state["model"]):
        return fabric.all_gather(parameters(state["model"])).tolist(), fabric.strategy.stats


def launched(name: str) -> bool:
    (one, other), stats = Fabric(accelerator="cpu", devices=2, strategy=name).launch(_steps)
    return one == other and stats.steps == 6 and stats.bytes_sent > 0


@pytest.mark.usefixtures("ranks")  # its server
def test_fabric_forks_processes_and_gets_their_result() -> None:
    assert alone(launched, "ring_int8_fork")

"""Local SGD and DiLoCo: beside a numpy twin, the same shared parameters on all ranks, and what users do with them."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from pool import Pool
from rank_files import rank_state
from test_strategy import Net, fit, net, rows, same_everywhere, trainer_with
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    BlockInt,
    Codec,
    CommunicationMonitor,
    Direct,
    Gaussian,
    Hierarchical,
    Identity,
    LocalSGD,
    Nesterov,
    Peers,
    PlanMismatchError,
    Ring,
    RingStrategy,
    Rotated,
    Sign,
    SmallExact,
    TopK,
)
from ringstrategy.algorithms.parameters.fragments import cut_fragments
from ringstrategy.algorithms.parameters.schedule import Schedule
from ringstrategy.names import STRATEGIES
from ringstrategy.transport.connect import connect

pytestmark = pytest.mark.timeout(120)
Arrays = dict[str, np.ndarray]
SHAPES = {
    "embed.weight": (40, 3),
    "layers.0.weight": (7, 5),
    "layers.0.bias": (3,),
    "layers.1.weight": (6, 5),
    "head": (),
}
STEPS = 50


def start() -> Arrays:
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def change_of(rank: int, step: int, values: Arrays) -> Arrays:
    """What an optimizer does: noise, and a pull towards an optimum that each rank has for itself."""
    random = np.random.default_rng([rank, step])
    return {
        name: (0.1 * random.standard_normal(shape) - 0.05 * (values[name] - rank)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def arrays_of(parameters: Mapping[str, nn.Parameter]) -> Arrays:
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


@contextmanager
def process_group() -> Iterator[Peers]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    try:
        yield peers
    finally:
        peers.close()
        dist.destroy_process_group()


def run(algorithm: LocalSGD, steps: int) -> tuple[Arrays, Arrays, list[Arrays]]:
    """This rank's parameters at the end, Theta as validation sees it then, and Theta after each step."""
    parameters = {name: nn.Parameter(torch.tensor(values)) for name, values in start().items()}
    thetas = []
    with process_group() as peers:
        algorithm.setup(parameters, peers)
        algorithm.bind(set(parameters.values()))
        for step in range(steps):
            with torch.no_grad():
                for name, change in change_of(peers.rank, step, arrays_of(parameters)).items():
                    parameters[name] += torch.tensor(change)
            algorithm.after_step(set(parameters.values()))
            thetas.append(theta_of(algorithm))
        assert (peers.stats.bytes_sent or 0) > 0
        own = arrays_of(parameters)
        assert algorithm.enter_consensus()
        seen = arrays_of(parameters)
        algorithm.leave_consensus()
        assert all(np.array_equal(own[name], again) for name, again in arrays_of(parameters).items())
        algorithm.close()
        return own, seen, thetas


def theta_of(algorithm: LocalSGD) -> Arrays:
    shared = algorithm.state_dict()["shared"]
    return {name: shared[name]["values"].numpy().copy() for name in SHAPES}


class Twin:
    """One parameter's values of all ranks, in float64, as the papers write it."""

    def __init__(self, size: int, values: np.ndarray, algorithm: LocalSGD, first: int) -> None:
        self.size, self.algorithm, self.first = size, algorithm, first
        self.own = [values.astype(np.float64) for _ in range(size)]
        self.theta = values.astype(np.float64)
        self.momentum = np.zeros_like(self.theta)
        self.anchors = [self.theta] * size
        self.momenta = [self.momentum] * size
        self.sent: list[np.ndarray] | None = None
        self.gradients: list[np.ndarray] = []
        self.others: list[np.ndarray] = [np.zeros_like(self.theta)] * size

    def outer(self, theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outer = self.algorithm.outer
        if outer is None:
            return theta - gradient, momentum
        assert isinstance(outer, Nesterov)
        momentum = outer.momentum * momentum + gradient
        return theta - outer.lr * (gradient + outer.momentum * momentum), momentum

    def after_step(self, turn: int) -> None:
        algorithm = self.algorithm
        if turn <= algorithm.warmup_steps:
            self.theta = sum(self.own) / self.size
            self.own, self.anchors = [self.theta] * self.size, [self.theta] * self.size
            return
        assert isinstance(algorithm.interval, int)
        since = (turn - algorithm.warmup_steps - self.first) % algorithm.interval
        late = algorithm.overlap * algorithm.interval if isinstance(algorithm.overlap, bool) else algorithm.overlap
        if self.sent is not None and since in (0, late):
            self.land(late)
        if since == 0:
            self.send()
            if late == 0:
                self.land(late)

    def send(self) -> None:
        self.sent = self.own
        origins = self.anchors if self.algorithm.eager else [self.theta] * self.size
        self.gradients = [origin - own for origin, own in zip(origins, self.own, strict=True)]
        if self.algorithm.eager:
            for rank, gradient in enumerate(self.gradients):
                step = self.outer(self.anchors[rank], self.momenta[rank], gradient / self.size + self.others[rank])
                self.anchors[rank], self.momenta[rank] = step
            self.own = list(self.anchors)

    def land(self, late: int) -> None:
        assert self.sent is not None
        mean = sum(self.gradients) / self.size
        self.others = [mean - gradient / self.size for gradient in self.gradients]
        self.theta, self.momentum = self.outer(self.theta, self.momentum, mean)
        blend = self.algorithm.blend
        if blend is not None:
            self.own = [blend * own + (1 - blend) * self.theta for own in self.own]
        elif not self.algorithm.eager:
            self.own = [self.theta + own - sent for own, sent in zip(self.own, self.sent, strict=True)]
        self.sent = None


def twin(algorithm: LocalSGD, size: int, steps: int, firsts: Mapping[str, int]) -> tuple[list[Arrays], list[Arrays]]:
    """All ranks' parameters at the end, and Theta after each step."""
    twins = {name: Twin(size, values, algorithm, firsts[name]) for name, values in start().items()}
    thetas = []
    for step in range(steps):
        for rank in range(size):
            now = {name: each.own[rank].astype(np.float32) for name, each in twins.items()}
            for name, change in change_of(rank, step, now).items():
                twins[name].own = [*twins[name].own]
                twins[name].own[rank] = twins[name].own[rank] + change
        for each in twins.values():
            each.after_step(step + 1)
        thetas.append({name: each.theta for name, each in twins.items()})
    return [{name: each.own[rank] for name, each in twins.items()} for rank in range(size)], thetas


def firsts_of(algorithm: LocalSGD) -> dict[str, int]:
    """The turn of each parameter's first exchange, counted from the end of the warm-up."""
    parameters = {name: nn.Parameter(torch.tensor(values)) for name, values in start().items()}
    parts = cut_fragments(parameters, algorithm.fragments)
    assert isinstance(algorithm.interval, int)
    return {name: (place + 1) * algorithm.interval // len(parts) for place, part in enumerate(parts) for name in part}


ALGORITHMS: dict[str, Callable[[], LocalSGD]] = {
    "plain": lambda: LocalSGD(interval=4),
    "momentum": lambda: LocalSGD(interval=4, outer=Nesterov()),
    "carried": lambda: LocalSGD(interval=6, outer=Nesterov(0.8, 0.6), overlap=2),
    "carried whole": lambda: LocalSGD(interval=3, outer=Nesterov(0.5, 0.5), overlap=True),
    "streaming": lambda: LocalSGD(interval=8, outer=Nesterov(), fragments=3, overlap=3, blend=0.5, warmup_steps=3),
    "eager": lambda: LocalSGD(interval=5, outer=Nesterov(0.7, 0.5), overlap=True, eager=True, warmup_steps=2),
    "blended at once": lambda: LocalSGD(interval=5, outer=Nesterov(1.0, 0.0), blend=0.25, fragments=2),
}


def compare(ranks: Pool, size: int, name: str) -> None:
    algorithm = ALGORITHMS[name]()
    found = ranks(size, run, algorithm, STEPS)
    expected, thetas = twin(algorithm, size, STEPS, firsts_of(algorithm))
    for rank, (own, seen, told) in enumerate(found):
        for key in SHAPES:
            np.testing.assert_allclose(own[key], expected[rank][key], rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}")
            np.testing.assert_array_equal(seen[key], told[-1][key])
            for step, theta in enumerate(told):
                np.testing.assert_array_equal(theta[key], found[0][2][step][key])
                np.testing.assert_allclose(theta[key], thetas[step][key], rtol=1e-5, atol=1e-6, err_msg=f"{step}")
    assert max(np.abs(own["layers.0.weight"] - found[0][0]["layers.0.weight"]).max() for own, _, _ in found) > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_ranks_agree_with_a_numpy_twin(ranks: Pool, name: str) -> None:
    compare(ranks, 3, name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_ranks_agree_with_a_numpy_twin(ranks: Pool, size: int) -> None:
    for name in ALGORITHMS:
        compare(ranks, size, name)


# What the codec does to it


def _lossy(codec: Codec | SmallExact, steps: int) -> list[Arrays]:
    return run(LocalSGD(4, Nesterov(), codec, Direct(), fragments=2, overlap=2), steps)[2]


@pytest.mark.parametrize("codec", [Rotated(Gaussian(4)), SmallExact(BlockInt(4), below=16), Sign()], ids=str)
def test_the_shared_parameters_have_the_same_bits_whatever_the_codec(ranks: Pool, codec: Codec | SmallExact) -> None:
    exact = ranks(3, _lossy, Identity(), 24)[0]
    found = ranks(3, _lossy, codec, 24)
    for step in range(24):
        for name in SHAPES:
            for rank in (1, 2):
                np.testing.assert_array_equal(found[rank][step][name], found[0][step][name])
    moved = np.abs(exact[-1]["embed.weight"] - start()["embed.weight"]).mean()
    apart = np.abs(exact[-1]["embed.weight"] - found[0][-1]["embed.weight"]).mean()
    assert 0 < apart < (0.8 if codec == Sign() else 0.2) * moved


def _losing(feedback: bool) -> np.ndarray:
    """How far Theta moved when the same small progress is made again and again beside a large one."""
    with process_group() as peers:
        parameter = nn.Parameter(torch.zeros(256))
        algorithm = LocalSGD(1, codec=BlockInt(4), collective=Direct(), error_feedback=feedback)
        algorithm.setup({"weight": parameter}, peers)
        algorithm.bind({parameter})
        change = torch.full((256,), 0.01 * (1 + peers.rank))
        change[0] = 1.0 if peers.rank else -1.0
        for _ in range(100):
            parameter.data += change
            algorithm.after_step({parameter})
        moved = parameter.detach().numpy().copy()
        algorithm.close()
        return moved


def test_what_a_codec_lost_is_sent_later(ranks: Pool) -> None:
    [fed, _], [lost, _] = ranks(2, _losing, True), ranks(2, _losing, False)
    np.testing.assert_allclose(fed[1:], 1.5, atol=0.1)
    assert np.abs(lost[1:] - 1.5).min() > 0.4, "so small a progress is rounded to nothing"


# Fragments and schedules


def test_fragments_are_whole_layers_of_about_the_same_bytes() -> None:
    def model(layers: int, embedding: int) -> dict[str, nn.Parameter]:
        shapes = {"embed.weight": (embedding, 8), "norm.weight": (8,)}
        for layer in range(layers):
            shapes |= {f"blocks.{layer}.up.weight": (32, 8), f"blocks.{layer}.down.weight": (8, 32)}
        return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}

    def layers_of(part: Mapping[str, nn.Parameter]) -> list[str]:
        return sorted({name.split(".")[1] for name in part if name.startswith("blocks")})

    parts = cut_fragments(model(6, 200), 4)
    assert list(parts[0]) == ["embed.weight"]
    assert [layers_of(part) for part in parts[1:]] == [["2", "5"], ["0", "3"], ["1", "4"]], "strided"
    assert sum(map(len, parts)) == 14
    assert list(cut_fragments(model(7, 100), 4)[0]) == ["embed.weight"], "apart, though smaller than the others"
    assert len(cut_fragments(model(7, 20), 4)[0]) > 1, "too small for that"
    sizes = [sum(p.numel() for p in part.values()) for part in cut_fragments(model(9, 1), 3)]
    assert max(sizes) - min(sizes) <= 2 * 32 * 8
    assert len(cut_fragments(model(9, 1), 1)) == 1
    assert len(cut_fragments({"weight": nn.Parameter(torch.empty(3))}, 4)) == 1


def test_each_fragment_is_exchanged_once_an_interval_at_a_time_of_its_own() -> None:
    schedule = Schedule(8, 3, "step", start=2)
    for place, turns in ((0, [4, 12, 20]), (1, [7, 15, 23]), (2, [10, 18])):
        assert [t for t in range(3, 25) if schedule.mixes(t, (place, 3))] == turns
        assert [t for t in range(3, 25) if schedule.applies(t, (place, 3))] == sorted(
            {*turns, *(t + 3 for t in turns if t + 3 < 25), *((t - 5) for t in turns if t - 5 > 2)}
        )
    assert all(schedule.mixes(t) and schedule.waits(t) for t in (1, 2))
    assert not schedule.waits(4, (0, 3))


# Refusals


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"interval": 0}, "at least 1"),
        ({"interval": "auto", "unit": "epoch"}, "unit='step'"),
        ({"interval": 4, "fragments": 5}, "take at most as many"),
        ({"fragments": 0}, "whole number >= 1"),
        ({"warmup_steps": -1}, "whole number >= 0"),
        ({"warmup_steps": 3, "unit": "epoch"}, "unit='step'"),
        ({"overlap": 99}, "1 to interval"),
        ({"blend": 1.5}, "from 0 to 1"),
        ({"eager": True}, "overlap=True with blend=None"),
        ({"codec": TopK(), "collective": Ring()}, "Direct"),
    ],
    ids=str,
)
def test_what_cannot_be_right_is_a_value_error(arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        LocalSGD(**arguments)


@pytest.mark.parametrize("outer", [0.7, Nesterov, lambda parameters: None], ids=["number", "class", "nothing"])
def test_an_outer_that_makes_no_optimizer_is_a_type_error(outer: Any) -> None:
    with pytest.raises(TypeError, match="outer makes an optimizer"):
        LocalSGD(outer=outer)
    assert "SGD(" in repr(LocalSGD(outer=torch.optim.SGD))  # whose lr has a default


@pytest.mark.parametrize("arguments", [{"lr": 0}, {"lr": True}, {"momentum": 1.0}, {"momentum": -0.1}], ids=str)
def test_a_nesterov_that_cannot_be_right_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is a number"):
        Nesterov(**arguments)


def test_nesterov_is_that_of_torch() -> None:
    ours, torchs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    one, other = Nesterov(0.3, 0.8)([ours]), torch.optim.SGD([torchs], lr=0.3, momentum=0.8, nesterov=True)
    for step in range(5):
        for parameter, optimizer in ((ours, one), (torchs, other)):
            parameter.grad = torch.sin(parameter.detach() + step)
            optimizer.step()
    torch.testing.assert_close(ours, torchs)
    assert (ours - torch.linspace(-1, 1, 7)).abs().max() > 0.1


def _differs(rank_lr: list[float]) -> str:
    with process_group() as peers:
        algorithm = LocalSGD(outer=Nesterov(rank_lr[peers.rank]))
        with pytest.raises(PlanMismatchError) as raised:
            algorithm.setup({"weight": nn.Parameter(torch.zeros(3))}, peers)
        algorithm.close()
        return str(raised.value)


def test_ranks_with_other_outer_optimizers_are_told(ranks: Pool) -> None:
    for told in ranks(2, _differs, [0.7, 0.5]):
        assert "lr=0.7" in told and "lr=0.5" in told  # noqa: PT018


# Under a trainer


class Watch(Callback):
    """The parameters and buffers at each validation."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.own: list[Tensor] = []

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(row(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.own.append(row(pl_module))


def row(module: nn.Module) -> Tensor:
    floats = [value for value in module.state_dict().values() if value.is_floating_point()]
    return torch.cat([value.detach().reshape(-1) for value in floats])


def normed() -> Net:
    return net(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3))


def _validates(algorithm: LocalSGD) -> tuple[list[bool], list[bool], bool, float]:
    watch, model = Watch(), normed()
    trainer = trainer_with(RingStrategy(algorithm), callbacks=[watch], val_check_interval=2, max_epochs=4)
    trainer.fit(model, rows(96), rows(24))
    assert isinstance(trainer.strategy, RingStrategy)
    assert (trainer.strategy.stats.bytes_sent or 0) > 0
    loss = float(trainer.callback_metrics["loss"])
    return (
        [same_everywhere(s) for s in watch.seen],
        [same_everywhere(s) for s in watch.own],
        same_everywhere(row(model)),
        loss,
    )


def test_validation_and_the_end_see_the_shared_parameters_and_the_mean_of_buffers(ranks: Pool) -> None:
    for seen, own, end, loss in ranks(3, _validates, LocalSGD(3, Nesterov(0.7, 0.3), overlap=1)):
        assert len(seen) > 3
        assert all(seen)
        assert not any(own)
        assert end
        assert loss < 1.5
    for _, own, _, _ in ranks(3, _validates, LocalSGD(3, average_optimizer=True)):
        assert own[2::3] == [True] * len(own[2::3]), "buffers too are the same after an agreement"
        assert not any(own[0::3])


def _resume(folder: str, algorithm: LocalSGD, epoch: int) -> None:
    """Four epochs, saved after this one (from 0): does a second run from there end alike?"""
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
    first = normed()
    fit(RingStrategy(algorithm), first, callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], **options)
    path = f"{folder}/epoch={epoch}.ckpt"
    saved = torch.load(path, weights_only=True)
    second = normed()
    again = fit(RingStrategy(algorithm), second, ckpt_path=path, **{**options, "enable_checkpointing": False})
    assert again.global_step == again.num_training_batches * 4
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    own = rank_state(path, again.global_rank)["own"]["checkpoint"]["state_dict"]
    shared = saved["ringstrategy"]["algorithm"]["shared"]
    for name, kept in shared.items():
        assert torch.equal(saved["state_dict"][name], kept["values"])
        assert not torch.equal(saved["state_dict"][name], own[name])
        assert same_everywhere(kept["values"])


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGD(3, Nesterov(), SmallExact(BlockInt(4)), Direct(), fragments=2, overlap=2, consensus=False),
        LocalSGD(
            4, Nesterov(), SmallExact(BlockInt(4), below=64), Direct(), True, fragments=2, overlap=1, consensus=False
        ),
        LocalSGD(5, Nesterov(), overlap=True, eager=True, consensus=False),
        LocalSGD(1, partial(torch.optim.Adam, lr=0.01), unit="epoch", overlap=1, blend=0.5, consensus=False),
    ],
    ids=lambda algorithm: f"{algorithm.interval} {algorithm.unit}",
)
def test_resuming_is_bit_for_bit_and_the_checkpoint_holds_the_shared_parameters(
    ranks: Pool, algorithm: LocalSGD, tmp_path: Path
) -> None:
    ranks(3, _resume, str(tmp_path), algorithm, 1)


def _with_another_policy() -> list[list[str]]:
    """What is kept for each flat, when a policy of the same name gives another codec than before the checkpoint."""
    chosen: list[Codec] = [Identity()]

    def policy(name: str, parameter: nn.Parameter) -> Codec:
        return chosen[0]

    with process_group() as peers:
        weight, found = nn.Parameter(torch.ones(300) * peers.rank), []
        saved: tuple[Any, Any] | None = None
        for codec in (Identity(), BlockInt(4)):
            chosen[0] = codec
            algorithm = LocalSGD(2, Nesterov(), policy, Direct(), error_feedback=True)
            algorithm.setup({"weight": weight}, peers)
            if saved is not None:
                algorithm.load_state_dict(saved[0])
                assert algorithm.load_own_state(saved[1])
            algorithm.bind({weight})
            saved = algorithm.state_dict(), algorithm.own_state()
            found.append([kind for flat in algorithm._groups[0].flats for kind in flat.memory])
            algorithm.close()
        return found


def test_errors_are_fed_back_where_a_resumed_run_has_other_codecs(ranks: Pool) -> None:
    assert ranks(2, _with_another_policy) == [[[], ["residual"]]] * 2


def test_resuming_after_an_epoch_that_has_no_agreement_yet_is_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _resume, str(tmp_path), LocalSGD(2, Nesterov(), unit="epoch", consensus=False), 0)


class SeesShared(Callback):
    """How far the parameters are from the shared ones at the first batch, and from some other values."""

    def __init__(self, other: Mapping[str, Tensor]) -> None:
        self.other, self.found = other, list[tuple[float, float]]()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.found:
            assert isinstance(trainer.strategy, RingStrategy)
            shared, held = trainer.strategy.algorithm.state_dict()["shared"], dict(pl_module.named_parameters())
            self.found.append(
                tuple(  # type: ignore[arg-type]
                    max(float((shared[name]["values"] - values[name]).abs().max()) for name in shared)
                    for values in (held, self.other)
                )
            )


def _save_after(epochs: int, path: str, before: str | None, callbacks: Sequence[Callback] = ()) -> None:
    algorithm = LocalSGD(2, Nesterov())
    trainer = fit(RingStrategy(algorithm), Net(), ckpt_path=before, max_epochs=epochs, callbacks=list(callbacks))
    trainer.save_checkpoint(path)


def _sees_shared(epochs: int, path: str) -> tuple[float, float]:
    sees = SeesShared(torch.load(path, weights_only=True)["state_dict"])
    fit(RingStrategy(LocalSGD(2, Nesterov())), Net(), ckpt_path=path, max_epochs=epochs, callbacks=[sees])
    [found] = sees.found
    return found


def test_what_a_single_rank_trained_in_between_is_shared(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _save_after, 1, str(tmp_path / "one.ckpt"), None)
    ranks(1, _save_after, 3, str(tmp_path / "two.ckpt"), str(tmp_path / "one.ckpt"))
    assert ranks(2, _sees_shared, 4, str(tmp_path / "two.ckpt")) == [(0.0, 0.0)] * 2


class Restores(Callback):
    """Ends with other weights than were trained, as callbacks do that restore the best ones."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(0.25)


def test_weights_that_a_callback_restores_at_the_end_are_what_ranks_share(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _save_after, 2, str(tmp_path / "end.ckpt"), None, [Restores()])
    assert ranks(2, _sees_shared, 3, str(tmp_path / "end.ckpt")) == [(0.0, 0.0)] * 2


def _thaws(overlap: bool | int) -> None:
    """Training resumes with an optimizer of one parameter; then a callback gives it those that it had, and freezes one.

    All that the checkpoint had is there, and no parameter is changed.
    """
    with process_group() as peers:
        named = {name: nn.Parameter(torch.full((300,), float(peers.rank))) for name in ("backbone", "head", "other")}
        algorithm = LocalSGD(4, Nesterov(), BlockInt(4), Direct(), error_feedback=True, overlap=overlap)
        algorithm.setup(named, peers)
        for _ in range(8 + bool(overlap)):
            for number, parameter in enumerate(named.values()):
                parameter.data.add_(torch.randn(300), alpha=0.1 * number + 0.1)
            algorithm.after_step(named.values())
        algorithm.settle()
        saved = algorithm.state_dict(), algorithm.own_state()
        held = {name: parameter.clone() for name, parameter in named.items()}
        algorithm.close()
        again = LocalSGD(4, Nesterov(), BlockInt(4), Direct(), error_feedback=True, overlap=overlap)
        again.setup(named, peers)
        again.load_state_dict(saved[0])
        assert again.load_own_state(saved[1])
        named["other"].requires_grad_(False)
        again.bind({named["head"]})
        again.bind(set(named.values()))
        [group] = again._groups
        assert set(group.parameters) == set(named), "frozen, but once trained"
        now = again.state_dict(), again.own_state()
        assert saved[0]["counts"] == now[0]["counts"]
        assert any(kept["outer"]["momentum"].any() for kept in saved[0]["shared"].values())
        assert ("correction" in saved[1]["kept"]["head"]) == bool(overlap)
        for name, parameter in named.items():
            assert torch.equal(parameter, held[name]), name
            assert torch.equal(saved[0]["shared"][name]["values"], now[0]["shared"][name]["values"])
            one, other = (state["shared"][name]["outer"]["momentum"] for state in (saved[0], now[0]))
            assert torch.equal(one, other)
            one, other = (state["kept"][name] for state in (saved[1], now[1]))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[kind], other[kind]) for kind in one)
        again.close()


def _grows(overlap: bool | int) -> None:
    """An optimizer gets another parameter before the first step after a checkpoint: as in a run that went on."""

    def run(peers: Peers, *, resumes: bool) -> tuple[int, list[Tensor]]:
        noise = torch.Generator().manual_seed(peers.rank)
        named = {name: nn.Parameter(torch.full((30,), float(peers.rank))) for name in ("backbone", "head")}

        def steps(count: int, names: Sequence[str]) -> None:
            for _ in range(count):
                for name in names:
                    named[name].data.add_(torch.randn(30, generator=noise))
                algorithm.after_step({named[name] for name in names})

        algorithm = LocalSGD(4, Nesterov(), overlap=overlap, warmup_steps=2)
        algorithm.setup(named, peers)
        steps(7, ["head"])
        if resumes:
            algorithm.settle()
            saved = algorithm.state_dict(), algorithm.own_state()
            algorithm.close()
            algorithm = LocalSGD(4, Nesterov(), overlap=overlap, warmup_steps=2)
            algorithm.setup(named, peers)
            algorithm.load_state_dict(saved[0])
            assert algorithm.load_own_state(saved[1])
            algorithm.bind({named["head"]})
        steps(6, ["backbone", "head"])
        algorithm.settle()
        count = algorithm.state_dict()["step"]
        algorithm.close()
        return count, [value.detach().clone() for value in named.values()]

    with process_group() as peers:
        (count, through), (again, resumed) = (run(peers, resumes=resumes) for resumes in (False, True))
        assert count == again == 13
        assert all(map(torch.equal, through, resumed))


@pytest.mark.parametrize("overlap", [False, 2])
def test_a_parameter_that_joins_after_a_checkpoint_changes_nothing_that_was_counted(
    ranks: Pool, overlap: bool | int
) -> None:
    ranks(2, _grows, overlap)


def _replaces_a_head(size: int) -> None:
    """Before the first step the model gets another parameter of the same name."""
    with process_group() as peers:
        named = {"backbone": nn.Parameter(torch.zeros(30)), "head": nn.Parameter(torch.zeros(9))}
        algorithm = LocalSGD(2, Nesterov())
        algorithm.setup(named, peers)
        algorithm.bind(set(named.values()))
        named["head"] = nn.Parameter(torch.full((size,), 7.0))
        algorithm.adopt(named)
        for _ in range(4):
            algorithm.after_step(set(named.values()))
        assert torch.equal(named["head"], torch.full((size,), 7.0)), "steps of length 0"
        assert torch.equal(algorithm.shared_values()["head"], named["head"])
        algorithm.close()


@pytest.mark.parametrize("size", [9, 6])
def test_a_new_parameter_of_an_old_name_is_shared_as_it_is(ranks: Pool, size: int) -> None:
    ranks(2, _replaces_a_head, size)


def _of_another_dtype() -> None:
    with process_group() as peers:
        saved: dict[str, Any] | None = None
        for dtype in (torch.float64, torch.float32):
            weight = nn.Parameter(torch.ones(30, dtype=dtype))
            algorithm = LocalSGD(1, Nesterov())
            algorithm.setup({"weight": weight}, peers)
            if saved is not None:
                algorithm.load_state_dict(saved)
            weight.data.add_(1.0 + peers.rank)
            algorithm.after_step({weight})
            saved = algorithm.state_dict()
            assert same_everywhere(weight)
            assert saved["shared"]["weight"]["outer"]["momentum"].dtype == dtype
            algorithm.close()


def test_a_checkpoint_of_another_dtype_goes_on(ranks: Pool) -> None:
    ranks(2, _of_another_dtype)


@pytest.mark.parametrize("overlap", [False, 2])
def test_what_a_checkpoint_holds_is_kept_until_all_parameters_are_thawed(ranks: Pool, overlap: bool | int) -> None:
    ranks(2, _thaws, overlap)


def _calls_of_the_collective() -> int:
    with process_group() as peers:
        named = {"weight": nn.Parameter(torch.randn(20, 15)), "bias": nn.Parameter(torch.randn(3))}
        algorithm = LocalSGD(1, Nesterov(), SmallExact(BlockInt(4), below=64), Direct())
        algorithm.setup(named, peers)
        algorithm.attend(lambda: [torch.randn(5)], tuple)
        algorithm.bind(set(named.values()))
        [group] = algorithm._groups
        assert len(group.flats) == 2
        for parameter in named.values():
            parameter.data.add_(torch.randn_like(parameter))
        with mock.patch.object(Direct, "sum_", autospec=True, side_effect=Direct.sum_) as sums:
            algorithm.after_step(named.values())
        assert all(map(same_everywhere, named.values()))
        algorithm.close()
        return sums.call_count


def test_all_of_an_agreement_travels_in_the_same_messages(ranks: Pool) -> None:
    """So it waits for two latencies, not for two for each."""
    assert ranks(2, _calls_of_the_collective) == [1, 1]


def _averages_weights(algorithm: LocalSGD) -> str:
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    try:
        fit(RingStrategy(algorithm), normed(), callbacks=[swa], max_epochs=3)
    except ValueError as error:
        return str(error)
    return ""


def test_weight_averages_with_batch_norm_and_overlap_are_refused(ranks: Pool) -> None:
    assert ranks(2, _averages_weights, LocalSGD(2, Nesterov())) == ["", ""]
    for said in ranks(2, _averages_weights, LocalSGD(2, Nesterov(), overlap=1)):
        assert "use LocalSGD(overlap=False)" in said


def test_a_longer_overlap_than_before_the_checkpoint_measures_the_interval_anew() -> None:
    state = {**LocalSGD("auto").state_dict(), "interval": 3}
    algorithm = LocalSGD("auto", overlap=2)
    algorithm.load_state_dict(state)
    assert algorithm.schedule.interval == 3
    assert not algorithm.news()
    for longer in (LocalSGD("auto", overlap=8), LocalSGD("auto", fragments=4)):
        longer.load_state_dict(state)
        assert longer.schedule.interval == 8, "the trial's"
        assert "measured anew" in longer.news()[0]


def _save(folder: str) -> None:
    saver = ModelCheckpoint(folder, "saved")
    fit(RingStrategy(LocalSGD(2, Nesterov())), Net(), callbacks=[saver], enable_checkpointing=True)


def _load(path: str) -> tuple[bool, bool]:
    """Does another number of ranks begin with the checkpoint's parameters, and with the outer momentum?"""
    model, found = Net(), []
    saved = torch.load(path, weights_only=True)

    class Start(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if found:
                return
            held = pl_module.state_dict()
            strategy = trainer.strategy
            assert isinstance(strategy, RingStrategy)
            shared, before = strategy.algorithm.state_dict()["shared"], saved["ringstrategy"]["algorithm"]["shared"]
            momentum = [torch.equal(shared[n]["outer"]["momentum"], before[n]["outer"]["momentum"]) for n in before]
            assert any(before[name]["outer"]["momentum"].abs().max() > 0 for name in before)
            found.append((all(torch.equal(saved["state_dict"][name], held[name]) for name in held), all(momentum)))

    fit(RingStrategy(LocalSGD(2, Nesterov())), model, ckpt_path=path, max_epochs=3, callbacks=[Start()])
    return found[0]


def _load_with_another_outer(path: str) -> str:
    algorithm = LocalSGD(2, partial(torch.optim.Adam, lr=0.01))
    algorithm.load_state_dict(torch.load(path, weights_only=True)["ringstrategy"]["algorithm"])
    [said] = algorithm.news()
    model = Net()
    fit(RingStrategy(LocalSGD(2, partial(torch.optim.Adam, lr=0.01))), model, ckpt_path=path, max_epochs=3)
    assert all(map(same_everywhere, model.parameters()))
    return said


def test_another_outer_optimizer_begins_anew_and_says_so(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _save, str(tmp_path))
    for said in ranks(2, _load_with_another_outer, str(tmp_path / "saved.ckpt")):
        assert "begins anew, because it is Adam, and in the checkpoint _Nesterov" in said


def test_another_number_of_ranks_starts_from_the_shared_parameters_and_keeps_the_momentum(
    ranks: Pool, tmp_path: Path
) -> None:
    ranks(3, _save, str(tmp_path))
    assert ranks(2, _load, str(tmp_path / "saved.ckpt")) == [(True, True)] * 2


def _as_ring(algorithm: LocalSGD | AllReduce) -> list[float]:
    class Sgd(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)

    model = Sgd()
    fit(RingStrategy(algorithm), model)
    return row(model).tolist()


def test_plain_agreements_at_each_step_of_sgd_are_synchronous_training(ranks: Pool) -> None:
    ring = ranks(3, _as_ring, AllReduce())[0]
    warm = LocalSGD(50, Nesterov(), BlockInt(4), warmup_steps=99)
    for found in ranks(3, _as_ring, LocalSGD(1)) + ranks(3, _as_ring, warm):
        np.testing.assert_allclose(found, ring, rtol=1e-5, atol=1e-6)
    seldom = ranks(3, _as_ring, LocalSGD(4))[0]
    assert np.abs(np.subtract(seldom, ring)).max() > 1e-3


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def _automatic(overlap: bool | int, seconds: float) -> tuple[int, list[str]]:
    """Each step takes 0.02 s, and an exchange the given seconds, on rank 1 twice as long: by a clock of the test."""
    clock = Clock()
    with process_group() as peers, mock.patch("time.perf_counter", clock):
        parameter = nn.Parameter(torch.zeros(1000))
        algorithm = LocalSGD("auto", overlap=overlap, fragments=1)
        algorithm.setup({"weight": parameter}, peers)
        algorithm.bind({parameter})
        means_, takes = algorithm.exchange.means_, seconds * (1 + peers.rank)

        def slowly(*given: Any) -> None:
            time.sleep(0.05)  # the training thread waits by now
            clock.now += takes
            means_(*given)

        algorithm.exchange.means_ = slowly  # type: ignore[method-assign]
        for _ in range(16):
            clock.now += 0.02
            algorithm.after_step({parameter})
        news, interval = algorithm.news(), algorithm.state_dict()["interval"]
        mixings = algorithm._groups[0].mixings
        for _ in range(interval - 16 % interval):
            assert algorithm._groups[0].under_way is None
            algorithm.after_step({parameter})
        assert (algorithm._groups[0].under_way is not None) == bool(overlap), "begins at the end of the interval"
        assert algorithm._groups[0].mixings - mixings == (not overlap)
        assert mixings == 2
        algorithm.settle()
        algorithm.close()
        return interval, news


def test_the_interval_may_be_chosen_by_what_an_exchange_takes(ranks: Pool) -> None:
    (one, [told]), (two, _) = ranks(2, _automatic, True, 0.2)
    assert one == two
    assert one in (25, 26), "0.4 s of the slower rank, by 0.02 s, with a margin"
    assert f"interval={one}" in told
    (waiting, _), _ = ranks(2, _automatic, False, 0.03)
    assert waiting in (100, 101), "waiting 0.06 s is 3 % of 100 steps"
    (hidden, _), _ = ranks(2, _automatic, 2, 0.03)
    assert hidden in (33, 34, 35), "of 0.06 s two steps hide 0.04 s"


def _resumes_choosing() -> tuple[int | None, int | None]:
    """Two optimizers, and a checkpoint from between the two trials: the interval before it and in the end."""
    with process_group() as peers:
        one, two = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(20))

        def run(state: dict[str, Any] | None) -> dict[str, Any]:
            algorithm = LocalSGD("auto")
            algorithm.setup({"one": one, "two": two}, peers)
            if state is not None:
                algorithm.load_state_dict(state)
            for _ in range(12):
                algorithm.after_step({one})
                algorithm.after_step({two})
            found = algorithm.state_dict()
            algorithm.close()
            return found

        before = run(None)
        return before["interval"], run(before)["interval"]


def test_an_interval_is_chosen_after_resuming_between_its_trials(ranks: Pool) -> None:
    (before, one), (_, two) = ranks(2, _resumes_choosing)
    assert before is None
    assert one == two
    assert one is not None


def _of_two_hosts(
    algorithm: LocalSGD | AllReduce, hosts: list[int], make: Callable[[], Net] = normed
) -> tuple[Tensor, list[Tensor], int]:
    """The shared parameters at the end, this rank's after each step, and the bytes it sent."""
    rank, weights = int(os.environ["RANK"]), list[Tensor]()

    class Weights(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            weights.append(torch.cat([value.detach().reshape(-1) for value in pl_module.parameters()]))

    model = make()
    with mock.patch("ringstrategy.transport.connect.this_host", return_value=f"host {hosts[rank]}"):
        trainer = trainer_with(RingStrategy(algorithm), callbacks=[Weights()], max_epochs=4)
        trainer.fit(model, rows(96), rows(24))
    assert isinstance(trainer.strategy, RingStrategy)
    return row(model), weights, trainer.strategy.stats.bytes_sent or 0


def test_ranks_of_a_host_stay_equal_and_hosts_meet_seldom(ranks: Pool) -> None:
    algorithm = LocalSGD(4, Nesterov(0.7, 0.3), collective=Hierarchical(), overlap=2, within_host=True)
    found = ranks(4, _of_two_hosts, algorithm, [0, 0, 1, 1])
    steps = len(found[0][1])
    assert steps > 8
    for step in range(steps):
        one, two, three, four = (own[step] for _, own, _ in found)
        assert torch.equal(one, two)
        assert torch.equal(three, four)
        assert not torch.equal(one, three)
    assert all(torch.equal(end, found[0][0]) for end, _, _ in found)
    alone = ranks(4, _of_two_hosts, algorithm, [0, 1, 2, 3])  # nobody shares a host
    assert not torch.equal(alone[0][1][0], alone[1][1][0])


class Rare(Net):
    """One parameter that only rank 0 uses, in one of three batches, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        used = self.trainer.global_rank == 0 and batch_idx % 3 == 0
        return loss + self.rare.square().sum() if used else loss


def test_ranks_of_a_host_stay_equal_where_parameters_are_not_used(ranks: Pool) -> None:
    algorithm = LocalSGD(4, Nesterov(0.7, 0.3), collective=Hierarchical(), overlap=2, within_host=True)
    found = ranks(4, _of_two_hosts, algorithm, [0, 0, 1, 1], Rare)
    for one, two, three, four in zip(*(own for _, own, _ in found), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(three, four)
    end = found[0][0]
    assert torch.equal(end[3:5], torch.ones(2)), "never"
    assert 0 < end[:3].max() < 1, "rare"


def test_on_one_host_each_step_is_that_of_ring(ranks: Pool) -> None:
    ring, seldom = (
        ranks(2, _of_two_hosts, algorithm, [0, 0], Net)[0][1]
        for algorithm in (AllReduce(), LocalSGD(4, within_host=True, average_optimizer=True))
    )
    for one, other in zip(ring, seldom, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Moments(Callback):
    """Are the optimizer's moments the same on all ranks, after each batch?"""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        states = trainer.optimizers[0].state
        moments = [states[parameter]["exp_avg_sq"] for parameter in pl_module.layers.parameters()]
        self.same.append(same_everywhere(torch.cat([moment.reshape(-1) for moment in moments])))


class Unused(Net):
    """A parameter that rank 1 never uses, so that its optimizer has no state for it there."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.global_rank == 1 else loss + self.rare.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def _moments(algorithm: LocalSGD) -> tuple[list[bool], Tensor]:
    moments, model = Moments(), Unused()
    fit(RingStrategy(algorithm), model, callbacks=[moments])
    return moments.same, model.rare.detach()


def test_the_state_of_inner_optimizers_is_averaged_on_demand(ranks: Pool) -> None:
    for same, rare in ranks(3, _moments, LocalSGD(3, average_optimizer=True)):
        assert len(same) > 5
        assert same[2::3] == [True] * len(same[2::3])
        assert not any(same[0::3])
        assert 0 < rare.max() < 1, "two of three ranks moved it"
    for same, _ in ranks(3, _moments, LocalSGD(3)):
        assert not any(same)


def _monitored(folder: str) -> None:
    logger = CSVLogger(folder, name="", version="")
    algorithm = LocalSGD(2, Nesterov())
    fit(RingStrategy(algorithm), Net(), logger=logger, callbacks=[CommunicationMonitor()], log_every_n_steps=1)


def test_the_monitor_logs_how_far_and_how_alike_ranks_went(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _monitored, str(tmp_path))
    with open(tmp_path / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    norms = [float(line["communication/outer_gradient_norm"] or 0) for line in lines]
    alike = [
        float(line["communication/direction_agreement"]) for line in lines if line["communication/direction_agreement"]
    ]
    assert (
        sum(norm > 0 for norm in norms)
        == len(alike)
        == sum(line["communication/exposed_ms"] != "" for line in lines) // 2
    )
    assert all(-0.5 <= each <= 1.0 for each in alike)
    assert max(alike) > 0.2, "all ranks learn the same"


def _directions(sign: float) -> float:
    with process_group() as peers:
        parameter = nn.Parameter(torch.zeros(64))
        algorithm = LocalSGD(1)
        algorithm.setup({"weight": parameter}, peers)
        algorithm.bind({parameter})
        parameter.data.add_(torch.linspace(0, 1, 64) * (sign if peers.rank else 1.0))
        algorithm.after_step({parameter})
        told = algorithm.metrics()
        assert algorithm.metrics() == {}
        algorithm.close()
        return told["direction_agreement"]


def test_directions_agree_from_minus_one_to_one(ranks: Pool) -> None:
    assert ranks(2, _directions, 1.0) == pytest.approx([1.0, 1.0])
    assert ranks(2, _directions, -1.0) == pytest.approx([-1.0, -1.0])


# What users do


def _short(unit: str) -> tuple[bool, list[bool]]:
    """Fewer steps than an interval has, or the one epoch: is there something to see at the end?"""
    before = Net().layers[0].weight.detach().clone()
    algorithm = LocalSGD(99 if unit == "step" else 1, Nesterov(), overlap=1, unit=unit)  # type: ignore[arg-type]
    model = Net()
    fit(RingStrategy(algorithm), model, max_epochs=1)
    same = [same_everywhere(parameter.detach()) for parameter in model.parameters()]
    return not torch.equal(before, model.layers[0].weight), same


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_the_result_has_the_last_steps_in_it(ranks: Pool, unit: str) -> None:
    for moved, same in ranks(3, _short, unit):
        assert moved
        assert all(same)


def _ends(algorithm: LocalSGD) -> tuple[list[float], float]:
    """Rank r moves by 1 + r a step: how far is the model after 14 steps, 28, and when its optimizer gets another?

    And where is this rank after the first agreement that follows the first end?
    """
    with process_group() as peers:
        parameter, other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(3))
        algorithm.setup({"weight": parameter, "other": other}, peers)
        algorithm.bind({parameter})
        found, places = [], []
        for _ in range(2):
            for _ in range(14):
                parameter.data.add_(1.0 + peers.rank)
                algorithm.after_step({parameter})
                places.append(float(parameter[0]))
            algorithm.finish()
            found += [float(value) for value in parameter.detach().aminmax()]
        for _ in range(6):
            parameter.data.add_(1.0 + peers.rank)
            algorithm.after_step({parameter})
        algorithm.bind({parameter, other})
        found += [float(value) for value in parameter.detach().aminmax()]
        algorithm.close()
        return found, places[15]


@pytest.mark.parametrize(
    ("algorithm", "places"),
    [
        (LocalSGD(4), [24, 24]),
        (LocalSGD(4, overlap=2), [23, 25]),
        (LocalSGD(4, overlap=True), [23, 25]),
        (LocalSGD(4, overlap=True, eager=True), [22, 23]),  # with half of its own two steps
    ],
)
def test_no_step_is_lost_at_the_end_nor_where_an_optimizer_gets_more(
    ranks: Pool, algorithm: LocalSGD, places: list[float]
) -> None:
    for (found, place), expected in zip(ranks(2, _ends, algorithm), places, strict=True):
        assert place == pytest.approx(expected)
        assert found == pytest.approx([21, 21, 42, 42, 51, 51], rel=1e-5)


def _nothing_left(folder: str, algorithm: LocalSGD) -> None:
    """A run that is started again when all its epochs are done."""
    first, again = normed(), normed()
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    fit(RingStrategy(algorithm), first, callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], **options)
    fit(
        RingStrategy(algorithm), again, ckpt_path=f"{folder}/epoch=1.ckpt", **{**options, "enable_checkpointing": False}
    )
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        assert same_everywhere(value.double())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_nothing_left_to_train_ends_with_the_same_model(ranks: Pool, overlap: bool, tmp_path: Path) -> None:
    ranks(3, _nothing_left, str(tmp_path), LocalSGD(5, Nesterov(0.5, 0.5), overlap=overlap))


def _copies(name: str) -> float:
    """How many more times the elements of the model it keeps after some agreements, as docs/local_sgd.md says."""
    with process_group() as peers:
        parameters = {f"layers.{layer}.weight": nn.Parameter(torch.randn(40, 50)) for layer in range(4)}
        algorithm = STRATEGIES[name]()
        assert isinstance(algorithm, LocalSGD)
        algorithm.setup(parameters, peers)
        for _ in range(40):
            for parameter in parameters.values():
                parameter.data.add_(1.0 + peers.rank)
            algorithm.after_step(parameters.values())
        algorithm.settle()
        kept = 0
        for flat in (flat for group in algorithm._groups for flat in group.flats):
            states = algorithm._shared[flat].state_dict().values()
            outer = [value for state in states for value in state["outer"].values() if isinstance(value, Tensor)]
            seen = [flat.correction, algorithm._shared[flat].values, *flat.memory.values(), *outer]
            kept += sum(tensor.numel() for tensor in seen)
            assert "values" not in vars(flat), "one more, if it is asked for"
        algorithm.close()
        return kept / sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.parametrize(("name", "copies"), [("local_sgd", 2), ("diloco", 3), ("diloco_int4", 5), ("diloco_sign", 5)])
def test_it_keeps_as_many_copies_as_the_page_says(ranks: Pool, name: str, copies: int) -> None:
    assert ranks(2, _copies, name) == [copies, copies]


class Buffered(Net):
    """Buffers as language models have them, and one that each rank changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += self.trainer.global_rank
        return super().training_step(batch, batch_idx)


def _buffers(overlap: int) -> list[Tensor]:
    model = Buffered()
    fit(RingStrategy(LocalSGD(2, overlap=overlap)), model)
    return [model.mask, model.turns, model.seen]


@pytest.mark.parametrize("overlap", [0, 1])
def test_buffers_that_have_no_mean_stay(ranks: Pool, overlap: int) -> None:
    for mask, turns, seen in ranks(3, _buffers, overlap or False):
        assert torch.equal(mask, torch.full((3,), -torch.inf))
        assert torch.equal(turns, torch.polar(torch.ones(3), torch.arange(3.0)))
        assert seen[0] == pytest.approx(seen[1])
        assert seen[0] > 1


def _several(count: int) -> list[float]:
    """A buffer at each step, with so many optimizers that each agree at each step, one step late."""
    with process_group() as peers:
        buffer = torch.tensor(float(peers.rank + 1))
        parameters = {f"{number}": nn.Parameter(torch.zeros(3)) for number in range(count)}
        algorithm, found = LocalSGD(1, overlap=1), []
        algorithm.setup(parameters, peers)
        algorithm.attend(lambda: [buffer], tuple)
        for parameter in parameters.values():
            algorithm.bind({parameter})
        for _ in range(6):
            for parameter in parameters.values():
                algorithm.after_step({parameter})
            found.append(buffer.item())
        algorithm.settle()
        algorithm.close()
        return found


def test_several_optimizers_average_a_buffer_once(ranks: Pool) -> None:
    for found in ranks(2, _several, 3):
        assert found[2:] == [1.5] * 4


class Adapted(Net):
    """A frozen part in the optimizer, which is thawed later."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.thaws = thaws
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.thaws and self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def _adapts(thaws: bool) -> tuple[bool, list[bool], int]:
    before, model = Net().layers[0].weight.detach().clone(), Adapted(thaws)
    algorithm = LocalSGD(2, Nesterov(), Rotated(Gaussian(4)), Direct())
    trainer = trainer_with(RingStrategy(algorithm), max_epochs=3)
    trainer.fit(model, rows(96))
    assert isinstance(trainer.strategy, RingStrategy)
    same = [same_everywhere(p.detach()) for p in model.parameters()]
    return torch.equal(before, model.layers[0].weight), same, trainer.strategy.stats.values_averaged


def test_frozen_parameters_are_neither_sent_nor_moved_until_they_are_thawed(ranks: Pool) -> None:
    frozen, thawed = ranks(2, _adapts, False)[0], ranks(2, _adapts, True)[0]
    assert frozen[0]
    assert not thawed[0]
    assert all(frozen[1])
    assert all(thawed[1])
    assert frozen[2] < thawed[2]


class LoadsLate(Net):
    """Weights that come from a file when training starts."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.data.add_(100.0)


def _loads_late() -> float:
    model = LoadsLate()
    fit(RingStrategy(LocalSGD(3, Nesterov())), model, max_epochs=1)
    return model.layers[0].weight.mean().item()


def test_weights_that_are_loaded_when_training_starts_are_shared(ranks: Pool) -> None:
    assert ranks(2, _loads_late) == pytest.approx([100.0, 100.0], abs=2.0)


def _narrow() -> list[float]:
    """Nothing moves, though the shared parameters are no values of this dtype."""
    with process_group() as peers:
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        algorithm = LocalSGD(1, Nesterov(0.4, 0.0))
        algorithm.setup({"weight": parameter}, peers)
        algorithm.bind({parameter})
        parameter.data.fill_(1.0 + peers.rank * 2**-7)
        found = []
        for _ in range(5):
            algorithm.after_step({parameter})
            found.append(algorithm.shared_values()["weight"][0].item())
        algorithm.close()
        return found


def test_rounding_to_16_bits_is_no_progress(ranks: Pool) -> None:
    for found in ranks(2, _narrow):
        assert len(set(found)) == 1


def _policies() -> str:
    with process_group() as peers:
        policy = SmallExact(BlockInt(4)) if peers.rank else SmallExact(BlockInt(8))
        algorithm = LocalSGD(codec=lambda name, parameter: policy(name, parameter), collective=Direct())
        with pytest.raises(PlanMismatchError) as raised:
            algorithm.setup({"weight": nn.Parameter(torch.zeros(64, 64))}, peers)
        algorithm.close()
        return str(raised.value)


def test_policies_that_choose_other_codecs_are_told(ranks: Pool) -> None:
    for told in ranks(2, _policies):
        assert "bits=4" in told
        assert "bits=8" in told


def test_parameters_without_elements_are_left_out(ranks: Pool) -> None:
    assert ranks(2, _empty) == [0, 0]


def _empty() -> int:
    with process_group() as peers:
        parameter = nn.Parameter(torch.zeros(0, 4))
        algorithm = LocalSGD(1, fragments=1)
        algorithm.setup({"nothing": parameter}, peers)
        algorithm.bind({parameter})
        algorithm.after_step({parameter})
        algorithm.close()
        return peers.stats.values_averaged

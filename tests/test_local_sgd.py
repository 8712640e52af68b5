"""Local SGD and DiLoCo: beside a numpy twin, the same shared parameters on all ranks, and what users do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, on_all_ranks
from lightning.pytorch.callbacks import Callback
from pool import Pool
from test_gossip import check_resumes
from test_session import batches, opened, process_group, train
from test_session import model as small_model
from test_strategy import Net, fit
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ringstrategy import (
    AllReduce,
    BlockInt,
    Direct,
    Gaussian,
    Hierarchical,
    LocalSGD,
    Nesterov,
    Peers,
    RingStrategy,
    Rotated,
    Sign,
    SmallExact,
)
from ringstrategy.algorithms.parameters.fragments import cut_fragments

Arrays = dict[str, np.ndarray]
SHAPES = {
    "embed.weight": (40, 3),
    "layers.0.weight": (7, 5),
    "layers.0.bias": (3,),
    "layers.1.weight": (6, 5),
    "head": (),
}
STEPS = 30


def start() -> Arrays:
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def parameters_of(rank: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(values)) for name, values in start().items()}


def change_of(rank: int, step: int, values: Arrays) -> Arrays:
    """What an optimizer does: noise, and a pull towards an optimum that each rank has for itself."""
    random = np.random.default_rng([rank, step])
    return {
        name: (0.1 * random.standard_normal(shape) - 0.05 * (values[name] - rank)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def change_(parameters: dict[str, nn.Parameter], rank: int, step: int) -> None:
    with torch.no_grad():
        for name, change in change_of(rank, step, arrays_of(parameters)).items():
            parameters[name] += torch.tensor(change)


def arrays_of(parameters: Mapping[str, Tensor]) -> Arrays:
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


def begun(peers: Peers, algorithm: LocalSGD, named: Mapping[str, nn.Parameter], *stepped: str) -> LocalSGD:
    """A copy, which averages them; an optimizer steps those, or all of them."""
    algorithm = copy.deepcopy(algorithm)
    algorithm.setup(named, peers)
    algorithm.bind({named[name] for name in stepped or named})
    return algorithm


Found = tuple[Arrays, Arrays, list[Arrays]]


def run(peers: Peers, algorithm: LocalSGD, steps: int) -> Found:
    """This rank's parameters at the end, Theta as validation sees it then, and Theta after each step."""
    parameters, thetas = parameters_of(), []
    algorithm = begun(peers, algorithm, parameters)
    for step in range(steps):
        change_(parameters, peers.rank, step)
        algorithm.after_step(set(parameters.values()))
        thetas.append(arrays_of(algorithm.shared_values()))
    assert (peers.stats.bytes_sent or 0) > 0
    own = arrays_of(parameters)
    assert algorithm.enter_consensus()
    seen = arrays_of(parameters)
    algorithm.leave_consensus()
    assert all(np.array_equal(own[name], again) for name, again in arrays_of(parameters).items())
    algorithm.close()
    return own, seen, thetas


class Twin:
    """One parameter's values of all ranks, in float64, as the papers write it."""

    def __init__(self, size: int, values: np.ndarray, algorithm: LocalSGD, first: int) -> None:
        self.size, self.algorithm, self.first = size, algorithm, first
        self.own = [values.astype(np.float64) for _ in range(size)]
        self.theta = values.astype(np.float64)
        self.momentum = np.zeros_like(self.theta)
        self.sent: list[np.ndarray] | None = None
        self.gradients: list[np.ndarray] = []

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
            self.own = [self.theta] * self.size
            return
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
        self.gradients = [self.theta - own for own in self.own]

    def land(self, late: int) -> None:
        assert self.sent is not None
        self.theta, self.momentum = self.outer(self.theta, self.momentum, sum(self.gradients) / self.size)
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
    parts = cut_fragments(parameters_of(), algorithm.fragments)
    return {name: (place + 1) * algorithm.interval // len(parts) for place, part in enumerate(parts) for name in part}


ALGORITHMS = {
    "plain": LocalSGD(4),
    "momentum": LocalSGD(4, Nesterov()),
    "carried": LocalSGD(6, Nesterov(0.8, 0.6), overlap=2),
    "carried whole": LocalSGD(3, Nesterov(0.5, 0.5), overlap=True),
    "streaming": LocalSGD(8, Nesterov(), fragments=3, overlap=3, warmup_steps=3),
    "fragments at once": LocalSGD(7, Nesterov(1.0, 0.0), fragments=2),
}


def _check_twin(found: Sequence[Found], algorithm: LocalSGD) -> None:
    expected, thetas = twin(algorithm, len(found), STEPS, firsts_of(algorithm))
    for rank, (own, seen, told) in enumerate(found):
        for key in SHAPES:
            np.testing.assert_allclose(
                own[key], expected[rank][key], rtol=1e-5, atol=1e-6, err_msg=f"{key}, rank {rank} of {len(found)}"
            )
            np.testing.assert_array_equal(seen[key], told[-1][key])
            for step, theta in enumerate(told):
                np.testing.assert_array_equal(theta[key], found[0][2][step][key])
                np.testing.assert_allclose(theta[key], thetas[step][key], rtol=1e-5, atol=1e-6, err_msg=f"{step}")
    assert max(np.abs(own["layers.0.weight"] - found[0][0]["layers.0.weight"]).max() for own, _, _ in found) > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_agree_with_a_numpy_twin(name: str) -> None:
    for size in (2, 3, 8):
        _check_twin(on_all_ranks(size, lambda peers: run(peers, ALGORITHMS[name], STEPS)), ALGORITHMS[name])


# What the codec does to it


def _weight(numel: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.full((numel,), value, dtype=dtype))}


def test_what_a_codec_lost_is_sent_later() -> None:
    """The same small progress is made again and again beside a large one."""

    def moved(peers: FakePeers, feedback: bool) -> tuple[np.ndarray, np.ndarray]:
        """Before and after the end of training."""
        named = _weight(256)
        algorithm = LocalSGD(1, codec=BlockInt(4), collective=Direct(), error_feedback=feedback)
        algorithm = begun(peers, algorithm, named)
        change = torch.full((256,), 0.01 * (1 + peers.rank))
        change[0] = 1.0 if peers.rank else -1.0
        for _ in range(100):
            named["weight"].data += change
            algorithm.after_step(named.values())
        before = named["weight"].detach().numpy().copy()
        algorithm.finish()
        return before, named["weight"].detach().numpy()

    (fed, end), (lost, _) = (on_all_ranks(2, lambda peers, on=on: moved(peers, on))[0] for on in (True, False))
    assert np.abs(end[1:] - 1.5).max() < 1e-5 < np.abs(fed[1:] - 1.5).max(), "the end has what was held back"
    np.testing.assert_allclose(fed[1:], 1.5, atol=0.1)
    assert np.abs(lost[1:] - 1.5).min() > 0.4, "so small a progress is rounded to nothing"


def test_rounding_to_16_bits_is_no_progress() -> None:
    """Nothing moves, though the shared parameters are no values of this dtype."""

    def narrow(peers: FakePeers) -> set[float]:
        named = _weight(3, dtype=torch.bfloat16)
        algorithm = begun(peers, LocalSGD(1, Nesterov(0.4, 0.0)), named)
        named["weight"].data.fill_(1.0 + peers.rank * 2**-7)
        found = set()
        for _ in range(5):
            algorithm.after_step(named.values())
            found.add(algorithm.shared_values()["weight"][0].item())
        return found

    assert {len(found) for found in on_all_ranks(2, narrow)} == {1}


# Fragments and schedules


def test_fragments_are_whole_layers_of_about_the_same_bytes() -> None:
    def parts(layers: int, embedding: int, count: int) -> list[list[str]]:
        shapes = {"embed.weight": (embedding, 8), "norm.weight": (8,)}
        for layer in range(layers):
            shapes |= {f"blocks.{layer}.up.weight": (32, 8), f"blocks.{layer}.down.weight": (8, 32)}
        named = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        found = cut_fragments(named, count)
        assert sum(map(len, found)) == len(named)
        return [list(dict.fromkeys(".".join(name.split(".")[:2]) for name in part)) for part in found]

    first, *others = parts(6, 200, 4)
    assert first == ["embed.weight"]
    strided = [{"blocks.2", "blocks.5"}, {"blocks.0", "blocks.3"}, {"blocks.1", "blocks.4"}]
    assert [set(part) - {"norm.weight"} for part in others] == strided
    assert parts(7, 100, 4)[0] == ["embed.weight"], "apart, though smaller than the others"
    assert len(parts(7, 20, 4)[0]) > 1, "too small for that"
    assert {sum(name.startswith("blocks") for name in part) for part in parts(9, 1, 3)} == {3}
    assert len(parts(9, 1, 1)) == 1
    assert len(cut_fragments({"weight": nn.Parameter(torch.empty(3))}, 4)) == 1


# Checkpoints


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(3, Nesterov(), SmallExact(BlockInt(4)), Direct(), fragments=2, overlap=2),
        lambda: LocalSGD(4, Nesterov(), SmallExact(BlockInt(4), below=64), Direct(), True, fragments=2, overlap=1),
        lambda: LocalSGD(3, partial(torch.optim.Adam, lr=0.01), overlap=1, warmup_steps=2),
        lambda: LocalSGD(2, Nesterov(), unit="epoch", overlap=1),
    ],
    ids=["fragments", "feedback", "adam", "epochs"],
)
def test_a_run_that_resumes_goes_on_bit_for_bit(make: Callable[[], LocalSGD]) -> None:
    check_resumes(make, 3, parameters_of, change_)


def test_a_checkpoint_of_another_dtype_or_outer_optimizer_goes_on() -> None:
    def work(peers: FakePeers) -> list[float]:
        saved: dict[str, Any] | None = None
        found = []
        for dtype, outer, key, anew in (
            (torch.float64, Nesterov(), "momentum", 0),
            (torch.float32, Nesterov(), "momentum", 0),
            (torch.float32, partial(torch.optim.Adam, lr=0.01), "exp_avg", 1),
        ):
            named, algorithm = _weight(30, 1.0, dtype), LocalSGD(1, outer)
            algorithm.setup(named, peers)
            if saved is not None:
                algorithm.load_state_dict(saved)
            said = "begins anew, because it is Adam, and in the checkpoint _Nesterov"
            assert [said in line for line in algorithm.news()] == [True] * anew
            named["weight"].data.add_(1.0 + peers.rank)
            algorithm.after_step(named.values())
            saved = copy.deepcopy(algorithm.state_dict())
            found.append(named["weight"][0].item())
            assert saved["shared"]["weight"]["outer"][key].dtype == dtype
        return found

    one, two = on_all_ranks(2, work)
    assert one == two


# The end


@pytest.mark.parametrize(
    ("algorithm", "places", "means"),
    [
        (LocalSGD(4), [24, 24], [21, 42, 51]),
        (LocalSGD(4, overlap=2), [23, 25], [21, 42, 51]),
        (LocalSGD(4, overlap=True), [23, 25], [21, 42, 51]),
        (LocalSGD(4, Nesterov(0.5, 0.0), overlap=True), [14, 16], [12, 22.5, 28.5]),  # half of each agreement's way
        (LocalSGD(50, Nesterov(), BlockInt(4), warmup_steps=99), [24, 24], [21, 42, 51]),  # exact, while it is plain
        (LocalSGD(4, codec=Rotated(Sign()), collective=Direct()), [], []),  # coarse, but for the last mean
    ],
    ids=str,
)
def test_no_step_is_lost_at_the_end_nor_where_an_optimizer_gets_more(
    algorithm: LocalSGD, places: list[float], means: list[float]
) -> None:
    """Rank r moves by 1 + r a step: how far is the model after 14 steps, 28, and when its optimizer gets another?

    And where is this rank after the first agreement that follows the first end?
    """

    def ends(peers: FakePeers) -> tuple[list[float], float]:
        named = {"weight": nn.Parameter(torch.zeros(8)), "other": nn.Parameter(torch.zeros(3))}
        mine, parameter, found, trail = begun(peers, algorithm, named, "weight"), named["weight"], [], []

        def steps(count: int) -> None:
            for _ in range(count):
                parameter.data.add_(1.0 + peers.rank)
                mine.after_step({parameter})
                trail.append(parameter[0].item())

        for _ in range(2):
            steps(14)
            mine.finish()
            found += parameter.detach().aminmax()
        steps(6)
        mine.bind({*named.values()})
        found += parameter.detach().aminmax()
        return [float(value) for value in found], trail[15]

    for rank, (found, place) in enumerate(on_all_ranks(2, ends)):
        if not places:
            assert len(set(found[:2])) == len(set(found[2:4])) == 1, "all ranks end alike"
        else:
            assert place == pytest.approx(places[rank])
            assert found == pytest.approx(np.repeat(means, 2), rel=1e-5)


# Beside the parameters


@pytest.mark.parametrize("overlap", [False, 1])
def test_buffers_that_have_a_mean_get_it_once_however_many_optimizers_there_are(overlap: bool | int) -> None:
    def work(peers: FakePeers) -> list[float]:
        mask, seen = torch.full((3,), -torch.inf), torch.tensor([peers.rank + 1.0, 0.0])
        turns = torch.polar(torch.ones(3), torch.arange(3.0) + peers.rank)
        named, found = {f"{number}": nn.Parameter(torch.zeros(3)) for number in range(3)}, []
        algorithm = LocalSGD(1, overlap=overlap)
        algorithm.setup(named, peers)
        count = torch.tensor([0, 2**60 + peers.rank])
        algorithm.attend(lambda: [mask, turns, seen], lambda: [count])
        for parameter in named.values():
            algorithm.bind({parameter})
        for _ in range(6):
            seen[1] += peers.rank  # which the mean must not lose, though it comes later
            count[0] += 1  # nor what rank 0 has
            for parameter in named.values():
                algorithm.after_step({parameter})
            found.append(seen[0].item())
        algorithm.settle()
        assert torch.equal(mask, torch.full((3,), -torch.inf))
        assert torch.equal(turns, torch.polar(torch.ones(3), torch.arange(3.0) + peers.rank)), "has no real mean"
        assert count.tolist() == [6, 2**60]
        assert seen[1] == (3.0 if not overlap else 2.5 + peers.rank)
        return found

    for found in on_all_ranks(2, work):
        assert found[2:] == [1.5] * 4


@pytest.mark.parametrize("thaws", [True, False])
def test_frozen_parameters_are_neither_sent_nor_moved_until_they_are_thawed(thaws: bool) -> None:
    def sent(peers: FakePeers) -> int:
        named = {"frozen": nn.Parameter(torch.zeros(7), False), "nothing": nn.Parameter(torch.zeros(0, 4))}
        named["trained"] = nn.Parameter(torch.zeros(5))
        algorithm = begun(peers, LocalSGD(2, Nesterov(), Rotated(Gaussian(4)), Direct()), named)
        for step in range(6):
            named["frozen"].requires_grad_(thaws and step > 1)
            for parameter in named.values():
                parameter.data += (1.0 + peers.rank) * parameter.requires_grad
            algorithm.bind(set(named.values()))
            algorithm.adopt(named)
            algorithm.after_step(set(named.values()))
        assert bool(named["frozen"].any()) == thaws
        return peers.stats.values_averaged

    assert on_all_ranks(2, sent) == [15 + 14 * thaws] * 2


def test_looking_before_the_first_agreement_changes_nothing() -> None:
    """Though after some steps, none of which is a turn where the interval counts epochs."""

    def work(peers: FakePeers) -> None:
        named = _weight(3)
        algorithm = begun(peers, LocalSGD(1, Nesterov(), unit="epoch"), named)
        named["weight"].data += 1.0 + peers.rank
        algorithm.after_step(named.values())
        assert algorithm.enter_consensus()
        assert named["weight"].tolist() == [0.0] * 3
        algorithm.leave_consensus()
        assert named["weight"].tolist() == [1.0 + peers.rank] * 3

    on_all_ranks(2, work)


def test_weights_that_are_loaded_when_training_starts_are_shared() -> None:
    """And are no progress, by which momentum would go on."""

    def work(peers: FakePeers) -> list[float]:
        named = _weight(3)
        algorithm = begun(peers, LocalSGD(2, Nesterov()), named)
        named["weight"].data += 100.0
        for _ in range(6):
            algorithm.start()
            algorithm.after_step(named.values())
        return named["weight"].tolist()

    assert on_all_ranks(2, work) == [[100.0] * 3] * 2


# Under a trainer


# Hosts


class Rare(nn.Module):
    """One parameter that only rank 0 uses, in one of three batches, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = small_model(), 0
        self.rare, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        used = dist.get_rank() == 0 and self.count % 3 == 1
        return self.inner(x) + (self.rare if used else 0)


def _of_hosts(algorithm: LocalSGD | AllReduce, hosts: str) -> Tensor:
    """This rank's parameters after each step, and with what it ends; the rare ones come last."""
    module, weights = Rare(), list[Tensor]()

    def note() -> None:
        weights.append(torch.cat([parameters_to_vector(module.inner.parameters()), module.rare, module.never]).detach())

    with (
        process_group(),
        mock.patch("ringstrategy.transport.connect.this_host", return_value=hosts[dist.get_rank()]),
        opened(module, algorithm) as (session, optimizer),
    ):
        for data in batches(9):
            train(session, optimizer, iter([data]))
            note()
        session.finish()
        note()
        return torch.stack(weights)


def test_ranks_of_a_host_stay_equal_and_hosts_meet_seldom(ranks: Pool) -> None:
    algorithm = LocalSGD(4, Nesterov(0.7, 0.3), collective=Hierarchical(), overlap=2, within_host=True)
    one, two, three, four = ranks(4, _of_hosts, algorithm, "aabb")
    assert torch.equal(one, two)
    assert torch.equal(three, four)
    assert (one != three).any(1).tolist() == [True] * 9 + [False]
    assert ((one[-1, -5:-2] > 0) & (one[-1, -5:-2] < 1)).all()
    assert one[-1, -2:].tolist() == [1, 1]
    alone = ranks(2, _of_hosts, algorithm, "ab")  # nobody shares a host
    assert not torch.equal(alone[0][0], alone[1][0])
    ring, within = (ranks(2, _of_hosts, each, "aa")[0] for each in (AllReduce(), LocalSGD(4, within_host=True)))
    torch.testing.assert_close(ring, within, rtol=1e-5, atol=1e-6)


# Under a trainer


class SeesShared(Callback):
    """That training starts with what the checkpoint holds as what is shared; and with its outer momentum?"""

    def __init__(self, path: str) -> None:
        self.saved = torch.load(path, weights_only=True)
        self.momentum: bool | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.momentum is None:
            shared = trainer.strategy.algorithm.state_dict()["shared"]
            ours, held = self.saved.get("ringstrategy", {"algorithm": {}}), pl_module.state_dict()
            before = ours["algorithm"].get("shared", {})
            for name, value in self.saved["state_dict"].items():
                assert torch.equal(shared[name]["values"], value)
                assert torch.equal(held[name], value)
            both = ([each[name]["outer"].get("momentum") for name in each] for each in (shared, before))
            self.momentum = bool(before) and all(map(torch.equal, *both))


class Restores(Callback):
    """Ends with other weights than were trained, as callbacks do that restore the best ones."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(0.25)


def _save_after(epochs: int, begin: str | None, end: str, *callbacks: Callback) -> None:
    strategy = RingStrategy(LocalSGD(2, Nesterov()))
    fit(strategy, Net(), ckpt_path=begin, max_epochs=epochs, callbacks=[*callbacks]).save_checkpoint(end)


def _resumes(path: str) -> bool | None:
    sees = SeesShared(path)
    fit(RingStrategy(LocalSGD(2, Nesterov())), Net(), ckpt_path=path, max_epochs=3, callbacks=[sees])
    return sees.momentum


def test_what_is_in_a_checkpoint_is_what_ranks_share_also_if_others_saved_it(ranks: Pool, tmp_path: Path) -> None:
    three, one, restored = (str(tmp_path / f"{name}.ckpt") for name in ("three", "one", "restored"))
    ranks(3, _save_after, 1, None, three)
    assert ranks(2, _resumes, three) == [True, True]
    ranks(1, _save_after, 2, three, one)  # a single rank trained in between
    ranks(2, _save_after, 2, None, restored, Restores())
    for path in (one, restored):
        assert None not in ranks(2, _resumes, path)

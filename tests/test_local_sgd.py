"""Local SGD and DiLoCo: beside a numpy twin, the same shared parameters on all ranks, and what users do with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, of_each_rank, on_all_ranks
from lightning.pytorch.callbacks import Callback
from pool import Pool
from test_gossip import SHAPES, flat_of, of_ranks, run
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
    Gossip,
    Hierarchical,
    LocalSGD,
    MuonAdamW,
    Nesterov,
    Peers,
    PlanMismatchError,
    RingStrategy,
    Rotated,
    Sign,
    SmallExact,
)
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.names import STRATEGIES

STEPS = 30


def begun(peers: Peers, algorithm: LocalSGD, named: Mapping[str, nn.Parameter], *stepped: str) -> LocalSGD:
    """A copy, which averages them; an optimizer steps those, or all of them."""
    algorithm = copy.deepcopy(algorithm)
    algorithm.setup(named, peers)
    algorithm.bind({named[name] for name in stepped or named})
    return algorithm


def firsts_of(algorithm: LocalSGD) -> np.ndarray:
    """The turn of each value's first exchange, counted from the end of the warm-up."""
    named = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    parts = cut_fragments(named, algorithm.fragments)
    turns = {name: (place + 1) * algorithm.interval // len(parts) for place, part in enumerate(parts) for name in part}
    return flat_of({name: np.full(shape, turns[name]) for name, shape in SHAPES.items()})


def twin(algorithm: LocalSGD, size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """All ranks' values (N, d) at the end, and Theta (d) after each step: in float64, as the papers write it."""
    start, late, outer = algorithm.schedule.start, algorithm.schedule.late, algorithm.outer or Nesterov(1.0, 0.0)
    assert isinstance(outer, Nesterov)
    [theta], firsts = of_ranks(1), firsts_of(algorithm)
    values, momentum, awaited, thetas = np.stack([theta] * size), 0 * theta, theta != theta, []
    sent = values
    for step in range(STEPS):
        values = values + of_ranks(size, step)
        since = (step + 1 - start - firsts) % algorithm.interval
        if step < start:
            theta = values.mean(0)
            values = np.stack([theta] * size)
        for lands in (late > 0, late == 0) if step >= start else ():
            if lands:
                due = awaited & (since == late % algorithm.interval)
                gradient = theta - sent.mean(0)
                momentum = np.where(due, outer.momentum * momentum + gradient, momentum)
                theta = np.where(due, theta - outer.lr * (gradient + outer.momentum * momentum), theta)
                values, awaited = np.where(due, theta + values - sent, values), awaited & ~due
            else:
                sent, awaited = np.where(since == 0, values, sent), awaited | (since == 0)
        thetas.append(theta)
    return values, thetas


ALGORITHMS = {
    "plain": (LocalSGD(4), 0.0),
    "momentum": (LocalSGD(4, Nesterov()), 0.0),
    "carried": (LocalSGD(6, Nesterov(0.8, 0.6), overlap=2), 0.0),
    "carried whole": (LocalSGD(3, Nesterov(0.5, 0.5), overlap=True), 0.0),
    "streaming": (LocalSGD(8, Nesterov(), fragments=3, overlap=3, warmup_steps=3), 0.0),
    "fragments at once": (LocalSGD(7, Nesterov(1.0, 0.0), fragments=2), 0.0),
    "epochs": (LocalSGD(2, unit="epoch"), 0.0),  # of two steps
    "encoded": (LocalSGD(4, Nesterov(), Rotated(Gaussian(4)), Direct(), overlap=2), 1.0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_agree_with_a_numpy_twin(name: str) -> None:
    """And hold the same shared parameters to the bit, after each step, whatever the codec."""
    algorithm, loss = ALGORITHMS[name]
    for size in (2, 3, 8):
        expected, thetas = twin(LocalSGD(4) if algorithm.unit == "epoch" else algorithm, size)

        def noted(peers: FakePeers) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
            told: list[np.ndarray] = []
            own, seen, *_ = run(peers, algorithm, STEPS, lambda mine: told.append(flat_of(mine.shared_values())))
            return own, seen, told

        found = on_all_ranks(size, noted)
        for rank, (own, seen, told) in enumerate(found):
            np.testing.assert_allclose(own, expected[rank], rtol=1e-5, atol=1e-6 + loss, err_msg=f"rank {rank}")
            np.testing.assert_allclose(told, thetas, rtol=1e-5, atol=1e-6 + loss)
            np.testing.assert_array_equal(told, found[0][2])
            np.testing.assert_array_equal(seen, told[-1])
        assert (np.abs(found[0][2] - np.stack(thetas)).max() > 1e-3) == (loss > 0)
        assert np.abs(found[1][0] - found[0][0]).max() > 0.01


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


@of_each_rank(2)
def test_rounding_to_16_bits_is_no_progress(peers: FakePeers) -> None:
    """Nothing moves, though the shared parameters are no values of this dtype."""
    named = _weight(3, dtype=torch.bfloat16)
    algorithm = begun(peers, LocalSGD(1, Nesterov(0.4, 0.0)), named)
    named["weight"].data.fill_(1.0 + peers.rank * 2**-7)
    found = set()
    for _ in range(5):
        algorithm.after_step(named.values())
        found.add(algorithm.shared_values()["weight"][0].item())
    assert len(found) == 1


def test_fragments_are_whole_layers_of_about_the_same_bytes() -> None:
    def parts(layers: int, embedding: int, count: int) -> list[set[str]]:
        """The layers of each fragment."""
        shapes = {"embed.weight": (embedding, 8)}
        for layer in range(layers):
            shapes |= {f"blocks.{layer}.up.weight": (32, 8), f"blocks.{layer}.down.weight": (8, 32)}
        named = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        found = cut_fragments(named, count)
        assert sum(map(len, found)) == len(named)
        return [{".".join(name.split(".")[:2]) for name in part} for part in found]

    strided = [{f"blocks.{place}", f"blocks.{place + 3}"} for place in range(3)]
    assert parts(6, 200, 4) == [{"embed.weight"}, *strided]
    assert parts(7, 100, 4)[0] == {"embed.weight"}, "apart, though smaller than the others"
    assert len(parts(7, 20, 4)[0]) > 1, "too small for that"
    assert len(parts(9, 1, 1)) == 1


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
@of_each_rank(2)
def test_no_step_is_lost_at_the_end_nor_where_an_optimizer_gets_more(
    peers: FakePeers, algorithm: LocalSGD, places: list[float], means: list[float]
) -> None:
    """Rank r moves by 1 + r a step: how far is the model after 14 steps, 28, and when its optimizer gets another?

    And where is this rank after the first agreement that follows the first end?
    """
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
    found = [float(value) for value in found]
    if not places:
        assert len(set(found[:2])) == len(set(found[2:4])) == 1, "all ranks end alike"
    else:
        assert trail[15] == pytest.approx(places[peers.rank])
        assert found == pytest.approx(np.repeat(means, 2), rel=1e-5)


# Beside the parameters


@pytest.mark.parametrize("overlap", [False, 1])
@of_each_rank(2)
def test_buffers_that_have_a_mean_get_it_once_however_many_optimizers_there_are(
    peers: FakePeers, overlap: bool | int
) -> None:
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
    assert found[2:] == [1.5] * 4


@pytest.mark.parametrize("thaws", [True, False])
@of_each_rank(2)
def test_frozen_parameters_are_neither_sent_nor_moved_until_they_are_thawed(peers: FakePeers, thaws: bool) -> None:
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
    assert peers.stats.values_averaged == 15 + 14 * thaws


@of_each_rank(2)
def test_with_muon_inside_the_log_names_its_outer_step(peers: FakePeers) -> None:
    for name, make, outer, said in (
        ("diloco_int4", MuonAdamW, None, 1),
        ("diloco_int4", MuonAdamW, Nesterov(0.7, 0.6), 0),
        ("diloco_int4", torch.optim.AdamW, None, 0),
        ("local_sgd", MuonAdamW, None, 0),
    ):
        weight = nn.Parameter(torch.ones(3, 4))
        algorithm = STRATEGIES[name]() if outer is None else LocalSGD(outer=outer)
        algorithm.setup({"weight": weight}, peers)
        algorithm.bind([weight], make([("weight", weight)], 1e-3))
        assert ["try LocalSGD(outer=Nesterov(0.7, 0.6))" in line for line in algorithm.news()] == [True] * said
        algorithm.close()


@of_each_rank(2)
def test_looking_before_the_first_agreement_changes_nothing(peers: FakePeers) -> None:
    """Though after some steps, none of which is a turn where the interval counts epochs."""
    named = _weight(3)
    algorithm = begun(peers, LocalSGD(1, Nesterov(), unit="epoch"), named)
    named["weight"].data += 1.0 + peers.rank
    algorithm.after_step(named.values())
    assert algorithm.enter_consensus()
    assert named["weight"].tolist() == [0.0] * 3
    algorithm.leave_consensus()
    assert named["weight"].tolist() == [1.0 + peers.rank] * 3


@of_each_rank(2)
def test_weights_that_are_loaded_when_training_starts_are_shared(peers: FakePeers) -> None:
    """And are no progress, by which momentum would go on."""
    named = _weight(3)
    algorithm = begun(peers, LocalSGD(2, Nesterov()), named)
    named["weight"].data += 100.0
    for _ in range(6):
        algorithm.start()
        algorithm.after_step(named.values())
    assert named["weight"].tolist() == [100.0] * 3


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


class Begins(Callback):
    """Training begins with what the checkpoint holds. Local SGD shares the same, and goes on with its momentum."""

    def __init__(self, path: str) -> None:
        self.saved = torch.load(path, weights_only=True)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        saved, shared = self.saved.pop("state_dict", None), trainer.strategy.algorithm.state_dict().get("shared")
        before = self.saved.get("ringstrategy", {"algorithm": {}})["algorithm"].get("shared")
        for name, value in pl_module.state_dict().items() if saved and trainer.world_size > 1 else ():
            assert torch.equal(saved[name], value)
            if shared:
                assert torch.equal(shared[name]["values"], value)
            if shared and before:
                assert torch.equal(shared[name]["outer"]["momentum"], before[name]["outer"]["momentum"])


def _goes_on(algorithm: Periodic, folder: str, epochs: int) -> None:
    """From where a run of an epoch less has ended, whatever its size was."""
    begin = f"{folder}/{epochs - 1}.ckpt" if epochs > 1 else None
    callbacks = [] if begin is None else [Begins(begin)]
    trainer = fit(RingStrategy(algorithm), Net(), ckpt_path=begin, max_epochs=epochs, callbacks=callbacks)
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(2, Nesterov())], ids=str)
def test_a_checkpoint_holds_what_ranks_share_for_any_number_of_them(
    ranks: Pool, tmp_path: Path, algorithm: Periodic
) -> None:
    for epochs, size in ((1, 3), (2, 2), (3, 1), (4, 2)):
        ranks(size, _goes_on, algorithm, str(tmp_path), epochs)
    assert len(list(tmp_path.glob("*.ckpt"))) == 4


@of_each_rank(2)
def test_ranks_with_other_outer_optimizers_or_codecs_are_told(peers: FakePeers) -> None:
    policies = SmallExact(BlockInt(8)), SmallExact(BlockInt(4))
    by_policy = LocalSGD(codec=lambda *named: policies[peers.rank](*named), collective=Direct())
    messages = []
    for algorithm in (LocalSGD(outer=Nesterov((0.7, 0.5)[peers.rank])), by_policy):
        with pytest.raises(PlanMismatchError) as raised:
            algorithm.setup({"weight": nn.Parameter(torch.zeros(64, 64))}, peers)
        messages.append(str(raised.value))
    outer, codec = messages
    assert all(each in outer for each in ("lr=0.7", "lr=0.5"))
    assert all(each in codec for each in ("bits=4", "bits=8"))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@of_each_rank(2)
def test_directions_agree_from_minus_one_to_one(peers: FakePeers, sign: float) -> None:
    named = _weight(64)
    algorithm = begun(peers, LocalSGD(1), named)
    named["weight"].data.add_(torch.linspace(0, 1, 64) * (sign if peers.rank else 1.0))
    algorithm.after_step(named.values())
    metrics = algorithm.metrics()
    assert metrics["direction_agreement"] == pytest.approx(sign)
    assert metrics["outer_gradient_norm"] == pytest.approx(torch.linspace(0, 1, 64).norm() if sign > 0 else 0.0)
    assert algorithm.metrics() == {}

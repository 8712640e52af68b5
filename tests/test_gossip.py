"""Decentralized averaging: real processes beside a plain numpy twin, the mean kept, and what people get to see."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from pool import Pool, RankFailed
from test_strategy import Net, fit, gathered, net, rows, run_script, said, same_everywhere, trainer_with, world
from torch import Tensor, nn

from ringstrategy import AllReduce, BlockInt, Cast, Gossip, Identity, PlanMismatchError, RingStrategy
from ringstrategy.algorithms import gossip
from ringstrategy.collectives.peers import connect
from ringstrategy.topologies import (
    Complete,
    Exponential,
    FromGraph,
    FromMatrix,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RingGraph,
    Star,
    Topology,
    Torus,
)

pytestmark = pytest.mark.timeout(120)
TOPOLOGIES: list[Topology] = [
    RingGraph(),
    Exponential(),
    OnePeerExponential(),
    Torus(),
    Star(),
    Hypercube(),
    RandomMatching(3),
    Complete(),
    Hierarchical(1),
]
Arrays = dict[str, np.ndarray]
SHAPES = {"wide": (7, 5), "bias": (3,), "scalar": (), "empty": (0, 4), "long": (40,)}


def values_of(rank: int) -> Arrays:
    random = np.random.default_rng(rank)
    return {name: random.standard_normal(shape) for name, shape in SHAPES.items()}


def change_of(rank: int, step: int) -> Arrays:
    random = np.random.default_rng([rank, step])
    return {name: 0.1 * random.standard_normal(shape) for name, shape in SHAPES.items()}


def run(
    algorithm: Gossip, steps: int, changing: bool = True, piece: int = gossip.PIECE
) -> tuple[Arrays, Arrays, float]:
    """This rank's parameters after `steps`, the mean it saw at the end, and the consensus distance."""
    gossip.PIECE = piece  # type: ignore[misc]
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    parameters = {name: nn.Parameter(torch.tensor(v).float()) for name, v in values_of(peers.rank).items()}
    try:
        algorithm.setup(parameters, peers)
        for step in range(steps):
            with torch.no_grad():
                for name, change in change_of(peers.rank, step).items() if changing else ():
                    parameters[name] += torch.tensor(change).float()
            algorithm.after_step(set(parameters.values()))
        assert (peers.stats.bytes_sent or 0) > 0
        assert algorithm.enter_consensus()
        mean = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
        algorithm.leave_consensus()
        distance = algorithm.consensus_distance()
        return {name: p.detach().numpy() for name, p in parameters.items()}, mean, distance
    finally:
        algorithm.close()
        peers.close()
        dist.destroy_process_group()


def twin(topology: Topology, size: int, steps: int, interval: int, overlap: bool) -> list[Arrays]:
    """The same in ten lines of float64."""
    ranks = [values_of(rank) for rank in range(size)]
    flying, mixing = None, 0
    for step in range(steps):
        for rank in range(size):
            ranks[rank] = {name: ranks[rank][name] + change_of(rank, step)[name] for name in SHAPES}
        if (step + 1) % interval == 0:
            for late in (True, False):
                if late or not overlap:
                    for name in SHAPES if flying else ():
                        before = np.stack([rank[name] for rank in flying])
                        after = np.tensordot(topology.matrix(size, mixing).numpy(), before, 1)
                        for rank in range(size):
                            ranks[rank][name] = ranks[rank][name] + after[rank] - before[rank]
                    mixing, flying = mixing + (flying is not None), None
                if late:
                    flying = [dict(rank) for rank in ranks]
    return ranks


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_real_processes_agree_with_a_numpy_twin(ranks: Pool, size: int) -> None:
    apart = []
    for number, topology in enumerate(TOPOLOGIES):
        interval, overlap = (1, 1, 3)[number % 3], number % 2 == 0
        found = ranks(size, run, Gossip(topology, interval=interval, overlap=overlap), 20)
        expected = twin(topology, size, 20, interval, overlap)
        for rank in range(size):
            for name in SHAPES:
                own, mean, _ = found[rank]
                np.testing.assert_allclose(own[name], expected[rank][name], rtol=0, atol=1e-6)
                np.testing.assert_allclose(mean[name], np.mean([one[name] for one in expected], 0), rtol=0, atol=1e-6)
                np.testing.assert_array_equal(mean[name], found[0][1][name])
        flat = [np.concatenate([rank[name].ravel() for name in SHAPES]) for rank in expected]
        distance = np.mean([np.square(one - np.mean(flat, 0)).sum() for one in flat])
        assert found[0][2] == pytest.approx(distance, abs=1e-5)
        apart.append(max(np.abs(one - flat[0]).max() for one in flat))
    assert size == 2 or max(apart) > 0.1


def _interrupted() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    algorithm = Gossip()
    parameters = {
        name: nn.Parameter(torch.full((5,), float(peers.rank), dtype=dtype))
        for name, dtype in (("narrow", torch.float32), ("wide", torch.float64))
    }
    algorithm.setup(parameters, peers)
    algorithm.after_step(set(parameters.values()))
    algorithm.settle()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    finish, calls = peers.finish, []

    def fail_at_second(tickets: Any) -> None:
        finish(tickets)
        calls.append(tickets)
        if len(calls) == 2:
            raise RuntimeError("a peer was lost")

    peers.finish = fail_at_second  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        algorithm.enter_consensus()
    assert not torch.equal(parameters["narrow"], before["narrow"]) or peers.size == 1
    algorithm.leave_consensus()
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    peers.finish = finish  # type: ignore[method-assign]

    algorithm.after_step(set(parameters.values()))  # leaves an exchange under way
    begin = time.perf_counter()
    algorithm.close()
    peers.close()
    assert time.perf_counter() - begin < 10
    dist.destroy_process_group()


def test_a_consensus_that_fails_half_way_gives_own_values_back_and_closing_waits_for_what_is_under_way(
    ranks: Pool,
) -> None:
    ranks(2, _interrupted)


def test_cutting_into_pieces_changes_no_bit(ranks: Pool) -> None:
    whole, pieces = (ranks(3, run, Gossip(Star(), Cast("float16")), 5, True, piece) for piece in (1 << 21, 16))
    for rank in range(3):
        for name in SHAPES:
            np.testing.assert_array_equal(whole[rank][0][name], pieces[rank][0][name])


@pytest.mark.parametrize("codec", [Identity(), Cast("bfloat16")])
@pytest.mark.parametrize("topology", [RingGraph(), OnePeerExponential(), FromGraph([(0, 1), (1, 2), (2, 3), (3, 4)])])
def test_a_thousand_mixings_keep_the_mean_and_reach_it(ranks: Pool, topology: Topology, codec: Any) -> None:
    found = ranks(5, run, Gossip(topology, codec, overlap=False), 1000, False)
    for name in SHAPES:
        start = np.stack([values_of(rank)[name] for rank in range(5)])
        end = np.stack([own[name] for own, _, _ in found])
        rounding, close = (2e-6, 1e-5) if codec == Identity() else (3e-5, 0.03)  # bfloat16 cannot bring them closer
        np.testing.assert_allclose(end.mean(0), start.mean(0), rtol=0, atol=rounding)
        np.testing.assert_allclose(end, np.broadcast_to(start.mean(0), end.shape), rtol=0, atol=close)
        assert np.abs(start - start.mean(0)).max(initial=1) > 0.1


# Under a trainer


class Watch(Callback):
    """Checks, at every validation, what is there before, during and after it."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def _flat(self, module: L.LightningModule) -> Tensor:
        floats = [t for t in module.state_dict().values() if t.is_floating_point()]
        return torch.cat([t.detach().reshape(-1) for t in floats])

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append((same_everywhere(self._flat(pl_module)), bool(self._flat(pl_module).isfinite().all())))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step > 1:
            assert not same_everywhere(self._flat(pl_module))


def normed() -> Net:
    return net(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3))


def _validates(consensus: bool) -> tuple[list[tuple[bool, bool]], bool, float]:
    watch, model = Watch(), normed()
    strategy = RingStrategy(Gossip(RingGraph() if world() > 3 else Star(), consensus=consensus))
    trainer = trainer_with(strategy, callbacks=[watch], val_check_interval=2)
    trainer.fit(model, rows(96), rows(24))
    assert isinstance(trainer.strategy, RingStrategy)
    assert trainer.strategy.stats.steps == trainer.global_step > 5
    assert trainer.strategy.stats.exposed_seconds > 0
    return watch.seen, same_everywhere(watch._flat(model)), float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("size", [3, 4])
def test_people_see_the_mean_and_training_goes_on_with_each_ranks_own(ranks: Pool, size: int) -> None:
    for seen, same, loss in ranks(size, _validates, True):
        assert len(seen) > 3
        assert all(equal and finite for equal, finite in seen)
        assert same
        assert loss < 1.5
    for seen, same, _ in ranks(size, _validates, False):
        assert not any(equal for equal, _ in seen)
        assert not same


def _validation_changes_nothing() -> tuple[list[float], list[float]]:
    ends = []
    for options in ({"limit_val_batches": 0}, {"val_check_interval": 3}):
        model = Net()
        fit(RingStrategy(Gossip(Star(), overlap=False)), model, **options)
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist())
    return ends[0], ends[1]


def test_validation_changes_nothing_for_training(ranks: Pool) -> None:
    for without, with_validation in ranks(3, _validation_changes_nothing):
        assert without == with_validation


def _resume(folder: str, overlap: bool) -> list[float]:
    """Six steps of twelve, saved at the third: does a second run from there end alike?"""

    def strategy() -> RingStrategy:
        return RingStrategy(Gossip(OnePeerExponential(), interval=2, overlap=overlap, consensus=False))

    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    first = normed()
    fit(strategy(), first, callbacks=[saver], **options)
    path = f"{folder}/epoch=1.ckpt"
    second = normed()
    again = fit(strategy(), second, ckpt_path=path, **{**options, "enable_checkpointing": False})
    assert again.global_step == again.num_training_batches * 4
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    one, two = (t.optimizers[0].state_dict() for t in (again, again))
    assert one.keys() == two.keys()
    own = torch.load(f"{path}.ringstrategy/rank_{again.global_rank:05d}.pt", weights_only=True)["own"]
    saved = torch.load(path, weights_only=True)["state_dict"]
    mean = {name: sum(gathered(value)) / world() for name, value in own["module"].items() if "num" not in name}
    for name, value in mean.items():
        torch.testing.assert_close(saved[name], value)
        assert not torch.equal(saved[name], own["module"][name])
    return first.layers[0].weight.detach().reshape(-1).tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_resuming_is_bit_for_bit_and_the_checkpoint_holds_the_mean(ranks: Pool, overlap: bool, tmp_path: Path) -> None:
    one, two, three = ranks(3, _resume, str(tmp_path), overlap)
    assert one != two != three != one


def _save(folder: str) -> None:
    fit(RingStrategy(Gossip()), Net(), callbacks=[ModelCheckpoint(folder, "saved")], enable_checkpointing=True)


def _load(path: str, consensus: bool) -> bool:
    model, starts = Net(), []

    class Start(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            starts.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    fit(RingStrategy(Gossip(consensus=consensus)), model, ckpt_path=path, max_epochs=3, callbacks=[Start()])
    saved = torch.load(path, weights_only=True)["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in starts[0].items())


def test_another_number_of_ranks_starts_from_the_mean_and_so_do_ranks_whose_files_are_gone(
    ranks: Pool, tmp_path: Path
) -> None:
    ranks(3, _save, str(tmp_path))
    path = tmp_path / "saved.ckpt"
    assert ranks(2, _load, str(path), True) == [True, True]
    assert ranks(3, _load, str(path), True) == [False, False, False]
    next((tmp_path / "saved.ckpt.ringstrategy").glob("rank_00001*")).unlink()
    assert ranks(3, _load, str(path), True) == [True, True, True]


def _other_family(path: str) -> None:
    trainer = fit("ring_int8", Net(), ckpt_path=path, max_epochs=3)
    assert same_everywhere(torch.cat([p.reshape(-1) for p in trainer.lightning_module.parameters()]))


def test_a_run_of_another_kind_takes_the_weights(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _save, str(tmp_path))
    ranks(2, _other_family, str(tmp_path / "saved.ckpt"))


class Gan(Net):
    """Two optimizers, the second stepping every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, part in ((first, self.layers), (second, self.other)):
            if optimizer is first or batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward((part(batch[0]) - batch[1]).square().mean())
                optimizer.step()
        self.count += 1 + self.global_rank

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)


def _gan() -> tuple[list[int], int]:
    model = Gan()
    model.layers[0].bias.ring_local = True
    with torch.no_grad():
        model.layers[0].bias += int(os.environ["RANK"])
    trainer = fit(RingStrategy(Gossip(Complete(), overlap=False)), model)
    assert isinstance(trainer.strategy, RingStrategy)
    algorithm = trainer.strategy.algorithm
    assert same_everywhere(model.other.weight)
    assert not same_everywhere(model.layers[0].bias), "local"
    state = algorithm.state_dict()
    return sorted(set(state["mixings"].values())), int(model.count)


def test_each_optimizer_mixes_its_own_parameters_and_whole_numbers_are_never_mixed(ranks: Pool) -> None:
    (few, many), counts = zip(*ranks(2, _gan), strict=True)
    assert few == many
    assert len(few) == 2
    assert few[1] == 2 * few[0]
    assert counts[1] == 2 * counts[0] > 0


def _differs(rank_topologies: list[Topology]) -> None:
    fit(RingStrategy(Gossip(rank_topologies[int(os.environ["RANK"])])), Net())


def test_ranks_with_other_topologies_are_told_so(ranks: Pool) -> None:
    outcomes = ranks.outcomes(2, _differs, [RingGraph(), Star()])
    for _, error in outcomes:
        assert error is not None
        assert "PlanMismatchError" in error
        assert "Star()" in error
    assert PlanMismatchError.__name__ in str(outcomes)


def _impossible(topology: Topology) -> None:
    fit(RingStrategy(Gossip(topology)), Net())


def test_a_topology_of_another_size_is_refused_before_training(ranks: Pool) -> None:
    with pytest.raises(RankFailed, match="describes 2 ranks, but there are 3"):
        ranks(3, _impossible, FromGraph([(0, 1)]))


def _plainly() -> None:
    ends = []
    for strategy in (RingStrategy(Gossip()), "auto"):
        model = Net()
        fit(strategy, model, use_distributed_sampler=False)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_one_rank_trains_plainly(ranks: Pool) -> None:
    ranks(1, _plainly)


SPAWNED = """
import json
import os
from test_strategy import Net, fit, torch
from ringstrategy import Gossip, RingStrategy

if __name__ == "__main__":
    model = Net()
    trainer = fit(RingStrategy(Gossip(), start_method="spawn"), model, devices=3, enable_checkpointing=True)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    print(json.dumps({"same": all(torch.allclose(saved[n], v) for n, v in model.state_dict().items())}))
"""


def test_spawned_processes_return_the_mean(tmp_path: Path) -> None:
    done = run_script(tmp_path, SPAWNED)
    assert said(done.stdout) == [{"same": True}], done.stderr


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Gossip(interval=0), ValueError, "at least 1"),
        (lambda: Gossip(interval=True), ValueError, "at least 1"),
        (lambda: Gossip("ring"), TypeError, r"RingGraph\(\)"),
        (lambda: Gossip(overlap=1), TypeError, "overlap is True or False"),
        (lambda: Gossip(codec=BlockInt(8)), ValueError, "never agree"),
        (lambda: Gossip(local="bias"), TypeError, "function"),
        (lambda: Gossip(FromMatrix([[0.5, 1.0], [0.5, 0.0]])), ValueError, "rows"),
    ],
)
def test_what_would_not_average_is_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_it_prints_its_arguments() -> None:
    text = repr(Gossip(Torus(2), Cast("float16"), interval=3, overlap=False))
    assert text.startswith("Gossip(topology=Torus(rows=2), codec=Cast(dtype=torch.float16), interval=3, overlap=False")
    assert not AllReduce().decentralized
    assert json.dumps(Gossip().state_dict())

"""Decentralized averaging: real processes beside a plain numpy twin, the mean kept, and what people get to see."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, on_all_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pool import Pool, RankFailed
from rank_files import rank_file, rank_state
from test_feedback import scaler
from test_strategy import Net, fit, gathered, net, rows, run_script, said, same_everywhere, trainer_with, world
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    BlockInt,
    Cast,
    Choco,
    CommunicationMonitor,
    Gaussian,
    Gossip,
    Identity,
    PeerLostError,
    PlanMismatchError,
    PushSum,
    RingStrategy,
    Rotated,
    Sign,
)
from ringstrategy.algorithms.parameters import exchange
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.group import Flat, Vector, cut_like
from ringstrategy.collectives.base import sums_dtype
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
from ringstrategy.transport.connect import connect

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
SHAPES = {
    "wide": (7, 5),
    "bias": (3,),
    "scalar": (),
    "empty": (0, 4),
    "long": (300,),
}  # of 339, the first 256 are rotated

GRID = 15 / 1024  # values on it have exact sums and exact means over 2, 3, 4, 5 and 8 ranks


def values_of(rank: int) -> Arrays:
    random = np.random.default_rng(rank)
    return {name: GRID * np.rint(random.standard_normal(shape) / GRID) for name, shape in SHAPES.items()}


def change_of(rank: int, step: int) -> Arrays:
    random = np.random.default_rng([rank, step])
    return {name: GRID * np.rint(0.1 * random.standard_normal(shape) / GRID) for name, shape in SHAPES.items()}


def flat_of(arrays: Arrays) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in SHAPES])


def run(
    algorithm: Decentralized, steps: int, changing: bool = True, piece: int = exchange.PIECE
) -> tuple[np.ndarray, np.ndarray, float, dict[str, Tensor]]:
    """This rank's parameters after `steps`, the mean it saw at the end, the consensus distance, and what it keeps."""
    exchange.PIECE = piece  # type: ignore[misc]
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    parameters = {name: nn.Parameter(torch.tensor(v).float()) for name, v in values_of(peers.rank).items()}

    def now() -> np.ndarray:
        return flat_of({name: parameter.detach().numpy() for name, parameter in parameters.items()})

    try:
        algorithm.setup(parameters, peers)
        for step in range(steps):
            with torch.no_grad():
                for name, change in change_of(peers.rank, step).items() if changing else ():
                    parameters[name] += torch.tensor(change).float()
            algorithm.after_step(set(parameters.values()))
        assert (peers.stats.bytes_sent or 0) > 0
        assert algorithm.enter_consensus()
        mean = now()
        algorithm.leave_consensus()
        distance = algorithm.consensus_distance()
        assert distance is not None
        (group,) = algorithm._groups
        return now(), mean, distance, {kind: kept.clone() for kind, kept in group.flats[0].memory.items()}
    finally:
        algorithm.close()
        peers.close()
        dist.destroy_process_group()


class GossipTwin:
    """What is sent, and what lands, of all ranks' values (N, d): the algorithm in float64."""

    def __init__(self, start: np.ndarray) -> None:
        self.total = np.zeros_like(start)

    def send(self, values: np.ndarray) -> np.ndarray:
        return values

    def land(self, values: np.ndarray, sent: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return values + matrix @ sent - sent

    def mean(self, values: np.ndarray) -> np.ndarray:
        return values.mean(0)


class UnequalTwin(GossipTwin):
    def send(self, values: np.ndarray) -> np.ndarray:
        return values + self.total

    def land(self, values: np.ndarray, sent: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        self.total = self.total + (matrix @ sent - sent) / 2
        return values + self.total


class UnequalLateTwin(UnequalTwin):
    def __init__(self, start: np.ndarray) -> None:
        super().__init__(start)
        self.before = start

    def send(self, values: np.ndarray) -> np.ndarray:
        before, self.before = self.before, values
        return 2 * values - before


class PushSumTwin(GossipTwin):
    def __init__(self, start: np.ndarray) -> None:
        self.numerators, self.weights, self.quotients = start, np.ones((len(start), 1)), start

    def send(self, values: np.ndarray) -> np.ndarray:
        self.numerators, self.quotients = self.numerators + values - self.quotients, values
        return self.numerators

    def land(self, values: np.ndarray, sent: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        self.numerators = self.send(values) + matrix @ sent - sent
        self.weights = matrix @ self.weights
        self.quotients = self.numerators / self.weights
        return self.quotients

    def mean(self, values: np.ndarray) -> np.ndarray:
        return self.send(values).mean(0)


class ChocoTwin(GossipTwin):
    """In float32, operation by operation: another last bit could turn a rounding, or the choice of a largest value."""

    def __init__(self, start: np.ndarray, gain: float = 1.0) -> None:
        self.gain, self.copies = gain, np.broadcast_to(start.mean(0), start.shape).astype(np.float32)

    def lossy(self, blocks: np.ndarray) -> np.ndarray:
        return blocks

    def send(self, values: np.ndarray) -> np.ndarray:
        unknown = values.astype(np.float32) - self.copies
        blocks = np.pad(unknown, ((0, 0), (0, -unknown.shape[1] % 16))).reshape(-1, 16)
        self.copies = self.copies + self.lossy(blocks).reshape(len(values), -1)[:, : values.shape[1]]
        return self.copies

    def land(self, values: np.ndarray, sent: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        corrections = np.zeros_like(sent)
        for rank, source in zip(*np.nonzero(matrix), strict=True):
            corrections[rank] += np.float32(self.gain * matrix[rank, source]) * (sent[source] - sent[rank])
        return values.astype(np.float32) + corrections


class ChocoIntTwin(ChocoTwin):
    def __init__(self, start: np.ndarray, gain: float, largest: int) -> None:
        super().__init__(start, gain)
        self.largest = largest

    def lossy(self, blocks: np.ndarray) -> np.ndarray:
        """BlockInt with absmax, as docs/wire-format.md has it."""
        bound = np.abs(blocks).max(1, keepdims=True) * np.float32(1 / self.largest)
        bits = np.maximum(bound, np.float32(2.0**-126)).view(np.uint32) + np.uint32(0xFFFF)
        scale = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        return np.rint(blocks * (1 / scale)) * scale


def twin(
    make: Callable[[np.ndarray], GossipTwin], topology: Topology, size: int, steps: int, interval: int, late: int
) -> tuple[np.ndarray, np.ndarray]:
    """All ranks' parameters (N, d), and their mean as people see it."""
    values = np.stack([flat_of(values_of(rank)) for rank in range(size)])
    algorithm, sent, mixing = None, None, 0
    for step in range(steps):
        values = values + np.stack([flat_of(change_of(rank, step)) for rank in range(size)])
        algorithm = make(values) if algorithm is None else algorithm
        place = (step + 1) % interval
        for now in (True, False):
            if sent is not None and (place in (0, late) if now else late == 0):
                values = algorithm.land(values, sent, topology.matrix(size, mixing).numpy())
                sent, mixing = None, mixing + 1
            if now and place == 0:
                sent = algorithm.send(values)
    assert algorithm is not None
    return values, algorithm.mean(values)


def directed(size: int) -> FromMatrix:
    """Everyone sends to the next, and rank 0 to everyone: columns sum to 1, rows do not."""
    sends = np.eye(size) + np.roll(np.eye(size), 1, 0)
    sends[:, 0] = 1
    return FromMatrix((np.minimum(sends, 1) / np.minimum(sends, 1).sum(0)).tolist())


@pytest.mark.parametrize("late", [1, 2, 3])
def test_corrections_that_are_some_steps_late(ranks: Pool, late: int) -> None:
    for make, twin_class, topology in (
        (Gossip, GossipTwin, OnePeerExponential()),
        (PushSum, PushSumTwin, directed(3)),
        (partial(Choco, codec=Identity()), ChocoTwin, RingGraph()),
    ):
        algorithm = make(topology, interval=4, overlap=late)
        steps = 16 + late  # the last correction has just been applied
        found = ranks(3, run, algorithm, steps)
        expected, mean = twin(twin_class, topology, 3, steps, 4, late)
        assert np.abs(expected - twin(twin_class, topology, 3, steps, 4, late + 1)[0]).max() > 1e-3, "not later"
        assert np.abs(expected - twin(twin_class, topology, 3, steps - 1, 4, late)[0]).max() > 1e-3, "nor earlier"
        for rank, (own, seen, _, _) in enumerate(found):
            np.testing.assert_allclose(own, expected[rank], rtol=1e-6, atol=1e-6, err_msg=f"{make} {topology}")
            np.testing.assert_allclose(seen, mean, rtol=1e-6, atol=1e-6)


def algorithms(size: int) -> list[tuple[Callable[..., Decentralized], Callable[[np.ndarray], GossipTwin], Topology]]:
    gain = 0.7
    at_once = partial(Gossip, overlap=False)
    int8, int2 = (partial(Choco, codec=BlockInt(bits, block=16), gain=gain) for bits in (8, 2))
    sums = [directed(size), OnePeerExponential(), RandomMatching(5)]
    return [
        *[(at_once if number % 2 else Gossip, GossipTwin, topology) for number, topology in enumerate(TOPOLOGIES)],
        *[(partial(Gossip, unequal_data=True), UnequalLateTwin, topology) for topology in (RingGraph(), Star())],
        *[(partial(at_once, unequal_data=True), UnequalTwin, topology) for topology in (RingGraph(), Torus())],
        *[(partial(PushSum, overlap=number != 1), PushSumTwin, topology) for number, topology in enumerate(sums)],
        (partial(Choco, codec=Identity()), ChocoTwin, Torus()),
        (int8, partial(ChocoIntTwin, gain=gain, largest=127), RingGraph()),
        (partial(int2, overlap=False), partial(ChocoIntTwin, gain=gain, largest=1), RingGraph()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_real_processes_agree_with_a_numpy_twin(ranks: Pool, size: int) -> None:
    apart = []
    for number, (make, twin_class, topology) in enumerate(algorithms(size)):
        algorithm = make(topology, interval=(1, 1, 3)[number % 3])
        found = ranks(size, run, algorithm, 20)
        expected, mean = twin(twin_class, topology, size, 20, algorithm.interval, algorithm.late)
        for rank, (own, seen, distance, kept) in enumerate(found):
            np.testing.assert_allclose(own, expected[rank], rtol=1e-6, atol=1e-6, err_msg=f"{make} {topology}")
            np.testing.assert_allclose(seen, mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(seen, found[0][1])
            assert distance == pytest.approx(np.square(expected - mean).sum(1).mean(), abs=1e-4)
            for kind in kept:
                if kind.startswith("copy of"):
                    assert torch.equal(kept[kind], found[int(kind.split()[-1])][3]["copy"])
                    assert rank != int(kind.split()[-1])
        apart.append(np.abs(expected - expected[0]).max())
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


@pytest.mark.parametrize(
    "algorithm", [Gossip(Star(), Cast("float16")), Choco(Star(), BlockInt(4, 64, rounding="stochastic"))]
)
def test_cutting_into_pieces_changes_no_bit(ranks: Pool, algorithm: Decentralized) -> None:
    whole, pieces = (ranks(3, run, algorithm, 5, True, piece) for piece in (1 << 21, 16))
    for rank in range(3):
        np.testing.assert_array_equal(whole[rank][0], pieces[rank][0])


def test_differences_of_narrow_values_keep_their_digits() -> None:
    given = [1.0, 2.0**-10, -300.0]

    def mixed(peers: FakePeers) -> list[float]:
        vector = Vector.of(torch.tensor([given[peers.rank]], dtype=torch.bfloat16))
        exchange.Exchange().mix(Gossip(), vector, peers, 0, 0)
        return vector.correction.tolist()

    weights = [RingGraph().weights(rank, 3, 0) for rank in range(3)]
    for rank, (correction,) in enumerate(on_all_ranks(3, mixed)):
        exact = sum(weight * (given[peer] - given[rank]) for peer, weight in weights[rank].items())
        assert correction == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_is_gathered_in_one_pass(dtype: torch.dtype) -> None:
    parameters = {
        "flipped": nn.Parameter(torch.randn(3, 4).to(dtype).t()),
        "one": nn.Parameter(torch.ones((), dtype=dtype)),
    }
    flat = Flat(parameters, torch.promote_types(dtype, torch.float32), Identity())
    flat.gather()
    known = torch.randn_like(flat.values)
    less = flat.values - known
    flat.gather_sum(known, -1.0)
    assert torch.equal(flat.values, less)
    assert flat.values.dtype == known.dtype


def _kinds(algorithm: Decentralized) -> dict[str, list[float]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    dtypes = {"narrow": torch.bfloat16, "middle": torch.float32, "other": torch.float32, "wide": torch.float64}
    parameters = {
        name: nn.Parameter(torch.tensor([1 + rank / 3, 2.0 - rank]).to(dtype))
        for rank in [peers.rank]
        for name, dtype in dtypes.items()
    }
    algorithm.setup(parameters, peers)
    for _ in range(2):
        algorithm.after_step(set(parameters.values()))
    ends = {name: parameter.detach().double().tolist() for name, parameter in parameters.items()}
    algorithm.close()
    peers.close()
    dist.destroy_process_group()
    return ends


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(Complete(), overlap=False),
        Gossip(Complete(), Cast("float16"), overlap=False),
        PushSum(Complete(), overlap=False),
        Choco(Complete(), Identity(), overlap=False),
    ],
    ids=str,
)
def test_parameters_of_all_widths_are_mixed_in_one_group(ranks: Pool, algorithm: Decentralized) -> None:
    rounding = {"narrow": 2**-7, "middle": 2**-9, "other": 2**-9, "wide": 2**-9}
    for ends in ranks(2, _kinds, algorithm):
        for name, end in ends.items():
            assert end == pytest.approx([7 / 6, 1.5], abs=rounding[name]), name


CHAIN = FromGraph([(0, 1), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("algorithm", "rounding", "close"),
    [
        (Gossip(RingGraph(), overlap=False), 2e-6, 1e-5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Gossip(OnePeerExponential(), overlap=False), 2e-6, 1e-5),
                (Gossip(CHAIN, overlap=False), 2e-6, 1e-5),
                (Gossip(CHAIN, Cast("bfloat16"), overlap=False), 3e-5, 0.03),  # bfloat16 cannot bring them closer
                # what rounding adds, each mixing adds again
                (Gossip(CHAIN, unequal_data=True, overlap=False), 4e-5, 5e-5),
                (PushSum(directed(5), overlap=False), 2e-6, 1e-5),
                (Choco(CHAIN, BlockInt(8), overlap=False), 2e-6, 1e-5),
                (Choco(CHAIN, Sign(), gain=0.2, overlap=False), 2e-6, 0.02),
                (Choco(RingGraph(), Rotated(Gaussian(2)), gain=0.5, overlap=False), 2e-6, 1e-4),
            )
        ),
    ],
)
def test_a_thousand_mixings_keep_the_mean_and_reach_it(
    ranks: Pool, algorithm: Decentralized, rounding: float, close: float
) -> None:
    found = ranks(5, run, algorithm, 1000, False)
    start = np.stack([flat_of(values_of(rank)) for rank in range(5)]).mean(0)
    end = np.stack([own for own, _, _, _ in found])
    np.testing.assert_allclose(found[0][1], start, rtol=0, atol=rounding)
    np.testing.assert_allclose(end, np.broadcast_to(start, end.shape), rtol=0, atol=close)


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


def _resume(folder: str, algorithm: Decentralized) -> list[float]:
    """Four epochs, saved after the second: does a second run from there end alike?"""

    def strategy() -> RingStrategy:
        return RingStrategy(algorithm)

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
    own = rank_state(path, again.global_rank)["own"]
    saved = torch.load(path, weights_only=True)["state_dict"]
    excess = {name: kept.get("excess", 0) for name, kept in own["algorithm"]["kept"].items()}
    mine = own["checkpoint"]["state_dict"]
    held = {name: value + excess.get(name, 0) for name, value in mine.items() if "num" not in name}
    mean = {name: sum(gathered(value)) / world() for name, value in held.items()}
    for name, value in mean.items():
        torch.testing.assert_close(saved[name], value)
        assert not torch.equal(saved[name], mine[name])
    return first.layers[0].weight.detach().reshape(-1).tolist()


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(OnePeerExponential(), interval=2, overlap=False, consensus=False),
        Gossip(OnePeerExponential(), interval=2, consensus=False),
        Gossip(OnePeerExponential(), interval=3, overlap=1, consensus=False),
        Gossip(Star(), interval=1, unit="epoch", overlap=False, consensus=False),
        Gossip(Star(), unequal_data=True, interval=2, consensus=False),
        Gossip(Star(), unequal_data=True, overlap=False, consensus=False),
        PushSum(directed(3), interval=2, consensus=False),
        Choco(codec=BlockInt(4, 64, rounding="stochastic"), interval=2, consensus=False),
        Choco(Star(), Rotated(Gaussian(2)), gain=0.5, overlap=False, consensus=False),
    ],
    ids=str,
)
def test_resuming_is_bit_for_bit_and_the_checkpoint_holds_the_mean(
    ranks: Pool, algorithm: Decentralized, tmp_path: Path
) -> None:
    one, two, three = ranks(3, _resume, str(tmp_path), algorithm)
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
    rank_file(path, 1).unlink()
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
    return sorted({count["mixings"] for count in state["counts"].values()}), int(model.count)


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


@pytest.mark.slow
def test_spawned_processes_return_the_mean(tmp_path: Path) -> None:
    done = run_script(tmp_path, SPAWNED)
    assert said(done.stdout) == [{"same": True}], done.stderr


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Gossip(interval=0), ValueError, "at least 1"),
        (lambda: Gossip(interval=True), ValueError, "at least 1"),
        (lambda: Gossip("ring"), TypeError, r"RingGraph\(\)"),
        (lambda: Gossip(overlap="yes"), TypeError, "overlap is True, False, or after how many steps"),
        (lambda: Gossip(interval=3, overlap=4), ValueError, "1 to interval=3, got 4"),
        (lambda: Gossip(interval=3, overlap=0), ValueError, "1 to interval=3, got 0"),
        (lambda: Gossip(interval=3, overlap=2, unequal_data=True), ValueError, "overlap=True or False"),
        (lambda: Gossip(local="bias"), TypeError, "function"),
        (lambda: Gossip(FromMatrix([[0.5, 1.0], [0.5, 0.0]])), ValueError, r"rows.*PushSum"),
        (lambda: Gossip(codec="int8"), TypeError, r"Identity\(\)"),
        (lambda: Gossip(codec=BlockInt(8)), ValueError, "Choco"),
        (lambda: Gossip(unit="steps"), ValueError, "'step' or 'epoch'"),
        (lambda: Gossip(unequal_data=1), TypeError, "True or False"),
        (lambda: Gossip(OnePeerExponential(), unequal_data=True), ValueError, "same symmetric matrix"),
        (lambda: Choco(OnePeerExponential()), ValueError, r"RingGraph\(\), Torus\(\)"),
        (lambda: Choco(Exponential()), ValueError, r"RingGraph\(\), Torus\(\)"),
        (lambda: Choco(gain=0), ValueError, "0 < gain <= 1"),
        (lambda: Choco(gain=float("nan")), ValueError, "0 < gain <= 1"),
        (lambda: PushSum(RingGraph), TypeError, r"RingGraph\(\)"),
        (lambda: CommunicationMonitor(-1), ValueError, "0 for never"),
        (lambda: CommunicationMonitor(0.5), TypeError, "whole number"),
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


class OverflowsHere(Net):
    """In batch 1 one value of one gradient is infinite, on rank 1 alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        overflows = batch_idx == 1 and self.global_rank == 1
        return loss + float("inf") * self.layers[0].weight[0, 0] if overflows else loss


def _skips() -> tuple[float, dict[str, int], bool]:
    trainer = fit(RingStrategy(Gossip(Complete(), overlap=False)), OverflowsHere(), plugins=[scaler()], max_epochs=1)
    assert isinstance(trainer.strategy, RingStrategy)
    counts = trainer.strategy.algorithm.state_dict()["counts"]
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.lightning_module.parameters())
    return trainer.precision_plugin.scaler.get_scale(), counts["layers.0.weight"], finite


def test_mixing_goes_on_after_a_step_that_one_ranks_loss_scaler_skipped(ranks: Pool) -> None:
    one, other = ranks(2, _skips)
    assert other[0] < one[0], "scalers are each rank's own"
    assert one[1] == other[1]
    assert one[1]["mixings"] == one[1]["steps"] > 2
    assert one[2]
    assert other[2]


def _fails(folder: str, algorithm: Decentralized) -> str:
    class Fails(Net):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if self.global_rank == 1 and self.global_step == 3:
                raise ArithmeticError("no more")
            return super().training_step(batch, batch_idx)

    saver = OnExceptionCheckpoint(folder, "left")
    with pytest.raises((ArithmeticError, PeerLostError)) as raised:
        fit(RingStrategy(algorithm), Fails(), callbacks=[saver], enable_checkpointing=True)
    return type(raised.value).__name__


@pytest.mark.slow
def test_an_exception_saves_local_weights_and_hangs_nobody(ranks: Pool, tmp_path: Path) -> None:
    outcomes = ranks(3, _fails, str(tmp_path), Gossip(RingGraph()), limit=50.0)
    assert outcomes.count("ArithmeticError") == 1
    assert set(outcomes) == {"ArithmeticError", "PeerLostError"}
    own = rank_state(tmp_path / "left.ckpt", 1)["own"]
    own = own["checkpoint"]["state_dict"]
    assert all(value.isfinite().all() for value in own.values())


def _torn(folder: str) -> None:
    _fails(folder, Choco(Star()))


def _begins(path: str, algorithm: Decentralized) -> float:
    """The first of this rank's parameters as training goes on from there, which then ends."""

    class Start(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            begun.append(pl_module.layers[0].weight[0, 0].item())

    begun: list[float] = []
    fit(RingStrategy(algorithm), Net(), ckpt_path=path, max_epochs=3, callbacks=[Start()])
    return begun[0]


@pytest.mark.slow
def test_copies_saved_within_an_exchange_are_not_taken_back(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _torn, str(tmp_path), limit=50.0)
    own = rank_state(tmp_path / "left.ckpt", 1)["own"]
    assert own["algorithm"]["torn"]
    assert len(set(ranks(3, _begins, str(tmp_path / "left.ckpt"), Choco(Star())))) == 1


def _epochs() -> dict[str, int]:
    trainer = fit(RingStrategy(Gossip(Star(), interval=2, unit="epoch", overlap=False)), Net(), max_epochs=5)
    assert isinstance(trainer.strategy, RingStrategy)
    assert trainer.strategy.stats.steps == 2
    return dict(trainer.strategy.algorithm.state_dict()["counts"]["layers.0.weight"])


def test_an_interval_may_count_epochs(ranks: Pool) -> None:
    for counts in ranks(3, _epochs):
        assert (counts["turns"], counts["mixings"]) == (4, 2)  # the fifth epoch is followed by none


def _monitored(folder: str, algorithm: Decentralized) -> None:
    logger = CSVLogger(folder, name="", version="")
    fit(RingStrategy(algorithm), Net(), logger=logger, callbacks=[CommunicationMonitor(2)], log_every_n_steps=1)


def test_the_monitor_logs_how_far_replicas_are_apart(ranks: Pool, tmp_path: Path) -> None:
    distances = []
    for number, algorithm in enumerate((Gossip(Complete(), overlap=False), Gossip(RingGraph()))):
        ranks(3, _monitored, str(tmp_path / str(number)), algorithm)
        with open(tmp_path / str(number) / "metrics.csv") as file:
            logged = [line["communication/consensus_distance"] for line in csv.DictReader(file)]
        distances.append([float(value) for value in logged if value])
        assert 3 * len(distances[-1]) == len(logged)  # a row for it beside every second step
    assert max(distances[0]) < 1e-10 < min(distances[1])


def _sampled() -> tuple[float, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    algorithm, random = Gossip(interval=100), torch.Generator().manual_seed(peers.rank)
    parameters = {name: nn.Parameter(torch.randn(50_000, generator=random)) for name in ("one", "two")}
    algorithm.setup(parameters, peers)
    algorithm.after_step(set(parameters.values()))
    exact, estimate = algorithm.consensus_distance(), algorithm.consensus_distance(10_000)
    algorithm.close()
    peers.close()
    dist.destroy_process_group()
    assert exact is not None
    assert estimate is not None
    return exact, estimate


def test_a_sample_estimates_the_consensus_distance(ranks: Pool) -> None:
    (exact, estimate), other = ranks(2, _sampled)
    assert (exact, estimate) == other
    assert exact == pytest.approx(50_000, rel=0.02)  # of two normal values 1/4 (x - y)^2 each
    assert exact != estimate == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    "algorithm", [Choco(Star()), PushSum(directed(3)), Gossip(RingGraph(), unequal_data=True)], ids=str
)
def test_another_decentralized_algorithm_goes_on_from_each_ranks_own(
    ranks: Pool, algorithm: Decentralized, tmp_path: Path
) -> None:
    ranks(3, _save, str(tmp_path))
    assert len(set(ranks(3, _begins, str(tmp_path / "saved.ckpt"), algorithm))) == 3


def _grows(algorithm: Decentralized) -> tuple[list[float], list[float], str]:
    """An optimizer gets a second parameter; then another one wants to step the first too."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    random = torch.Generator().manual_seed(peers.rank)
    parameters = {name: nn.Parameter(torch.randn(300, generator=random)) for name in ("one", "two", "three")}
    sums = [torch.stack(list(parameters.values())).detach().sum(0)[:3].tolist()]
    algorithm.setup(parameters, peers)
    one, two, three = parameters.values()
    for stepped in ({one}, {one}, {one, two}, {one, two}):
        algorithm.after_step(stepped)
    assert len(algorithm._groups) == 1
    assert algorithm._groups[0].steps == 4
    algorithm.enter_consensus()
    sums.append(torch.stack(list(parameters.values())).detach().sum(0)[:3].tolist())
    algorithm.leave_consensus()
    with pytest.raises(ValueError, match="two optimizers step one") as raised:
        algorithm.after_step({one, three})
    algorithm.close()
    peers.close()
    dist.destroy_process_group()
    return sums[0], sums[1], str(raised.value)


@pytest.mark.parametrize(
    "algorithm", [Gossip(), PushSum(directed(3)), Choco(overlap=False), Gossip(unequal_data=True)], ids=str
)
def test_an_optimizer_may_get_more_parameters_but_not_anothers(ranks: Pool, algorithm: Decentralized) -> None:
    found = ranks(3, _grows, algorithm)
    start, end = (np.array([sums[place] for sums in found]) for place in (0, 1))
    np.testing.assert_allclose(end.mean(0), start.mean(0), rtol=0, atol=1e-5)
    assert "such as 'ring'" in found[0][2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_gathering_a_sum_and_adding_have_the_bits_of_a_loop(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(33, 7), (1,), (0,), (5, 3, 2), (1000,)]
    parameters = {f"p{k}": nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for k, s in enumerate(shapes)}
    flat = Flat(parameters, sums_dtype(dtype), Identity())
    other = torch.randn(flat.values.shape, generator=generator, dtype=flat.values.dtype)
    flat.gather_sum(other, factor)
    before = [parameter.detach().clone() for parameter in parameters.values()]
    for value, part, parameter in zip(cut_like(flat.values, before), cut_like(other, before), before, strict=True):
        assert torch.equal(value, parameter.to(part.dtype) + factor * part)
    flat.add(other)
    for parameter, part, was in zip(parameters.values(), cut_like(other, before), before, strict=True):
        assert torch.equal(parameter, (was.to(part.dtype) + part).to(dtype))

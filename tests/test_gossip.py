"""Decentralized averaging: beside a plain numpy twin, the mean kept, and what people get to see."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from fakes import FakePeers, on_all_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pool import Pool
from rank_files import rank_file, rank_state
from test_strategy import Net, fit, normed, rows, same_everywhere, trainer_with
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
    LocalSGD,
    Nesterov,
    PeerLostError,
    PushSum,
    RingStrategy,
    Rotated,
    Sign,
)
from ringstrategy.algorithms import Algorithm
from ringstrategy.algorithms.parameters import exchange
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.simulator import Simulation
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
from ringstrategy.transport.base import Peers

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


def own_parameters(rank: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(values).float()) for name, values in values_of(rank).items()}


def change_(parameters: dict[str, nn.Parameter], rank: int, step: int) -> None:
    with torch.no_grad():
        for name, change in change_of(rank, step).items():
            parameters[name] += torch.tensor(change).float()


Found = tuple[np.ndarray, np.ndarray, float, dict[str, Tensor]]


def run(peers: Peers, algorithm: Decentralized, steps: int) -> Found:
    """This rank's parameters after `steps`, the mean it saw at the end, the consensus distance, and what it keeps."""
    algorithm, parameters = copy.deepcopy(algorithm), own_parameters(peers.rank)

    def now() -> np.ndarray:
        return flat_of({name: parameter.detach().numpy() for name, parameter in parameters.items()})

    algorithm.setup(parameters, peers)
    for step in range(steps):
        change_(parameters, peers.rank, step)
        algorithm.after_step(set(parameters.values()))
    assert (peers.stats.bytes_sent or 0) > 0
    assert algorithm.enter_consensus()
    mean = now()
    with pytest.raises(RuntimeError, match="leave `with consensus"):
        algorithm.after_step(set(parameters.values()))
    algorithm.leave_consensus()
    distance = algorithm.consensus_distance()
    assert distance is not None
    (group,) = algorithm._groups
    found = now(), mean, distance, {kind: kept.clone() for kind, kept in group.flats[0].memory.items()}
    algorithm.close()
    return found


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


_at_once = partial(Gossip, overlap=False)
_INT8, _INT2 = (partial(Choco, codec=BlockInt(bits, block=16), gain=0.7) for bits in (8, 2))
Case = tuple[Callable[..., Decentralized], Callable[[np.ndarray], GossipTwin], Callable[[int], Topology]]
TOPOLOGIES = [RingGraph(), Exponential(), OnePeerExponential(), Torus(), Star(), Hypercube(), RandomMatching(3)]
CASES: dict[str, Case] = {
    **{str(each): (Gossip, GossipTwin, lambda size, each=each: each) for each in TOPOLOGIES},
    **{str(each): (_at_once, GossipTwin, lambda size, each=each: each) for each in (Complete(), Hierarchical(1))},
    "ring at once": (_at_once, GossipTwin, lambda size: RingGraph()),
    "unequal ring": (partial(Gossip, unequal_data=True), UnequalLateTwin, lambda size: RingGraph()),
    "unequal star": (partial(Gossip, unequal_data=True), UnequalLateTwin, lambda size: Star()),
    "unequal at once": (partial(_at_once, unequal_data=True), UnequalTwin, lambda size: Torus()),
    "push-sum": (PushSum, PushSumTwin, directed),
    "push-sum at once": (partial(PushSum, overlap=False), PushSumTwin, lambda size: OnePeerExponential()),
    "push-sum by draw": (PushSum, PushSumTwin, lambda size: RandomMatching(5)),
    "choco": (partial(Choco, codec=Identity()), ChocoTwin, lambda size: Torus()),
    "choco int8": (_INT8, partial(ChocoIntTwin, gain=0.7, largest=127), lambda size: RingGraph()),
    "choco int2": (partial(_INT2, overlap=False), partial(ChocoIntTwin, gain=0.7, largest=1), lambda size: RingGraph()),
}


def _check_twin(found: Sequence[Found], algorithm: Decentralized, twin_class: Any, steps: int) -> np.ndarray:
    size, interval, late = len(found), algorithm.interval, algorithm.schedule.late
    expected, mean = twin(twin_class, algorithm.topology, size, steps, interval, late)
    for rank, (own, seen, distance, kept) in enumerate(found):
        np.testing.assert_allclose(own, expected[rank], rtol=1e-6, atol=1e-6, err_msg=f"rank {rank} of {size}")
        np.testing.assert_allclose(seen, mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(seen, found[0][1])
        assert distance == pytest.approx(np.square(expected - mean).sum(1).mean(), abs=1e-4)
        for kind in kept:
            if kind.startswith("copy of"):
                assert torch.equal(kept[kind], found[int(kind.split()[-1])][3]["copy"])
                assert rank != int(kind.split()[-1])
    return expected


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_a_numpy_twin(name: str) -> None:
    make, twin_class, topology = CASES[name]
    for size, interval in ((2, 3), (3, 1), (4, 3), (5, 1), (8, 3)):
        algorithm = make(topology(size), interval=interval)
        found = on_all_ranks(size, lambda peers, algorithm=algorithm: run(peers, algorithm, 10))
        expected = _check_twin(found, algorithm, twin_class, 10)
        assert size == 2 or interval == 1 or np.abs(expected - expected[0]).max() > 0.1


@pytest.mark.parametrize("name", ["push-sum", "choco", str(OnePeerExponential())])
def test_corrections_that_are_some_steps_late(name: str) -> None:
    make, twin_class, topology = CASES[name]
    for late in (1, 2, 3):
        algorithm, steps = make(topology(3), interval=4, overlap=late), 16 + late  # the last was just applied
        found = on_all_ranks(3, lambda peers, algorithm=algorithm, steps=steps: run(peers, algorithm, steps))
        expected = _check_twin(found, algorithm, twin_class, steps)
        for count, other in ((steps, late + 1), (steps - 1, late)):  # neither later nor earlier
            assert np.abs(expected - twin(twin_class, algorithm.topology, 3, count, 4, other)[0]).max() > 1e-3


CHAIN = FromGraph([(0, 1), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("algorithm", "rounding", "close"),
    [
        (Gossip(RingGraph(), overlap=False), 2e-6, 1e-5),
        (Gossip(OnePeerExponential(), overlap=False), 2e-6, 1e-5),
        (Gossip(CHAIN, Cast("bfloat16"), overlap=False), 3e-5, 0.03),  # bfloat16 cannot bring them closer
        # what rounding adds, each mixing adds again
        (Gossip(CHAIN, unequal_data=True, overlap=False), 4e-5, 5e-5),
        (PushSum(directed(5), overlap=False), 2e-6, 1e-5),
        (Choco(CHAIN, BlockInt(8), overlap=False), 2e-6, 1e-5),
        (Choco(CHAIN, Sign(), gain=0.2, overlap=False), 2e-6, 0.02),
        (Choco(RingGraph(), Rotated(Gaussian(2)), gain=0.5, overlap=False), 2e-6, 1e-4),
    ],
    ids=str,
)
def test_a_thousand_mixings_keep_the_mean_and_reach_it(algorithm: Decentralized, rounding: float, close: float) -> None:
    start = torch.tensor(np.stack([np.resize(flat_of(values_of(rank)), 512) for rank in range(5)])).float()
    simulation = Simulation(algorithm, start)
    for _ in range(1000):
        simulation.step(torch.zeros_like(start))
    torch.testing.assert_close(simulation.mean(), start.mean(0), rtol=0, atol=rounding)
    torch.testing.assert_close(simulation.values, start.mean(0).expand_as(start), rtol=0, atol=close)


# Arithmetic


@pytest.mark.parametrize(
    "algorithm", [Gossip(Star(), Cast("float16")), Choco(Star(), BlockInt(4, 64, rounding="stochastic"))], ids=str
)
def test_cutting_into_pieces_changes_no_bit(algorithm: Decentralized) -> None:
    whole = on_all_ranks(3, lambda peers: run(peers, algorithm, 5))
    with mock.patch.object(exchange, "PIECE", 64):
        pieces = on_all_ranks(3, lambda peers: run(peers, algorithm, 5))
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


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
def test_parameters_of_all_widths_are_mixed_in_one_group(algorithm: Decentralized) -> None:
    dtypes = {"narrow": torch.bfloat16, "middle": torch.float32, "other": torch.float32, "wide": torch.float64}

    def ends(peers: FakePeers) -> dict[str, list[float]]:
        mine, values = copy.deepcopy(algorithm), torch.tensor([1 + peers.rank / 3, 2.0 - peers.rank])
        parameters = {name: nn.Parameter(values.to(dtype, copy=True)) for name, dtype in dtypes.items()}
        mine.setup(parameters, peers)
        for _ in range(2):
            mine.after_step(set(parameters.values()))
        return {name: parameter.tolist() for name, parameter in parameters.items()}

    for end in on_all_ranks(2, ends):
        for name, values in end.items():
            assert values == pytest.approx([7 / 6, 1.5], abs=2**-7 if name == "narrow" else 2**-9), name


def test_ranks_round_by_noise_of_their_own() -> None:
    """If it were the same, their errors would not average out."""

    def copies(peers: FakePeers) -> dict[str, Tensor]:
        weight = nn.Parameter(torch.zeros(512))
        algorithm = Choco(codec=BlockInt(2, 64, rounding="stochastic"), overlap=False)
        algorithm.setup({"weight": weight}, peers)
        algorithm.bind({weight})
        weight.data += torch.linspace(0, 1, 512)
        algorithm.after_step({weight})
        return {kind: kept.clone() for kind, kept in algorithm._groups[0].flats[0].memory.items()}

    zero, one = on_all_ranks(2, copies)
    assert torch.equal(zero["copy of 1"], one["copy"])
    assert not torch.equal(zero["copy"], one["copy"])


# What all ranks see


def _of_rank(peers: FakePeers, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full((5,), float(peers.rank), dtype=dtype))


def test_a_consensus_that_fails_half_way_gives_own_values_back() -> None:
    def interrupted(peers: FakePeers) -> None:
        algorithm = Gossip()
        parameters = {"narrow": _of_rank(peers), "wide": _of_rank(peers, torch.float64)}
        algorithm.setup(parameters, peers)
        algorithm.after_step(set(parameters.values()))
        finish, calls = peers.finish, []

        def fail_at_second(tickets: Any) -> None:
            finish(tickets)
            calls.append(tickets)
            if len(calls) == 3:  # the first is of the mixing
                raise RuntimeError("a peer was lost")

        peers.finish = fail_at_second  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="lost"):
            algorithm.enter_consensus()
        assert parameters["narrow"][0] == 0.5
        algorithm.leave_consensus()
        assert all((parameter == peers.rank).all() for parameter in parameters.values())

    on_all_ranks(2, interrupted)


def test_who_changes_a_tensor_while_the_mean_is_shown_keeps_the_change() -> None:
    """As a callback does that restores the best weights at the end."""

    def work(peers: FakePeers) -> None:
        one, two, buffer, count = _of_rank(peers), _of_rank(peers), _of_rank(peers).data, torch.tensor(peers.rank)
        algorithm = Gossip()
        algorithm.setup({"one": one, "two": two}, peers)
        algorithm.bind({one, two})
        assert algorithm.enter_consensus([buffer, count])
        assert not algorithm.enter_consensus([buffer]), "it is entered already"
        assert [each[0].item() for each in (one, two, buffer)] == [0.5] * 3
        assert count == peers.rank, "a whole number has no mean"
        with algorithm.as_own():
            assert [each[0].item() for each in (one, two, buffer)] == [peers.rank] * 3
        assert [each[0].item() for each in (one, two, buffer)] == [0.5] * 3
        two.data[4] = 7.0
        algorithm.leave_consensus()
        assert one.tolist() == buffer.tolist() == [peers.rank] * 5
        assert two.tolist() == [0.5, 0.5, 0.5, 0.5, 7.0]

    on_all_ranks(2, work)


def test_a_sample_estimates_the_consensus_distance() -> None:
    def sampled(peers: FakePeers) -> tuple[float | None, float | None]:
        algorithm, random = Gossip(interval=100), torch.Generator().manual_seed(peers.rank)
        parameters = {name: nn.Parameter(torch.randn(50_000, generator=random)) for name in ("one", "two")}
        algorithm.setup(parameters, peers)
        algorithm.after_step(set(parameters.values()))
        return algorithm.consensus_distance(), algorithm.consensus_distance(10_000)

    (exact, estimate), other = on_all_ranks(2, sampled)
    assert (exact, estimate) == other
    assert exact == pytest.approx(50_000, rel=0.02)  # of two normal values 1/4 (x - y)^2 each
    assert exact != estimate == pytest.approx(exact, rel=0.05)


# Optimizers


@pytest.mark.parametrize(
    "algorithm", [Gossip(), PushSum(directed(3)), Choco(overlap=False), Gossip(unequal_data=True)], ids=str
)
def test_an_optimizer_may_get_more_parameters_but_not_anothers(algorithm: Decentralized) -> None:
    def grows(peers: FakePeers) -> tuple[Tensor, Tensor]:
        """The sum of the parameters at the start, and of what all see at the end."""
        mine, random = copy.deepcopy(algorithm), torch.Generator().manual_seed(peers.rank)
        parameters = {name: nn.Parameter(torch.randn(300, generator=random)) for name in ("one", "two", "three")}
        begin = torch.stack([*parameters.values()]).detach().sum(0)
        mine.setup(parameters, peers)
        one, two, three = parameters.values()
        for stepped in ({one}, {one}, {one, two}, {one, two}):
            mine.after_step(stepped)
        assert [group.steps for group in mine._groups] == [4]
        mine.enter_consensus()
        end = torch.stack([*parameters.values()]).detach().sum(0)
        mine.leave_consensus()
        with pytest.raises(ValueError, match=r"two optimizers step one.*such as 'ring'"):
            mine.after_step({one, three})
        return begin, end

    begin, end = map(torch.stack, zip(*on_all_ranks(3, grows), strict=True))
    torch.testing.assert_close(end.mean(0), begin.mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [Gossip(), PushSum(directed(3)), Choco(), LocalSGD(2, Nesterov(), overlap=1)], ids=str
)
def test_parameters_in_one_memory_are_averaged_once(algorithm: Periodic) -> None:
    def ends(peers: FakePeers, stepped: slice) -> Tensor:
        """Where it ends if an optimizer steps these two of the names of one memory; the third is of it alone."""
        mine, generator = copy.deepcopy(algorithm), torch.Generator().manual_seed(peers.rank)
        one = nn.Parameter(torch.randn(4, 5, generator=generator))
        named = {"one": one, "other": nn.Parameter(torch.empty(0)), "alone": nn.Parameter(torch.zeros(3))}
        named["other"].data = one.data
        if stepped == slice(0, 1):
            del named["other"]
        mine.setup(named, peers)
        for _ in range(9):
            one.data.add_(torch.randn(4, 5, generator=generator))
            mine.after_step([*list(named.values())[stepped], named["alone"]])
        return one.detach().clone()

    alone, both, second = (
        on_all_ranks(3, lambda peers, which=which: ends(peers, which))
        for which in (slice(0, 1), slice(0, 2), slice(1, 2))
    )
    for rank in range(3):
        assert torch.equal(both[rank], alone[rank])
        assert torch.equal(second[rank], alone[rank])


def test_each_optimizer_mixes_its_own_parameters_and_an_interval_may_count_epochs() -> None:
    def work(peers: FakePeers) -> None:
        one, two, local = (_of_rank(peers) for _ in range(3))
        steps, epochs = (Gossip(interval=2, overlap=False, unit=unit) for unit in ("step", "epoch"))
        for algorithm in (steps, epochs):
            algorithm.local = lambda name, _: name == "local"
            algorithm.setup({"one": one, "two": two, "local": local}, peers)
        for number in range(4):
            steps.after_step({one, local})
            if number % 2:
                steps.after_step({two})
            steps.after_epoch({one})
        counts = steps.state_dict()["counts"]
        assert counts["one"] == {"steps": 4, "turns": 4, "mixings": 2}
        assert counts["two"] == {"steps": 2, "turns": 2, "mixings": 1}
        assert one[0] == two[0] == 0.5
        assert local[0] == peers.rank
        for _ in range(3):
            epochs.after_step({one})
            epochs.after_epoch({one})
        assert epochs.state_dict()["counts"]["one"] == {"steps": 3, "turns": 3, "mixings": 1}
        assert epochs.state_dict()["step"] == 3

    on_all_ranks(2, work)


# Checkpoints


def check_resumes(
    make: Callable[[], Periodic],
    size: int,
    parameters_of: Callable[[int], dict[str, nn.Parameter]],
    change: Callable[[dict[str, nn.Parameter], int, int], None],
) -> None:
    """Runs that end after some steps, and begin again from what was saved, go on with the bits of one that did not.

    What is saved are two states and the parameters; nothing of a state is changed by the run that takes it.
    """

    def work(peers: FakePeers) -> None:
        through, *_ = train(peers, 12)
        for step in (1, 4, 5, 6, 7):
            saved = train(peers, step)
            kept = str(saved)
            resumed, *_ = train(peers, 12, saved, step)
            assert all(torch.equal(through[name], resumed[name]) for name in through), f"after step {step} of {make()}"
            assert str(saved) == kept

    def train(peers: FakePeers, end: int, saved: Any = None, begin: int = 0) -> Any:
        parameters, algorithm = parameters_of(peers.rank), make()
        algorithm.setup(parameters, peers)
        if saved is not None:
            for name, value in saved[0].items():
                parameters[name].data.copy_(value)
            assert algorithm.load_own_state(saved[1])
            algorithm.load_state_dict(saved[2])
        algorithm.bind(set(parameters.values()))
        for step in range(begin, end):
            change(parameters, peers.rank, step)
            algorithm.after_step(set(parameters.values()))
            if step % 2:
                algorithm.after_epoch(set(parameters.values()))
        algorithm.settle()
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        return copy.deepcopy((values, algorithm.own_state(), algorithm.state_dict()))

    on_all_ranks(size, work)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gossip(RandomMatching(3), interval=2),
        lambda: Gossip(Star(), interval=3, overlap=1),
        lambda: Gossip(Star(), unequal_data=True, interval=2),
        lambda: Gossip(Star(), unequal_data=True, overlap=False),
        lambda: PushSum(directed(3), interval=2),
        lambda: Choco(codec=BlockInt(4, 64, rounding="stochastic"), interval=2),
        lambda: Choco(Star(), Rotated(Gaussian(2)), gain=0.5, overlap=False),
    ],
)
def test_a_run_that_resumes_goes_on_bit_for_bit(make: Callable[[], Decentralized]) -> None:
    check_resumes(make, 3, own_parameters, change_)


def test_state_of_another_algorithm_is_of_no_use_and_a_torn_one_says_so() -> None:
    def work(peers: FakePeers) -> list[bool]:
        weight = _of_rank(peers)
        choco = Choco()
        choco.setup({"weight": weight}, peers)
        choco.after_step({weight})
        torn = choco.own_state()
        choco.settle()
        whole = choco.own_state()
        assert "correction" in whole["kept"]["weight"]
        assert choco.load_own_state(whole)
        for other in (Choco(Star()), Gossip(), PushSum(), Gossip(unequal_data=True)):
            assert not other.load_own_state(whole)
        return [torn["torn"], whole["torn"]]

    assert on_all_ranks(2, work) == [[True, False]] * 2


def test_what_would_be_averaged_twice_or_by_another_graph_is_refused() -> None:
    def named(one: Tensor, other: Tensor) -> dict[str, nn.Parameter]:
        return {"one": nn.Parameter(one), "other": nn.Parameter(other)}

    def work(peers: FakePeers) -> None:
        whole = torch.zeros(6, 4)
        for shares in (named(whole, whole[2:4]), named(whole, whole.t()), named(whole[:, ::2], whole[:, 2:])):
            with pytest.raises(ValueError, match=r"one and other have a part .*: give each memory of its own"):
                Gossip().setup(shares, peers)
        for apart in (named(whole[:, ::2], whole[:, 1::2]), named(whole[:2], whole[2:]), named(whole[:0], whole)):
            Gossip().setup(apart, peers)
            with pytest.raises(ValueError, match="describes 3 ranks, but there are 2"):
                Gossip(FromGraph([(0, 1), (1, 2)])).setup(apart, peers)

    on_all_ranks(2, work)


# Under a trainer


class Watch(Callback):
    """The state with which training starts; do all ranks hold the same at each validation, and after each batch?"""

    def __init__(self) -> None:
        self.begin: dict[str, Tensor] = {}
        self.seen: list[bool] = []
        self.own: list[bool] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(same_everywhere(flat(pl_module)))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.own.append(same_everywhere(flat(pl_module)))


def flat(module: nn.Module) -> Tensor:
    """Buffers too."""
    return torch.cat([v.detach().reshape(-1) for v in module.state_dict().values() if v.is_floating_point()])


APART: dict[str, tuple[Periodic, int, int]] = {  # epochs, and how many mixings there are in them
    "gossip": (Gossip(), 1, 7),
    "own": (Gossip(consensus=False), 1, 7),
    "late": (LocalSGD(3, Nesterov(0.7, 0.3), overlap=1), 1, 2),
    "at once": (LocalSGD(2), 1, 4),
    "epochs": (LocalSGD(1, unit="epoch"), 2, 1),
}


def _validates(folder: str) -> None:
    for name, (algorithm, epochs, mixings) in APART.items():
        watch, model, logger = Watch(), normed(), CSVLogger(folder, name=name, version="")
        options: dict[str, Any] = {"max_epochs": epochs, "val_check_interval": 2, "log_every_n_steps": 1}
        strategy = RingStrategy(algorithm)
        trainer = trainer_with(strategy, callbacks=[watch, CommunicationMonitor(2)], logger=logger, **options)
        trainer.fit(model, rows(96), rows(24))
        assert strategy.stats.steps == trainer.global_step > 5
        assert strategy.stats.exposed_seconds > 0
        assert strategy.algorithm.state_dict()["counts"]["layers.0.weight"]["mixings"] == mixings
        assert len(watch.seen) > 3
        assert set(watch.seen) == {same_everywhere(flat(model))} == {name != "own"}
        assert watch.own == [name == "at once" and step % 2 == 1 for step in range(len(watch.own))], "buffers too"


def test_validation_and_the_end_see_what_ranks_share_and_the_monitor_how_far_they_are_apart(
    ranks: Pool, tmp_path: Path
) -> None:
    ranks(3, _validates, str(tmp_path))

    def logged(name: str, column: str) -> list[float]:
        with open(tmp_path / name / "metrics.csv") as file:
            return [float(line[f"communication/{column}"] or 0) for line in csv.DictReader(file)]

    assert min(distance for distance in logged("gossip", "consensus_distance") if distance) > 1e-12
    norms, alike = logged("at once", "outer_gradient_norm"), logged("at once", "direction_agreement")
    assert sum(norm > 0 for norm in norms) == sum(each != 0 for each in alike) == 4
    assert 0.2 < max(alike) <= 1.0, "all ranks learn the same"
    assert min(alike) >= -0.5


def _save(folder: str) -> None:
    callbacks = [ModelCheckpoint(folder, "saved")]
    fit(RingStrategy(Gossip()), Net(), max_epochs=1, callbacks=callbacks, enable_checkpointing=True)


def _begins(path: str, algorithm: Algorithm) -> tuple[bool, float]:
    """With the mean that the checkpoint holds? And with which first value?"""
    watch = Watch()
    fit(RingStrategy(algorithm), Net(), ckpt_path=path, max_epochs=4, limit_train_batches=1, callbacks=[watch])
    saved = torch.load(path, weights_only=True)["state_dict"]
    equal = all(torch.equal(saved[name], value) for name, value in watch.begin.items())
    return equal, watch.begin["layers.0.weight"][0, 0].item()


def test_who_starts_from_a_checkpoint_has_its_own_parameters_or_else_the_mean(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _save, str(tmp_path))
    path = tmp_path / "saved.ckpt"
    for size, algorithm, means in (
        (2, Gossip(), True),
        (3, Gossip(), False),
        (3, Choco(Star()), False),  # goes on from each rank's own, with nothing else
        (2, AllReduce(BlockInt(8)), True),
    ):
        found = ranks(size, _begins, str(path), algorithm)
        assert [equal for equal, _ in found] == [means] * size, algorithm
        assert len({value for _, value in found}) == (1 if means else size)
    rank_file(path, 1).unlink()
    assert all(equal for equal, _ in ranks(3, _begins, str(path), Gossip()))


class Fails(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == 3:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_idx)


def _torn(folder: str) -> None:
    saver = OnExceptionCheckpoint(folder, "left")
    with pytest.raises((ArithmeticError, PeerLostError)):
        fit(RingStrategy(Choco(Star())), Fails(), callbacks=[saver], enable_checkpointing=True)


@pytest.mark.slow
def test_copies_that_an_exception_has_torn_are_not_taken_back(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _torn, str(tmp_path))
    own = rank_state(tmp_path / "left.ckpt", 1)["own"]
    assert own["algorithm"]["torn"]
    assert all(value.isfinite().all() for value in own["checkpoint"]["state_dict"].values())
    assert len({value for _, value in ranks(3, _begins, str(tmp_path / "left.ckpt"), Choco(Star()))}) == 1

"""Decentralized averaging: beside a plain numpy twin, the mean kept, and what people get to see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fakes import FakePeers, of_each_rank, on_all_ranks
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from pool import Pool
from rank_files import rank_state
from test_strategy import Net, fit
from torch import Tensor, nn

from ringstrategy import (
    BlockInt,
    Cast,
    Choco,
    Direct,
    Gaussian,
    Gossip,
    Identity,
    LocalSGD,
    Nesterov,
    PeerLostError,
    PlanMismatchError,
    PushSum,
    RingStrategy,
    Rotated,
    SmallExact,
)
from ringstrategy.algorithms.parameters import exchange
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.periodic import Periodic
from ringstrategy.topologies import (
    Complete,
    Exponential,
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

SHAPES = {  # of 369 values, the first 256 are rotated
    "embed.weight": (100, 3),
    "layers.0.weight": (7, 5),
    "layers.0.bias": (3,),
    "layers.1.weight": (6, 5),
    "head": (),
    "empty": (0, 4),
}
GRID = 15 / 1024  # values on it have exact sums and exact means over 2, 3, 4, 5 and 8 ranks


def values_of(rank: int, step: int = -1) -> dict[str, np.ndarray]:
    """A rank's parameters at the start, or how they change in a step."""
    random, size = np.random.default_rng([rank, 1 + step]), 1.0 if step < 0 else 0.1
    return {name: GRID * np.rint(size * random.standard_normal(shape) / GRID) for name, shape in SHAPES.items()}


def flat_of(values: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
    """A copy; what is empty may not be there."""
    there = [torch.as_tensor(values[name]).detach() for name in SHAPES if name in values]
    return np.concatenate([value.numpy().ravel() for value in there])


def of_ranks(size: int, step: int = -1) -> np.ndarray:
    return np.stack([flat_of(values_of(rank, step)) for rank in range(size)])


def train(
    peers: Peers,
    algorithm: Periodic,
    steps: range,
    saved: Any = None,
    note: Callable[[Periodic], None] = lambda algorithm: None,
) -> tuple[Periodic, dict[str, nn.Parameter]]:
    """A copy of the algorithm and this rank's parameters after these steps, which go on from what was saved."""
    algorithm, whose = copy.deepcopy(algorithm), 0 if isinstance(algorithm, LocalSGD) else peers.rank
    parameters = {name: nn.Parameter(torch.tensor(values).float()) for name, values in values_of(whose).items()}
    algorithm.setup(parameters, peers)
    if saved is not None:
        for name, value in saved[0].items():
            parameters[name].data.copy_(value)
        assert algorithm.load_own_state(saved[1])
        algorithm.load_state_dict(saved[2])
    algorithm.bind(set(parameters.values()))
    for step in steps:
        for name, change in values_of(peers.rank, step).items():
            parameters[name].data += torch.tensor(change).float()
        algorithm.after_step(set(parameters.values()))
        if step % 2:
            algorithm.after_epoch(set(parameters.values()))
        note(algorithm)
    return algorithm, parameters


def trained_until(peers: Peers, algorithm: Periodic, end: int, begin: int = 0, saved: Any = None) -> Any:
    """Parameters and the states that a checkpoint has, after these steps."""
    trained, parameters = train(peers, algorithm, range(begin, end), saved)
    trained.settle()
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    return copy.deepcopy((values, trained.own_state(), trained.state_dict()))


Found = tuple[np.ndarray, np.ndarray, float | None, dict[str, Tensor]]


def run(peers: Peers, algorithm: Periodic, steps: int, note: Callable[[Periodic], None] = lambda _: None) -> Found:
    """This rank's parameters after `steps`, the mean it saw at the end, the consensus distance, and what it keeps."""
    algorithm, parameters = train(peers, algorithm, range(steps), note=note)
    assert (peers.stats.bytes_sent or 0) > 0
    own = flat_of(parameters)
    assert algorithm.enter_consensus()
    mean = flat_of(parameters)
    with pytest.raises(RuntimeError, match="leave `with consensus"):
        algorithm.after_step(set(parameters.values()))
    algorithm.leave_consensus()
    np.testing.assert_array_equal(flat_of(parameters), own)
    distance = algorithm.consensus_distance()
    kept = {kind: kept.clone() for kind, kept in algorithm._groups[0].flats[0].memory.items()}
    algorithm.close()
    return own, mean, distance, kept


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


class SlowTwin(GossipTwin):
    lr, momentum = 0.7, 0.5

    def __init__(self, start: np.ndarray) -> None:
        self.slow, self.kept = start, np.zeros_like(start)

    def land(self, values: np.ndarray, sent: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        gradient = self.slow - matrix @ sent
        self.kept = self.momentum * self.kept + gradient
        self.slow = self.slow - self.lr * (gradient + self.momentum * self.kept)
        return values + self.slow - sent


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
    values = of_ranks(size)
    algorithm, sent, mixing = make(values), None, 0
    for step in range(steps):
        values = values + of_ranks(size, step)
        place = (step + 1) % interval
        for now in (True, False):
            if sent is not None and (place in (0, late) if now else late == 0):
                values = algorithm.land(values, sent, topology.matrix(size, mixing).numpy())
                sent, mixing = None, mixing + 1
            if now and place == 0:
                sent = algorithm.send(values)
    return values, algorithm.mean(values)


def directed(size: int) -> FromMatrix:
    """Everyone sends to the next, and rank 0 to everyone: columns sum to 1, rows do not."""
    sends = np.eye(size) + np.roll(np.eye(size), 1, 0)
    sends[:, 0] = 1
    return FromMatrix((np.minimum(sends, 1) / np.minimum(sends, 1).sum(0)).tolist())


_at_once = partial(Gossip, overlap=False)
_slow = partial(Gossip, outer=Nesterov(SlowTwin.lr, SlowTwin.momentum))
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
    "slow weights": (_slow, SlowTwin, lambda size: RandomMatching(2)),
    "slow weights late": (partial(_slow, overlap=1), SlowTwin, lambda size: RingGraph()),
    "slow weights at once": (partial(_slow, overlap=False), SlowTwin, lambda size: OnePeerExponential()),
    "push-sum": (PushSum, PushSumTwin, directed),
    "push-sum at once": (partial(PushSum, overlap=False), PushSumTwin, lambda size: OnePeerExponential()),
    "late": (partial(Gossip, overlap=1), GossipTwin, lambda size: OnePeerExponential()),
    "push-sum late": (partial(PushSum, overlap=1), PushSumTwin, directed),
    "push-sum by draw": (PushSum, PushSumTwin, lambda size: RandomMatching(5)),
    "choco": (partial(Choco, codec=Identity()), ChocoTwin, lambda size: Torus()),
    "choco late": (partial(Choco, codec=Identity(), overlap=1), ChocoTwin, lambda size: Torus()),
    "choco int8": (_INT8, partial(ChocoIntTwin, gain=0.7, largest=127), lambda size: RingGraph()),
    "choco int2": (partial(_INT2, overlap=False), partial(ChocoIntTwin, gain=0.7, largest=1), lambda size: RingGraph()),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_a_numpy_twin(name: str) -> None:
    make, twin_class, topology = CASES[name]
    for size, interval in ((2, 3), (3, 1), (4, 3), (5, 1), (8, 3)):
        algorithm = make(topology(size), interval=interval)
        found = on_all_ranks(size, lambda peers, algorithm=algorithm: run(peers, algorithm, 10))
        expected, mean = twin(twin_class, algorithm.topology, size, 10, interval, algorithm.schedule.late)
        assert size == 2 or interval == 1 or np.abs(expected - expected[0]).max() > 0.1
        for rank, (own, seen, distance, kept) in enumerate(found):
            np.testing.assert_allclose(own, expected[rank], rtol=1e-6, atol=1e-6, err_msg=f"rank {rank} of {size}")
            np.testing.assert_allclose(seen, mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(seen, found[0][1])
            assert distance == pytest.approx(np.square(expected - mean).sum(1).mean(), abs=1e-4)
            for kind in kept:
                if kind.startswith("copy of"):
                    assert torch.equal(kept[kind], found[int(kind.split()[-1])][3]["copy"])
                    assert rank != int(kind.split()[-1])


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


@of_each_rank(2)
def test_a_consensus_that_fails_half_way_gives_own_values_back(peers: FakePeers) -> None:
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


@of_each_rank(2)
def test_who_changes_a_tensor_while_the_mean_is_shown_keeps_the_change(peers: FakePeers) -> None:
    """As a callback does that restores the best weights at the end."""
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
    with pytest.raises(ValueError, match=r"two optimizers step one.*such as 'ring'"):
        algorithm.after_step({one})


@of_each_rank(2)
def test_a_sample_estimates_the_consensus_distance(peers: FakePeers) -> None:
    algorithm, random = Gossip(interval=100), torch.Generator().manual_seed(peers.rank)
    parameters = {name: nn.Parameter(torch.randn(50_000, generator=random)) for name in ("one", "two")}
    algorithm.setup(parameters, peers)
    algorithm.after_step(set(parameters.values()))
    exact, estimate = algorithm.consensus_distance(), algorithm.consensus_distance(10_000)
    assert exact == pytest.approx(50_000, rel=0.02)  # of two normal values 1/4 (x - y)^2 each
    assert exact != estimate == pytest.approx(exact, rel=0.05)
    peers.all_reduce_(total := torch.tensor([exact, estimate]))
    assert torch.equal(total, 2 * torch.tensor([exact, estimate])), "all ranks see the same"


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


# Checkpoints


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(RandomMatching(3), interval=2),
        Gossip(Star(), interval=3, overlap=1),
        Gossip(Star(), unequal_data=True, interval=2),
        Gossip(Star(), unequal_data=True, overlap=False),
        Gossip(RandomMatching(), interval=3, overlap=2, outer=Nesterov(0.7, 0.5)),
        Gossip(RandomMatching(), interval=2, overlap=False, outer=Nesterov(0.7, 0.5)),
        PushSum(directed(3), interval=2),
        Choco(codec=BlockInt(4, 64, rounding="stochastic"), interval=2),
        Choco(Star(), Rotated(Gaussian(2)), gain=0.5, overlap=False),
        LocalSGD(3, Nesterov(), SmallExact(BlockInt(4)), Direct(), fragments=2, overlap=2),
        LocalSGD(4, Nesterov(), SmallExact(BlockInt(4), below=64), Direct(), True, fragments=2, overlap=1),
        LocalSGD(3, partial(torch.optim.Adam, lr=0.01), overlap=1, warmup_steps=2),
        LocalSGD(2, Nesterov(), unit="epoch", overlap=1),
    ],
    ids=str,
)
@of_each_rank(3)
def test_a_run_that_resumes_goes_on_bit_for_bit(peers: FakePeers, algorithm: Periodic) -> None:
    """And changes nothing of the state that it takes."""
    through, *_ = trained_until(peers, algorithm, 12)
    for step in (1, 4, 5, 6, 7):
        saved = trained_until(peers, algorithm, step)
        kept = str(saved)
        resumed, *_ = trained_until(peers, algorithm, 12, step, saved)
        assert all(torch.equal(through[name], resumed[name]) for name in through), f"after step {step}"
        assert str(saved) == kept


@pytest.mark.parametrize("how", [{"unequal_data": True}, {"outer": Nesterov()}], ids=str)
@of_each_rank(2)
def test_weights_that_are_loaded_before_the_first_step_are_no_progress(peers: FakePeers, how: dict[str, Any]) -> None:
    algorithm, weight = Gossip(Complete(), **how), _of_rank(peers)
    algorithm.setup({"weight": weight}, peers)
    algorithm.bind({weight})
    weight.data.fill_(7.0)
    for _ in range(4):
        algorithm.start()
        algorithm.after_step({weight})
    algorithm.close()
    assert weight.tolist() == [7.0] * 5


def test_ranks_compare_their_outer_steps_and_those_that_are_left_are_warned() -> None:
    def set_up(peers: FakePeers) -> None:
        Gossip(outer=Nesterov(0.7, 0.5 + peers.rank / 10)).setup({"weight": _of_rank(peers)}, peers)

    with pytest.raises(PlanMismatchError, match=r"momentum=0\.5"):
        on_all_ranks(2, set_up)
    mixing = Gossip(OnePeerExponential(), outer=Nesterov(0.9, 0.8)).mixing
    with pytest.raises(ValueError, match="between 6 ranks grow"):
        mixing.check(6)
    mixing.check(7)
    with pytest.warns(match="between 6 ranks grow"):
        mixing.check(6)


@of_each_rank(2)
def test_state_of_another_algorithm_is_of_no_use_and_a_torn_one_says_so(peers: FakePeers) -> None:
    weight = _of_rank(peers)
    choco = Choco()
    choco.setup({"weight": weight}, peers)
    choco.after_step({weight})
    torn = choco.own_state()
    choco.settle()
    whole = choco.own_state()
    assert "correction" in whole["kept"]["weight"]
    assert choco.load_own_state(whole)
    for other in (Choco(Star()), Gossip(), PushSum(), Gossip(unequal_data=True), Gossip(outer=Nesterov())):
        assert not other.load_own_state(whole)
    assert (torn["torn"], whole["torn"]) == (True, False)


class Fails(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == 3:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_idx)


def _torn(folder: str) -> None:
    saver = OnExceptionCheckpoint(folder, "left")
    with pytest.raises((ArithmeticError, PeerLostError)):
        fit(RingStrategy(Choco(Star())), Fails(), callbacks=[saver], enable_checkpointing=True)


def _first_value(path: str) -> float:
    """With which a run begins that goes on from this checkpoint."""
    seen: list[float] = []

    class Begins(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.layers[0].weight[0, 0].item())

    once = {"max_epochs": 4, "limit_train_batches": 1, "callbacks": [Begins()]}
    fit(RingStrategy(Choco(Star())), Net(), ckpt_path=path, **once)
    return seen[0]


@pytest.mark.slow
def test_copies_that_an_exception_has_torn_are_not_taken_back(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _torn, str(tmp_path))
    own = rank_state(tmp_path / "left.ckpt", 1)["own"]
    assert own["algorithm"]["torn"]
    assert len(set(ranks(3, _first_value, str(tmp_path / "left.ckpt")))) == 1

"""The simulator beside real processes, the laws that both keep, and its problems beside their own slow twins."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from syncing import Here, learner_of, take_all
from torch import Tensor, nn

import ringstrategy as ring
from benchmarks.simulation import directed, factor, main, train
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.algorithms.parameters.gossip import SlowWeights
from ringstrategy.server.merges import radial_directional
from ringstrategy.server.rules import Async, Rule, Staleness, Sync
from ringstrategy.simulator import Learners, Logistic, Pace, Problem, Quadratic, Simulation, Workers
from ringstrategy.simulator.simulation import NAME
from ringstrategy.topologies import Complete, OnePeerExponential, RandomMatching, RingGraph, Star, Topology, Torus
from ringstrategy.transport.connect import connect

SIZE, DIM, STEPS = 4, 512, 20


def start() -> Tensor:
    """Of all ranks, on a grid, so that their mean after the first step has no rounding."""
    return torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(1)).mul_(16).round_().div_(16)


def change(values: Tensor, rank: int | slice) -> Tensor:
    """A step of gradient descent on sum a (x - b)**2 / 2 from a rank's own values; a and b differ between ranks."""
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(1, 5, (SIZE, DIM), generator=generator) / 4
    b = torch.randn(SIZE, DIM, generator=generator).mul_(16).round_().div_(16)
    return (values - b[rank]) * a[rank] / -4


ALGORITHMS: list[Decentralized | ring.LocalSGD] = [
    ring.Gossip(RingGraph()),
    ring.Gossip(OnePeerExponential(), interval=3),
    ring.Gossip(Star(), ring.Cast("float16"), overlap=False),
    ring.Gossip(RingGraph(), unequal_data=True),
    ring.Gossip(Torus(), unequal_data=True, interval=3, overlap=False),
    ring.Gossip(RingGraph(), interval=3, overlap=2, outer=ring.Nesterov(0.5, 0.5)),
    ring.Gossip(RandomMatching(), overlap=False, outer=ring.Nesterov(0.5, 0.5)),
    ring.PushSum(directed(SIZE)),
    ring.PushSum(directed(SIZE), interval=3, overlap=False),
    # gain times a weight is 1/4, so that fused multiply-adds change no bit, and no rounding turns
    ring.Choco(RingGraph(), ring.BlockInt(8, block=16), gain=0.75),
    ring.Choco(RingGraph(), ring.Rotated(ring.Gaussian(2)), gain=0.75, overlap=False),
    ring.LocalSGD(3),
    ring.LocalSGD(4, ring.Nesterov(0.5, 0.5), ring.BlockInt(4, block=16), ring.Direct(segments=1), True, overlap=2),
    ring.LocalSGD(4, ring.Nesterov(0.5, 0.5), ring.BlockInt(8, block=16), ring.Direct(segments=1), overlap=True),
]


def _really() -> list[tuple[np.ndarray, np.ndarray, int]]:
    """This rank's parameters after all steps, the mean it saw, and the bytes it sent for all mixings but the first."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.get_world_size() == SIZE
    results = []
    for algorithm in ALGORITHMS:
        peers = connect(torch.device("cpu"), timedelta(seconds=60))
        parameter = nn.Parameter(start()[peers.rank])
        algorithm.setup({NAME: parameter}, peers)
        algorithm.bind({parameter})
        for step in range(STEPS):
            parameter.data += change(parameter.data, peers.rank)
            algorithm.after_step({parameter})
            algorithm.settle()
            if step + 1 == algorithm.interval:
                before = peers.stats.bytes_sent
        sent = peers.stats.bytes_sent - before
        own = parameter.detach().numpy().copy()
        algorithm.enter_consensus()
        results.append((own, parameter.detach().numpy().copy(), sent))
        algorithm.close()
        peers.close()
    dist.barrier()
    return results


def test_it_does_what_real_processes_do(ranks: Pool) -> None:
    every_rank = ranks(SIZE, _really)
    for algorithm, *real in zip(ALGORITHMS, *every_rank, strict=True):
        simulation, first = Simulation(algorithm, start()), 0.0
        for step in range(STEPS):
            simulation.step(change(simulation.values, slice(None)))
            if step + 1 == algorithm.interval:
                first = simulation.bytes_sent
        mean = simulation.mean()
        for values, (own, seen, _) in zip(simulation.values, real, strict=True):
            np.testing.assert_allclose(values.numpy(), own, rtol=0, atol=1e-6, err_msg=str(algorithm))
            np.testing.assert_allclose(mean.numpy(), seen, rtol=0, atol=1e-6, err_msg=str(algorithm))
        assert simulation.bytes_sent - first == np.mean([sent for _, _, sent in real]) > 0, algorithm
        assert simulation.consensus_distance() > 1e-3, algorithm


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        partial(ring.Gossip, RandomMatching()),
        partial(ring.Gossip, Torus(), unequal_data=True),
        partial(ring.PushSum, directed(64)),
        partial(ring.Choco, codec=ring.BlockInt(4)),
    ],
    ids=["gossip", "unequal data", "push-sum", "choco"],
)
def test_the_mean_goes_where_the_changes_go(make: Callable[..., Decentralized], overlap: bool) -> None:
    algorithm = make(overlap=overlap)
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    simulation, expected = Simulation(algorithm, values), values.double().mean(0)
    torch.testing.assert_close(simulation.mean().double(), expected, rtol=0, atol=1e-6)  # before it mixes too
    distance = float((values - values.mean(0)).square().sum(1).mean())
    assert simulation.consensus_distance() == pytest.approx(distance, rel=1e-5)
    for step in range(30):
        change = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)) / (step + 1)
        expected += change.double().mean(0)
        simulation.step(change)
    torch.testing.assert_close(simulation.mean().double(), expected, rtol=0, atol=2e-6)
    assert not torch.equal(simulation.values[0], simulation.values[1])


@pytest.mark.parametrize("overlap", [False, True, 2])
def test_with_outer_momentum_the_mean_goes_where_diloco_goes_and_all_ranks_if_each_meets_all(
    overlap: bool | int,
) -> None:
    outer, values = ring.Nesterov(0.7, 0.6), torch.randn(256, generator=torch.Generator().manual_seed(3))
    topologies = Complete(), RingGraph(), RandomMatching(), OnePeerExponential()
    gossips = [
        Simulation(ring.Gossip(each, None, 3, overlap, outer=outer), values.expand(16, -1)) for each in topologies
    ]
    diloco = Simulation(ring.LocalSGD(3, outer, overlap=overlap), values.expand(16, -1))
    for step in range(30):
        change = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)) / 8
        for simulation in (diloco, *gossips):
            simulation.step(change)
        for simulation in gossips:
            torch.testing.assert_close(simulation.values.mean(0), diloco.values.mean(0), rtol=0, atol=1e-5)
        torch.testing.assert_close(gossips[0].values, diloco.values, rtol=0, atol=1e-5)
    assert gossips[1].consensus_distance() > 1e-3 + diloco.consensus_distance()


def slowest(topology: Topology, size: int, outer: ring.Nesterov) -> tuple[float, Tensor]:
    """In what direction differences between ranks shrink least, and a mixing's factor."""
    values, vectors = torch.linalg.eigh(topology.matrix(size, 0))
    factors = [factor(torch.stack([value, torch.ones_like(value)]), outer) for value in values[:-1]]
    return max(factors), vectors[:, int(np.argmax(factors))].clone()


@pytest.mark.parametrize(("topology", "size"), [(RingGraph(), 16), (RingGraph(), 32), (Torus(), 64), (Star(), 9)])
def test_with_momentum_differences_shrink_as_fast_as_the_spectrum_says(topology: Topology, size: int) -> None:
    factors, nothing = [], torch.zeros(size, 1, dtype=torch.float64)
    for outer in (ring.Nesterov(1.0, 0.0), ring.Nesterov(0.7, 0.5), ring.Nesterov(0.7, 0.9)):
        expected, start = slowest(topology, size, outer)
        simulation, looks = Simulation(ring.Gossip(topology, overlap=False, outer=outer), start[:, None]), []
        while not looks or -25 < looks[-1] < 25:
            simulation.step(nothing)
            looks.append(np.log(simulation.consensus_distance()))
        slope, _ = np.polyfit(range(len(looks)), looks, 1)
        factors.append(float(np.exp(slope / 2)))
        assert np.log(factors[-1]) == pytest.approx(np.log(expected), rel=0.1)
    if size == 32:  # of slow mixing about the root is left
        assert np.log(factors[0]) / np.log(factors[2]) < 0.3


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("topology", [RandomMatching(), OnePeerExponential(), RingGraph(), Torus()], ids=str)
def test_what_would_make_ranks_differ_more_and_more_is_refused(topology: Topology, size: int) -> None:
    start = torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    refused = 0
    for outer in (ring.Nesterov(0.7, 0.5), ring.Nesterov(0.9, 0.8), ring.Nesterov(0.7, 0.9), ring.Nesterov(1.4, 0.8)):
        algorithm = ring.Gossip(topology, overlap=False, outer=outer)
        with mock.patch.object(SlowWeights, "_growth", return_value=0.0):
            simulation = Simulation(algorithm, start)
        for _ in range(400):
            simulation.step(torch.zeros_like(start))
        if simulation.consensus_distance() < 1:
            Simulation(algorithm, start)
        else:
            refused += 1
            with pytest.raises(ValueError, match="take a smaller lr"):
                Simulation(algorithm, start)
    assert 0 < refused < 4


PROBLEMS: list[Problem] = [
    Quadratic(6, dim=5, unequal=0.5, noise=0.0),
    Logistic(6, dim=5, unequal=0.5, samples=8, batch=8),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_nothing_is_below_the_optimum_and_gradients_lead_there(problem: Problem) -> None:
    x = torch.zeros(problem.dim, dtype=torch.float64)
    for _ in range(3000):
        x -= problem.gradient(x.float().expand(problem.size, -1), 0).mean(0)
    assert 0 <= problem.loss(x) + 1e-12 < 1e-10 < 1e-2 < problem.loss(torch.zeros(problem.dim))


@pytest.mark.parametrize("kind", [Quadratic, Logistic])
def test_noise_is_a_function_of_the_step_and_unequal_data_pull_ranks_apart(kind: type[Quadratic | Logistic]) -> None:
    zeros = torch.zeros(8, 16)
    equal, unequal = (kind(8, dim=16, unequal=unequal) for unequal in (0.0, 1.0))
    assert torch.equal(equal.gradient(zeros, 1), kind(8, dim=16).gradient(zeros, 1))
    assert not torch.equal(equal.gradient(zeros, 1), equal.gradient(zeros, 2))
    pulls = [sum(problem.gradient(zeros, step) for step in range(100)) / 100 for problem in (equal, unequal)]
    apart = [float((pull - pull.mean(0)).square().sum()) for pull in pulls]
    assert apart[1] > 2 * apart[0] > 0


@pytest.mark.parametrize(("topology", "overlap"), [(RingGraph(), True), (Torus(), False), (Star(), True)], ids=str)
def test_gossip_for_unequal_data_ends_at_the_optimum_and_plain_gossip_does_not(
    topology: Topology, overlap: bool
) -> None:
    problem = Quadratic(8, dim=16, unequal=1.0, noise=0.0)
    plain, exact = (
        train(ring.Gossip(topology, overlap=overlap, unequal_data=unequal), problem, 0.2, 800).losses[-1]
        for unequal in (False, True)
    )
    assert exact < 1e-8 < 1e-4 < plain


# Parameter servers, and learners of a syncer

EQUAL, SLOW = [1] * 8, [1] * 6 + [2] * 2  # ticks of a step, by rank
BOWL = Quadratic(8, dim=6, unequal=0.5)


def work(rule: Rule, pace: Pace, ticks: int, momentum: float = 0.0, problem: Problem = BOWL) -> Workers:
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    workers = Workers(rule, optimizer, torch.ones(problem.dim), pace)
    for tick in range(ticks):
        workers.step(problem.gradient(workers.values, tick))
    return workers


def learners_of(folder: Path, pace: Pace, dim: int = BOWL.dim, **options: Any) -> Learners:
    """Of two fragments."""
    return Learners(
        lambda row, name: learner_of([{"p": part} for part in row.tensor_split(2)], name, **options),
        torch.ones(dim),
        pace,
        folder,
    )


def learn(learners: Learners, ticks: int) -> list[int]:
    """The versions in the end. Nobody waits for a learner that is away."""
    with contextlib.closing(learners):
        for tick in range(ticks):
            learners.step(BOWL.gradient(learners.values, tick).mul_(-0.1))
            told = learners.syncer.report()["learners"]
            assert not any(told[f"{rank:06d}"]["there"] for rank in (~learners.pace.there).nonzero().flatten())
        versions: list[int] = learners.syncer.report()["versions"]
        return versions


def test_workers_in_step_are_one_process_that_has_all_gradients() -> None:
    quiet = Quadratic(8, dim=6, unequal=0.5, noise=0.0)
    workers = work(Sync(8), Pace([1, 2, 1, 3, 1, 1, 2, 1]), 60, momentum=0.9, problem=quiet)
    alone = nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([alone], lr=0.05, momentum=0.9)
    for _ in range(20):
        alone.grad = quiet.gradient(alone.detach().expand(8, -1), 0).mean(0)
        optimizer.step()
    torch.testing.assert_close(workers.shared(), alone.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(workers.values, alone.detach().expand(8, -1), rtol=0, atol=1e-6)
    assert workers.staleness == {0: 160}


def test_workers_out_of_step_end_where_a_loop_in_numpy_does() -> None:
    periods, pace = [1, 2, 1, 3, 1, 1, 2, 1], Pace([1, 2, 1, 3, 1, 1, 2, 1])
    workers = work(Async(), pace, 30)
    row, version, stale = np.ones(6, np.float32), 0, list[int]()
    pulled = [(version, row)] * 8
    for tick in range(30):
        gradients = BOWL.gradient(torch.from_numpy(np.stack([values for _, values in pulled])), tick).numpy()
        for worker in pace.order(tick):
            if (tick + 1) % periods[worker] == 0:
                stale.append(version - pulled[worker][0])
                row = row - np.float32(0.05 / (1 + stale[-1])) * gradients[worker]
                version += 1
                pulled[worker] = version, row
    np.testing.assert_allclose(workers.values.numpy(), [values for _, values in pulled], rtol=0, atol=1e-6)
    np.testing.assert_allclose(workers.shared().numpy(), row, rtol=0, atol=1e-6)
    assert workers.staleness == Counter(stale)
    assert max(stale) > 8
    assert not torch.equal(workers.shared(), work(Async(), Pace(periods, seed=1), 30).shared()), "another order"


def test_learners_have_the_bits_of_those_that_are_driven_by_hand(tmp_path: Path) -> None:
    options = {"codec": ring.BlockInt(8), "broadcast": ring.Cast("bfloat16"), "merge": radial_directional, "quorum": 3}
    simulated = learners_of(tmp_path / "simulated", Pace([1] * SIZE), DIM, **options)
    here, rows = Here(tmp_path / "by hand"), torch.ones(SIZE, DIM)
    by_hand = [
        (learner_of([{"p": part} for part in row.tensor_split(2)], f"{rank:06d}", **options), here.asker(f"{rank:06d}"))
        for rank, row in enumerate(rows)
    ]
    for learner, ask in by_hand:
        learner.exchange(ask)
        take_all(learner)
    for tick in range(STEPS):
        here.now = tick + 1
        rows += change(rows, slice(None))
        for learner, ask in by_hand:
            learner.after_step(1.0)
            learner.exchange(ask)
            take_all(learner)
        here.merge()
        simulated.step(change(simulated.values, slice(None)))
    assert torch.equal(simulated.values, rows)
    assert min(simulated.syncer.report()["versions"]) > 3
    assert simulated.syncer.report()["learners"] == here.report()["learners"]
    assert not torch.equal(rows[0], rows[1])
    simulated.close()


def test_no_worker_begins_a_step_that_is_too_far_ahead() -> None:
    workers = Workers(Staleness(2), partial(torch.optim.SGD, lr=0.05), torch.ones(6), Pace([1, 1, 2, 2, 2, 3, 3, 5]))
    ahead = []
    for tick in range(60):
        workers.step(BOWL.gradient(workers.values, tick))
        ahead.append(int(workers.pace.steps.max() - workers.pace.steps.min()))
    assert max(ahead) == 3, "it began the last one when it was 2 ahead"
    assert workers.pace.steps.min() == 12, "nobody holds up the slowest"


def test_a_slow_quarter_costs_steps_in_step_and_no_others(tmp_path: Path) -> None:
    assert work(Async(), Pace(SLOW), 20).pace.steps.tolist() == [20] * 6 + [10] * 2
    assert work(Sync(8), Pace(SLOW), 20).pace.steps.tolist() == [10] * 8
    merges = {
        (quorum, tuple(periods)): learn(learners_of(tmp_path / f"{quorum}{periods}", Pace(periods), quorum=quorum), 24)
        for quorum, periods in ((6, EQUAL), (6, SLOW), (None, SLOW))
    }
    assert list(merges.values()) == [[6, 6], [6, 6], [3, 3]]


def test_learners_that_are_there_go_on_while_others_are_away(tmp_path: Path) -> None:
    """A quarter of the time each; a merge is of all that are there."""
    learners = learners_of(tmp_path, Pace(SLOW, away=0.25, cycle=40), quorum=None)
    versions = learn(learners, 80)
    possible = torch.tensor([60.0] * 6 + [30.0] * 2)
    assert torch.equal(learners.pace.possible, possible)
    assert torch.equal(learners.pace.steps, possible.long())
    assert min(versions) > 5
    assert all(learner.counts["taken"] > 2 for learner in learners.learners)


def test_a_thousand_learners_that_come_and_go_learn(tmp_path: Path) -> None:
    problem = Quadratic(1000, dim=8)
    learners = learners_of(tmp_path, Pace([1, 1, 1, 2] * 250, away=0.2, cycle=20), 8, quorum=400, interval=8)
    with contextlib.closing(learners):
        before = problem.loss(learners.shared())
        for tick in range(24):
            learners.step(problem.gradient(learners.values, tick).mul_(-0.2))
        told = learners.syncer.report()["learners"].values()
        assert problem.loss(learners.shared()) < before / 4
        assert torch.equal(learners.pace.steps, learners.pace.possible.floor().long())
        assert sum(each["taken"] for each in told) > sum(each["late"] for each in told) > 100
        assert learners.bytes_sent > 0


@pytest.mark.slow
def test_the_command_writes_tables(tmp_path: Path) -> None:
    main(["--sizes", "4,8", "--size", "4", "--rounds", "20", "--out", str(tmp_path / "new")])
    text = (tmp_path / "new" / "simulation.md").read_text()
    assert "| OnePeerExponential | 2 / 8 | 3 / 12 |" in text, "steps to consensus and bytes, which the matrix says"
    assert text.count("\n## ") == 9
    assert "| RingGraph | 8 | 30 / 32 | 14 / 16 |" in text, "with momentum half as many, as the spectrum says"

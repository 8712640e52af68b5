"""The simulator beside real processes, the laws that both keep, and its problems beside their own slow twins."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import ringstrategy as ring
from benchmarks.simulation import directed, main, train
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.simulator import Logistic, Problem, Quadratic, Simulation
from ringstrategy.simulator.simulation import NAME
from ringstrategy.topologies import OnePeerExponential, RandomMatching, RingGraph, Star, Topology, Torus
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
        if isinstance(algorithm, ring.LocalSGD):
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


@pytest.mark.slow
def test_the_command_writes_tables(tmp_path: Path) -> None:
    main(["--sizes", "4,8", "--size", "4", "--rounds", "20", "--out", str(tmp_path / "new")])
    text = (tmp_path / "new" / "simulation.md").read_text()
    assert "| OnePeerExponential | 2 / 8 | 3 / 12 |" in text, "steps to consensus and bytes, which the matrix says"
    assert text.count("\n## ") == 6

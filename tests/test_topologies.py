"""Topologies: law 9 at every size and step, what the field says of each graph, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

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

YAMLS = sorted((Path(__file__).parents[1] / "configs" / "topology").glob("*.yaml"))
CONFIGURED: list[Topology] = [instantiate(OmegaConf.load(path)) for path in YAMLS]
DIRECTED = [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
GIVEN: list[Topology] = [FromMatrix(DIRECTED), FromGraph([(0, 1), (1, 2), (2, 3), (1, 3)])]


def fits(topology: Topology, size: int) -> bool:
    try:
        topology.check(size)
    except ValueError:
        return False
    return True


def graph_of(topology: Topology, size: int, step: int = 0) -> Any:
    """Who takes from whom, without loops."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    for rank in range(size):
        graph.add_edges_from((source, rank) for source in topology.weights(rank, size, step) if source != rank)
    return graph


# Law 9


@pytest.mark.parametrize("topology", [*CONFIGURED, *GIVEN], ids=repr)
def test_the_mean_is_kept_at_every_size_and_step(topology: Topology) -> None:
    for size in range(1, 18):
        if not fits(topology, size):
            assert topology in GIVEN or (isinstance(topology, Hierarchical) and size % 2)
            continue
        for step in range(9):
            matrix = topology.matrix(size, step).numpy()
            np.testing.assert_allclose(matrix.sum(0), 1, rtol=0, atol=1e-14)
            np.testing.assert_allclose(matrix.sum(1), 1, rtol=0, atol=1e-14)
            for rank in range(size):
                row = topology.weights(rank, size, step)
                assert rank in row
                assert all(0 <= source < size and weight > 0 for source, weight in row.items())
                assert row == topology.weights(rank, size, step)
            assert not topology.symmetric or np.array_equal(matrix, matrix.T)
            assert not topology.static or np.array_equal(matrix, topology.matrix(size, 0).numpy())


@given(st.integers(1, 17), st.integers(0, 1 << 70), st.integers(-5, 1 << 40))
def test_random_pairs_are_pairs(size: int, step: int, seed: int) -> None:
    topology = RandomMatching(seed)
    partners = [max(topology.weights(rank, size, step), key=lambda peer: peer != rank) for rank in range(size)]
    assert [partners[partner] for partner in partners] == list(range(size))
    assert sum(partner == rank for rank, partner in enumerate(partners)) == size % 2


def test_random_pairs_are_new_at_each_step_and_for_each_seed_and_leave_everyone_out_in_turn() -> None:
    rows = [tuple(map(tuple, RandomMatching(seed).matrix(8, step).tolist())) for seed in range(5) for step in range(20)]
    assert len(set(rows)) > 50  # of 105 matchings
    alone = {rank for step in range(50) for rank in range(5) if len(RandomMatching().weights(rank, 5, step)) == 1}
    assert alone == set(range(5))


# What the field says of them


def test_the_graphs_are_those_of_networkx() -> None:
    for size in (3, 4, 7, 16):
        assert nx.utils.graphs_equal(graph_of(RingGraph(), size), nx.cycle_graph(size).to_directed())
        assert nx.utils.graphs_equal(graph_of(Complete(), size), nx.complete_graph(size).to_directed())
        assert nx.utils.graphs_equal(graph_of(Star(), size), nx.star_graph(size - 1).to_directed())
    for power in (1, 2, 3, 4):
        cube = nx.convert_node_labels_to_integers(nx.hypercube_graph(power), ordering="sorted")
        assert nx.utils.graphs_equal(graph_of(Hypercube(), 1 << power), cube.to_directed())
    for topology, rows, columns in (
        (Torus(), 3, 4),
        (Torus(), 4, 4),
        (Torus(2), 2, 6),
        (Torus(), 2, 3),
        (Torus(5), 5, 3),
    ):
        grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns, periodic=True), ordering="sorted")
        assert nx.utils.graphs_equal(graph_of(topology, rows * columns), grid.to_directed())
    assert nx.utils.graphs_equal(graph_of(Torus(), 7), graph_of(RingGraph(), 7))
    edges = [(0, 1), (2, 1), (1, 3), (2, 3), (3, 3), (1, 2)]  # also to itself, and twice
    given_ = nx.Graph(edges[:4])
    assert FromGraph(edges) == FromGraph(given_) == FromGraph(nx.MultiGraph(edges))
    assert nx.utils.graphs_equal(graph_of(FromGraph(edges), 4), given_.to_directed())
    hops = {(rank, (rank + hop) % 11) for rank in range(11) for hop in (1, 2, 4, 8)}
    assert set(graph_of(Exponential(), 11).edges) == hops
    # at odd steps hosts of two ranks gossip, at even ones each averages
    between = FromGraph([(0, 1), (1, 2)])
    topology = Hierarchical(2, between)
    both = topology.matrix(6, 5) @ topology.matrix(6, 4)
    np.testing.assert_allclose(both, np.kron(between.matrix(3, 2), np.full((2, 2), 0.5)))
    assert torch.equal(Hierarchical(1).matrix(8, 3), OnePeerExponential().matrix(8, 1))


@pytest.mark.parametrize("size", [4, 6, 8, 16, 64])
def test_spectral_gaps_have_their_closed_forms(size: int) -> None:
    hops = math.ceil(math.log2(size))
    assert RingGraph().spectral_gap(size) == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / size)))
    assert Exponential().spectral_gap(size) == pytest.approx(2 / (1 + hops))  # Ying et al. 2021, even sizes
    assert Star().spectral_gap(size) == pytest.approx(1 / size)
    assert Complete().spectral_gap(size) == 1
    if size == 1 << hops:
        assert Hypercube().spectral_gap(size) == pytest.approx(2 / (1 + hops))
        assert OnePeerExponential().spectral_gap(size) == Hierarchical(2).spectral_gap(size) == 1
    assert RandomMatching().spectral_gap(size) > 0
    alternating = Hierarchical(2, RingGraph())  # a mean factor a step: of two steps one mixes hosts
    assert (1 - alternating.spectral_gap(size)) ** 2 == pytest.approx(1 - RingGraph().spectral_gap(size // 2))


@pytest.mark.parametrize("topology", [*CONFIGURED, *GIVEN], ids=repr)
def test_steps_to_consensus_are_those_it_takes(topology: Topology) -> None:
    for size in filter(lambda size: fits(topology, size), [1, 2, 3, 4, 8, 11]):
        product, distances = np.eye(size), [1.0 if size > 1 else 0.0]
        while distances[-1] > 1e-3:
            product = topology.matrix(size, len(distances) - 1).numpy() @ product
            distances.append(np.linalg.norm(product - 1 / size, 2))  # of a difference between ranks this can be left
        assert topology.steps_to_consensus(size) == len(distances) - 1
        if size == 1:
            assert topology.weights(0, 1, 7) == {0: 1}
            assert topology.spectral_gap(1) == 1
        elif topology.static:
            second = sorted(abs(np.linalg.eigvals(topology.matrix(size, 0).numpy())))[-2]
            assert topology.spectral_gap(size) == pytest.approx(1 - second, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FromMatrix([[1, 0], [0, 1]]), "rank 0 never reaches ranks"),
        (lambda: FromMatrix([[0.5, 0], [0.5, 1]]), "never hears from"),
        (lambda: FromMatrix([[0.5, 0.5], [0.4, 0.5]]), "column 0 of matrix sums to 0.9"),
        (lambda: FromMatrix([[0.5, 0.5]]), "square"),
        (lambda: FromMatrix([[1.5, -0.5], [-0.5, 1.5]]), "below 0"),
        (lambda: FromMatrix([[math.nan, 0.5], [0.5, 0.5]]), "no number"),
        (lambda: FromMatrix(DIRECTED).check(4), "describes 3 ranks, but there are 4"),
        (lambda: FromGraph([(0, 1), (2, 3)]), "add edges"),
        (lambda: FromGraph([(0, 2)]), r"rank 0 never reaches ranks \[1\]"),
        (lambda: FromGraph(nx.DiGraph([(0, 1)])), "to_undirected"),
        (lambda: FromGraph(nx.Graph([("a", "b")])), "convert_node_labels"),
        (lambda: Torus(0), "at least 1"),
        (lambda: Torus(3).check(8), "do not make 3 equal rows"),
        (lambda: RandomMatching(0.5), "whole number"),  # type: ignore[arg-type]
        (lambda: Hierarchical(0), "at least 1"),
        (lambda: Hierarchical(2).check(5), "must divide"),
        (lambda: Hierarchical(2, FromGraph([(0, 1)])).check(6), "describes 2 ranks"),
        (lambda: Hierarchical(2, "ring"), "OnePeerExponential"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_mix_is_refused_with_the_cure(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()

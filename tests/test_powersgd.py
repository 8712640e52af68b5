"""PowerSGD: replicas hold one mean, feedback loses nothing, and bad or missing gradients leave no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fakes import FakePeers, Toy, of_each_rank, on_all_ranks
from pairs import pairs
from torch import Tensor, nn

from ringstrategy import Cast, Codec, Collective, Direct, Identity, Ring
from ringstrategy.algorithms.gradients.powersgd import PowerSGD
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.low_rank import LowRankBucket
from ringstrategy.buckets.sparse import SparseBucket
from ringstrategy.kernels.reference import orthonormalise_
from ringstrategy.transport.base import Done

SHAPES = {"first": (40, 30), "bias": (40,), "second": (30, 40), "convolution": (24, 3, 3, 3), "again": (40, 30)}


class _Rank:
    """The algorithm's buckets on one rank of a fake network, driven as `Synchronous` drives them."""

    def __init__(self, algorithm: PowerSGD, peers: FakePeers, parameters: Mapping[str, nn.Parameter]) -> None:
        self.algorithm, self.peers, self.parameters = algorithm, peers, dict(parameters)
        self.buckets = algorithm.plan(self.parameters, frozenset(), 0)
        self.steps = 0

    def step(self, gradients_: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Mean gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients_[name].to(parameter.dtype, copy=True)
        for bucket in self.buckets:
            bucket.pack(self.peers.size)
            bucket.launch(self.peers, self.algorithm.collective, Done(), 1000 * self.steps + bucket.index, "")
        for bucket in self.buckets:
            bucket.unpack(lambda slot: True)
        self.steps += 1
        return {name: parameter.grad.clone() for name, parameter in self.parameters.items()}

    def residuals(self) -> dict[str, Tensor]:
        """Copies."""
        kept = [(slot, bucket.residuals.lost) for bucket in self.buckets for slot in bucket.slots]
        return {slot.name: slot.like_view(lost).clone() for slot, lost in kept if lost is not None}

    def queries(self) -> dict[str, Tensor]:
        """Copies."""
        return {name: query.clone() for bucket in self.buckets for name, query in bucket.state().items()}


def _parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}


def _strided(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """A matrix lies transposed in memory, and of images channels come last; their gradients lie otherwise."""
    image, matrix = parameters["convolution"].detach(), parameters["second"].detach()
    values = (image.to(memory_format=torch.channels_last), matrix.T.contiguous().T)
    return {**parameters, **dict(zip(("convolution", "second"), map(nn.Parameter, values), strict=True))}


def _random(rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)


def _close(one: Tensor, other: Tensor, tolerance: float = 3e-6) -> bool:
    return bool((one.double() - other.double()).abs().max() <= tolerance * other.double().abs().max())


def _same(results: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(value, other[name]) for other in results[1:] for name, value in results[0].items())


# What is delivered


@pairs(
    size=[2, 3, 4, 8],
    codec=[Identity(), Cast("fp16"), Toy()],
    collective=[Ring(), Direct()],
    rank=[1, 3],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
)
def test_replicas_are_identical_and_nothing_is_lost(
    size: int, codec: Codec, collective: Collective, rank: int, dtype: torch.dtype
) -> None:
    """Of 16 bits too, whose sums and residuals are wider; beside the rounding of the mean."""
    rounding = torch.finfo(torch.bfloat16).eps if dtype == torch.bfloat16 else 3e-6

    def run(peers: FakePeers) -> list[tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]]:
        me = _Rank(PowerSGD(rank, codec, collective), peers, _strided(_parameters(dtype=dtype)))
        return [(me.step(_random(peers.rank, step)), me.residuals(), me.queries()) for step in range(3)]

    results = on_all_ranks(size, run)
    before = {name: [torch.zeros(shape)] * size for name, shape in SHAPES.items()}
    for step in range(3):
        means = [result[step][0] for result in results]
        assert _same(means)
        assert _same([result[step][2] for result in results])
        assert set(results[0][step][1]) == set(SHAPES) - {"bias"}
        for name, mean in means[0].items():
            assert mean.dtype == dtype
            local = [_random(r, step)[name].to(dtype).double() / size for r in range(size)]
            if name == "bias":
                assert _close(mean, _sum(local), rounding)
                continue
            wanted = _sum(local) + _sum(before[name])
            lacking = [result[step][1][name] for result in results]
            assert {rest.dtype for rest in lacking} == {torch.promote_types(dtype, torch.float32)}
            assert _close(mean + _sum(lacking), wanted, 2 * rounding)
            assert (mean - wanted).norm() > 0.1 * wanted.norm()  # much is left out, or nothing was compressed
            before[name] = lacking


def _twin(gradients_: list[list[Tensor]], query: Tensor) -> list[Tensor]:
    """Algorithm 2 of the paper at any rank, in float64, for one matrix: `gradients_[step][rank]`, query (m, rank)."""
    errors = [torch.zeros_like(gradients_[0][0])] * len(gradients_[0])
    means = []
    for step in gradients_:
        corrected = [gradient + error for gradient, error in zip(step, errors, strict=True)]
        left = torch.linalg.qr(torch.stack([matrix @ query for matrix in corrected]).mean(0))[0]
        query = torch.stack([matrix.T @ left for matrix in corrected]).mean(0)
        means.append(left @ query.T)
        errors = [matrix - means[-1] for matrix in corrected]
    return means


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 2), (2, 4)])
def test_means_are_the_papers(size: int, rank: int) -> None:
    def run(peers: FakePeers) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        me = _Rank(PowerSGD(rank), peers, _parameters())
        return me.queries(), [me.step(_random(peers.rank, step)) for step in range(4)]

    results = on_all_ranks(size, run)
    assert _same([first for first, _ in results])
    queries, means = results[0]
    assert queries["first"].shape == (rank, 30)
    for name, query in queries.items():
        matrices = [[_random(r, step)[name].flatten(1).double() for r in range(size)] for step in range(4)]
        for mean, expected in zip(means, _twin(matrices, query.double().T), strict=True):
            assert _close(mean[name].flatten(1), expected, 1e-4)


def test_only_what_gets_smaller_is_compressed() -> None:
    shapes = {"scalar": (), "bias": (50,), "row": (1, 90), "column": (90, 1), "empty": (0, 40), "small": (4, 4)}
    shapes |= {"border": (8, 8), "beyond": (8, 7), "wide": (1, 40, 50), "matrix": (30, 40)}
    parameters = _parameters(shapes)
    parameters["complex"] = nn.Parameter(torch.zeros(30, 40, dtype=torch.complex64))
    parameters["rows"] = nn.Parameter(torch.zeros(90, 40))
    buckets = PowerSGD(2).plan(parameters, frozenset({"rows"}), 5)
    assert [bucket.index for bucket in buckets] == list(range(5, 5 + len(buckets)))
    kinds = {slot.name: type(bucket) for bucket in buckets for slot in bucket.slots}
    assert {name for name, kind in kinds.items() if kind is LowRankBucket} == {"border", "wide", "matrix"}
    assert {name for name, kind in kinds.items() if kind is SparseBucket} == {"rows"}
    assert set(kinds) == set(parameters)
    assert {type(b.residuals.lost) for b in buckets if isinstance(b, DenseBucket)} == {type(None)}
    said = "\n".join(bucket.describe() for bucket in buckets)
    assert "40 + 50" in said
    larger = PowerSGD(9).plan(_parameters({"a": (30, 40)}), frozenset(), 0)  # 630 of 1200 elements
    assert [type(bucket) for bucket in larger] == [DenseBucket]


# Bad and missing gradients


@pairs(codec=[Identity(), Cast("fp16"), Toy()], bad=[torch.nan, torch.inf, -torch.inf], rank=[1, 2])
def test_what_is_not_finite_is_seen_everywhere_and_leaves_no_trace(codec: Codec, bad: float, rank: int) -> None:
    def run(peers: FakePeers) -> dict[str, Any]:
        me = _Rank(PowerSGD(rank, codec), peers, _parameters())
        for step in range(2):
            dull = _random(peers.rank, step)
            dull["first"][:, 7] = 0  # so q is zero where the bad value will be
            me.step(dull)
        assert me.queries()["first"][:, 7].abs().max() == 0 or codec == Toy()
        residuals, queries = me.residuals(), me.queries()
        gradients_ = _random(peers.rank, 2)
        if peers.rank == 1:
            gradients_["first"][3, 7] = bad
        means = me.step(gradients_)
        mean = means["first"]
        assert not mean.isfinite().any()
        assert torch.equal(me.residuals()["first"], residuals["first"])
        assert torch.equal(me.queries()["first"], queries["first"])
        if codec.block == 1:
            assert all(value.isfinite().all() for n, value in means.items() if n != "first")
            assert not torch.equal(me.residuals()["second"], residuals["second"])
        after = me.step(_random(peers.rank, 3))
        assert all(value.isfinite().all() for value in after.values())
        return after

    assert _same(on_all_ranks(3, run))


@of_each_rank(2)
def test_zeros_stay_zeros_and_their_q_stays_alive(peers: FakePeers) -> None:
    me = _Rank(PowerSGD(2), peers, _parameters({"matrix": (40, 30)}))
    fresh = me.queries()["matrix"]
    mean = me.step({"matrix": torch.zeros(40, 30)})["matrix"]
    assert torch.equal(mean, torch.zeros(40, 30))
    assert torch.equal(me.queries()["matrix"], fresh)
    assert torch.equal(me.residuals()["matrix"], torch.zeros(40, 30))
    one = torch.zeros(40, 30)
    one[:, 4] = torch.arange(40.0) * (1 + peers.rank)  # all other columns are zeros, and its rank is 1
    mean = me.step({"matrix": one})["matrix"]
    later = me.queries()["matrix"]
    assert (later[0] != 0).sum() == 1
    assert torch.equal(later[1], fresh[1])
    assert torch.allclose(mean[:, 4], torch.arange(40.0) * 1.5)
    assert mean[:, :4].abs().max() == 0


# Arithmetic


@pairs(count=[1, 3], rank=[1, 2, 4], length=[1, 2, 3, 4, 7, 40], magnitude=[1e-30, 1.0, 1e30])
def test_columns_become_orthonormal_or_zero(count: int, rank: int, length: int, magnitude: float) -> None:
    shape = (count, rank, length)
    given_ = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * magnitude
    columns = given_.clone()
    orthonormalise_(columns)
    for alone, matrix, before in zip(given_.clone(), columns, given_, strict=True):
        lengths = torch.linalg.vector_norm(matrix, dim=-1)
        kept = lengths > 0
        gram = matrix[kept].double() @ matrix[kept].double().T
        assert torch.allclose(gram, torch.eye(int(kept.sum())).double(), atol=1e-3)
        assert kept.sum() == min(torch.linalg.matrix_rank(before.double()), length)
        orthonormalise_(alone[None])
        assert torch.equal(alone, matrix)  # a matrix's bits do not depend on the others beside it


def test_dependent_columns_are_dropped_and_bad_ones_shown() -> None:
    first = torch.arange(1.0, 9)
    nearly = first + torch.tensor([1e-3, -1e-3] * 4)
    columns = torch.stack([first, -2 * first, torch.zeros(8), nearly, torch.ones(8)])[None]
    orthonormalise_(columns)
    assert (columns[0].abs().amax(-1) > 0).tolist() == [True, False, False, False, True]
    assert abs(float(columns[0, 0] @ columns[0, 4])) < 1e-6
    for bad in (torch.nan, torch.inf, -torch.inf):
        columns = torch.ones(1, 1, 8)
        columns[0, 0, 3] = bad
        orthonormalise_(columns)
        assert columns.isnan().all()


DIGEST = """
import hashlib, torch
from ringstrategy.algorithms.gradients.powersgd import PowerSGD
from ringstrategy.buckets.low_rank import multiply
from ringstrategy.kernels.reference import orthonormalise_
digest = hashlib.sha256()
for length in (1, 7, 33, 1000):
    generator = torch.Generator().manual_seed(length)
    columns = torch.rand(2, 3, length, generator=generator) - 0.5  # `randn` does depend on the CPU
    rows = torch.rand(3, length, generator=generator) - 0.5
    orthonormalise_(columns)
    product = torch.empty(length, length)
    multiply(columns[0], rows, out=product)
    digest.update(columns.numpy().tobytes() + product.numpy().tobytes())
parameters = {"matrix": torch.nn.Parameter(torch.zeros(40, 30)), "other": torch.nn.Parameter(torch.zeros(30, 40))}
states = [bucket.state() for bucket in PowerSGD(3).plan(parameters, frozenset(), 0)]
digest.update(b"".join(query.numpy().tobytes() for state in states for query in state.values()))
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_cpus_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    """Law 1 on mixed hosts: everything that follows a collective, with and without vectors and fused multiply-adds."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    out = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    exec(DIGEST, {})
    assert out.stdout == capsys.readouterr().out
    assert torch.backends.cpu.get_cpu_capability() != "DEFAULT", "this CPU cannot show a difference"


# Trainings


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    """Queries are part of it: without them later means differ."""

    def run(peers: FakePeers, queries: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        algorithm = PowerSGD(2, Toy())
        me, resumed = (_Rank(algorithm, peers, _parameters()) for _ in range(2))
        for step in range(3):
            me.step(_random(peers.rank, step))
        resumed.steps = me.steps
        for bucket, saved in zip(resumed.buckets, me.buckets, strict=True):
            if bucket.residuals.lost is not None:
                bucket.residuals.lost.copy_(saved.residuals.lost)
            bucket.load_state(saved.state() if queries else {})
        return me.step(_random(peers.rank, 3)), resumed.step(_random(peers.rank, 3))

    assert all(_same(list(pair)) for pair in on_all_ranks(3, lambda peers: run(peers, True)))
    assert not any(_same(list(pair)) for pair in on_all_ranks(3, lambda peers: run(peers, False)))


def test_a_state_of_another_rank_is_refused() -> None:
    bucket = PowerSGD(2).plan(_parameters({"matrix": (40, 30)}), frozenset(), 0)[0]
    with pytest.raises(ValueError, match="resume with the rank"):
        bucket.load_state({"matrix": torch.zeros(1, 30)})
    bucket.load_state({"other": torch.zeros(1, 30)})

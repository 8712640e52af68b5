"""A rank whose gradients are not finite: the other ranks do with that step what it does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fakes import FakePeers, on_all_ranks
from pairs import pairs
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    BlockInt,
    Cast,
    Direct,
    Gaussian,
    PowerSGD,
    Rotated,
    Sign,
    SmallExact,
    TopK,
)
from ringstrategy.algorithms.gradients.nonfinite import are_finite
from ringstrategy.algorithms.gradients.synchronous import Synchronous

STEPS = 8
MATRIX, BIAS = 2, 3  # which parameter has it
BAD = {2: (1, float("inf")), 3: (2, float("nan")), 6: (0, float("-inf"))}  # by step: which rank, and what it has


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 50), nn.Tanh(), nn.Linear(50, 3))


def model() -> nn.Sequential:
    return copy.deepcopy(MODEL)  # ranks are threads, which share torch's generator


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def spoilt(loss: Tensor, last: nn.Parameter, rank: int, step: int) -> Tensor:
    """With one element of one gradient that is not finite: of a bias, which many codecs keep exact, or of a matrix."""
    whose, what = BAD.get(step, (-1, 0.0))
    return loss + last.flatten()[-1] * what if rank == whose else loss


def train(peers: FakePeers, algorithm: Synchronous, place: int) -> list[list[Tensor]]:
    """After each step: parameters and momentum, then residuals."""
    module = model()
    parameters = dict(module.named_parameters())
    algorithm.setup(parameters, peers)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = spoilt(module(batch(peers.rank, step)).pow(2).mean(), list(parameters.values())[place], peers.rank, step)
        algorithm.before_backward(loss)
        loss.backward()
        algorithm.after_backward()
        optimizer.step()
        algorithm.after_step(set(parameters.values()))
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        now = [*parameters.values(), *momentum, *(residual for _, residual in algorithm.residuals())]
        history.append([value.detach().clone() for value in now])
    assert peers.stats.exchanges == STEPS
    assert peers.stats.steps_skipped == len(BAD)
    said = [line for line in algorithm.news() if "skipped" in line]
    assert len(said) == 2, "the first, the second, but not the third"
    assert "step 2 is skipped on all ranks" in said[0]
    assert "steps skipped so far: 2" in said[1]
    algorithm.close()
    return history


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        (lambda: AllReduce(bucket_mb=1e-3, on_nonfinite="skip"), MATRIX),
        (lambda: AllReduce(Cast("fp16"), Direct(), on_nonfinite="skip"), BIAS),
        (lambda: AllReduce(SmallExact(BlockInt(8)), error_feedback=True, bucket_mb=1e-2, on_nonfinite="skip"), MATRIX),
        (lambda: AllReduce(Rotated(Gaussian(4)), error_feedback=True, on_nonfinite="skip"), BIAS),
        (lambda: AllReduce(Rotated(Sign()), on_nonfinite="skip"), MATRIX),
        (lambda: AllReduce(TopK(8), Direct(), error_feedback=True, on_nonfinite="skip"), BIAS),
        (lambda: PowerSGD(2, on_nonfinite="skip"), MATRIX),
        (lambda: PowerSGD(1, BlockInt(8), on_nonfinite="skip"), BIAS),
    ],
)
def test_a_step_that_is_skipped_changes_nothing_on_any_rank(algorithm: Any, place: int) -> None:
    every_rank = on_all_ranks(3, lambda peers: train(peers, algorithm(), place))
    shared = 2 * len(list(model().parameters()))  # all but the residuals
    for history in every_rank:
        for step, now in enumerate(history):
            assert all(map(torch.equal, now[:shared], every_rank[0][step]))
            assert all(value.isfinite().all() for value in now)
            assert step == 0 or all(map(torch.equal, now, history[step - 1])) == (step in BAD)


def one_backward(peers: FakePeers, algorithm: Synchronous) -> nn.Sequential:
    """At step 2, where rank 1 has an infinity in that parameter's gradient."""
    module = model()
    algorithm.setup(dict(module.named_parameters()), peers)
    module[4].requires_grad_(False)
    module[4].bias.grad = torch.ones(3)  # a toggled one's
    loss = spoilt(module(batch(peers.rank, 2)).pow(2).mean(), module[2].bias, peers.rank, 2)
    algorithm.before_backward(loss)
    loss.backward()
    return module


def test_raise_names_the_parameters_on_all_ranks() -> None:
    def words(peers: FakePeers) -> str:
        one_backward(peers, algorithm := AllReduce(on_nonfinite="raise"))
        with pytest.raises(RuntimeError) as caught:
            algorithm.after_backward()
        return str(caught.value)

    first, *others = on_all_ranks(3, words)
    assert first.startswith("the mean gradient of 2.bias is not finite at step 0")
    assert "on_nonfinite='skip'" in first
    assert others == [first, first]


def test_local_parameters_are_skipped_too_and_toggled_ones_keep_their_gradients() -> None:
    def gradients(peers: FakePeers) -> list[bool]:
        algorithm = AllReduce(local=lambda name, _: name == "0.bias", on_nonfinite="skip")
        module = one_backward(peers, algorithm)
        algorithm.after_backward()
        return [parameter.grad is None for parameter in module.parameters()]

    assert on_all_ranks(2, gradients) == [[True, True, True, True, True, False]] * 2


@pairs(
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    value=[float("nan"), float("inf"), float("-inf")],
)
def test_every_element_counts_and_the_largest_finite_ones_pass(dtype: torch.dtype, value: float) -> None:
    largest = torch.full((3, 1000), torch.finfo(dtype).max, dtype=dtype)
    assert are_finite([largest, torch.empty(0), -largest])
    assert are_finite([])
    for place in (0, 1, 999):
        spoilt = torch.zeros(1000, dtype=dtype)
        spoilt[place] = value
        assert not are_finite([largest, spoilt])
        rows = torch.sparse_coo_tensor(torch.tensor([[5]]), spoilt[None], (9, 1000), check_invariants=True)
        assert not are_finite([rows])

"""Synchronous averaging of gradients, one thread a rank, with other data on every rank: what no door shows."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from fakes import FakePeers, of_each_rank, on_all_ranks
from pairs import pairs
from torch import Tensor, nn

import ringstrategy as ring
from ringstrategy.algorithms.gradients.nonfinite import are_finite
from ringstrategy.algorithms.gradients.synchronous import Synchronous


class Branches(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(5))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x).pow(2).sum() for i in which]).sum()


X = torch.ones(1, 3)

with torch.random.fork_rng():
    torch.manual_seed(0)
    BRANCHES, MODEL = Branches(), nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 50), nn.Linear(50, 3))


def backward(algorithm: Synchronous, loss: Tensor, *, sync: bool = True) -> None:
    algorithm.before_backward(loss, sync=sync)
    loss.backward()
    algorithm.after_backward()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def _setup(peers: FakePeers, algorithm: Any, module: Any, **how: Any) -> Any:
    """A copy, which averages the gradients of the module, or of parameters by name."""
    algorithm = copy.deepcopy(algorithm)
    algorithm.setup(module if isinstance(module, dict) else dict(module.named_parameters()), peers, **how)
    return algorithm


# Order of launches


def _noting_launches(peers: FakePeers) -> list[str]:
    """Those of buckets, from now on."""
    submit, launched = peers.submit, list[str]()

    def noting(work: Callable[[], None], where: str) -> Any:
        if "in bucket" in where:
            launched.append(where)
        return submit(work, where)

    peers.submit = noting  # type: ignore[method-assign]
    return launched


def test_buckets_launch_in_index_order_not_in_order_of_readiness() -> None:
    def launches(peers: FakePeers) -> tuple[list[str], list[str]]:
        module, launched, ready = copy.deepcopy(BRANCHES), _noting_launches(peers), list[str]()
        algorithm = _setup(peers, ring.AllReduce(bucket_mb=1e-6), module)
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        x = torch.ones(1, 3)
        for branch in [0, 1, 2, 3, 4] if peers.rank == 0 else [4, 2, 0, 1, 3]:
            x = module.branches[branch](x).sum() * torch.ones(1, 3)
        backward(algorithm, x.sum())
        return launched, ready

    (first, first_ready), (second, second_ready) = on_all_ranks(2, launches)
    assert first_ready != second_ready
    assert first == second == [f"at step 0, in bucket {index} of 10" for index in range(10)]


@of_each_rank(2)
def test_hooks_of_several_devices_launch_in_index_order(peers: FakePeers) -> None:
    """Which fire in several threads: here while the first bucket is being packed."""
    parameters = {name: nn.Parameter(torch.zeros(10)) for name in "ab"}
    algorithm = _setup(peers, ring.AllReduce(bucket_mb=1e-6), parameters)
    launched = _noting_launches(peers)
    first, second = algorithm._buckets
    first.rider = lambda *_: None  # type: ignore[method-assign]
    algorithm.before_backward()
    other = threading.Thread(target=algorithm._on_gradient, args=(second.slots[0].parameter,))
    pack = first.pack

    def slowly(*how: Any) -> None:
        other.start()
        other.join(0.2)  # longer than it takes, unless it waits for this one
        pack(*how)

    first.pack = slowly  # type: ignore[method-assign]
    for parameter in parameters.values():
        parameter.grad = torch.full((10,), float(peers.rank))
    algorithm._on_gradient(first.slots[0].parameter)
    other.join()
    algorithm.after_backward()
    assert all(parameter.grad[0] == 0.5 for parameter in parameters.values() if parameter.grad is not None)
    assert launched == [f"at step 0, in bucket {index} of 2" for index in range(2)]


# Frozen


@pytest.mark.parametrize("freezes", [True, False])
def test_freezing_and_unfreezing_on_one_rank_is_an_error_on_all(freezes: bool) -> None:
    def one_changes(peers: FakePeers) -> str:
        module = copy.deepcopy(BRANCHES)
        module.branches[1].requires_grad_(freezes)
        algorithm = _setup(peers, ring.AllReduce(), module)
        backward(algorithm, module(X, [0]))
        if peers.rank == 1:
            module.branches[1].requires_grad_(not freezes)
        with pytest.raises(ring.PlanMismatchError) as caught:
            backward(algorithm, module(X, [0]))
        return str(caught.value)

    messages = _though_messages_are_left(3, one_changes)
    assert len(set(messages)) == 1
    assert "rank 1 has" in messages[0]
    assert not freezes or "branches.1.bias: frozen at step 1" in messages[0]


def _though_messages_are_left(size: int, function: Callable[[FakePeers], Any]) -> list[Any]:
    """An exchange that ends in an error leaves sends behind, of which the network would complain."""
    with mock.patch("fakes.Network.check"):
        return on_all_ranks(size, function)


@pytest.mark.parametrize("collective", [None, ring.Ring(), ring.Native()], ids=str)
def test_toggling_keeps_the_other_gradients(collective: ring.Collective | None) -> None:
    """As a GAN: a gradient kept from a first backward survives a second one in which its parameter is frozen.

    Some collectives carry beside the last bucket who used what, others do not.
    """

    def toggle(peers: FakePeers) -> dict[str, Tensor | None]:
        module = copy.deepcopy(BRANCHES)
        algorithm = _setup(peers, ring.AllReduce(collective=collective), module)
        x = torch.full((1, 3), 1.0 + peers.rank)
        module.branches[1].requires_grad_(False)
        backward(algorithm, module(x, [0]))
        kept = gradients(module)["branches.0.weight"]
        module.branches[0].requires_grad_(False)
        module.branches[1].requires_grad_(True)
        backward(algorithm, module(x, [1, 3] if peers.rank == 2 else [1]))
        after = gradients(module)
        assert torch.equal(kept, after["branches.0.weight"])  # type: ignore[arg-type]
        return after

    results = on_all_ranks(3, toggle)
    for after in results:
        for name, value in after.items():
            assert (value is None) == (name[9] not in "013"), name
            assert value is None or torch.equal(value, results[0][name]), name  # type: ignore[arg-type]


@of_each_rank(8)
def test_sums_are_not_taken_in_16_bits_and_other_dtypes_keep_their_digits(peers: FakePeers) -> None:
    weights = [torch.arange(5.0) + 1.0001 * 2.0 ** (-8 * (rank > 0)) for rank in range(8)]
    dtypes = {"sixteen": torch.bfloat16, "thirty_two": torch.float32, "sixty_four": torch.float64}
    named = {name: nn.Parameter(torch.ones(5, dtype=dtype)) for name, dtype in dtypes.items()}
    named["rows"] = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
    algorithm = _setup(peers, ring.AllReduce(ring.Identity()), named, sparse=frozenset({"rows"}))
    for _ in range(2):
        for parameter in named.values():
            parameter.grad = None
        weight = weights[peers.rank]
        row = nn.functional.embedding(torch.tensor([1]), named["rows"], sparse=True)
        losses = [(row * weight.bfloat16()).sum().double()]
        losses += [(named[name] * weight.to(dtype)).sum().double() for name, dtype in dtypes.items()]
        backward(algorithm, torch.stack(losses).sum())
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in named.values())
    found = {name: p.grad.to_dense() for name, p in named.items()}  # type: ignore[union-attr]
    half = torch.stack([weight.bfloat16().float() / 8 for weight in weights]).sum(0).bfloat16()
    assert not torch.equal(half, sum(weight.bfloat16() / 8 for weight in weights)), "or this tests nothing"
    assert torch.equal(found["sixteen"], half)
    assert torch.equal(found["rows"][1], half)
    assert torch.allclose(found["thirty_two"], torch.stack(weights).mean(0), rtol=1e-6)
    assert torch.allclose(found["sixty_four"], torch.stack([w.double() for w in weights]).mean(0), rtol=1e-14)


@pytest.mark.parametrize(("codec", "nbytes"), [(ring.Identity(), 2), (ring.BlockInt(8), 1 + 2 / 256)], ids=str)
@of_each_rank(4)
def test_gradients_of_16_bits_travel_in_16_bits_or_fewer(peers: FakePeers, codec: ring.Codec, nbytes: float) -> None:
    weight = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    algorithm = _setup(peers, ring.AllReduce(codec), {"weight": weight})
    before = peers.stats.bytes_sent
    assert before is not None
    backward(algorithm, (weight * peers.rank).sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2048,), 1.5, dtype=torch.bfloat16))
    assert peers.stats.bytes_sent is not None
    least = 2 * 3 / 4 * 2048 * nbytes
    assert least <= peers.stats.bytes_sent - before <= least + 128, "with what ranks agree on"


def test_noise_follows_from_rank_step_and_bucket_alone() -> None:
    """All ranks round the same gradient, at each step and in each bucket: what they lose shows what they drew."""

    def lost(peers: FakePeers, stops: tuple[int, ...]) -> list[Tensor]:
        named = {name: nn.Parameter(torch.zeros(256)) for name in ("one", "two")}
        original, found = (
            ring.AllReduce(ring.BlockInt(2, 64, rounding="stochastic"), ring.Direct(), True, bucket_mb=1e-4),
            [],
        )
        algorithm = _setup(peers, original, named)
        for step in range(4):
            if step in stops:  # the run ends, and one from its state goes on
                state = copy.deepcopy(algorithm.state_dict())
                algorithm.close()
                algorithm = _setup(peers, original, named)
                algorithm.load_state_dict(state)
            for parameter in named.values():
                parameter.grad = None
            algorithm.load_residuals({name: torch.zeros(256) for name in named})
            backward(algorithm, sum((torch.linspace(-1, 1, 256) * p).sum() for p in named.values()))  # type: ignore[arg-type]
            algorithm.after_step(set(named.values()))
            found += [residual.clone() for _, residual in algorithm.residuals()]
        assert len(algorithm._buckets) == 2
        return found

    through, resumed = (on_all_ranks(3, lambda peers, at=at: lost(peers, at)) for at in ((), (1, 3)))
    drawn = [residual for found in through for residual in found]
    assert all(map(torch.equal, drawn, chain(*resumed)))
    assert len({tuple(residual.tolist()) for residual in drawn}) == len(drawn) == 3 * 4 * 2


# Steps that are not finite: the other ranks do with such a step what the one rank does

STEPS = 8
MATRIX, BIAS = 2, 3  # which parameter has it
BAD = {2: (1, float("inf")), 3: (2, float("nan")), 6: (0, float("-inf"))}  # by step: which rank, and what it has


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def spoilt(loss: Tensor, last: nn.Parameter, rank: int, step: int) -> Tensor:
    """With one element of one gradient that is not finite: of a bias, which many codecs keep exact, or of a matrix."""
    whose, what = BAD.get(step, (-1, 0.0))
    return loss + last.flatten()[-1] * what if rank == whose else loss


def train(peers: FakePeers, algorithm: Synchronous, place: int) -> list[list[Tensor]]:
    """After each step: parameters and momentum, then residuals."""
    module = copy.deepcopy(MODEL)
    parameters = dict(module.named_parameters())
    algorithm.setup(parameters, peers)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = spoilt(module(batch(peers.rank, step)).pow(2).mean(), list(parameters.values())[place], peers.rank, step)
        backward(algorithm, loss)
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
        (lambda: ring.AllReduce(bucket_mb=1e-3, on_nonfinite="skip"), MATRIX),
        (lambda: ring.AllReduce(ring.Cast("fp16"), ring.Direct(), on_nonfinite="skip"), BIAS),
        (
            lambda: ring.AllReduce(
                ring.SmallExact(ring.BlockInt(8)), error_feedback=True, bucket_mb=1e-2, on_nonfinite="skip"
            ),
            MATRIX,
        ),
        (lambda: ring.AllReduce(ring.Rotated(ring.Gaussian(4)), error_feedback=True, on_nonfinite="skip"), BIAS),
        (lambda: ring.AllReduce(ring.Rotated(ring.Sign()), on_nonfinite="skip"), MATRIX),
        (lambda: ring.AllReduce(ring.TopK(8), ring.Direct(), error_feedback=True, on_nonfinite="skip"), BIAS),
        (lambda: ring.PowerSGD(2, on_nonfinite="skip"), MATRIX),
        (lambda: ring.PowerSGD(1, ring.BlockInt(8), on_nonfinite="skip"), BIAS),
    ],
)
def test_a_step_that_is_skipped_changes_nothing_on_any_rank(algorithm: Any, place: int) -> None:
    every_rank = on_all_ranks(3, lambda peers: train(peers, algorithm(), place))
    shared = 2 * len(list(MODEL.parameters()))  # all but the residuals
    for history in every_rank:
        for step, now in enumerate(history):
            assert all(map(torch.equal, now[:shared], every_rank[0][step]))
            assert all(value.isfinite().all() for value in now)
            assert step == 0 or all(map(torch.equal, now, history[step - 1])) == (step in BAD)


def one_backward(peers: FakePeers, algorithm: Synchronous) -> nn.Sequential:
    """At step 2, where rank 1 has an infinity in that parameter's gradient."""
    module = copy.deepcopy(MODEL)
    algorithm.setup(dict(module.named_parameters()), peers)
    module[3].requires_grad_(False)
    module[3].bias.grad = torch.ones(3)  # a toggled one's
    loss = spoilt(module(batch(peers.rank, 2)).pow(2).mean(), module[2].bias, peers.rank, 2)
    algorithm.before_backward(loss)
    loss.backward()
    return module


@of_each_rank(3)
def test_raise_names_the_parameters_on_all_ranks(peers: FakePeers) -> None:
    one_backward(peers, algorithm := ring.AllReduce(on_nonfinite="raise"))
    with pytest.raises(RuntimeError) as caught:
        algorithm.after_backward()
    assert str(caught.value).startswith("the mean gradient of 2.bias is not finite at step 0")
    assert "on_nonfinite='skip'" in str(caught.value)


@of_each_rank(2)
def test_local_parameters_are_skipped_too_and_toggled_ones_keep_their_gradients(peers: FakePeers) -> None:
    algorithm = ring.AllReduce(local=lambda name, _: name == "0.bias", on_nonfinite="skip")
    module = one_backward(peers, algorithm)
    algorithm.after_backward()
    assert [parameter.grad is None for parameter in module.parameters()] == [True] * 5 + [False]


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


# Errors


@of_each_rank(2)
def test_stepping_what_a_backward_behind_our_back_made_is_an_error(peers: FakePeers) -> None:
    module = copy.deepcopy(BRANCHES)
    algorithm, everything = _setup(peers, ring.AllReduce(), module), set(module.parameters())

    def refuses(cure: str) -> None:
        with pytest.raises(RuntimeError, match=f"is this rank's alone.*{cure}"):
            algorithm.before_step(everything)

    for drop in (lambda: module.zero_grad(set_to_none=False), module.zero_grad):
        module(X, [0, 1]).backward()
        refuses("manual_backward")
        algorithm.before_step({module.branches[2].weight})  # another optimizer's
        drop()
        algorithm.before_step(everything)
    backward(algorithm, module(X, [0, 1]), sync=False)
    refuses("block_backward_sync")
    backward(algorithm, module(X, [0, 1]))  # averages what was there too
    algorithm.before_step(everything)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_one_memory_each_get_their_own_mean(dtype: torch.dtype) -> None:
    """Autograd gives `a` and `b` one memory for their gradients, if nothing else does with it."""

    def shared(peers: FakePeers) -> list[Tensor]:
        a, b = (nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((40, 10), (20, 20)))
        generator = torch.Generator().manual_seed(peers.rank)
        algorithm = _setup(peers, ring.AllReduce(ring.BlockInt(4, block=24), ring.Direct()), {"a": a, "b": b})
        loss = ((a.view(-1) + b.view(-1)) * torch.randn(400, generator=generator).to(dtype)).sum()
        algorithm.before_backward(loss)
        loss.backward()
        assert a.grad.data_ptr() == b.grad.data_ptr(), "or this tests nothing"  # type: ignore[union-attr]
        algorithm.after_backward()
        slots = [slot for bucket in algorithm._buckets for slot in bucket.slots]
        assert all(torch.equal(slot.view.to(dtype), slot.parameter.grad) for slot in slots)  # type: ignore[arg-type]
        return [slot.parameter.grad.view(-1) for slot in slots]  # type: ignore[union-attr]

    every_rank = on_all_ranks(3, shared)
    for first, second in every_rank:
        assert not torch.equal(first, second), "blocks lie elsewhere in each, so the means differ"
        assert torch.equal(first, every_rank[0][0])
        assert torch.equal(second, every_rank[0][1])


@of_each_rank(2, _though_messages_are_left)
def test_a_backward_after_one_that_failed_is_an_error(peers: FakePeers) -> None:
    weight = nn.Parameter(torch.zeros(3))
    algorithm = _setup(peers, ring.AllReduce(), {"weight": weight})
    algorithm.before_backward(weight.sum())  # and then backward raised, and somebody caught it
    with pytest.raises(RuntimeError, match="half-way"):
        backward(algorithm, weight.sum())

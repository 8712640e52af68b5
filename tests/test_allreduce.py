"""Synchronous averaging of gradients, one thread a rank, with other data on every rank: what no door shows."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from fakes import FakePeers, Toy, on_all_ranks
from pairs import pairs
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    BlockInt,
    Cast,
    Codec,
    Collective,
    Direct,
    Hierarchical,
    Identity,
    Native,
    PlanMismatchError,
    Ring,
    Stats,
)
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.transport.base import Peers

SIZES = [2, 3, 4, 5, 8]
MINUTE = timedelta(seconds=60)


class Net(nn.Module):
    """Odd shapes, a tied weight, a scalar, an empty and a channels-last parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(12, 513)
        self.back = nn.Linear(513, 7, bias=False)
        self.tied = nn.Linear(7, 7)
        self.also_tied = nn.Linear(7, 7)
        self.also_tied.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(self.wide(self.convolution(x).flatten(1)).tanh()) * self.scale
        return self.also_tied(self.tied(y).tanh()).pow(2).mean() + self.empty.sum()


class Branches(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(5))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x).pow(2).sum() for i in which]).sum()


_original = cache(lambda kind: kind())
_making = threading.Lock()


def fresh(kind: Callable[[], Any]) -> Any:
    """A copy: ranks that are threads share torch's generator, so each making its own would draw other numbers."""
    with _making:
        return copy.deepcopy(_original(kind))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(algorithm: Synchronous, loss: Tensor, *, sync: bool = True) -> None:
    algorithm.before_backward(loss, sync=sync)
    loss.backward()
    algorithm.after_backward()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def there(module: nn.Module) -> list[Tensor]:
    return [gradient for gradient in gradients(module).values() if gradient is not None]


def _setup(peers: FakePeers, algorithm: Any, module: Any, **how: Any) -> Any:
    """A copy, which averages the gradients of the module, or of parameters by name."""
    algorithm = copy.deepcopy(algorithm)
    algorithm.setup(module if isinstance(module, dict) else dict(module.named_parameters()), peers, **how)
    return algorithm


def train(peers: Peers, algorithm: AllReduce, steps: int) -> tuple[list[Tensor], list[list[Tensor]], Stats]:
    module = fresh(Net)
    algorithm = _setup(peers, algorithm, module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(algorithm, module(batch(peers.rank, step)))
        history.append(there(module))
        optimizer.step()
    algorithm.close()
    return [p.detach().clone() for p in module.parameters()], history, peers.stats


def sum_in_float64(size: int, steps: Sequence[int]) -> list[Tensor]:
    """Of all ranks' gradients, over so many steps from the same parameters."""
    module = fresh(Net)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()]
    for rank in range(size):
        for step in steps:
            module.zero_grad()
            module(batch(rank, step)).backward()
            total = [a + p.grad.double() for a, p in zip(total, module.parameters(), strict=True)]
    return total


ALGORITHMS = {
    AllReduce(bucket_mb=0.01): 1e-6,  # and how far the worst element may be from the mean, relative to the largest
    AllReduce(collective=Direct(), bucket_mb=0.01): 1e-6,
    AllReduce(collective=Native()): 1e-6,
    AllReduce(Cast("bf16")): 2e-2,
    AllReduce(Toy(), error_feedback=True, bucket_mb=0.01): 2.0,
    AllReduce(Toy(), Direct(), error_feedback=True): 2.0,
}


@pairs(algorithm=ALGORITHMS, size=[2, 3, 5])
def test_replicas_stay_identical_and_near_the_mean(algorithm: AllReduce, size: int) -> None:
    (parameters, history, stats), *others = on_all_ranks(size, lambda peers: train(peers, algorithm, 3))
    for other, other_history, _ in others:
        assert all(map(torch.equal, parameters, other))
        assert all(map(torch.equal, chain(*history), chain(*other_history)))
    exact = [total / size for total in sum_in_float64(size, [0])]
    largest = max(e.abs().max() for e in exact if e.numel())
    error = max((a - e).abs().max() / largest for a, e in zip(history[0], exact, strict=True) if e.numel())
    assert error < ALGORITHMS[algorithm]
    assert error > 0 or algorithm.codec == Identity()
    assert stats.exchanges == 3
    assert stats.values_averaged == 3 * sum(p.numel() for p in parameters)
    assert stats.bytes_sent is None if isinstance(algorithm.collective, Native) else stats.bytes_sent > 0


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
        module, launched, ready = fresh(Branches), _noting_launches(peers), list[str]()
        algorithm = _setup(peers, AllReduce(bucket_mb=1e-6), module)
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


def test_hooks_of_several_devices_launch_in_index_order() -> None:
    """Which fire in several threads: here while the first bucket is being packed."""

    def launches(peers: FakePeers) -> list[str]:
        parameters = {name: nn.Parameter(torch.zeros(10)) for name in "ab"}
        algorithm = _setup(peers, AllReduce(bucket_mb=1e-6), parameters)
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
        return launched

    expected = [f"at step 0, in bucket {index} of 2" for index in range(2)]
    assert on_all_ranks(2, launches) == [expected, expected]


def _every_way_to_ride(peers: FakePeers, collective: Collective | None, rides: bool) -> tuple[list[Any], list[str]]:
    """Eight steps with frozen, unused and dropped gradients and a loss scale that moves; and the launches."""
    generator = torch.Generator().manual_seed(peers.rank)
    shapes = {"a": (100, 40), "bias": (10,), "norm": (11,), "z": (200, 40)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}

    def codec_of(name: str, parameter: nn.Parameter) -> Codec:
        return BlockInt(4, block=24) if parameter.dim() < 2 else BlockInt(8)

    algorithm = AllReduce(codec_of, collective, error_feedback=True, bucket_mb=0.03)
    algorithm.setup(parameters, peers)
    launched = _noting_launches(peers)
    for bucket in algorithm._buckets if not rides else ():
        bucket.rider = lambda *_: None  # type: ignore[method-assign]
    outcome: list[Any] = []
    for step in range(8):
        used = dict(parameters)
        for parameter in parameters.values():
            parameter.grad = None
        parameters["bias"].requires_grad_(step not in (3, 4))
        parameters["norm"].requires_grad_(step != 4)
        if step in (1, 2) and peers.rank == 0:
            used.pop("bias")
        elif step == 5:
            used.pop("bias")
            used.pop("norm")
        elif step == 6:
            used.pop("a")
        scale = torch.tensor(2.0 ** (step % 3))
        loss = sum((torch.randn(shapes[name], generator=generator) * p).sum() for name, p in used.items())
        algorithm.before_backward(loss, scale=scale)
        (loss * scale).backward()  # type: ignore[operator]
        algorithm.after_backward()
        outcome += [None if p.grad is None else p.grad.clone() for p in parameters.values()]
        if step != 6:
            algorithm.after_step(set(parameters.values()))
        outcome += [residual.clone() for _, residual in algorithm.residuals()]
    algorithm.close()
    return outcome, launched


@pytest.mark.parametrize("collective", [None, Ring(), Direct(), Hierarchical()], ids=str)
def test_a_small_bucket_travels_in_the_messages_of_the_next_with_the_same_outcome(
    collective: Collective | None,
) -> None:
    together = on_all_ranks(3, lambda peers: _every_way_to_ride(peers, collective, True))
    apart = on_all_ranks(3, lambda peers: _every_way_to_ride(peers, collective, False))
    for (ours, riding), (expected, never) in zip(together, apart, strict=True):
        assert riding[:2] == ["at step 0, in bucket 0 of 3", "at step 0, in buckets 1, 2 of 3"]
        assert sum("buckets 1, 2" in where for where in riding) == 7, "at step 4 the small bucket is frozen"
        assert not any("buckets" in where for where in never)
        for one, other in zip(ours, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


# Accumulation and repeated backwards


# Unused, frozen, local, sparse


def which(rank: int, step: int) -> list[int]:
    """Branch 4 is never used, branch 3 by rank 1 in odd steps only, others by turns."""
    used = [0, 1 + (rank + step) % 2]
    return [*used, 3] if rank == 1 and step % 2 else used


def test_unused_parameters_count_zeros_or_have_no_gradient() -> None:
    """As under DDP; whether the graph is walked for them or not."""

    def unused(peers: FakePeers, find: bool) -> list[dict[str, Tensor | None]]:
        module, history = fresh(Branches), []
        algorithm = _setup(peers, AllReduce(bucket_mb=2e-5, find_unused_parameters=find), module)
        for step in range(4):
            module.zero_grad()
            backward(algorithm, module(_inputs(peers.rank, step), which(peers.rank, step)))
            history.append(gradients(module))
        return history

    for find in (False, True):
        for history in on_all_ranks(2, lambda peers, find=find: unused(peers, find)):
            for step, means in enumerate(history):
                alone = fresh(Branches)
                for rank in range(2):
                    (alone(_inputs(rank, step), which(rank, step)) / 2).backward()
                for name, exact in gradients(alone).items():
                    assert (means[name] is None) == (exact is None), name
                    assert exact is None or torch.equal(means[name], exact), name  # type: ignore[arg-type]


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("freezes", [True, False])
def test_freezing_and_unfreezing_on_one_rank_is_an_error_on_all(freezes: bool) -> None:
    def one_changes(peers: FakePeers) -> str:
        module = fresh(Net)
        module.wide.requires_grad_(freezes)
        algorithm = _setup(peers, AllReduce(), module)
        backward(algorithm, module(batch(peers.rank, 0)))
        if peers.rank == 1:
            module.wide.requires_grad_(not freezes)
        with pytest.raises(PlanMismatchError) as caught:
            backward(algorithm, module(batch(peers.rank, 1)))
        return str(caught.value)

    messages = _though_messages_are_left(3, one_changes)
    assert len(set(messages)) == 1
    assert "rank 1 has" in messages[0]
    assert not freezes or "wide.bias: frozen at step 1" in messages[0]


def _though_messages_are_left(size: int, function: Callable[[FakePeers], Any]) -> list[Any]:
    """An exchange that ends in an error leaves sends behind, of which the network would complain."""
    with mock.patch("fakes.Network.check"):
        return on_all_ranks(size, function)


@pytest.mark.parametrize("collective", [None, Ring(), Native()], ids=str)
def test_toggling_keeps_the_other_gradients(collective: Collective | None) -> None:
    """As a GAN: a gradient kept from a first backward survives a second one in which its parameter is frozen.

    Some collectives carry beside the last bucket who used what, others do not.
    """

    def toggle(peers: FakePeers) -> dict[str, Tensor | None]:
        module = fresh(Branches)
        algorithm = _setup(peers, AllReduce(collective=collective), module)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_one_memory_each_get_their_own_mean(dtype: torch.dtype) -> None:
    """Autograd gives `a` and `b` one memory for their gradients, if nothing else does with it."""

    def shared(peers: FakePeers) -> list[Tensor]:
        a, b = (nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((40, 10), (20, 20)))
        generator = torch.Generator().manual_seed(peers.rank)
        algorithm = _setup(peers, AllReduce(BlockInt(4, block=24), Direct()), {"a": a, "b": b})
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


def test_sums_are_not_taken_in_16_bits_and_other_dtypes_keep_their_digits() -> None:
    def mixed(peers: FakePeers) -> dict[str, Tensor]:
        dtypes = {"sixteen": torch.bfloat16, "thirty_two": torch.float32, "sixty_four": torch.float64}
        named = {name: nn.Parameter(torch.ones(5, dtype=dtype)) for name, dtype in dtypes.items()}
        named["rows"] = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
        algorithm = _setup(peers, AllReduce(Identity()), named, sparse=frozenset({"rows"}))
        for _ in range(2):
            for parameter in named.values():
                parameter.grad = None
            weight = torch.arange(5.0) + 1.0001 * 2.0 ** (-8 * (peers.rank > 0))
            row = nn.functional.embedding(torch.tensor([1]), named["rows"], sparse=True)
            losses = [(row * weight.bfloat16()).sum().double()]
            losses += [(named[name] * weight.to(dtype)).sum().double() for name, dtype in dtypes.items()]
            backward(algorithm, torch.stack(losses).sum())
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in named.values())
        return {name: p.grad.to_dense() for name, p in named.items()}  # type: ignore[union-attr]

    weights = [torch.arange(5.0) + 1.0001 * 2.0 ** (-8 * (rank > 0)) for rank in range(8)]
    half = torch.stack([weight.bfloat16().float() / 8 for weight in weights]).sum(0).bfloat16()
    assert not torch.equal(half, sum(weight.bfloat16() / 8 for weight in weights)), "or this tests nothing"
    for found in on_all_ranks(8, mixed):
        assert torch.equal(found["sixteen"], half)
        assert torch.equal(found["rows"][1], half)
        assert torch.allclose(found["thirty_two"], torch.stack(weights).mean(0), rtol=1e-6)
        assert torch.allclose(found["sixty_four"], torch.stack([w.double() for w in weights]).mean(0), rtol=1e-14)


@pytest.mark.parametrize(("codec", "nbytes"), [(Identity(), 2), (BlockInt(8), 1 + 2 / 256)], ids=str)
def test_gradients_of_16_bits_travel_in_16_bits_or_fewer(codec: Codec, nbytes: float) -> None:
    def sent(peers: FakePeers) -> int:
        weight = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
        algorithm = _setup(peers, AllReduce(codec), {"weight": weight})
        before = peers.stats.bytes_sent
        assert before is not None
        backward(algorithm, (weight * peers.rank).sum())
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((2048,), 1.5, dtype=torch.bfloat16))
        assert peers.stats.bytes_sent is not None
        return peers.stats.bytes_sent - before

    values = 2 * 3 / 4 * 2048
    for found in on_all_ranks(4, sent):
        assert values * nbytes <= found <= values * nbytes + 128, "with what ranks agree on"


# Noise


def test_noise_follows_from_rank_step_and_bucket_alone() -> None:
    """All ranks round the same gradient, at each step and in each bucket: what they lose shows what they drew."""

    def lost(peers: FakePeers, stops: tuple[int, ...]) -> list[Tensor]:
        named = {name: nn.Parameter(torch.zeros(256)) for name in ("one", "two")}
        original, found = AllReduce(BlockInt(2, 64, rounding="stochastic"), Direct(), True, bucket_mb=1e-4), []
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


# Errors


def test_stepping_what_a_backward_behind_our_back_made_is_an_error() -> None:
    def unmanaged(peers: FakePeers) -> None:
        module = fresh(Net)
        algorithm, everything = _setup(peers, AllReduce(), module), set(module.parameters())

        def refuses(cure: str) -> None:
            with pytest.raises(RuntimeError, match=f"is this rank's alone.*{cure}"):
                algorithm.before_step(everything)

        for drop in (lambda: module.zero_grad(set_to_none=False), module.zero_grad):
            module(batch(0, 0)).backward()
            refuses("manual_backward")
            algorithm.before_step({module.empty}), "another optimizer's"
            drop()
            algorithm.before_step(everything)
        backward(algorithm, module(batch(0, 0)), sync=False)
        refuses("block_backward_sync")
        backward(algorithm, module(batch(peers.rank, 1)))  # averages what was there too
        algorithm.before_step(everything)

    on_all_ranks(2, unmanaged)

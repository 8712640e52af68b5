"""The algorithm on real processes over gloo, with torch DDP as the oracle; different data on every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fakes import FakePeers, Toy, on_all_ranks
from pool import Pool
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
    SmallExact,
    Stats,
)
from ringstrategy.buckets.dense import DenseBucket
from ringstrategy.buckets.sparse import SparseBucket
from ringstrategy.collectives import mean_
from ringstrategy.collectives.base import SMALLEST_SEGMENT
from ringstrategy.transport import connect

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


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def start(algorithm: AllReduce, module: nn.Module, **kwargs: Any) -> tuple[Any, Stats]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=MINUTE)
    stats = Stats()
    peers = connect(torch.device("cpu"), MINUTE, stats)
    dist.barrier()  # one that fails closes its connections, which the others may still be making
    try:
        algorithm.setup(dict(module.named_parameters()), peers, **kwargs)
    except BaseException:
        peers.close()
        raise
    return peers, stats


def backward(algorithm: AllReduce, loss: Tensor, *, sync: bool = True) -> None:
    algorithm.before_backward(loss, sync=sync)
    loss.backward()
    algorithm.after_backward()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def train(
    algorithm: AllReduce, steps: int, *, set_to_none: bool = True
) -> tuple[list[Tensor], list[list[Tensor]], Stats]:
    module = Net()
    peers, stats = start(algorithm, module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    history = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(algorithm, module(batch(peers.rank, step)))
        history.append([g.clone() for g in gradients(module).values() if g is not None])
        optimizer.step()
    algorithm.close()
    peers.close()
    return [p.detach().clone() for p in module.parameters()], history, stats


def train_ddp(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    dist.init_process_group("gloo", timeout=MINUTE)
    module = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(dist.get_rank(), step)).backward()
        history.append([g.clone() for g in gradients(module).values() if g is not None])
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()], history


def mean_in_float64(size: int, step: int) -> list[Tensor]:
    total = None
    for rank in range(size):
        module = Net()
        module(batch(rank, step)).backward()
        mine = [p.grad.double() for p in module.parameters() if p.grad is not None]
        total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
    assert total is not None
    return [t / size for t in total]


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        *((AllReduce(bucket_mb=0.01), size) for size in SIZES),
        *((AllReduce(collective=Direct(), bucket_mb=0.01), size) for size in (2, 5)),
        *((AllReduce(collective=Native()), size) for size in (3, 4)),
        *((AllReduce(Cast("bf16")), size) for size in (2, 3)),
        *((AllReduce(Toy(), bucket_mb=0.01), size) for size in (3, 8)),
        *((AllReduce(Toy(), Direct()), size) for size in (2, 5)),
    ],
    ids=str,
)
def test_replicas_stay_identical_and_near_the_mean(ranks: Pool, size: int, algorithm: AllReduce) -> None:
    results = ranks(size, train, algorithm, 3)
    parameters, history, stats = results[0]
    for others, other_history, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
        assert all(
            torch.equal(a, b) for s, t in zip(history, other_history, strict=True) for a, b in zip(s, t, strict=True)
        )
    exact = mean_in_float64(size, 0)
    largest = max(e.abs().max() for e in exact if e.numel())
    error = max((a - e).abs().max() / largest for a, e in zip(history[0], exact, strict=True) if e.numel())
    bound = {Identity(): 1e-6, Cast("bf16"): 2e-2, Toy(): 2.0}[algorithm.codec]
    assert error < bound
    assert stats.steps == 3
    assert stats.values_averaged == 3 * sum(p.numel() for p in parameters)
    if isinstance(algorithm.collective, Native):
        assert stats.bytes_sent is None
    else:
        assert stats.bytes_sent is not None
        assert stats.bytes_sent > 0


def test_two_ranks_equal_ddp_bit_for_bit(ranks: Pool) -> None:
    ours, our_history, _ = ranks(2, train, AllReduce(), 5)[0]
    theirs, their_history = ranks(2, train_ddp, 5)[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(
        torch.equal(a, b) for s, t in zip(our_history, their_history, strict=True) for a, b in zip(s, t, strict=True)
    )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_stay_views_or_become_them_again(ranks: Pool, set_to_none: bool) -> None:
    parameters = ranks(3, _train_and_watch, set_to_none)
    expected = ranks(3, train, AllReduce(), 4)
    assert all(torch.equal(a, b) for a, b in zip(parameters[0], expected[0][0], strict=True))


def _train_and_watch(set_to_none: bool) -> list[Tensor]:
    return train(AllReduce(), 4, set_to_none=set_to_none)[0]


def _feedback_sum(feedback: bool) -> tuple[Tensor, Tensor]:
    """Mean gradients over many steps, delivered and exact."""
    algorithm = AllReduce(Toy(), error_feedback=feedback)
    weight = nn.Parameter(torch.zeros(203))
    module = nn.ParameterDict({"weight": weight})
    peers, _ = start(algorithm, module)
    delivered, local = torch.zeros(203), torch.zeros(203)
    direction = torch.randn(203, generator=torch.Generator().manual_seed(peers.rank))
    for _ in range(50):
        weight.grad = None
        backward(algorithm, (weight * direction).sum())
        assert weight.grad is not None
        delivered += weight.grad / 50
        algorithm.after_step({weight})
        local = direction
    algorithm.close()
    peers.close()
    return delivered, local


def test_feedback_is_kept_between_steps(ranks: Pool) -> None:
    errors = []
    for feedback in (False, True):
        results = ranks(4, _feedback_sum, feedback)
        exact = torch.stack([local for _, local in results]).mean(0)
        errors.append((results[0][0] - exact).norm())
    assert 0 < errors[1] < 0.2 * errors[0]


# Order of launches


def _launches() -> tuple[list[str], list[str]]:
    """Ranks run their branches in different orders, so gradients get ready in different orders."""
    module = Branches()
    algorithm = AllReduce(bucket_mb=1e-6)
    peers, _ = start(algorithm, module)
    submit, launched, ready = peers.submit, [], []
    peers.submit = lambda work, where: (launched.append(where), submit(work, where))[1]
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    order = [0, 1, 2, 3, 4] if peers.rank == 0 else [4, 2, 0, 1, 3]
    x = torch.ones(1, 3)
    for branch in order:
        x = module.branches[branch](x).sum() * torch.ones(1, 3)
    backward(algorithm, x.sum())
    algorithm.close()
    peers.close()
    return [where for where in launched if "in bucket" in where], ready


def test_buckets_launch_in_index_order_not_in_order_of_readiness(ranks: Pool) -> None:
    (first, first_ready), (second, second_ready) = ranks(2, _launches)
    assert first_ready != second_ready
    assert first == second == [f"at step 0, in bucket {index} of 10" for index in range(10)]


def _riding(rides: bool) -> tuple[list[str], list[Tensor]]:
    """Three steps: the launches of each, the last mean gradients and residuals."""
    shapes = {"a": (100, 40), "bias": (10,), "norm": (11,), "z": (200, 40)}
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    algorithm = AllReduce(SmallExact(BlockInt(8)), error_feedback=True, bucket_mb=0.03)
    peers, _ = start(algorithm, module)
    submit, launched = peers.submit, []
    peers.submit = lambda work, where: (launched.append(where), submit(work, where))[1]
    with pytest.MonkeyPatch.context() as patch:
        if not rides:
            patch.setattr(DenseBucket, "rider", lambda *_: None)
        for step in range(3):
            module.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + peers.rank)
            weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            backward(algorithm, sum((weights[name] * p).sum() for name, p in module.items()))
            algorithm.after_step(set(module.parameters()))
    mean = weights["bias"].clone()
    dist.all_reduce(mean)
    assert module["bias"].grad is not None
    assert torch.allclose(module["bias"].grad, mean / peers.size, atol=1e-6)
    kept = [p.grad.clone() for p in module.values() if p.grad is not None] + [
        left.clone() for _, left in algorithm.residuals()
    ]
    assert any(left.any() for _, left in algorithm.residuals())
    algorithm.close()
    peers.close()
    return [where for where in launched if "in bucket" in where], kept


@pytest.mark.parametrize("size", [2, 3])
def test_a_small_bucket_travels_in_the_messages_of_the_next_with_the_same_outcome(ranks: Pool, size: int) -> None:
    for together, apart in zip(ranks(size, _riding, True), ranks(size, _riding, False), strict=True):
        assert together[0] == [
            f"at step {step}, in {which} of 3" for step in range(3) for which in ("bucket 0", "buckets 1, 2")
        ]
        assert len(apart[0]) == 9
        assert len(together[1]) == 6
        assert all(torch.equal(one, other) for one, other in zip(together[1], apart[1], strict=True))


def _every_way_to_ride(peers: FakePeers, collective: Collective | None, rides: bool) -> tuple[list[Any], int]:
    """Eight steps with frozen, unused and dropped gradients and a loss scale that moves; how often a bucket rode."""
    generator = torch.Generator().manual_seed(peers.rank)
    shapes = {"a": (100, 40), "bias": (10,), "norm": (11,), "z": (200, 40)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}

    def codec_of(name: str, parameter: nn.Parameter) -> Codec:
        return BlockInt(4, block=24) if parameter.dim() < 2 else BlockInt(8)

    algorithm = AllReduce(codec_of, collective, error_feedback=True, bucket_mb=0.03)
    algorithm.setup(parameters, peers)
    for bucket in algorithm._buckets if not rides else ():
        bucket.rider = lambda *_: None  # type: ignore[method-assign]
    outcome: list[Any] = []
    rode = 0
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
        assert algorithm._pass is not None
        exchange = algorithm._pass
        (loss * scale).backward()  # type: ignore[operator]
        algorithm.after_backward()
        rode += len(exchange.active) - len(exchange._tickets)
        outcome += [None if p.grad is None else p.grad.clone() for p in parameters.values()]
        if step != 6:
            algorithm.after_step(set(parameters.values()))
        outcome += [residual.clone() for _, residual in algorithm.residuals()]
    algorithm.close()
    return outcome, rode


@pytest.mark.parametrize("collective", [None, Ring(), Direct(), Hierarchical()], ids=str)
def test_riding_changes_no_gradient_and_no_residual(collective: Collective | None) -> None:
    together = on_all_ranks(3, lambda peers: _every_way_to_ride(peers, collective, True))
    apart = on_all_ranks(3, lambda peers: _every_way_to_ride(peers, collective, False))
    for (ours, rode), (expected, never) in zip(together, apart, strict=True):
        assert (rode, never) == (7, 0), "at step 4 the small bucket is frozen"
        for one, other in zip(ours, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


# Accumulation and repeated backwards


def _accumulate() -> tuple[list[int], Tensor, Tensor]:
    algorithm, module = AllReduce(), Net()
    peers, stats = start(algorithm, module)
    sent = []
    for micro in range(3):
        before = stats.bytes_sent or 0
        backward(algorithm, module(batch(peers.rank, micro)) / 3, sync=micro == 2)
        sent.append((stats.bytes_sent or 0) - before)
    accumulated = module.wide.weight.grad
    assert accumulated is not None
    accumulated = accumulated.clone()
    alone, mean = Net(), torch.zeros(())
    for rank in range(peers.size):
        for micro in range(3):
            (alone(batch(rank, micro)) / (3 * peers.size)).backward()
    assert alone.wide.weight.grad is not None
    mean = alone.wide.weight.grad
    algorithm.close()
    peers.close()
    return sent, accumulated, mean


def test_accumulation_sends_nothing_until_the_last_micro_batch(ranks: Pool) -> None:
    for sent, accumulated, mean in ranks(3, _accumulate):
        assert sent[:2] == [0, 0]
        assert sent[2] > 0
        assert torch.allclose(accumulated, mean, atol=1e-6)


def _twice() -> tuple[Tensor, Tensor]:
    algorithm, module = AllReduce(), Net()
    peers, _ = start(algorithm, module)
    backward(algorithm, module(batch(peers.rank, 0)))
    backward(algorithm, module(batch(peers.rank, 1)))
    assert module.wide.weight.grad is not None
    result = module.wide.weight.grad.clone()
    exact = torch.zeros_like(result)
    for step in (0, 1):
        for rank in range(peers.size):
            alone = Net()
            alone(batch(rank, step)).backward()
            assert alone.wide.weight.grad is not None
            exact += alone.wide.weight.grad / peers.size
    algorithm.close()
    peers.close()
    return result, exact


def test_a_second_backward_averages_the_sum(ranks: Pool) -> None:
    for result, exact in ranks(4, _twice):
        assert torch.allclose(result, exact, atol=1e-6)


# Unused, frozen, local, sparse


class Branches(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(5))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x).pow(2).sum() for i in which]).sum()


def which(rank: int, step: int) -> list[int]:
    """Branch 4 is never used, branch 3 by rank 1 in odd steps only, others by turns."""
    used = [0, 1 + (rank + step) % 2]
    return [*used, 3] if rank == 1 and step % 2 else used


def _unused(ours: bool, find: bool) -> list[dict[str, Tensor | None]]:
    module = Branches()
    history = []
    if ours:
        algorithm = AllReduce(bucket_mb=2e-5, find_unused_parameters=find)
        peers, _ = start(algorithm, module)
        rank = peers.rank
    else:
        dist.init_process_group("gloo", timeout=MINUTE)
        wrapped = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        rank = dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        if ours:
            backward(algorithm, module(x, which(rank, step)))
        else:
            wrapped(x, which(rank, step)).backward()
        history.append(gradients(module))
        optimizer.step()
    history.append({name: p.detach().clone() for name, p in module.named_parameters()})
    if ours:
        algorithm.close()
        peers.close()
    return history


@pytest.mark.parametrize("find", [False, True])
def test_unused_parameters_as_under_ddp(ranks: Pool, find: bool) -> None:
    ours, theirs = ranks(2, _unused, True, find), ranks(2, _unused, False, find)
    assert ours[0][0]["branches.4.weight"] is None
    assert ours[0][0]["branches.3.weight"] is None
    assert ours[0][1]["branches.3.weight"] is not None
    for mine, reference in zip(ours, theirs, strict=True):
        for step, expected in zip(mine, reference, strict=True):
            for name, value in expected.items():
                assert (value is None) == (step[name] is None), name
                assert value is None or torch.equal(value, step[name]), name


def _unfreeze() -> tuple[list[Tensor], list[int]]:
    algorithm, module = AllReduce(bucket_mb=0.01), Net()
    module.wide.requires_grad_(False)
    peers, _ = start(algorithm, module)
    plans = [len(algorithm._buckets)]
    backward(algorithm, module(batch(peers.rank, 0)))
    assert module.wide.weight.grad is None
    buffers = [bucket.slots[0].view.data_ptr() for bucket in algorithm._buckets]
    module.wide.requires_grad_(True)
    module.zero_grad()
    backward(algorithm, module(batch(peers.rank, 1)))
    plans.append(len(algorithm._buckets))
    assert [bucket.slots[0].view.data_ptr() for bucket in algorithm._buckets][: len(buffers)] == buffers
    result = [g for g in gradients(module).values() if g is not None]
    algorithm.close()
    peers.close()
    return result, plans


def test_parameters_that_unfreeze_append_buckets(ranks: Pool) -> None:
    for result, (before, after) in ranks(3, _unfreeze):
        assert after > before
        for mine, exact in zip(result, mean_in_float64(3, 1), strict=True):
            assert torch.allclose(mine.double(), exact, atol=1e-6)


def _unfreeze_on_one_rank() -> str:
    algorithm, module = AllReduce(), Net()
    module.wide.requires_grad_(False)
    peers, _ = start(algorithm, module)
    backward(algorithm, module(batch(peers.rank, 0)))
    if peers.rank == 1:
        module.wide.requires_grad_(True)
    with pytest.raises(PlanMismatchError) as caught:
        backward(algorithm, module(batch(peers.rank, 1)))
    algorithm.close()
    peers.close()
    return str(caught.value)


def test_unfreezing_on_one_rank_is_an_error_on_all(ranks: Pool) -> None:
    for message in ranks(3, _unfreeze_on_one_rank):
        assert "rank 1 has" in message


def _toggle() -> dict[str, Tensor | None]:
    """As a GAN: a gradient kept from a first backward must survive a second one in which its parameter is frozen."""
    algorithm, module = AllReduce(), Branches()
    peers, _ = start(algorithm, module)
    x = torch.full((1, 3), 1.0 + peers.rank)
    module.branches[1].requires_grad_(False)
    backward(algorithm, module(x, [0]))
    kept = gradients(module)["branches.0.weight"]
    assert kept is not None
    module.branches[0].requires_grad_(False)
    module.branches[1].requires_grad_(True)
    backward(algorithm, module(x, [1]))
    after = gradients(module)
    assert after["branches.0.weight"] is not None
    assert torch.equal(kept, after["branches.0.weight"])
    algorithm.close()
    peers.close()
    return after


def test_toggling_keeps_the_other_gradients(ranks: Pool) -> None:
    results = ranks(3, _toggle)
    for name, value in results[0].items():
        assert all((value is None and r[name] is None) or torch.equal(value, r[name]) for r in results)
    assert results[0]["branches.1.weight"] is not None
    assert results[0]["branches.2.weight"] is None


def _shared_memory(peers: FakePeers, dtype: torch.dtype) -> list[Tensor]:
    """Autograd gives `a` and `b` one memory for their gradients, if nothing else does with it."""
    a, b = (nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((40, 10), (20, 20)))
    generator = torch.Generator().manual_seed(peers.rank)
    algorithm = AllReduce(BlockInt(4, block=24), Direct())
    algorithm.setup({"a": a, "b": b}, peers)
    loss = ((a.view(-1) + b.view(-1)) * torch.randn(400, generator=generator).to(dtype)).sum()
    algorithm.before_backward(loss)
    loss.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.data_ptr() == b.grad.data_ptr(), "or this tests nothing"
    algorithm.after_backward()
    views = [slot.view for bucket in algorithm._buckets for slot in bucket.slots]
    gradients = [slot.parameter.grad for bucket in algorithm._buckets for slot in bucket.slots]
    algorithm.close()
    for view, gradient in zip(views, gradients, strict=True):
        assert torch.equal(view.to(dtype), gradient)  # type: ignore[arg-type]
    return [gradient.view(-1) for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_one_memory_each_get_their_own_mean(dtype: torch.dtype) -> None:
    every_rank = on_all_ranks(3, lambda peers: _shared_memory(peers, dtype))
    for first, second in every_rank:
        assert not torch.equal(first, second), "blocks lie elsewhere in each, so the means differ"
        assert torch.equal(first, every_rank[0][0])
        assert torch.equal(second, every_rank[0][1])


def _local(by_attribute: bool) -> tuple[Tensor, Tensor]:
    module = Net()
    if by_attribute:
        module.wide.weight.ring_local = True  # type: ignore[attr-defined]
    algorithm = AllReduce(local=None if by_attribute else lambda name, parameter: name == "wide.weight")
    peers, _ = start(algorithm, module)
    backward(algorithm, module(batch(peers.rank, 0)))
    algorithm.close()
    peers.close()
    assert module.wide.weight.grad is not None
    assert module.back.weight.grad is not None
    return module.wide.weight.grad, module.back.weight.grad


@pytest.mark.parametrize("by_attribute", [True, False])
def test_local_parameters_are_never_averaged(ranks: Pool, by_attribute: bool) -> None:
    results = ranks(2, _local, by_attribute)
    assert torch.equal(results[0][1], results[1][1])
    for rank, (own, _) in enumerate(results):
        alone = Net()
        alone(batch(rank, 0)).backward()
        assert torch.equal(own, alone.wide.weight.grad)


def _clamped_by_a_hook() -> list[Tensor]:
    """A user's own post-accumulate hook changes gradients; it must be done before they are sent."""
    parameters = [nn.Parameter(torch.ones(50)) for _ in range(30)]
    module = nn.ParameterList(parameters)
    algorithm = AllReduce(bucket_mb=1e-4)
    peers, _ = start(algorithm, module)

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1, 1)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(clamp)
    for _ in range(3):
        module.zero_grad()
        backward(algorithm, sum((7.0 if peers.rank == 0 else 0.5) * p.sum() for p in parameters))  # type: ignore[arg-type]
    algorithm.close()
    peers.close()
    return [p.grad for p in parameters if p.grad is not None]


def test_hooks_of_the_user_come_before_the_exchange(ranks: Pool) -> None:
    for gradients_ in ranks(2, _clamped_by_a_hook):
        assert len(gradients_) == 30
        assert all(torch.equal(g, torch.full((50,), 0.75)) for g in gradients_)


def _sparse_sixteen() -> Tensor:
    module = nn.Sequential(nn.Embedding(3, 2, sparse=True, dtype=torch.bfloat16))
    algorithm = AllReduce()
    peers, _ = start(algorithm, module, sparse=frozenset({"0.weight"}))
    scale = 1.0 if peers.rank == 0 else 2.0**-8
    backward(algorithm, module(torch.tensor([1])).sum() * scale)
    algorithm.close()
    peers.close()
    assert module[0].weight.grad is not None
    assert module[0].weight.grad.dtype == torch.bfloat16
    return module[0].weight.grad.to_dense()


def test_sparse_sums_are_not_taken_in_16_bits(ranks: Pool) -> None:
    exact = torch.tensor((1 + 7 * 2.0**-8) / 8).bfloat16()
    for mean in ranks(8, _sparse_sixteen):
        assert torch.equal(mean[1], torch.stack([exact, exact]))


def _sparse(codec: Codec) -> tuple[list[Tensor], bool]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3))
    algorithm = AllReduce(codec)
    peers, _ = start(algorithm, module, sparse=frozenset({"0.weight"}))
    means = []
    for step in range(3):
        module.zero_grad()
        # rank 2 has no rows at all in step 1, and other ranks have different numbers of them
        rows = torch.arange(0 if (peers.rank, step) == (2, 1) else 2 + peers.rank) * (step + 1)
        backward(algorithm, module(rows).pow(2).sum() + 0 * module[1].weight.sum())
        assert module[0].weight.grad is not None
        means.append(module[0].weight.grad.clone())
        module[0].weight.grad.mul_(1)  # in place, as clipping does
    algorithm.close()
    peers.close()
    return [m.to_dense() for m in means], all(m.is_sparse and m.is_coalesced() for m in means)


@pytest.mark.parametrize("codec", [Identity(), Cast("fp16")], ids=str)
def test_sparse_gradients_stay_sparse_and_exact(ranks: Pool, codec: Codec) -> None:
    results = ranks(3, _sparse, codec)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))
    for step in range(3):
        alone.zero_grad()
        for rank in range(3):
            rows = torch.arange(0 if (rank, step) == (2, 1) else 2 + rank) * (step + 1)
            (alone(rows).pow(2).sum() / 3).backward()
        for means, sparse in results:
            assert sparse
            assert torch.equal(means[step], results[0][0][step])
            assert torch.allclose(means[step], alone[0].weight.grad, atol=1e-6)


def _mixed_dtypes(codec: Codec) -> list[Tensor]:
    module = nn.ParameterDict(
        {
            "sixteen": nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
            "thirty_two": nn.Parameter(torch.ones(5)),
            "sixty_four": nn.Parameter(torch.ones(5, dtype=torch.float64)),
        }
    )
    algorithm = AllReduce(codec)
    peers, _ = start(algorithm, module)
    weight = torch.arange(5.0) + 1.0001 * peers.rank
    for _ in range(2):
        module.zero_grad()
        backward(algorithm, sum((p * weight.to(p.dtype)).sum().double() for p in module.values()))  # type: ignore[arg-type]
    algorithm.close()
    peers.close()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.values())
    return [module[name].grad for name in ("sixteen", "thirty_two", "sixty_four")]


def test_mixed_dtypes(ranks: Pool) -> None:
    results = ranks(3, _mixed_dtypes, Identity())
    weights = [torch.arange(5.0) + 1.0001 * rank for rank in range(3)]
    for half, single, double in results:
        assert torch.equal(half, torch.stack([w.bfloat16().float() / 3 for w in weights]).sum(0).bfloat16())
        assert torch.allclose(single, torch.stack(weights).mean(0), rtol=1e-6)
        assert torch.allclose(double, torch.stack([w.double() for w in weights]).mean(0), rtol=1e-14)


def _in_segments(collective: Collective) -> Tensor:
    dist.init_process_group("gloo", timeout=MINUTE)
    peers = connect(torch.device("cpu"), MINUTE)
    values = torch.randn(4 << 20, generator=torch.Generator().manual_seed(peers.rank)) / peers.size
    mean_(values, peers, collective, BlockInt(8))
    peers.close()
    return values


@pytest.mark.parametrize("collective", [Ring(), Direct()], ids=str)
def test_large_buckets_travel_in_several_segments(ranks: Pool, collective: Collective) -> None:
    assert 2 * SMALLEST_SEGMENT <= (4 << 20) * 4 / 2
    first, second = ranks(2, _in_segments, collective)
    assert torch.equal(first, second)
    inputs = [torch.randn(4 << 20, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    assert torch.allclose(first, (inputs[0] + inputs[1]) / 2, atol=0.05)


# Seeds

STEPS, NUMELS = 4, {"first": 40, "second": 9, "third": 70}
SEEN: list[tuple[str, str, int, range]] = []  # on this rank: which method, for which bucket, its seed, the places
Seeds = dict[tuple[int, str], int]  # by step and bucket


@dataclass(frozen=True)
class Spy(Codec):
    """The values' own bytes, though it calls itself lossy; notes the seeds it is given."""

    bucket: str
    shares_seed: bool = False

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def note(self, method: str, seed: int, begin: int = 0, numel: int = 0) -> None:
        SEEN.append((method, self.bucket, seed, range(begin, begin + numel)))

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        self.note("encode", seed, offset, values.numel())
        wire.copy_(values.view(torch.uint8))
        if lost is not None:
            lost.zero_()

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        out.add_(wire.view(out.dtype)) if add else out.copy_(wire.view(out.dtype))

    def reduce(self, wires: Sequence[Tensor], *tensors: Tensor, seed: int = 0, **options: Any) -> None:
        self.note("reduce", seed)
        super().reduce(wires, *tensors, seed=seed, **options)

    def prepare_(self, values: Tensor, seed: int) -> None:
        self.note("prepare_", seed)

    def restore_(self, values: Tensor, seed: int) -> None:
        self.note("restore_", seed)


def _seeds(collective: Collective, shared: bool, stops: tuple[int, ...] = ()) -> tuple[Seeds, Seeds]:
    """Of encodes, and of `prepare_`; after each of the steps `stops` the run ends, and one from its state goes on."""
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(numel)) for name, numel in NUMELS.items()})
    encoding: Seeds = {}
    preparing: Seeds = {}
    state: dict[str, Any] = {}
    for begin, end in pairwise([0, *stops, STEPS]):
        algorithm = AllReduce(lambda name, parameter: Spy(name, shared), collective, error_feedback=True)
        peers, stats = start(algorithm, module)
        assert len(algorithm._buckets) == len(NUMELS)
        if begin:
            algorithm.load_state_dict(state)
        for step in range(begin, end):
            SEEN.clear()
            module.zero_grad()
            backward(algorithm, sum(((peers.rank + step) * p).sum() for p in module.values()))  # type: ignore[arg-type]
            for bucket, numel in NUMELS.items():
                seen = [(method, seed, places) for method, name, seed, places in SEEN if name == bucket]
                methods = {method for method, _, _ in seen}
                assert methods >= {"encode", "reduce", "prepare_"}
                # one seed, and under it each place once
                [encoding[step, bucket]] = {s for method, s, _ in seen if method in ("encode", "reduce")}
                [preparing[step, bucket]] = {s for method, s, _ in seen if method in ("prepare_", "restore_")}
                encoded = chain.from_iterable(places for method, _, places in seen if method == "encode")
                assert sorted(encoded) == list(range(numel))
        assert stats.bytes_sent
        state = copy.deepcopy(algorithm.state_dict())
        algorithm.close()
        peers.close()
    return encoding, preparing


def check_shared(every_rank: list[Seeds]) -> None:
    """The same on all ranks, another one for each step and bucket."""
    assert all(seeds == every_rank[0] for seeds in every_rank)
    assert len({*every_rank[0].values()}) == len(every_rank[0]) == STEPS * len(NUMELS)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", [Ring(), Direct()], ids=str)
def test_seeds_follow_from_rank_step_and_bucket_alone(ranks: Pool, collective: Collective, size: int) -> None:
    seeds = ranks(size, _seeds, collective, False)
    own = [seed for encoding, _ in seeds for seed in encoding.values()]
    assert len({*own}) == len(own) == size * STEPS * len(NUMELS)
    check_shared([preparing for _, preparing in seeds])
    assert ranks(size, _seeds, collective, False) == seeds
    assert ranks(size, _seeds, collective, False, (1, 3)) == seeds


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", [Ring(), Direct()], ids=str)
def test_a_codec_that_shares_its_seed_has_one_on_all_ranks(ranks: Pool, collective: Collective, size: int) -> None:
    seeds = ranks(size, _seeds, collective, True)
    check_shared([encoding for encoding, _ in seeds])
    check_shared([preparing for _, preparing in seeds])


# Errors


def _differing(what: str) -> str:
    dist.init_process_group("gloo", timeout=MINUTE)
    odd = dist.get_rank() == 2
    module: nn.Module = Net()
    algorithm = AllReduce()
    if odd and what == "model":
        module.back = nn.Linear(513, 7)
    if odd and what == "codec":
        algorithm = AllReduce(Cast("fp16"))
    if odd and what == "collective":
        algorithm = AllReduce(collective=Ring(3))
    if odd and what == "shape":
        module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(PlanMismatchError) as caught:
        start(algorithm, module)
    return str(caught.value)


@pytest.mark.parametrize("what", ["model", "codec", "collective", "shape"])
def test_ranks_that_differ_are_named_on_every_rank(ranks: Pool, what: str) -> None:
    messages = ranks(4, _differing, what)
    assert len(set(messages)) == 1
    assert "rank 2 has" in messages[0]
    assert "rank 1" not in messages[0]


def _unmanaged_backward() -> str:
    module, algorithm = Net(), AllReduce()
    peers, _ = start(algorithm, module)
    module(batch(0, 0)).backward()
    with pytest.raises(RuntimeError) as caught:
        algorithm.before_step(set(module.parameters()))
    for drop in (lambda: module.zero_grad(set_to_none=False), module.zero_grad):
        drop()
        algorithm.before_step(set(module.parameters()))
        module(batch(0, 0)).backward()
    backward(algorithm, module(batch(peers.rank, 1)))  # averages what was there too
    algorithm.before_step(set(module.parameters()))
    peers.close()
    return str(caught.value)


def test_stepping_what_a_backward_behind_our_back_made_is_an_error(ranks: Pool) -> None:
    assert all("manual_backward" in message for message in ranks(2, _unmanaged_backward))


def _swallowed() -> str:
    module = Net()
    algorithm = AllReduce()
    peers, _ = start(algorithm, module)
    algorithm.before_backward(module(batch(peers.rank, 0)))  # and then backward raised, and somebody caught it
    with pytest.raises(RuntimeError) as caught:
        backward(algorithm, module(batch(peers.rank, 1)))
    peers.abort("test")
    algorithm.close()
    peers.close()
    return str(caught.value)


def test_a_backward_after_one_that_failed_is_an_error(ranks: Pool) -> None:
    assert all("half-way" in message for message in ranks(2, _swallowed))


def _broken_rows(rows: list[int]) -> str:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    algorithm = AllReduce()
    peers, _ = start(algorithm, module, sparse=frozenset({"0.weight"}))
    gather = SparseBucket.gather

    def sends(self: SparseBucket, divisor: float) -> None:
        gather(self, divisor)
        if peers.rank == 1:
            self._indices, self._values = torch.tensor([rows]), torch.ones(len(rows), 2)

    with mock.patch.object(SparseBucket, "gather", sends), pytest.raises(ValueError, match=r"of 0\.weight") as caught:
        backward(algorithm, module(torch.tensor([1, 2])).sum())
    peers.abort("test")
    algorithm.close()
    peers.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [([1, 5], "row 5"), ([-1, 2], "row -1"), ([10**12], "row 1000000000000"), ([0, 1, 2, 3, 4, 4], "6 rows")],
)
def test_rows_that_a_parameter_has_not_are_refused_with_the_rank(ranks: Pool, rows: list[int], said: str) -> None:
    """An optimizer would write outside of the parameter."""
    for message in ranks(2, _broken_rows, rows):
        assert message.startswith(f"rank 1 sent {said} of")
        assert "which has 5 rows" in message


def _stepwise_loss() -> None:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    algorithm = AllReduce()
    peers, _ = start(algorithm, module)
    with pytest.raises(TypeError, match="sparse=True"):
        backward(algorithm, module(torch.tensor([1])).sum())
    peers.abort("test")
    algorithm.close()
    peers.close()


def test_undeclared_sparse_gradients_are_not_densified(ranks: Pool) -> None:
    ranks(2, _stepwise_loss)


@pytest.mark.parametrize(
    ("arguments", "error", "cure"),
    [
        ({"codec": "int8"}, TypeError, "Identity"),
        ({"codec": Identity}, TypeError, "Identity"),
        ({"collective": "ring"}, TypeError, "Ring"),
        ({"error_feedback": "yes"}, TypeError, "None"),
        ({"bucket_mb": 0}, ValueError, "> 0"),
        ({"bucket_mb": "25"}, ValueError, "> 0"),
        ({"local": "wide"}, TypeError, "function"),
        ({"codec": Toy(), "collective": Native()}, ValueError, "Ring"),
    ],
)
def test_bad_arguments_name_the_cure(arguments: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        AllReduce(**arguments)


@pytest.mark.parametrize(("scaled_loss", "clips_by_norm"), [(True, False), (False, True)])
def test_local_parameters_refuse_what_looks_at_all_gradients(
    ranks: Pool, scaled_loss: bool, clips_by_norm: bool
) -> None:
    ranks(2, _local_with_what_looks_at_all, scaled_loss, clips_by_norm)


def _local_with_what_looks_at_all(scaled_loss: bool, clips_by_norm: bool) -> None:
    module = Net()
    module.scale.ring_local = True  # type: ignore[attr-defined]
    algorithm = AllReduce(Toy())
    peers, _ = start(algorithm, module)
    algorithm.check(scaled_loss=False, clips_by_norm=False)
    with pytest.raises(ValueError, match="scale"):
        algorithm.check(scaled_loss=scaled_loss, clips_by_norm=clips_by_norm)
    algorithm.close()
    peers.close()


def _complex() -> None:
    module = nn.ParameterDict({"z": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    with pytest.raises(TypeError, match=r"Identity\(\)"):
        start(AllReduce(Cast("fp16")), module)
    algorithm = AllReduce()
    peers, _ = start(algorithm, module)
    backward(algorithm, (module["z"] * (1 + peers.rank)).abs().sum())
    assert module["z"].grad is not None
    assert torch.allclose(module["z"].grad, torch.tensor(1.5 + 0j))
    algorithm.close()
    peers.close()


def test_a_codec_that_cannot_carry_a_dtype_says_so(ranks: Pool) -> None:
    ranks(2, _complex)


def test_how_many_cores_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("ringstrategy.algorithms.gradients.allreduce.use_threads", asked.append)

    def set_up(peers: FakePeers) -> None:
        algorithm = AllReduce(BlockInt(8), codec_threads=[None, 1, 3][peers.rank])  # ranks may differ
        algorithm.setup(dict(torch.nn.Linear(3, 2).named_parameters()), peers)
        algorithm.close()

    on_all_ranks(3, set_up)
    assert sorted(asked) == [1, 3]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_cores_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="codec_threads is how many cores"):
        AllReduce(codec_threads=bad)

"""A plain torch loop over `Session`, on real processes: what Lightning's strategy promises holds without Lightning."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn

from ringstrategy import AllReduce, BlockInt, Choco, Gossip, LocalSGD, Nesterov, PlanMismatchError
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session import Session
from ringstrategy.session.optimizers import OptimizerSteps
from ringstrategy.topologies import Complete

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)
Model = nn.Sequential
Calls = list[tuple[str, torch.optim.Optimizer]]


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def batches(count: int = 6, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Other ones on each rank."""
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * i + int(os.environ["RANK"]))
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=MINUTE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(session: Session, optimizer: torch.optim.Optimizer, data: Iterator[tuple[Tensor, Tensor]]) -> None:
    for i, (inputs, targets) in enumerate(data):
        session.begin_batch(f"in batch {i}", [optimizer], first=i == 0, later_epoch=False)
        session.send_buffers()
        optimizer.zero_grad()
        session.backward(nn.functional.mse_loss(session.module(inputs), targets))
        optimizer.step()
        session.end_batch(1)


@contextmanager
def opened(
    module: nn.Module, algorithm: Algorithm, *optimizers: torch.optim.Optimizer, **how: Any
) -> Iterator[tuple[Session, torch.optim.Optimizer]]:
    """The session, and the first optimizer: one of its own if none is given."""
    session = Session(module, algorithm, timeout=MINUTE, **how)
    bound = optimizers or (torch.optim.SGD(module.parameters(), 0.05, momentum=0.9),)
    session.open(CPU)
    session.synchronize()
    session.bind(bound)
    session.compare_optimizers()
    try:
        yield session, bound[0]
    finally:
        session.close()


def values(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def gathered(tensors: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return everyone


@on_ranks(2)
def test_what_a_closed_session_held_is_freed_at_once() -> None:
    """Sockets too, without a garbage collection: nothing refers to itself."""
    with process_group():
        gc.disable()
        with opened(model(), AllReduce(BlockInt(8))) as (session, optimizer):
            train(session, optimizer, batches(1))
            held = [weakref.ref(session), weakref.ref(session.link.peers)]
        del session, optimizer
        freed = [each() is None for each in held]
        gc.enable()
        assert freed == [True, True]


@on_ranks(3)
def test_the_mean_is_looked_at_and_each_rank_goes_on_with_its_own() -> None:
    """Gossip's ranks differ, the mean is exact, and looking changes nothing; who looks twice ends nothing."""
    with process_group(), opened(module := model(), Gossip(interval=2)) as (session, optimizer):
        train(session, optimizer, batches(3))
        own, before = values(module), gathered([module[0].weight])
        assert not torch.equal(before[0], before[1])
        with session.consensus():
            mean = values(module)
            torch.testing.assert_close(mean[0].double().flatten(), torch.stack(before).mean(0), rtol=0, atol=1e-7)
            with session.consensus():
                pass
            with contextlib.suppress(ZeroDivisionError), session.consensus():
                raise ZeroDivisionError
            assert all(map(torch.equal, values(module), mean))
            means = session.means_of(module.state_dict)
            assert all(map(torch.equal, means.means.values(), mean))
            assert all(map(torch.equal, means.own.values(), own))
        means = session.means_of(module.state_dict)
        assert all(map(torch.equal, values(module), own))
        assert all(map(torch.equal, means.means.values(), mean))
        assert all(map(torch.equal, means.own.values(), own))


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), Gossip(), LocalSGD(2, Nesterov()), LocalSGD(2, Nesterov(), overlap=1)], ids=str
)
@on_ranks(2)
def test_buffers_in_the_memory_of_parameters_change_nothing(algorithm: Algorithm) -> None:
    """Nor do buffers in that of another buffer."""
    ended = []
    with process_group():
        for views in (False, True):
            module = model()
            if views:
                module.register_buffer("row", module[0].weight.data[0])
                module.register_buffer("statistic", torch.full((4,), dist.get_rank() + 1.0))
                module.register_buffer("half_of_it", module.statistic[2:])
            with opened(module, copy.deepcopy(algorithm)) as (session, optimizer):
                train(session, optimizer, batches(6))
                with session.consensus():
                    ended.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *ended))


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(2, Nesterov()), LocalSGD(2, overlap=1)], ids=str)
@on_ranks(3)
def test_buffers_without_a_mean_are_rank_0s(algorithm: Algorithm) -> None:
    """Statistics of batches have a mean, and masks, scales and counters are rank 0's: after training, and once seen."""
    with process_group():
        module, rank = model(), dist.get_rank()
        others = {
            "mask": torch.tensor([1.0, 0.0, 1.0]) if rank else torch.tensor([1.0, 1.0, 0.0]),
            "scale": torch.full((2,), rank + 0.1, dtype=torch.float64).t(),
            "zero_point": torch.tensor(rank + 3, dtype=torch.int8),
            "seed": torch.tensor(2**60 + rank),
            "on": torch.tensor([rank == 0]),
            "narrow": torch.tensor([rank - 0.5], dtype=torch.bfloat16),
            "turn": torch.polar(torch.ones(1), torch.full((1,), rank + 1.0)),
            "empty": torch.empty(0),
        }
        for name, buffer in others.items():
            module.register_buffer(name, buffer.clone())
        with opened(module, algorithm) as (session, optimizer):
            for name, buffer in others.items():  # which `synchronize` has replaced
                module.get_buffer(name).copy_(buffer)
            train(session, optimizer, batches(4))
            own = {name: buffer.clone() for name, buffer in module.named_buffers()}
            of_rank_0 = [[value.clone() for value in others.values()]]
            dist.broadcast_object_list(of_rank_0)
            statistics = torch.stack(gathered([own["1.running_mean"]])).mean(0)
            agrees = isinstance(algorithm, LocalSGD)
            for name, expected in zip(others, of_rank_0[0], strict=True):
                assert torch.equal(own[name], expected if agrees else others[name]), name
            with session.consensus():
                torch.testing.assert_close(module[1].running_mean.double(), statistics, rtol=0, atol=1e-6)
                for name, expected in zip(others, of_rank_0[0], strict=True):
                    assert torch.equal(module.get_buffer(name), expected), name
            assert all(torch.equal(buffer, own[name]) for name, buffer in module.named_buffers())


@on_ranks(2)
def test_tensors_that_cannot_be_exchanged_are_named() -> None:
    with process_group():
        for odd, words in (
            (nn.Parameter(torch.eye(3).to_sparse()), "parameter odd is sparse .*to_dense"),
            (torch.eye(3).to_sparse_csr(), "buffer odd is sparse .*to_dense"),
            (nn.Parameter(torch.ones(3).expand(2, 3)), r"parameter odd has several .*contiguous\(\)"),
            (torch.ones(1, 3).expand(2, 3), r"buffer odd has several .*contiguous\(\)"),
            (nn.Parameter(torch.ones(3).to(torch.float8_e5m2)), "parameter odd is of torch.float8_e5m2.*bfloat16"),
            (torch.ones(3).to(torch.float8_e4m3fn), "buffer odd is of torch.float8_e4m3fn.*bfloat16"),
            (nn.Parameter(torch.ones(3, dtype=torch.complex64)), r"parameter odd: BlockInt.*codec=Identity\(\)"),
        ):
            module = model()
            add = module.register_parameter if isinstance(odd, nn.Parameter) else module.register_buffer
            add("odd", odd)
            session = Session(module, AllReduce(BlockInt(8)), timeout=MINUTE)
            with pytest.raises((TypeError, ValueError), match=words):
                session.open(CPU)
            dist.barrier()  # the other rank may still connect
            session.close()


@on_ranks(2)
def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Session(model(), AllReduce()).open(CPU)
    with process_group():
        with opened(model(), AllReduce()) as (session, _):
            state = session.state_dict()
            with pytest.raises(ValueError, match="give each rank what it saved itself, and start as many"):
                session.load_state_dict(state | {"world_size": 4})
        with opened(model(), Gossip()) as (gossip, _):
            with pytest.raises(ValueError, match="averages gradients, and this"):
                gossip.load_state_dict(state)
            state = gossip.state_dict()
        with opened(model(), Choco()) as (choco, _), pytest.raises(ValueError, match="this state is of Gossip"):
            choco.load_state_dict(state)
        odd = 0.05 * (1 + dist.get_rank())
        session = Session(module := model(), AllReduce(), timeout=MINUTE)
        session.open(CPU)
        groups = [{"params": module.parameters(), "first_sample": dist.get_rank()}]
        session.bind([torch.optim.SGD(groups, 0.05)])
        session.compare_optimizers()  # what else is in a group may differ
        session.bind([torch.optim.SGD(module.parameters(), odd)])
        with pytest.raises(PlanMismatchError, match=r"group 0: lr=0\.1' where rank 0 has '.*group 0: lr=0\.05'"):
            session.compare_optimizers()
        session.close()


def _backward(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    session.begin_batch("in batch 0", optimizers, first=True, later_epoch=False)
    session.backward(session.module(next(batches())[0]).square().mean())


@on_ranks(2)
def test_a_step_that_one_rank_drops_is_a_step_unless_nobody_knows_whose() -> None:
    with process_group():
        with opened(module := model(), AllReduce()) as (session, _):
            optimizers = [torch.optim.SGD(module[part].parameters(), 0.05) for part in (0, 3)]
            _backward(session, optimizers)
            optimizers[0].step()
            with pytest.raises(ValueError, match="1 of 2 steps were not made, and with 2 optimizers it is not known"):
                session.end_batch(2)
            session.end_batch(None)
        with opened(model(), Gossip(Complete(), overlap=False)) as (session, optimizer):
            _backward(session, [optimizer])
            if dist.get_rank():
                optimizer.step()
            session.end_batch(1)  # the loop has counted it
            assert session.stats.exchanges == 1, "mixing goes on"
            [one, other] = gathered(list(session.module.parameters()))
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("scales", "counts"), [([], True), ([4.0, 4.0], True), ([4.0, 8.0], True), ([4.0, 2.0], False)]
)
@on_ranks(2)
def test_a_step_that_the_caller_announces_counts_unless_its_scaler_backs_off(scales: list[float], counts: bool) -> None:
    fed = AllReduce(BlockInt(2), error_feedback=True)
    with process_group(), opened(model(), fed, notice_steps=False) as (session, optimizer):
        _backward(session, [optimizer])
        scale = iter(map(torch.tensor, scales))
        with session.stepping(optimizer, lambda: next(scale, None)):
            optimizer.step()
        session.end_batch(1)
        left = any(residual.any() for _, residual in fed.residuals())
        assert left == counts, "a skipped step has taken the residuals back"
        assert session._noticed == 1, "torch's hooks have counted the step too"


# Whose steps are noticed


class CallsItsBase(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def calls() -> Iterator[Calls]:
    """What is noticed of all optimizers' steps."""
    calls: Calls = []
    before, after = (lambda o: calls.append(("before", o))), (lambda o: calls.append(("after", o)))
    watching = OptimizerSteps(before, after, within_backward=lambda o: calls.append(("within backward", o)))
    yield calls
    watching.close()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_a_step_that_calls_its_base_is_one_step(calls: Calls) -> None:
    torch.optim.SGD([parameter()], 0.1)  # from now on torch calls hooks at the base's steps too
    optimizer = CallsItsBase([parameter()], 0.1)
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert calls == [("before", optimizer), ("after", optimizer)] * 2


@pytest.mark.parametrize(
    ("args", "seen"), [((), 1.0), ((None,), 1.0), ((lambda: 0.0,), 0.9)], ids=["none", "None", "a closure"]
)
def test_before_comes_before_a_step_unless_a_closure_makes_its_gradients(args: Any, seen: float) -> None:
    """As Accelerate does, which passes the closure that it has, or None."""
    stepped, values = parameter(), []
    watching = OptimizerSteps(lambda _: values.append(stepped[0].item()), lambda _: None, lambda _: None)
    torch.optim.SGD([stepped], 0.1).step(*args)
    watching.close()
    assert values == [pytest.approx(seen)]


def test_a_step_of_another_thread_hides_none(calls: Calls) -> None:
    theirs, mine = (torch.optim.SGD([parameter()], 0.1) for _ in range(2))

    def meanwhile() -> None:
        thread = threading.Thread(target=mine.step)
        thread.start()
        thread.join()

    theirs.step(meanwhile)
    assert [what for what, optimizer in calls if optimizer is mine] == ["before", "after"]


@on_ranks(2)
def test_what_is_not_averaged_is_left_alone() -> None:
    """What is not averaged: local parts with rates of their own, what DDP ignores, and what another session steps."""
    with process_group():
        module = model(seed=dist.get_rank())
        for parameter in module[3].parameters():
            parameter.ring_local = True  # type: ignore[attr-defined]
        module._ddp_params_and_buffers_to_ignore = ["0.bias", "1.running_mean"]  # type: ignore[assignment]
        session = Session(module, AllReduce(), timeout=MINUTE)
        session.open(CPU)
        session.synchronize()
        assert not torch.equal(*gathered([module[0].bias]))
        groups = [{"params": module[0].parameters()}, {"params": module[3].parameters(), "lr": 0.1 + dist.get_rank()}]
        optimizer = torch.optim.SGD(groups, 0.05)
        session.bind([optimizer])
        session.compare_optimizers()
        train(session, optimizer, batches(2))
        session.send_buffers()
        same = {name: torch.equal(*gathered([value])) for name, value in module.state_dict().items()}
        assert [name for name in same if not same[name]] == ["0.bias", "1.running_mean", "3.weight", "3.bias"]
        assert "0.weight" in session.equal_values()
        assert session.equal_values().keys().isdisjoint(["0.bias", "3.weight"])
        session.close()
        session = Session(module, AllReduce(), timeout=MINUTE)
        with pytest.raises(ValueError, match="clipping by norm looks at all gradients"):
            session.open(CPU, clips_by_norm=True)
        session.close()
        seldom = partial(Gossip, interval=2, overlap=False)
        with opened(model(), seldom()) as (one, first), opened(model(), seldom()) as (other, _):
            train(one, first, batches(4))
            assert (one.stats.exchanges, one.stats.steps, other.stats.steps) == (2, 4, 0)


@on_ranks(2)
def test_buffers_are_sent_when_ddp_would() -> None:
    with process_group(), opened(module := model(), AllReduce()) as (session, optimizer):
        session.begin_batch("in batch 0", [optimizer], first=True, later_epoch=False)
        buffers, moved = module[1], []
        for accumulates in (False, True, False, False):
            buffers.running_mean.fill_(1.0 + dist.get_rank())
            session.accumulating = accumulates
            session.send_buffers()
            moved.append(buffers.running_mean[0].item())
        assert moved == [1.0, 1.0, 1.0 + dist.get_rank(), 1.0], "not after a forward that only accumulated"


class BindsNobody(Gossip):
    def bind(self, parameters: Any) -> None:
        pytest.fail("with one rank there was no setup")


@on_ranks(1)
def test_one_rank_meets_nobody() -> None:
    with process_group(), opened(module := model(), BindsNobody()) as (session, optimizer):
        train(session, optimizer, batches())
        own = values(module)
        with session.consensus():
            assert all(map(torch.equal, values(module), own))
        session.finish()
        assert (session.stats.steps, session.stats.bytes_sent) == (6, 0)


@pytest.mark.slow
def test_the_loop_in_the_documentation_trains_equal_replicas(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    (tmp_path / "loop.py").write_text(page.split("```python torchrun\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^rank (\d): .*\bsteps=100\b.* sum of weights (\S+)$", done.stdout, re.M)
    assert {rank for rank, _ in said} == {"0", "1"}, done.stdout
    assert len({weights for _, weights in said}) == 1, done.stdout

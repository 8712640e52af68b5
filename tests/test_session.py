"""A plain torch loop over `Session`, on real processes: what Lightning's strategy promises holds without Lightning."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    Choco,
    Direct,
    Gossip,
    LocalSGD,
    Nesterov,
    PlanMismatchError,
    PowerSGD,
    RingStrategy,
    SmallExact,
)
from ringstrategy.algorithms import Algorithm
from ringstrategy.kernels import threads
from ringstrategy.names import STRATEGIES
from ringstrategy.session import Session
from ringstrategy.session.optimizer_steps import OptimizerSteps

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)
Model = nn.Sequential
CORES = "ringstrategy.session.session.free_cores"


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
def opened(module: nn.Module, algorithm: Algorithm, **how: Any) -> Iterator[tuple[Session, torch.optim.Optimizer]]:
    session = Session(module, algorithm, timeout=MINUTE, **how)
    session.open(CPU)
    session.synchronize()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    session.bind([optimizer])
    session.compare_optimizers()
    try:
        yield session, optimizer
    finally:
        session.close()


def values(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def gathered(tensors: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return everyone


def _beside_ddp() -> int:
    with process_group():
        twin = DistributedDataParallel(model())
        optimizer = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
        for inputs, targets in batches():
            optimizer.zero_grad()
            nn.functional.mse_loss(twin(inputs), targets).backward()
            optimizer.step()
        module = model(seed=dist.get_rank())  # `synchronize` makes them equal
        with opened(module, AllReduce()) as (session, optimizer):
            train(session, optimizer, batches())
            sent = session.stats.bytes_sent
        # torch DDP sends buffers before a forward: after the last one rank 0's are the same
        for ours, theirs in zip(module.parameters(), twin.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        if dist.get_rank() == 0:
            assert all(map(torch.equal, values(module), values(twin.module)))
        return sent or 0


def test_at_two_ranks_a_plain_loop_is_ddp_bit_for_bit(ranks: Pool) -> None:
    assert min(ranks(2, _beside_ddp)) > 0


def _replicas(name: str) -> tuple[list[Tensor], int]:
    with process_group():
        module = model()
        with opened(module, STRATEGIES[name]()) as (session, optimizer):
            train(session, optimizer, batches())
            with session.consensus():
                return gathered([parameter.detach() for parameter in module.parameters()]), session.stats.steps


@pytest.mark.parametrize("name", ["ring_int8", "ring_powersgd", "gossip", "gossip_int8"])
def test_all_ranks_end_with_the_same_bits(ranks: Pool, name: str) -> None:
    outcomes = ranks(3, _replicas, name)
    everyone = outcomes[0][0]
    assert all(torch.equal(each, everyone[0]) for each in everyone)
    assert [steps for _, steps in outcomes] == [6, 6, 6]


def _looks_and_goes_on() -> None:
    """Gossip's ranks differ, the mean is exact, and looking changes nothing."""
    with process_group():
        module = model()
        with opened(module, Gossip(interval=2)) as (session, optimizer):
            train(session, optimizer, batches(3))
            own = values(module)
            before = gathered([own[0]])
            assert not torch.equal(before[0], before[1])
            with session.consensus():
                [*_, mean] = gathered([module.state_dict()["0.weight"]])
            torch.testing.assert_close(mean, torch.stack(before).mean(0), rtol=0, atol=1e-7)
            assert all(map(torch.equal, own, values(module)))


def test_the_mean_is_looked_at_and_each_rank_goes_on_with_its_own(ranks: Pool) -> None:
    ranks(3, _looks_and_goes_on)


FAMILIES: dict[str, Callable[[], Algorithm]] = {
    "feedback": lambda: AllReduce(SmallExact(BlockInt(4)), error_feedback=True),
    "powersgd": lambda: PowerSGD(),
    "gossip": lambda: Gossip(interval=3, overlap=True),
    "choco": lambda: Choco(interval=2),
    "diloco": lambda: LocalSGD(3, Nesterov(), SmallExact(BlockInt(4)), Direct(), fragments=2, overlap=2),
    "eager": lambda: LocalSGD(2, Nesterov(), overlap=True, eager=True),
    "adam outside": lambda: LocalSGD(2, partial(torch.optim.Adam, lr=0.01), blend=0.5, average_optimizer=True),
}


def _resumes(family: str) -> None:
    with process_group():
        saved = io.BytesIO()
        through = model()
        with opened(through, FAMILIES[family]()) as (session, optimizer):
            train(session, optimizer, batches(4))
            state = {
                "session": session.state_dict(),
                "module": through.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(copy.deepcopy(state), saved)
            train(session, optimizer, batches(4, first=4))
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        again = model(seed=5)
        session = Session(again, FAMILIES[family](), timeout=MINUTE)
        session.open(CPU)
        again.load_state_dict(state["module"])
        session.load_state_dict(state["session"])
        optimizer = torch.optim.SGD(again.parameters(), 0.05, momentum=0.9)
        optimizer.load_state_dict(state["optimizer"])
        session.bind([optimizer])
        train(session, optimizer, batches(4, first=4))
        session.settle()
        session.close()
        assert all(map(torch.equal, values(again), values(through)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_session_goes_on_bit_for_bit(ranks: Pool, family: str) -> None:
    ranks(2, _resumes, family)


def _cores(algorithm: Algorithm) -> int:
    threads.use_threads(99)  # what an earlier training left
    with process_group(), mock.patch(CORES, lambda ranks: 10 * ranks), opened(model(), algorithm):
        count = threads._threads
        values, wire = torch.randn(1 << 18), torch.empty(BlockInt(8).nbytes(1 << 18, torch.float32), dtype=torch.uint8)
        BlockInt(8).encode(values, wire)
        assert any(thread.name.startswith("ringstrategy-codec") for thread in threading.enumerate())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ringstrategy")]
    return count


def test_each_session_says_on_how_many_cores_codecs_run(ranks: Pool) -> None:
    for algorithm, cores in ((AllReduce(BlockInt(8)), 20), (Auto(), 20), (AllReduce(codec_threads=3), 3)):
        assert ranks(2, _cores, algorithm) == [cores] * 2


def _refuses() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Session(model(), AllReduce()).open(CPU)
    with process_group():
        with opened(model(), AllReduce()) as (session, _):
            state = session.state_dict()
            with pytest.raises(ValueError, match="give each rank what it saved itself, and start as many"):
                session.load_state_dict(state | {"world_size": 4})
        with opened(model(), Gossip()) as (gossip, _), pytest.raises(ValueError, match="averages gradients, and this"):
            gossip.load_state_dict(state)
        odd = 0.05 * (1 + dist.get_rank())
        session = Session(module := model(), AllReduce(), timeout=MINUTE)
        session.open(CPU)
        session.bind([torch.optim.SGD(module.parameters(), odd)])
        with pytest.raises(PlanMismatchError, match=r"lr=0\.1.* where rank 0 has .*lr=0\.05"):
            session.compare_optimizers()
        session.close()


def test_what_cannot_be_right_is_refused(ranks: Pool) -> None:
    ranks(2, _refuses)


class OfNoFamily(Algorithm):
    """As algorithms were before there were two families: nobody would call what averages."""

    def setup(self, *_: Any, **__: Any) -> None: ...
    def adopt(self, *_: Any, **__: Any) -> list[nn.Parameter]:
        return []

    def before_backward(self, *_: Any, **__: Any) -> None: ...
    def after_backward(self) -> None: ...
    def after_step(self, *_: Any, **__: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...
    def close(self) -> None: ...


def test_an_algorithm_of_no_family_is_refused() -> None:
    for make in (lambda: Session(model(), OfNoFamily()), lambda: RingStrategy(OfNoFamily())):
        with pytest.raises(TypeError, match=r"derive it from ringstrategy\.GradientAlgorithm or from"):
            make()


def _drops_a_step_of_one_of_two() -> None:
    with process_group(), opened(module := model(), AllReduce()) as (session, _):
        optimizers = [torch.optim.SGD(module[part].parameters(), 0.05) for part in (0, 3)]
        session.begin_batch("in batch 0", optimizers, first=True, later_epoch=False)
        session.backward(module(next(batches())[0]).square().mean())
        optimizers[0].step()
        with pytest.raises(ValueError, match="1 of 2 steps were not made, and with 2 optimizers it is not known whose"):
            session.end_batch(2)
        session.end_batch(None)


def test_a_dropped_step_of_several_optimizers_is_refused(ranks: Pool) -> None:
    ranks(2, _drops_a_step_of_one_of_two)


def _announces_steps_itself() -> float:
    fed = AllReduce(BlockInt(2), error_feedback=True)
    with process_group(), opened(module := model(), fed, notice_steps=False) as (session, optimizer):
        session.begin_batch("in batch 0", [optimizer], first=True, later_epoch=False)
        session.backward(module(next(batches())[0]).square().mean())
        with session.stepping(optimizer, lambda: None):
            optimizer.step()
        return sum(float(residual.abs().sum()) for _, residual in fed.residuals())


def test_a_step_that_the_caller_announces_counts(ranks: Pool) -> None:
    assert min(ranks(2, _announces_steps_itself)) > 0, "a skipped step would have taken the residuals back"


def _drops_a_step_before_a_turn() -> list[str]:
    """Rank 0 alone drops the step after which ring_auto is to go on with another candidate."""
    with process_group(), opened(module := model(), Auto(allow=[BlockInt(8)])) as (session, optimizer):
        for i, (inputs, targets) in enumerate(batches(80)):
            session.begin_batch(f"in batch {i}", [optimizer], first=i == 0, later_epoch=False)
            session.backward(nn.functional.mse_loss(module(inputs), targets))
            if dist.get_rank() or i % 4 != 3:
                optimizer.step()
                optimizer.zero_grad()
            session.end_batch(None)  # the loop does not tell
        state = session.algorithm.state_dict()
        return [str(state["tuned"]), *session.algorithm.news()]


def test_ring_auto_and_a_step_that_one_rank_drops(ranks: Pool) -> None:
    for said in ranks(2, _drops_a_step_before_a_turn):
        assert said[0] == "True"
        assert any("candidates and keeps" in line for line in said), said


def _fails_after_the_greeting() -> str | None:
    """Rank 2 cannot make its group; the others are told, long before anything times out."""
    dist.init_process_group("gloo", timeout=MINUTE)
    make, begin = dist.new_group, time.monotonic()
    session = Session(model(), AllReduce(), timeout=timedelta(seconds=15))
    error: RuntimeError | None = None
    try:
        if dist.get_rank() == 2:
            dist.new_group = _broken
        session.open(CPU)
    except RuntimeError as caught:
        error = caught
    finally:
        dist.new_group = make
    assert time.monotonic() < begin + 12
    for thread in threading.enumerate():  # of the group that never came about
        if thread.name == "ringstrategy-connect":
            thread.join()
    session.close()
    dist.destroy_process_group()
    return None if error is None else f"{type(error).__name__}: {error}"


def _broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("no interface eth7")


@pytest.mark.slow
def test_a_rank_that_fails_while_it_connects_is_named_at_once(ranks: Pool) -> None:
    *others, failed = ranks(3, _fails_after_the_greeting)
    assert failed == "RuntimeError: no interface eth7"
    for other in others:
        assert other is not None
        assert re.match(r"PeerLostError: lost rank 2 .* it stopped with RuntimeError: no interface eth7", other)


# Whose steps are noticed


class CallsItsBase(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@contextmanager
def noticed() -> Iterator[list[tuple[str, torch.optim.Optimizer]]]:
    calls: list[tuple[str, torch.optim.Optimizer]] = []
    watching = OptimizerSteps(lambda o: calls.append(("before", o)), lambda o: calls.append(("after", o)))
    try:
        yield calls
    finally:
        watching.close()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_a_step_that_calls_its_base_is_one_step() -> None:
    torch.optim.SGD([parameter()], 0.1)  # from now on torch calls hooks at the base's steps too
    optimizer = CallsItsBase([parameter()], 0.1)
    with noticed() as calls:
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        optimizer.step()
    assert calls == [("before", optimizer), ("after", optimizer)] * 2


def test_a_step_of_another_thread_hides_none() -> None:
    inside, leave = threading.Event(), threading.Event()

    def closure() -> None:
        inside.set()
        assert leave.wait(10)

    theirs, mine = (torch.optim.SGD([parameter()], 0.1) for _ in range(2))
    with noticed() as calls:
        thread = threading.Thread(target=theirs.step, args=(closure,))
        thread.start()
        assert inside.wait(10)
        mine.step()
        leave.set()
        thread.join()
    assert [what for what, optimizer in calls if optimizer is mine] == ["before", "after"]


class BindsNobody(Gossip):
    def bind(self, parameters: Any) -> None:
        pytest.fail("with one rank there was no setup")


def _alone() -> None:
    with process_group():
        plain, alone = model(), model()
        optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
        for inputs, targets in batches():
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(inputs), targets).backward()
            optimizer.step()
        with opened(alone, PowerSGD()) as (session, optimizer):
            train(session, optimizer, batches())
            with session.consensus():
                assert all(map(torch.equal, values(alone), values(plain)))
            assert (session.stats.steps, session.stats.bytes_sent) == (6, 0)
        with opened(alone, BindsNobody()) as (session, optimizer):
            train(session, optimizer, batches())


def test_one_rank_trains_as_without(ranks: Pool) -> None:
    ranks(1, _alone)


def _looks_twice() -> None:
    """Who looks while somebody looks already ends nothing."""
    with process_group():
        module = model()
        with opened(module, Gossip(interval=2)) as (session, optimizer):
            train(session, optimizer, batches(3))
            own = values(module)
            with session.consensus():
                mean = values(module)
                with session.consensus():
                    pass
                with contextlib.suppress(ZeroDivisionError), session.consensus():
                    raise ZeroDivisionError
                assert all(map(torch.equal, values(module), mean))
            assert all(map(torch.equal, values(module), own))


def test_looking_may_be_nested(ranks: Pool) -> None:
    ranks(2, _looks_twice)


def _own_head() -> None:
    """A part that is never averaged may be stepped by other rates, but not where one norm or scale is of all."""
    with process_group():
        module = model()
        for parameter in module[3].parameters():
            parameter.ring_local = True  # type: ignore[attr-defined]
        session = Session(module, AllReduce(), timeout=MINUTE)
        session.open(CPU)
        session.synchronize()
        groups = [{"params": module[0].parameters()}, {"params": module[3].parameters(), "lr": 0.1 + dist.get_rank()}]
        optimizer = torch.optim.SGD(groups, 0.05)
        session.bind([optimizer])
        session.compare_optimizers()
        train(session, optimizer, batches(2))
        session.close()
        session = Session(module, AllReduce(), timeout=MINUTE)
        with pytest.raises(ValueError, match="clipping by norm looks at all gradients"):
            session.open(CPU, clips_by_norm=True)
        session.close()
        with opened(model(), Gossip()) as (gossip, _):
            state = gossip.state_dict()
        with opened(model(), Choco()) as (choco, _), pytest.raises(ValueError, match="this state is of Gossip"):
            choco.load_state_dict(state)


def test_local_parts_have_rates_of_their_own(ranks: Pool) -> None:
    ranks(2, _own_head)


def _accumulates() -> list[int]:
    with process_group(), opened(model(), AllReduce(), broadcast_buffers=False) as (session, optimizer):
        sent = []
        for i, (inputs, targets) in enumerate(batches(4)):
            with session.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                session.backward(nn.functional.mse_loss(session.module(inputs), targets))
            sent.append(session.stats.bytes_sent or 0)
        optimizer.step()
        return sent


def test_accumulation_sends_nothing(ranks: Pool) -> None:
    for first, second, third, fourth in ranks(2, _accumulates):
        assert first < second == third < fourth


def _two_at_once() -> None:
    """Each notices the steps of its own module's optimizer alone."""
    with (
        process_group(),
        opened(model(), Gossip(interval=2, overlap=False)) as (one, first),
        opened(model(), Gossip(interval=2, overlap=False)) as (other, _),
    ):
        train(one, first, batches(4))
        assert (one.stats.steps, other.stats.steps) == (2, 0)


def test_two_sessions_do_not_meet(ranks: Pool) -> None:
    ranks(2, _two_at_once)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_loop_in_the_documentation_trains_equal_replicas(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()
    (tmp_path / "loop.py").write_text(page.split("```python torchrun\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=80)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^rank (\d): .*\bsteps=100\b.* sum of weights (\S+)$", done.stdout, re.M)
    assert {rank for rank, _ in said} == {"0", "1"}, done.stdout
    assert len({weights for _, weights in said}) == 1, done.stdout

"""A plain torch loop over `Session`, on real processes: what Lightning's strategy promises holds without Lightning."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringstrategy import AllReduce, BlockInt, Choco, Gossip, PlanMismatchError, PowerSGD, SmallExact
from ringstrategy.algorithms import Algorithm
from ringstrategy.names import STRATEGIES
from ringstrategy.session import Session

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)
Model = nn.Sequential


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


def _refuses() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Session(model(), AllReduce()).open(CPU)
    with process_group():
        with opened(model(), AllReduce()) as (session, _):
            state = session.state_dict()
            with pytest.raises(ValueError, match="give each rank what it saved itself, and start as many"):
                session.load_state_dict(state | {"world_size": 4})
        odd = 0.05 * (1 + dist.get_rank())
        session = Session(module := model(), AllReduce(), timeout=MINUTE)
        session.open(CPU)
        session.bind([torch.optim.SGD(module.parameters(), odd)])
        with pytest.raises(PlanMismatchError, match=r"lr=0\.1.* where rank 0 has .*lr=0\.05"):
            session.compare_optimizers()
        session.close()


def test_what_cannot_be_right_is_refused(ranks: Pool) -> None:
    ranks(2, _refuses)


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

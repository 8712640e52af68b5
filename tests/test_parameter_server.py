"""Servers step in the place of ranks: in step as one process, else with nobody waiting; and the state comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_session import CPU, MINUTE, process_group
from torch import Tensor, nn

from ringstrategy.algorithms.server.parameter_server import ParameterServer
from ringstrategy.session import Session

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda module: torch.optim.SGD(module.parameters(), 0.05, momentum=0.9),
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.01, foreach=True),
    "groups": lambda module: torch.optim.AdamW(
        [{"params": module.first.parameters(), "weight_decay": 0.1}, {"params": module.rest.parameters(), "lr": 0.02}],
        0.01,
    ),
}


class Net(nn.Module):
    """A convolution in channels-last memory, a layer that not every batch uses, a frozen one, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.rest = nn.ModuleDict(
            {
                "linear": nn.Linear(8 * 16, 5),
                "sometimes": nn.Linear(8 * 16, 5),
                "frozen": nn.Linear(5, 5).requires_grad_(False),
            }
        )
        self.rest.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))

    def forward(self, inputs: Tensor, sometimes: bool) -> Tensor:
        hidden = self.first(inputs).relu().flatten(1)
        out = self.rest["linear"](hidden) * self.rest.scale
        if sometimes:
            out = out + self.rest["sometimes"](hidden)
        return self.rest["frozen"](out)


def loss_of(module: nn.Module, step: int, rank: int) -> Tensor:
    """Other data on each rank; the layer is used by all, by some, by none."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 5, generator=generator)
    used = step % 3 == 0 or (step % 3 == 1 and rank == 1)
    return nn.functional.mse_loss(module(inputs, used), targets)


def in_one_process(make: Make, ranks: int, steps: range, micro: int = 1, clip: float | None = None) -> Any:
    """The twin: one optimizer, the mean of all ranks' gradients, a schedule."""
    module = Net()
    optimizer = make(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in steps:
        grads: list[list[Tensor | None]] = []
        for rank in range(ranks):
            module.zero_grad()
            for part in range(micro):
                loss_of(module, step * micro + part, rank).backward()
            grads.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        for parameter, *given in zip(module.parameters(), *grads, strict=True):
            there = [grad for grad in given if grad is not None]
            parameter.grad = sum(there[1:], there[0]) / ranks if there else None
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        schedule.step()
    return module, optimizer


@contextmanager
def opened(
    algorithm: ParameterServer, make: Make = OPTIMIZERS["momentum"]
) -> Iterator[tuple[Session, torch.optim.Optimizer]]:
    module = Net()
    optimizer = make(module)
    session = Session(module, algorithm, timeout=MINUTE)
    session.open(CPU)
    try:
        session.synchronize()
        session.bind([optimizer])
        session.compare_optimizers()
        yield session, optimizer
    finally:
        session.close()


def train(session: Session, optimizer: torch.optim.Optimizer, steps: range, micro: int = 1) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in steps:
        for part in range(micro):
            session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
            session.send_buffers()
            loss = loss_of(session.module, step * micro + part, dist.get_rank())
            if part < micro - 1:
                with session.no_sync():
                    session.backward(loss)
            else:
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            session.end_batch(int(part == micro - 1))
    session.finish()


def everyone(module: nn.Module) -> Tensor:
    flat = torch.cat([value.detach().flatten() for value in module.state_dict().values()])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("how", "servers", "more"),
    [
        ("momentum", 1, {}),
        ("momentum", "all", {"clip_norm": 0.5}),
        ("adam", "all", {"bucket_mb": 0.001}),
        ("groups", 2, {"micro": 2}),
    ],
)
@on_ranks(2, 3)
def test_in_step_it_is_one_process_with_all_ranks_data(how: str, servers: Any, more: dict[str, Any]) -> None:
    micro = more.pop("micro", 1)
    with process_group():
        ranks = dist.get_world_size()
        twin, twins = in_one_process(OPTIMIZERS[how], ranks, range(12), micro, more.get("clip_norm"))
        with opened(ParameterServer(servers, **more), OPTIMIZERS[how]) as (session, optimizer):
            train(session, optimizer, range(12), micro)
            apart = 0.0 if ranks == 2 and "clip_norm" not in more else 1e-6
            rows = everyone(session.module)
            assert all(torch.equal(row, rows[0]) for row in rows)
            for mine, theirs in zip(session.module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=apart)
            for mine, theirs in zip(session.module.parameters(), twin.parameters(), strict=True):
                assert optimizer.state[mine].keys() == twins.state[theirs].keys()
                for key, value in twins.state[theirs].items():
                    torch.testing.assert_close(optimizer.state[mine][key], value, rtol=0, atol=apart)
            assert session.stats.bytes_sent

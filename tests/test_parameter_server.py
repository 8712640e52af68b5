"""Servers step in the place of ranks: in step as one process, else with nobody waiting; and the state comes back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import test_session
import test_strategy
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from on_ranks import on_ranks
from pool import Pool
from test_session import CPU, MINUTE, process_group
from torch import Tensor, nn

import ringstrategy as ring
from ringstrategy import AllReduce, BlockInt, Cast, ParameterServer, Staleness
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.server.servers import Servers
from ringstrategy.algorithms.server.service import Service
from ringstrategy.requests import Client
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


def opened(
    algorithm: Algorithm, make: Make = OPTIMIZERS["momentum"]
) -> AbstractContextManager[tuple[Session, torch.optim.Optimizer]]:
    module = Net()
    return test_session.opened(module, algorithm, make(module))


def train(session: Session, optimizer: torch.optim.Optimizer, steps: range, micro: int = 1) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    schedule.last_epoch = steps.start
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


def is_one_process(algorithm: Algorithm, make: Make, micro: int = 1, clip_norm: float | None = None) -> None:
    """With the data of all ranks: the parameters, and the optimizer's state, also when training has ended."""
    with process_group():
        ranks, served = dist.get_world_size(), isinstance(algorithm, ParameterServer)
        twin, twins = in_one_process(make, ranks, range(12), micro, clip_norm)
        with opened(algorithm, make) as (session, optimizer):
            train(session, optimizer, range(12), micro)
            apart = 0.0 if ranks == 2 and clip_norm is None else 1e-6
            rows = everyone(session.module)
            assert all(torch.equal(row, rows[0]) for row in rows)
            for mine, theirs in zip(session.module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=apart)
            assert bool(optimizer.state) == served, "else it is in shared memory"
            assert session.stats.bytes_sent or not served
            within = state_of(optimizer)
        for found in (within, state_of(optimizer)):
            torch.testing.assert_close(found, state_of(twins), rtol=0, atol=apart)


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    return {place: state for place, state in optimizer.state_dict()["state"].items() if state}


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
    is_one_process(ParameterServer(servers, **more), OPTIMIZERS[how], micro, more.get("clip_norm"))


@pytest.mark.parametrize("servers", ["all", 2])
@on_ranks(3)
def test_where_all_serve_a_link_carries_one_message_at_a_time(servers: Any) -> None:
    asks, note, answered = Client.ask, Service._note, list[str]()

    def ask(client: Client, operation: str, *given: Any, sent: Any = None, **how: Any) -> Any:
        if operation == "push":
            told.append(("begins", client.address))
            how["sent"] = lambda: [told.append(("ends", client.address)), sent()]
        return asks(client, operation, *given, **how)

    def left(service: Service, ranks: set[str], rank: str) -> None:
        answered.append(rank)
        note(service, ranks, rank)

    told = list[tuple[str, Any]]()
    with process_group(), mock.patch.object(Client, "ask", ask), mock.patch.object(Service, "_note", left):
        me = dist.get_rank()
        with opened(ParameterServer(servers), OPTIMIZERS["adam"]) as (session, optimizer):
            train(session, optimizer, range(4))
            addresses = [getattr(client, "address", None) for client in session.algorithm._servers._clients]
        begun = [address for what, address in told if what == "begins"]
        assert begun == [addresses[(me + k) % 3] for k in (1, 2) if (me + k) % 3 < len(addresses)] * 4
        if servers == "all":
            assert [what for what, _ in told] == ["begins", "ends"] * 8
            others = [f"{(me - k) % 3:06d}" for k in (1, 2)]
            assert answered == others * 4


# Out of step


@on_ranks(3)
def test_out_of_step_nobody_is_too_far_ahead_and_all_see_the_servers_parameters() -> None:
    """Ranks 1 and 2 begin a step when rank 0 has ended the next one, and so waits as far ahead as it may be."""
    ahead: list[int] = []
    lets = Staleness.lets

    def watched(rule: Staleness, learner: str, steps: dict[str, int]) -> bool:
        may = lets(rule, learner, steps)
        if may:
            ahead.append(steps[learner] - min(steps.values()))
        return may

    rank, total = int(os.environ["RANK"]), 12
    algorithm = ParameterServer(1, Staleness(2), BlockInt(8), error_feedback=True, pull=Cast("bfloat16"))
    with process_group(), mock.patch.object(Staleness, "lets", watched), opened(algorithm) as (session, optimizer):
        store = dist.distributed_c10d._get_default_store()
        first = loss_of(session.module, 0, 0).item()
        for step in range(total):
            session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
            if rank:
                store.wait([f"step {min(step + 1, total - 1)} of rank 0"])
            session.backward(loss_of(session.module, 0, 0))
            optimizer.step()
            session.end_batch(1)
            if not rank:
                store.set(f"step {step} of rank 0", "ended")
        session.finish()
        with session.consensus():
            rows = everyone(session.module)
            assert all(torch.equal(row, rows[0]) for row in rows)
            assert loss_of(session.module, 0, 0).item() < 0.5 * first
        if rank == 0:
            assert max(ahead) == 2
            assert min(ahead) == 0
        assert optimizer.state[session.module.first.weight]["momentum_buffer"].abs().max() > 0


@on_ranks(2)
def test_out_of_step_each_gradient_is_a_step_divided_by_its_age() -> None:
    """In a scripted order: rank 1 computes from version 0, and pushes when rank 0 has made three steps."""
    module = nn.Linear(3, 1, bias=False)
    nn.init.ones_(module.weight)
    algorithm, sgd = ParameterServer(2, "async", clip_norm=2.0), torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)
    with process_group(), test_session.opened(module, algorithm, sgd) as (session, optimizer):
        given = [torch.tensor([[1.0, 2.0, -2.0]]), torch.tensor([[0.5, 0.0, 1.0]])]  # of length 3, and 1.118
        twin, velocity = torch.ones(1, 3), torch.zeros(1, 3)
        for gradient, age in [(given[0] * 2 / 3, 0)] * 3 + [(given[1], 3)]:
            velocity = 0.5 * velocity + gradient
            twin = twin - 0.1 / (1 + age) * velocity
        rank = dist.get_rank()
        for step in range(3 - 2 * rank):
            session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
            session.backward((module.weight * given[rank]).sum())
            if rank == 1:
                dist.barrier()
            optimizer.step()
            session.end_batch(1)
        if rank == 0:
            dist.barrier()
        with session.consensus():
            torch.testing.assert_close(module.weight, twin, rtol=0, atol=1e-6)


# State


@on_ranks(2)
def test_the_state_is_that_of_the_whole_optimizer_and_goes_on_with_other_servers_or_none(tmp_path: Path) -> None:
    """Saved by two servers, it resumes with one, and in one process without any; each to the bit."""
    make = OPTIMIZERS["groups"]
    with process_group():
        whole, _ = in_one_process(make, 2, range(8))
        with opened(ParameterServer(), make) as (session, optimizer):
            train(session, optimizer, range(4))
            saved = {
                "net": session.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ours": session.state_dict(),
            }
            torch.save(saved, tmp_path / f"{dist.get_rank()}.pt")
        saved = torch.load(tmp_path / f"{dist.get_rank()}.pt", weights_only=True)
        assert optimizer.state_dict()["state"], "it stays after the end"
        for servers in (1, None):
            module = Net()
            optimizer = make(module)
            module.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            kept: list[int] = []
            optimizer.register_step_pre_hook(lambda mine, *_: kept.append(len(mine.state)))  # noqa: B023
            algorithm = AllReduce() if servers is None else ParameterServer(servers)
            with test_session.opened(module, algorithm, optimizer) as (session, _):
                train(session, optimizer, range(4, 8))
            assert any(kept[1:]) == (servers is None), "the ranks keep nothing"
            assert all(map(torch.equal, module.parameters(), whole.parameters())), servers


@pytest.mark.parametrize("make", [torch.optim.Adafactor, partial(torch.optim.Muon, lr=0.02)], ids=["adafactor", "muon"])
@on_ranks(2)
def test_one_server_steps_whole_parameters(make: Any) -> None:
    torch.manual_seed(0)
    module, twin = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    twin.load_state_dict(module.state_dict())
    steps, server = make(twin.parameters()), ParameterServer(1)
    with process_group(), test_session.opened(module, server, make(module.parameters())) as (session, optimizer):
        for step in range(4):
            rows = [torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
            session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
            session.backward(module(rows[dist.get_rank()]).square().sum())
            optimizer.step()
            session.end_batch(1)
            steps.zero_grad()
            (sum(twin(each).square().sum() for each in rows) / 2).backward()
            steps.step()
        torch.testing.assert_close(module.weight, twin.weight, rtol=0, atol=1e-6)


def trained_by_two(algorithm: Algorithm, first: torch.dtype, second: torch.dtype) -> list[Tensor]:
    """What two optimizers end with, as a GAN's: a backward fills the gradients of both, and one of them steps."""
    torch.manual_seed(0)
    parts = nn.ModuleList([nn.Linear(4, 4).to(first), nn.Linear(4, 1).to(second)])
    both = [torch.optim.Adam(part.parameters(), 0.01) for part in parts]
    with test_session.opened(parts, algorithm, *both) as (session, _):
        for step in range(6):
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            session.begin_batch(f"in batch {step}", both, first=step == 0, later_epoch=False)
            for optimizer in both:
                parts.zero_grad()
                session.backward(parts[1](parts[0](rows.to(first)).relu().to(second)).square().mean())
                optimizer.step()
            session.end_batch(2)
        return [value.detach().clone() for value in parts.parameters()]


@on_ranks(2)
def test_several_optimizers_step_each_its_own() -> None:
    with process_group():
        ends = [trained_by_two(each, torch.float32, torch.float32) for each in (ParameterServer(), AllReduce())]
        assert all(map(torch.equal, *ends))


@on_ranks(2)
def test_in_step_a_rank_without_a_gradient_counts_too() -> None:
    """Each rank trains a head of its own, and both optimizers step; the second has a group a parameter."""
    with process_group():
        ends = []
        for algorithm in (ParameterServer(), AllReduce()):
            torch.manual_seed(0)
            heads = nn.ModuleList([nn.Linear(4, 1), nn.ModuleList(nn.Linear(1, 1) for _ in range(300))])
            groups = [{"params": [each]} for each in heads[1].parameters()]
            both = [torch.optim.SGD(heads[0].parameters(), 0.1, momentum=0.5), torch.optim.AdamW(groups, 0.1)]
            with test_session.opened(heads, algorithm, *both) as (session, _):
                for step in range(3):
                    session.begin_batch(f"in batch {step}", both, first=step == 0, later_epoch=False)
                    heads.zero_grad()
                    rank = dist.get_rank() if step else 0  # first none of the second
                    rows = torch.full((2, 4), 1.0 + step)
                    session.backward(
                        heads[0](rows).sum() if rank == 0 else sum(each(rows[:, :1]).sum() for each in heads[1])
                    )
                    for optimizer in both:
                        optimizer.step()
                    session.end_batch(2)
                session.finish()
            ends.append(torch.cat([value.detach().flatten() for value in heads.parameters()]))
        assert torch.equal(*ends)


# What is refused


def test_wrong_arguments_are_refused_with_the_cure() -> None:
    for wrong, words in [
        ({"servers": 0}, "a whole number >= 1, or 'all'"),
        ({"servers": True}, "a whole number >= 1, or 'all'"),
        ({"mode": "asynchronous"}, "'sync', 'async' or Staleness"),
        ({"mode": Staleness}, "'sync', 'async' or Staleness"),
        ({"pull": "bf16"}, "pull is a Codec"),
        ({"clip_norm": 0}, "clip_norm is a number > 0"),
        ({"bucket_mb": 0}, "bucket_mb is a number"),
        ({"codec": 8}, "codec is a Codec"),
        ({"error_feedback": 1}, "error_feedback is True or False"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            ParameterServer(**wrong)
    with pytest.raises(ValueError, match="use on_peer_loss='raise'"):
        ring.RingStrategy(ParameterServer(), on_peer_loss="shrink")


@on_ranks(2)
def test_what_a_server_cannot_do_is_refused_with_the_cure() -> None:
    with process_group():
        net = Net()
        weights = list(net.parameters())
        net.part = nn.Parameter(torch.zeros(4, 6)[:, :3])
        for algorithm, optimizers, how, words in [
            (ParameterServer(3), [torch.optim.SGD(weights)], {}, "pass at most as many as there are ranks"),
            (ParameterServer(), [torch.optim.Adafactor(weights)], {}, "use ParameterServer(servers=1)"),
            (ParameterServer(1), [torch.optim.LBFGS(weights)], {}, "evaluates the loss"),
            (ParameterServer(), [torch.optim.SGD(weights[:2]), torch.optim.SGD(weights[1:])], {}, "to one optimizer"),
            (ParameterServer(), [torch.optim.SGD([net.part])], {}, "nn.Parameter(part.contiguous())"),
            (ParameterServer(), [], {"scaled_loss": True}, "bf16-mixed"),
            (ParameterServer(), [], {"clips_by_norm": True}, "ParameterServer(clip_norm=...)"),
        ]:
            with pytest.raises(ValueError, match=re.escape(words)):
                begun(Session(net, algorithm, timeout=MINUTE), optimizers, how)


def begun(session: Session, optimizers: list[torch.optim.Optimizer], how: dict[str, bool]) -> None:
    try:
        session.open(CPU, **how)
        session.bind(optimizers)
    finally:
        session.close()


@on_ranks(2)
def test_what_would_be_lost_is_an_error() -> None:
    """Gradients that change after they have left, that never left, an optimizer that grows, ranks that differ."""

    def clipped(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.backward(loss_of(session.module, 0, 0))
        nn.utils.clip_grad_norm_(session.module.parameters(), 0.1)

    def kept(session: Session, optimizer: torch.optim.Optimizer) -> None:
        with session.no_sync():
            session.backward(loss_of(session.module, 0, 0))

    def unknown(session: Session, optimizer: torch.optim.Optimizer) -> None:
        loss_of(session.module, 0, 0).backward()

    def grows(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.backward(loss_of(session.module, 0, 0))
        optimizer.add_param_group({"params": [session.module.more]})

    def another(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.backward(loss_of(session.module, 0, 0))
        torch.optim.SGD(session.module.parameters(), 0.1).step()

    def removed(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.backward(loss_of(session.module, 0, 0))
        session.module.first.bias.grad = None

    def clamped(session: Session, optimizer: torch.optim.Optimizer) -> None:
        for parameter in session.module.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        session.backward(loss_of(session.module, 0, 0))

    def differs(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.backward(loss_of(session.module, 0, 0))
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())

    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.zeros(3))

    with process_group():
        for spoil, words in [
            (clipped, "ParameterServer(clip_norm=...)"),
            (kept, "outside of block_backward_sync()"),
            (unknown, "self.manual_backward(loss)"),
            (grows, "all of its parameters from the start"),
            (another, "announce it by bind"),
            (removed, "was removed after it was handed over"),
            (clamped, "clamping, pruning or loading"),
            (differs, "lr=0.2"),
        ]:
            module = Larger()
            optimizer = torch.optim.SGD([p for n, p in module.named_parameters() if n != "more"], 0.1)
            with test_session.opened(module, ParameterServer(), optimizer) as (session, _):
                session.begin_batch("in batch 0", [optimizer], first=True, later_epoch=False)
                with pytest.raises(RuntimeError, match=re.escape(words)):
                    spoiled(spoil, session, optimizer)
                dist.barrier()


def spoiled(spoil: Callable[..., None], session: Session, optimizer: torch.optim.Optimizer) -> None:
    spoil(session, optimizer)
    optimizer.step()


# By a Trainer, out of step


class Fitted(test_strategy.Net):
    def __init__(self) -> None:
        super().__init__(test_strategy.normed().layers)
        self.seen: list[tuple[float, float]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        flat = torch.cat([each.flatten().double() for each in self.state_dict().values()])
        self.seen.append((float(flat.sum()), float(self.loss(batch))))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def fit(algorithm: Any, epochs: int, folder: Path, resume: str | None = None) -> tuple[L.Trainer, Fitted]:
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, monitor="loss")
    how: dict[str, Any] = {"callbacks": [saver, EarlyStopping("loss", patience=9)], "enable_checkpointing": True}
    strategy = ring.RingStrategy(algorithm, timeout=MINUTE)
    trainer = test_strategy.trainer_with(strategy, max_epochs=epochs, num_sanity_val_steps=0, **how)
    validated = test_strategy.rows(16, batch_size=8)
    trainer.fit(module := Fitted(), test_strategy.rows(64, batch_size=8), validated, ckpt_path=resume)
    return trainer, module


@pytest.mark.parametrize(("mode", "steps"), [("sync", 12.0), ("async", 24.0)])  # of both ranks as one, or each
@on_ranks(2)
def test_a_trainer_validates_stops_saves_and_resumes(tmp_path: Path, mode: Any, steps: float) -> None:
    trainer, module = fit(ParameterServer(mode=mode), 3, tmp_path / "first")
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    first, last = module.seen[0], module.seen[-1]
    assert last[1] < first[1]
    table = torch.tensor([value for value, _ in module.seen], dtype=torch.float64)
    for saved in (torch.load(tmp_path / name, weights_only=True) for name in ("first/epoch=2.ckpt", "end.ckpt")):
        state = saved["optimizer_states"][0]["state"]
        assert [float(each["step"]) for each in state.values()] == [steps] * 6
        assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    _, module = fit(ParameterServer(1, mode=mode), 5, tmp_path / "second", f"{tmp_path}/first/epoch=2.ckpt")
    again = torch.load(tmp_path / "second" / "epoch=4.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert [float(each["step"]) for each in again.values()] == [steps * 5 / 3] * 6
    assert module.seen[-1][1] < last[1]
    rows = torch.tensor([value for value, _ in module.seen], dtype=torch.float64)
    both = [torch.empty(len(table) + len(rows), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(both, torch.cat([table, rows]))
    assert torch.equal(*both), "both ranks see the same in each validation"


def _goes(mode: Any, how: str) -> tuple[str, Any]:
    """Rank 1 is lost, or leaves in good order, while the others train."""
    with process_group(), opened(ParameterServer(mode=mode, servers=1)) as (session, optimizer):
        try:
            for step in range(4 if how == "leaves" else 10_000):
                session.begin_batch(f"in batch {step}", [optimizer], first=step == 0, later_epoch=False)
                if (dist.get_rank(), step) == (1, 2):
                    if how == "is lost":
                        os._exit(1)
                    return "", None
                session.backward(loss_of(session.module, step, dist.get_rank()))
                optimizer.step()
                session.end_batch(1)
            session.finish()
        except ring.PeerLostError as error:
            return str(error), error.rank
    return "", None


@on_ranks(3)
def test_in_step_nobody_waits_for_a_rank_that_has_left() -> None:
    """It has said why before the servers know that it leaves: here it goes no further until the others have stopped."""

    def end(servers: Servers) -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["stopped/0", "stopped/2"], MINUTE)
        else:
            store.set(f"stopped/{dist.get_rank()}", "")
        original(servers)

    original = Servers._end
    with mock.patch.object(Servers, "_end", end):
        said, whose = _goes("sync", "leaves")
    if os.environ["RANK"] != "1":
        assert whose == 1
        assert "the end of its training after 3 batches" in said


def test_out_of_step_a_lost_rank_is_named(ranks: Pool) -> None:
    """Although nobody waits for it, and long before the others would meet."""
    outcomes = ranks.outcomes(3, _goes, "async", "is lost")
    assert [error is None for _, error in outcomes] == [True, False, True], outcomes
    assert [result[1] for result, _ in outcomes[::2]] == [1, 1], outcomes

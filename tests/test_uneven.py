"""Ranks with different numbers of batches: `uneven="join"` takes the mean over those who have data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from on_ranks import on_ranks
from pool import Pool
from test_session import CPU, MINUTE, gathered, opened, process_group
from test_strategy import check_replicas, trainer_with
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import ringstrategy as ring
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.session import Session
from ringstrategy.topologies import RingGraph

Batch = tuple[Tensor, Tensor, Tensor]
COUNTS = 5, 3, 1  # batches of an epoch, by rank
JOINS = ring.AllReduce(uneven="join")


class Net(nn.Module):
    """A dense part, and an embedding whose gradient is sparse."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, rows: Tensor, inputs: Tensor) -> Tensor:
        return self.layers(self.embedding(rows) + inputs)


def batch(rank: int, epoch: int, place: int) -> Batch:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * epoch + place)
    rows = torch.randint(11, (4,), generator=generator)
    return rows, torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def loss_of(module: nn.Module, data: Batch) -> Tensor:
    rows, inputs, targets = data
    kind = next(module.parameters()).dtype
    return nn.functional.mse_loss(module(rows, inputs.to(kind)), targets.to(kind))


def make_optimizer(module: Net) -> torch.optim.Optimizer:
    dense = {"params": module.layers.parameters(), "momentum": 0.9, "weight_decay": 0.1}
    return torch.optim.SGD([dense, {"params": module.embedding.parameters()}], 0.2)


def loader(rank: int, epoch: int, counts: tuple[int, ...] = COUNTS) -> Iterator[Batch]:
    return (batch(rank, epoch, place) for place in range(counts[rank]))


def flat(tensors: Iterator[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def train(
    algorithm: Algorithm, module: Net, accumulate: int = 1, epochs: int = 2, *, averages_each: bool = False
) -> list[bool]:
    """When this rank was idle. `averages_each`: also where gradients accumulate, so that means are averaged again."""
    idle = []
    with opened(module, algorithm, make_optimizer(module)) as (session, optimizer):
        for epoch in range(epochs):
            for place, data in enumerate(session.join(loader(dist.get_rank(), epoch))):
                session.begin_batch(f"batch {place}", [optimizer], first=place == 0, later_epoch=epoch > 0)
                session.send_buffers()
                steps = (place + 1) % accumulate == 0 or place + 1 == max(COUNTS)
                with nullcontext() if steps or averages_each else session.no_sync():
                    session.backward(loss_of(module, data) / accumulate)
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
                session.end_batch(int(steps))
                idle.append(session.uneven.idle)
            assert not session.uneven.idle
    return idle


def oracle(
    ranks: Sequence[int],
    counts: Sequence[int] = COUNTS,
    accumulate: int = 1,
    *,
    averages_each: bool = False,
    same_epochs: bool = False,
    decay: float = 1.0,
) -> Tensor:
    """The parameters that one process gets in float64, in two epochs, which sees the batches of all these ranks.

    Args:
        ranks: whose batches.
        counts: batches of an epoch, by rank.
        accumulate: batches of a rank in a step.
        averages_each: the mean of each place of a step is over the ranks that have a batch there.
        same_epochs: the second has the batches of the first.
        decay: of the learning rate, at each step.
    """
    module = Net(sparse=False).double()
    optimizer = make_optimizer(module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    longest = max(counts[rank] for rank in ranks)
    for epoch in range(2):
        window: list[Tensor] = []
        for place in range(longest):
            there = [rank for rank in ranks if place < counts[rank]]
            losses = [loss_of(module, batch(rank, 0 if same_epochs else epoch, place)) for rank in there]
            window += [torch.stack(losses).mean()] if averages_each else losses
            begun = place % accumulate + 1
            if begun == accumulate or place + 1 == longest:
                optimizer.zero_grad()
                # of an epoch's last, shorter window Lightning divides by `accumulate` all the same
                (torch.stack(window).mean() * begun / accumulate).backward()
                optimizer.step()
                scheduler.step()
                window = []
    return flat(module.parameters())


@pytest.mark.parametrize(
    ("make", "accumulate", "averages_each", "most"),
    [
        (partial(ring.AllReduce, uneven="join"), 1, False, 1e-5),
        (partial(ring.AllReduce, uneven="join"), 2, False, 1e-5),
        (partial(ring.AllReduce, uneven="join"), 2, True, 1e-5),  # at each backward, the mean is over its own ranks
        (partial(ring.Auto, [ring.Identity()], uneven="join"), 1, False, 1e-5),
        (partial(ring.PowerSGD, rank=8, uneven="join"), 1, False, 1e-4),
        (partial(ring.AllReduce, ring.BlockInt(8), uneven="join"), 2, False, 0.05),
    ],
)
@on_ranks(3)
def test_the_mean_is_over_the_batches_that_there_are(
    make: Callable[[], Algorithm], accumulate: int, averages_each: bool, most: float
) -> None:
    with process_group():
        module, rank = Net(), dist.get_rank()
        idle = train(make(), module, accumulate, averages_each=averages_each)
        values, *others = gathered(list(module.parameters()))
    assert idle == 2 * [place >= COUNTS[rank] for place in range(max(COUNTS))]
    assert all(torch.equal(other, values) for other in others)
    expected = oracle(range(3), accumulate=accumulate, averages_each=averages_each)
    assert 0 < (values - expected).abs().max() < most


def _buffers(algorithm: Algorithm, first: int, second: int) -> list[tuple[bool, list[Tensor]]]:
    """At each batch's end: was it a repeated one, and the buffers."""
    module = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    ends = []
    with process_group(), opened(module, algorithm) as (session, optimizer):
        data = loader(0, 0, (first if dist.get_rank() == 0 else second,))
        for place, (_, inputs, targets) in enumerate(session.join(data)):
            session.begin_batch(f"batch {place}", [optimizer], first=place == 0, later_epoch=False)
            for _ in range(2):
                session.send_buffers()
                loss = nn.functional.mse_loss(module(inputs), targets)
            optimizer.zero_grad()
            session.backward(loss)
            module(inputs)
            optimizer.step()
            session.end_batch(1)
            ends.append((session.uneven.idle, [buffer.clone() for buffer in module.buffers()]))
    return ends


@pytest.mark.parametrize("make", [ring.AllReduce, ring.Gossip])
def test_a_repeated_batch_leaves_no_statistics(ranks: Pool, make: type[ring.AllReduce | ring.Gossip]) -> None:
    ends = ranks(2, _buffers, make(uneven="join"), 2, 4)[0]
    assert [idle for idle, _ in ends] == [False, False, True, True]
    assert all(map(torch.equal, ends[1][1] * 2, ends[2][1] + ends[3][1]))


def test_a_rank_without_data_takes_the_mean_of_statistics_and_adds_nothing_to_it(ranks: Pool) -> None:
    ends = ranks(2, _buffers, ring.LocalSGD(2, uneven="join"), 3, 6)
    assert [idle for idle, _ in ends[0]] == [False] * 3 + [True] * 3
    for (_, mine), (_, others) in list(zip(*ends, strict=True))[1::2]:
        assert torch.equal(mine[0], others[0])
    assert torch.equal(ends[0][3][1][0], ends[0][4][1][0])
    assert not torch.equal(ends[1][3][1][0], ends[1][4][1][0])


def _gossip_oracle(size: int) -> list[Tensor]:
    modules = [Net(sparse=False).double() for _ in range(size)]
    optimizers = [make_optimizer(module) for module in modules]
    weights = [RingGraph().weights(rank, size, 0) for rank in range(size)]
    for epoch in range(2):
        for place in range(max(COUNTS)):
            for rank in range(size):
                if place < COUNTS[rank]:
                    optimizers[rank].zero_grad()
                    loss_of(modules[rank], batch(rank, epoch, place)).backward()
                    optimizers[rank].step()
            with torch.no_grad():
                before = [[p.clone() for p in module.parameters()] for module in modules]
                for rank, module in enumerate(modules):
                    for i, parameter in enumerate(module.parameters()):
                        mixed = [weight * before[source][i] for source, weight in weights[rank].items()]
                        parameter.copy_(torch.stack(mixed).sum(0))
    return [flat(module.parameters()) for module in modules]


@pytest.mark.parametrize("zeros", [False, True])
@on_ranks(3)
def test_a_rank_without_data_mixes_and_does_not_step(zeros: bool) -> None:
    """Gradients that are not dropped must not be stepped either."""
    module, zero_grad, expected = Net(), torch.optim.SGD.zero_grad, _gossip_oracle(3)
    keeping = mock.patch.object(torch.optim.SGD, "zero_grad", lambda self: zero_grad(self, set_to_none=False))
    with process_group(), keeping if zeros else nullcontext():
        train(ring.Gossip(overlap=False, uneven="join"), module)
        assert torch.allclose(flat(module.parameters()), expected[dist.get_rank()], rtol=0, atol=1e-5)


# Lightning

EPOCH = 5, 7, 4  # batches, by rank


class Endless(IterableDataset[Batch]):
    """Of no known length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data)


class Lying(Endless):
    def __len__(self) -> int:
        return len(self.data) + 2


def of_rank(rank: int, kind: str = "sized") -> Any:
    """Its loader: the same batches in each epoch."""
    data = list(loader(rank, 0, EPOCH))
    source = {"sized": list, "endless": Endless, "lying": Lying}[kind](data)
    return DataLoader(source, batch_size=None)


class Module(L.LightningModule):
    """Notes where it is; what it logs of a repeated batch must not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(sparse=False)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.idle: list[bool] = []
        self.validated: list[int] = []
        self.statistics: list[Tensor] = []

    def training_step(self, data: Batch, batch_idx: int) -> Tensor:
        self.norm(data[1])
        self.idle.append(self.trainer.strategy._fit.uneven.idle)
        self.log("count", 100.0 if self.idle[-1] else 1.0, sync_dist=True, on_step=False, on_epoch=True)
        return loss_of(self.net, data)

    def on_train_batch_end(self, *_: Any) -> None:
        self.statistics.append(self.norm.running_mean.clone())

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        self.validated.append(self.trainer.fit_loop.epoch_loop.batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fitted(algorithm: Algorithm, kind: str = "sized", **options: Any) -> L.Trainer:
    module, ckpt_path = Module(), options.pop("ckpt_path", None)
    trainer = trainer_with(
        ring.RingStrategy(algorithm), **{"num_sanity_val_steps": 0, "use_distributed_sampler": False, **options}
    )
    rank = trainer.strategy.cluster_environment.global_rank()
    trainer.fit(module, of_rank(rank, kind), DataLoader([batch(rank, 9, 0)], batch_size=None), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sized", {}),
        ("sized", {"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
        pytest.param("endless", {"val_check_interval": 4}, marks=pytest.mark.slow),
    ],
)
@on_ranks(3)
def test_lightning_trains_until_no_rank_has_a_batch(kind: str, options: dict[str, Any]) -> None:
    trainer = fitted(JOINS, kind, **options)
    check_replicas(trainer)
    module, rank = trainer.lightning_module, dist.get_rank()
    assert isinstance(module, Module)
    accumulate, idle = options.get("accumulate_grad_batches", 1), 2 * [place >= EPOCH[rank] for place in range(7)]
    steps = 2 * -(-max(EPOCH) // accumulate)
    assert trainer.num_training_batches == (float("inf") if kind == "endless" else 7)
    assert trainer.global_step == steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * 0.9**steps)
    assert float(trainer.callback_metrics["count"]) == pytest.approx(
        1.0, rel=0.02
    )  # Lightning divides by whole numbers
    assert module.idle == idle
    assert module.validated == 2 * {0.5: [2, 5], 4: [3]}.get(options.get("val_check_interval"), [6])
    expected = oracle(range(3), EPOCH, accumulate, same_epochs=True, decay=0.9)
    assert torch.allclose(flat(module.net.parameters()), expected, rtol=0, atol=1e-5)
    if rank == 0:  # whose statistics all get: they stay while it repeats a batch
        assert [torch.equal(*pair) for pair in pairwise(module.statistics)] == idle[1:]


@on_ranks(2)
def test_resuming_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    algorithm = ring.AllReduce(ring.BlockInt(8), uneven="join")
    saving: dict[str, Any] = {"dirpath": tmp_path, "filename": "{step}", "save_top_k": -1}
    callbacks = [ModelCheckpoint(every_n_epochs=1, **saving), ModelCheckpoint(every_n_train_steps=5, **saving)]
    whole = fitted(algorithm, enable_checkpointing=True, callbacks=callbacks)
    resumed = fitted(algorithm, ckpt_path=tmp_path / "step=7.ckpt")
    for one, other in zip(whole.lightning_module.parameters(), resumed.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.global_step == resumed.global_step == 14
    # within an epoch, after rank 0 had run out; Lightning begins this loader anew
    rest = fitted(algorithm, max_epochs=1, ckpt_path=tmp_path / "step=5.ckpt")
    assert rest.global_step == 7
    assert isinstance(rest.lightning_module, Module)
    assert rest.lightning_module.idle == 2 * [dist.get_rank() == 0]


# What is refused


def _joins(module: nn.Module, algorithm: Algorithm, *, scaled: bool = False, none_on_rank_1: bool = False) -> None:
    with process_group():
        session = Session(module, algorithm, timeout=MINUTE)
        try:
            session.open(CPU, scaled_loss=scaled)
            for _ in session.join([] if none_on_rank_1 and dist.get_rank() == 1 else [1, 2]):
                pass
        except Exception as error:
            session.tell(error)
            raise
        finally:
            session.close()


def _fits_nothing() -> None:
    with mock.patch.dict(globals(), EPOCH=(3, 0)):
        fitted(JOINS, "endless")


NORMED = nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "SyncBatchNorm": (lambda: _joins(NORMED, JOINS), "nn.GroupNorm"),
    "scaler": (lambda: _joins(Net(), ring.Gossip(uneven="join"), scaled=True), "bf16-mixed"),
    "empty": (lambda: _joins(Net(), JOINS, none_on_rank_1=True), "at least one batch"),
    "empty with lightning": (_fits_nothing, "at least one batch"),
    "wrong length with lightning": (lambda: fitted(JOINS, "lying"), "correct its __len__"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_cannot_be_joined_is_refused_on_all_ranks(name: str) -> None:
    joins, cure = REFUSED[name]
    with pytest.raises((ValueError, ring.PeerLostError), match=cure):
        joins()

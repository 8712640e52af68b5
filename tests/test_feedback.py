"""Error feedback as state: kept through checkpoints, world sizes, loss scales, and steps that must not change it."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fakes import FakePeers, Toy, of_each_rank, on_all_ranks
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from listening import listening
from pool import Pool
from rank_files import rank_file, rank_state
from test_strategy import Net, check_replicas, rows, trainer_with
from torch import Tensor, nn

from ringstrategy import (
    AllReduce,
    Cast,
    Codec,
    Collective,
    Direct,
    Gaussian,
    PowerSGD,
    Ring,
    RingStrategy,
    Rotated,
    Sign,
    SmallExact,
    TopK,
)
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients.synchronous import Synchronous
from ringstrategy.kernels import feedback

State = dict[str, Tensor]
Wire = tuple[Codec, Collective] | type[PowerSGD]
WIRES: list[Wire] = [(Toy(), Ring()), (Sign(), Ring()), (Rotated(Gaussian(1)), Direct()), (TopK(8), Direct()), PowerSGD]


def lossy(**options: Any) -> RingStrategy:
    return RingStrategy(AllReduce(Toy(), **{"error_feedback": True, "bucket_mb": 1e-4, **options}))


def residuals(algorithm: Algorithm) -> State:
    """A copy."""
    return {name: value.clone() for name, value in algorithm.residuals()}


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def is_sum_of(value: State, states: list[State]) -> None:
    """Up to rounding."""
    for name in value.keys() | states[0].keys():
        exact = torch.stack([state[name] for state in states]).double().sum(0)
        torch.testing.assert_close(value[name].double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


# How much of a mean was stepped


def test_parts_that_were_stepped() -> None:
    """Relative to the largest part of late; what is zero follows the others; what did not step, steps nothing."""
    means = [torch.full((600,), 3.0), torch.tensor([2.0, -4.0]), torch.zeros(5), None, torch.ones(3)]
    then = feedback.sample(means)
    assert then.shape == (5, 512)
    assert then[0].eq(3).all()
    assert then[1].count_nonzero() == 2
    halved = [None if mean is None else mean / 2 for mean in means]
    turned = [means[0], -means[1], *means[2:]]  # type: ignore[operator]
    assert feedback.stepped_parts(then, halved, None, None, True).tolist() == [0.5, 0.5, 0.5, 1, 0.5]
    assert feedback.stepped_parts(then, turned, None, None, True).tolist()[:2] == [1, 0], "never less than nothing"
    late = torch.zeros(5, dtype=torch.float64)
    for factor, expected in ((0.5, 1.0), (0.25, 0.5), (1.0, 1.0)):
        now = [None if mean is None else mean * factor for mean in means]
        parts = feedback.stepped_parts(then, now, late, None, True)
        assert parts.tolist() == [expected, expected, expected, 1, expected]
        assert late[3] == 0, "it has no gradient"
    assert feedback.stepped_parts(then, means, late, None, torch.tensor(False)).tolist() == [0, 0, 0, 1, 0]
    assert late[0] == 1.0, "a step that was not made says nothing of how much is stepped"
    scaled = feedback.stepped_parts(then, halved, late, torch.tensor(2.0), True)
    assert scaled.tolist() == [1, 1, 1, 1, 1], "the optimizer saw unscaled gradients"
    nothing, late = [torch.zeros(3)], torch.zeros(1, dtype=torch.float64)
    assert feedback.stepped_parts(feedback.sample(nothing), nothing, late, torch.tensor(1024.0), True).item() == 1
    assert late.item() == 1, "zeros count whole, not as often as the loss is scaled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_residuals_go_a_part_of_the_way(dtype: torch.dtype) -> None:
    before, after = torch.zeros(12, dtype=dtype), torch.arange(12.0).to(dtype)
    now = after.clone()
    feedback.go_(now, before, [0, 3, 3, 6, 9], torch.tensor([0.0, 0.5, 1.0, 0.25], dtype=torch.float64))
    assert now.tolist() == [0, 0, 0, 3, 4, 5, 1.5, 1.75, 2, 9, 10, 11]


# What must not touch a residual, on all ranks of a fake network


class Run:
    """One rank's algorithm over parameters whose gradients are drawn by rank and step."""

    def __init__(self, peers: FakePeers, algorithm: Synchronous, **sizes: int) -> None:
        self.peers, self.algorithm = peers, algorithm
        self.module = {name: nn.Parameter(torch.zeros(size, 3)) for name, size in sizes.items()}
        self.scale: Tensor | None = None
        algorithm.setup(dict(self.module), peers)

    def backward(self, step: int, *, without: Collection[str] = (), times: float = 1.0) -> State:
        """The gradients of this rank alone."""
        generator = torch.Generator().manual_seed(100 * step + self.peers.rank)
        own = {name: torch.randn(p.shape, generator=generator) for name, p in self.module.items()}
        own = {name: value for name, value in own.items() if name not in without}
        self.algorithm.before_backward(scale=self.scale)
        loss = sum((self.module[name] * value).sum() for name, value in own.items() if self.module[name].requires_grad)
        if isinstance(loss, Tensor):
            (loss * (1.0 if self.scale is None else self.scale) * times).backward()
        self.algorithm.after_backward()
        return own

    def step(self) -> None:
        """Of an optimizer of all."""
        self.algorithm.after_step(set(self.module.values()))
        for parameter in self.module.values():
            parameter.grad = None

    def residuals(self) -> State:
        return residuals(self.algorithm)

    def close(self) -> State:
        assert self.peers.stats.bytes_sent
        self.algorithm.close()
        return self.residuals()


def run_on(peers: FakePeers, wire: Wire, bucket_mb: float, dtype: Any, **sizes: int) -> Run:
    """As many blocks of the wire's codec, and of them to a bucket, as `sizes` and `bucket_mb` make blocks of 4."""
    times = 4 if isinstance(wire, type) else wire[0].block // 4
    if isinstance(wire, type):
        algorithm: Synchronous = wire(bucket_mb=bucket_mb * times)
    else:
        algorithm = AllReduce(*wire, error_feedback=True, bucket_mb=bucket_mb * times, residual_dtype=dtype)
    return Run(peers, algorithm, **{name: times * size for name, size in sizes.items()})


def differ(states: list[State]) -> bool:
    return any(not torch.equal(states[0][name], value) for state in states[1:] for name, value in state.items())


FATES = {  # of a gradient, and the part of the mean that is stepped
    **{"stepped": 1.0, "another backward": 1.0, "unused by rank 1": 1.0, "a thousandth": 1e-3},
    **dict.fromkeys(["no step", "skipped", "skipped on the device", "no gradient", "zeroed", "replaced"], 0.0),
    **{"unused": 0.0, "frozen": 0.0},
}
STEPS = 60


def fates() -> list[dict[str, str]]:
    """Of each parameter's gradient in each step; after one that counted by a part, one that counts whole."""
    random, names = torch.Generator().manual_seed(7), list(FATES)
    drawn = [{n: names[int(torch.randint(len(names), (), generator=random))] for n in "abcd"} for _ in range(STEPS)]
    assert min(sum(fate in chosen.values() for chosen in drawn[1::2]) for fate in FATES) > 2
    return [chosen if step % 2 else dict.fromkeys("abcd", "stepped") for step, chosen in enumerate(drawn)]


def lives(peers: FakePeers, wire: Wire, scaled: bool, dtype: Any) -> list[tuple[State, State, State]]:
    """Of each step the own gradients, what was stepped of the means, and the residuals; some gradients are huge."""
    run = run_on(peers, wire, 1e-4, dtype, a=9, b=5, c=2, d=7)
    assert len(run.algorithm._buckets) > 1
    history = []
    for step, chosen in enumerate(fates()):
        run.scale = torch.tensor(2.0 ** (step * 7 % 17)) if scaled and step % 4 != 2 else None
        without = tuple(n for n, f in chosen.items() if f == "unused" or (f == "unused by rank 1" and peers.rank == 1))
        for name, parameter in run.module.items():
            parameter.requires_grad_(chosen[name] != "frozen")
            if chosen[name].startswith("unused"):
                parameter.grad = None
        before = run.residuals()
        huge = 1e4 if step % 10 == 3 else 1.0
        there = {n: huge * value for n, value in run.backward(step, without=without, times=huge).items()}
        if "another backward" in chosen.values():
            again = run.backward(1000 + step, without=without)
            there = {n: value + again[n] for n, value in there.items()}
        for name, parameter in run.module.items():
            fate, grad = chosen[name], parameter.grad
            assert (grad is None) <= (fate in ("frozen", "unused")), (step, name)
            if fate in ("no gradient", "unused"):
                parameter.grad = None
            elif fate == "replaced":
                parameter.grad = torch.zeros_like(parameter)
            elif grad is not None:
                grad.mul_({"zeroed": 0.0, "a thousandth": 1e-3}.get(fate, 1.0) / (run.scale or 1.0))
        got = {n: run.module[n].grad.clone() for n, fate in chosen.items() if FATES[fate]}  # type: ignore[union-attr]
        for skipped, stepped in (("skipped", False), ("skipped on the device", torch.tensor(False)), (None, True)):
            others = ("no step", "skipped", "skipped on the device") if skipped is None else ()
            asked = {run.module[n] for n, f in chosen.items() if (f == skipped or not skipped) and f not in others}
            run.algorithm.after_step(asked, stepped)
        now = run.residuals()
        for name, fate in chosen.items():
            assert FATES[fate] or fate == "no step" or torch.equal(now[name], before[name]), (step, name, fate)
        for parameter in run.module.values():
            parameter.grad = None if step % 4 < 2 or parameter.grad is None else parameter.grad.zero_()
        history.append((there, got, now))
    saved = {name: value + 1 for name, value in now.items()}
    assert run.algorithm.load_residuals(saved) == []
    assert equal(run.close(), saved), "in units of the unscaled loss"
    return history


@pytest.mark.parametrize(
    ("wire", "scaled", "dtype", "least", "bound"),
    [
        (WIRES[0], True, None, 0, 1e-4),
        (WIRES[0], False, torch.bfloat16, 1e-4, 0.1),
        (WIRES[1], False, None, 0, 1e-4),
        (WIRES[2], True, None, 0, 5e-3),  # a rotation rounds all values of a block as it does the largest
        (WIRES[3], False, None, 0, 1e-4),
        (WIRES[4], True, None, 0, 1e-4),
    ],
    ids=str,
)
def test_what_was_stepped_and_what_is_left_are_what_there_was(
    wire: Wire, scaled: bool, dtype: Any, least: float, bound: float
) -> None:
    """And a mean that was not stepped, for whatever reason, leaves the residual bit for bit as it was."""
    size, largest = 3, 0.0
    wanted, got = ({name: torch.zeros((), dtype=torch.float64) for name in "abcd"} for _ in range(2))
    steps = zip(*on_all_ranks(size, lambda peers: lives(peers, wire, scaled, dtype)), strict=True)
    for chosen, ranks in zip(fates(), steps, strict=True):
        theirs, stepped, left = zip(*ranks, strict=True)
        assert all(equal(other, stepped[0]) for other in stepped)
        for name, fate in chosen.items():
            rest = torch.stack([state[name] for state in left]).double().sum(0)
            if FATES[fate]:
                there = sum(own[name].double() for own in theirs if name in own)
                wanted[name] = wanted[name] + FATES[fate] * there / size
                got[name] = got[name] + stepped[0][name].double()
            difference = (got[name] + rest - wanted[name]).abs().max()
            largest = max(largest, float(difference / wanted[name].abs().max()))
    assert differ(list(left))
    assert least < largest < bound


# Checkpoints, through Lightning on real processes


class Remembers(L.Callback):
    """Residuals as training starts, and after the last batch."""

    def __init__(self) -> None:
        self.first: State = {}
        self.last: State = {}

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.first = residuals(trainer.strategy.algorithm)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.last = residuals(trainer.strategy.algorithm)


class Fails(Net):
    """Rank 1 fails in batch 3, when half of its gradients are on their way."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            hidden = self.layers[:2](batch[0])
            hidden.register_hook(self.raise_in_backward)
            return self.layers[2](hidden).square().mean()
        return super().training_step(batch, batch_idx)

    def raise_in_backward(self, gradient: Tensor) -> None:
        self.trainer.strategy.algorithm._pass._tickets[0].wait()  # the bucket of the second layer
        raise RuntimeError("on purpose")


def _trains(folder: str, epochs: int) -> tuple[State, State, list[str]]:
    """From where the run of an epoch less has ended; the first one fails. Residuals at both ends, and what was said."""
    remember, fails = Remembers(), epochs == 1
    layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    saver = OnExceptionCheckpoint(folder, str(epochs))
    trainer = trainer_with(lossy(), callbacks=[remember, saver], enable_checkpointing=True, max_epochs=epochs)
    with listening() as heard, pytest.raises(RuntimeError) if fails else nullcontext():
        begin = None if fails else f"{folder}/{epochs - 1}.ckpt"
        trainer.fit(Fails(layers) if fails else Net(layers), rows(), ckpt_path=begin)
    if trainer.world_size == 2:
        check_replicas(trainer)
    if not fails:
        trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    said = [text for text in heard if "residual" in text and not text.startswith("Rest")]  # Lightning names a path
    return remember.first, remember.last, said


def test_residuals_keep_their_sum_though_a_rank_fails_or_trains_alone_or_its_file_is_gone(
    ranks: Pool, tmp_path: Path
) -> None:
    """Three ranks, of which one fails within a backward; then two, one alone, and two, twice."""
    seen: list[list[tuple[State, State, list[str]]]] = []
    for epochs, size in enumerate((3, 2, 1, 2, 2), 1):
        if epochs == 5:
            rank_file(tmp_path / "4.ckpt", 1).unlink()
        seen.append(ranks(size, _trains, str(tmp_path), epochs))
    begins, ends, heard = ([[each[of] for each in stage] for stage in seen] for of in range(3))
    failed = torch.load(tmp_path / "1.ckpt", weights_only=True)["ringstrategy"]
    assert failed["residual_sum"] is None
    assert failed["algorithm"]["step"] == 3
    for rank in range(3):  # though the second layer was on its way
        assert equal(rank_state(tmp_path / "1.ckpt", rank)["residuals"], ends[0][rank])
        assert all(value.any() for value in ends[0][rank].values())
    assert differ(ends[0])
    is_sum_of({name: value + begins[1][1][name] for name, value in begins[1][0].items()}, ends[0])
    alone = torch.load(tmp_path / "3.ckpt", weights_only=True)["ringstrategy"]["residual_sum"]
    is_sum_of(alone, ends[1])
    for stage, before in ((3, [alone]), (4, ends[3])):
        for first in begins[stage]:
            is_sum_of({name: 2 * value for name, value in first.items()}, before)
    assert [[bool(each) for each in said] for said in heard[1:3]] == [[True, False], [True]]
    assert "carried on" in heard[2][0][0]
    [message] = heard[4][0]
    assert "of rank 1 are not beside" in message
    assert "1/2 of their sum" in message


# Policies


def test_small_exact_divides_by_size_dimension_and_name() -> None:
    policy = SmallExact(Toy(), Cast("bf16"), below=100, names=["*embedding*", "head.?"])
    coded = {"matrix": (10, 10), "kernel": (3, 3, 3, 4), "head.10": (50, 50)}
    exact = {"matrix": (11, 9), "bias": (5000,), "scale": (), "token_embedding.weight": (50, 50), "head.0": (50, 50)}
    for codec, shapes in ((Toy(), coded), (Cast("bf16"), exact)):
        for name, shape in shapes.items():
            assert policy(name, nn.Parameter(torch.empty(shape))) == codec
    assert SmallExact(Toy(), vectors=False, below=0)("bias", nn.Parameter(torch.empty(1))) == Toy()
    assert repr(AllReduce(pickle.loads(pickle.dumps(policy)))) == repr(AllReduce(policy)), "or ranks would differ"


@of_each_rank(2)
def test_steps_that_torch_does_not_tell_of_are_said(peers: FakePeers) -> None:
    run = run_on(peers, WIRES[0], 25.0, None, a=9, b=5)
    for step in range(25):
        run.backward(step)
        with torch.no_grad():
            for parameter in run.module.values():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]  # by hand
                parameter.grad = None
    [line] = run.algorithm.news()
    assert "error feedback keeps nothing" in line
    assert not any(value.any() for value in run.close().values())

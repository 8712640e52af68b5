"""The differential campaign: random models and habits, beside Lightning's `ddp`, a resumed run, and the ranks' mean.

`pytest tests/test_campaign.py --cases 5000` runs more of them, `--cases 1 --first-case 1234` one. All but some of
each number of ranks run at night. What an exchange of gradients delivers is the soak's to check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from campaign import Case, Model, Saves, batches, flat
from lightning.pytorch.callbacks import Callback
from pool import Pool
from torch import Tensor

AT_ONCE = 10
QUICK = {0, 5, 9, 1, 2, 3, 4, 86}  # a raw optimizer, and two that are toggled late, are among them
DDP = "ddp_find_unused_parameters_true"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-case"), metafunc.config.getoption("--cases")
        by_size: dict[int, list[int]] = {}
        for seed in range(first, first + count):
            by_size.setdefault(Case.draw(seed).size, []).append(seed)
        chunks = []
        for size, seeds in by_size.items():
            seeds.sort(key=lambda seed: seed not in QUICK)
            cuts = sorted({0, *range(len(QUICK.intersection(seeds)), len(seeds), AT_ONCE), len(seeds)})
            for begin, end in itertools.pairwise(cuts):
                name = f"{seeds[begin]} to {seeds[end - 1]} on {size} ranks"
                chunks.append(
                    pytest.param(size, seeds[begin:end], id=name, marks=[pytest.mark.nightly] if begin else [])
                )
        metafunc.parametrize(("size", "seeds"), chunks)


def test_whatever_users_do(ranks: Pool, tmp_path: Path, size: int, seeds: list[int]) -> None:
    ranks(size, _run, str(tmp_path), seeds)


def _run(folder: str, seeds: list[int]) -> None:
    for seed in seeds:
        case = Case.draw(seed)
        try:
            run(case, f"{folder}/{seed}")
        except BaseException as error:
            what = f"{case!r} with {case.strategy().algorithm!r}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def run(case: Case, folder: str) -> None:
    saves = Saves(case, f"{folder}/saved.ckpt")
    whole, looks = fit(case, case.strategy(), saves, folder=folder)
    model = whole.lightning_module
    check(all(value.isfinite().all() for value in model.parameters()), "not finite")
    if case.kind == "gossip":
        check_same(flat(model), "the ranks' models")
        for shown in model.shown:
            check_same(shown, "what ranks validate")
        looks.check()
    else:
        check_same(parameters_of(model), "the ranks' parameters")
        check_same(torch.tensor(model.seen, dtype=torch.float64), "what the ranks' hooks saw")
    if case.kind == "ddp":
        theirs, _ = fit(case, DDP, folder=folder)
        other = theirs.lightning_module.seen
        if case.precision == "16-true":  # DDP rounds twice where a half is subnormal
            check(model.seen == pytest.approx(other, rel=0.01, abs=1e-4), "hooks saw something else")
        else:
            check_equal(whole, theirs, "ring and ddp")
            check(model.seen == other, f"hooks saw {first_difference(model.seen, other)}")
    if saves.has_saved:
        resumed, _ = fit(case, case.strategy(), ckpt_path=saves.path, folder=folder)
        if case.resumes_exactly:
            check_equal(resumed, whole, "the resumed run and the whole one")
        if case.kind == "ddp" and case.precision != "16-true":
            check_equal(resumed, fit(case, DDP, ckpt_path=saves.path, folder=folder)[0], "ring and ddp, resumed,")


def fit(
    case: Case, strategy: Any, *callbacks: Callback, folder: str, ckpt_path: str | None = None
) -> tuple[L.Trainer, Looks]:
    looks = Looks()
    trainer = case.trainer(strategy, [*callbacks, looks], folder)
    trainer.fit(Model(case), batches(), batches(), ckpt_path=ckpt_path)
    return trainer, looks


def first_difference(one: list[float], other: list[float]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if place is None:
        return f"{len(one)} values instead of {len(other)}"
    return f"{one[place]} instead of {other[place]}, value {place} of {len(one)}"


def check(holds: Any, words: str) -> None:
    assert holds, words


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def check_same(value: Tensor, what: str) -> None:
    for rank, other in enumerate(gathered(value)):
        check(torch.equal(other, value), f"{what} differ, here and on rank {rank}")


def parameters_of(model: L.LightningModule) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def check_equal(one: L.Trainer, other: L.Trainer, what: str) -> None:
    """Parameters, buffers, the optimizers' states and steps of this rank, bit for bit."""
    check(one.global_step == other.global_step, f"{what}: steps {one.global_step} and {other.global_step}")
    pairs = {"model": (one.lightning_module.state_dict(), other.lightning_module.state_dict())}
    for i, (mine, theirs) in enumerate(zip(one.optimizers, other.optimizers, strict=True)):
        pairs[f"optimizer {i}"] = (mine.state_dict(), theirs.state_dict())
    for name, (mine_of_it, theirs_of_it) in pairs.items():
        for path, a, b in leaves(mine_of_it, theirs_of_it):
            by_how_much = f" by {float((a - b).abs().max())}" if isinstance(a, Tensor) else f": {a} and {b}"
            check(same(a, b), f"{what} differ in {name}, {path}{by_how_much}")


def leaves(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict):
        check(one.keys() == other.keys(), f"{path}: {sorted(map(str, one))} and {sorted(map(str, other))}")
        for key in one:
            yield from leaves(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        check(len(one) == len(other), path)
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from leaves(a, b, f"{path}/{i}")
    else:
        yield path, one, other


def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)


# What people look at under gossip


class Looks(Callback):
    """The last callback: what is there when all the others have put theirs."""

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.model: Any = None
        self.end = torch.empty(0)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.model = pl_module

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.left.append(flat(pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.model, self.end = pl_module, flat(pl_module)

    def check(self) -> None:
        for left, shown in zip([*self.left, self.end], [*self.model.shown, flat(self.model)], strict=True):
            mean = sum(gathered(left)) / dist.get_world_size()
            largest = float(torch.stack(gathered(left)).abs().max())
            error = float((shown - mean).abs().max()) / (largest + 1e-30)
            eps = torch.finfo(self.model.head.weight.dtype).eps
            check(error < 8 * eps, f"what is looked at is {error} of the largest off the mean of all ranks")

"""The differential campaign: random models and habits, beside Lightning's `ddp`, a resumed run, and the ranks' mean.

`pytest tests/test_campaign.py --cases 5000` runs more of them, `--cases 1 --first-case 1234` one. All but some of
each number of ranks run at night. What an exchange of gradients delivers is the soak's to check.

A case is a random model, random habits of a user's, and a strategy; all of it from one seed. Each rank draws its data
from its rank and from how many steps it has taken, so that a resumed run sees what the whole one saw.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from pool import Pool
from test_strategy import trainer_with
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import drawn
from ringstrategy import RingStrategy
from ringstrategy.failure import progress

LAYERS = ("linear", "tanh", "norm", "layer norm", "dropout", "turned", "tied", "residual")
EXTRAS = ("embedding", "sparse", "unused", "used by turns", "used by some", "frozen", "scalar", "double", "skewed")
SHARES = ("one memory", "view", "row")  # two parameters, or a parameter and a buffer, or two buffers
LOOPS = ("automatic", "manual", "raw", "closure", "accumulating", "by turns", "surgery", "skipping", "freezing")
GANS = ("toggled", "toggled late", "untoggled")
HABITS = ("noise", "halves", "centers", "keeps", "hooks", "scales", "decays", "attacks")
MISTAKES = {  # which ddp forgives, or waits for; and what each rank is told
    "steps within backward": "within backward, where its gradient is this rank's alone",
    "a collective on one rank": r"lost rank 1 .*it waits in all_reduce\(\) at .*test_campaign",
}
OPTIMIZERS = (*drawn.OPTIMIZERS, "groups")
EPOCHS, BATCHES = 2, 6


@dataclass(frozen=True)
class Case:
    """What is drawn; `Case.draw(seed)` is the same everywhere."""

    seed: int
    kind: str  # "ddp": to be compared with it; "lossy"; "gossip"
    size: int  # processes
    layers: tuple[str, ...]
    extras: frozenset[str]
    loop: str
    habits: frozenset[str]
    optimizer: str
    schedule: str
    drops: str  # who drops a step now and then: "", "all", "one" (of gossip's ranks)
    accumulate: int
    clip: str
    precision: str
    zeroes_in_place: bool
    swaps: bool  # what is looked at is Lightning's average of the parameters
    validates: int  # every so many batches; 0: never
    saves: tuple[str, int] | None = None  # in which hook, at which of its calls
    mistake: str = ""

    @staticmethod
    def draw(seed: int) -> Case:
        case, rng = Case._draw(seed), random.Random(f"scripts and mistakes {seed}")
        if rng.random() < 0.1:
            case = replace(case, extras=case.extras | {"scripted"})
        if rng.random() < 0.04 and case.loop == "automatic" and case.kind != "gossip":
            mistake = rng.choices(list(MISTAKES), (3, 1))[0]
            case = replace(case, mistake=mistake, accumulate=1, drops="", saves=None)
        return case

    @staticmethod
    def _draw(seed: int) -> Case:
        rng = random.Random(seed)

        def some(names: tuple[str, ...]) -> set[str]:
            return {name for name in names if rng.random() < 0.2}

        kind, loop = rng.choice(("ddp", "lossy", "gossip")), rng.choice(("automatic",) * 8 + LOOPS[1:] + GANS)
        layers = [rng.choice(LAYERS) for _ in range(rng.randint(1, 4))]
        extras, shares, habits, optimizer = some(EXTRAS), some(SHARES), some(HABITS), rng.choice(list(OPTIMIZERS))
        precision = rng.choice(("32-true",) * 3 + ("64-true", "bf16-mixed", "bf16-true", "16-true", "scaled"))
        zeroes_in_place, swaps, validates = rng.random() < 0.2, rng.random() < 0.3, rng.choice((0, 1, 2, 3))
        schedule, drops, accumulate, clip = "", "", 1, ""
        if is_automatic := loop == "automatic":
            schedule, drops = rng.choice(("", "steps", "plateau")), rng.choice(("", "", "all", "one"))
            accumulate, clip = rng.choice((1, 1, 2, 3)), rng.choice(("", "", "norm", "value"))
        if drops == "one" and kind != "gossip":
            drops = "all"
        if precision == "16-true" and optimizer != "sgd":
            precision = "bf16-true"  # others overflow in 16 bits with five of them
        if precision == "scaled" and not is_automatic:
            precision = "bf16-mixed"  # a scaler wants a gradient for each optimizer
        # torch has no such step; and beside one, torch DDP (2.13, gloo) leaves these models' dense ones as they are
        steps = optimizer in ("sgd", "adagrad") and precision in ("32-true", "64-true", "bf16-mixed") and not clip
        if kind == "ddp" or not is_automatic or not steps:
            extras.discard("sparse")
        if precision == "scaled":
            extras.discard("double")
        if is_automatic and precision not in ("64-true", "bf16-true", "16-true"):  # they part what shares memory
            extras |= shares
        if shares & extras or loop in ("raw", "closure"):
            swaps = False  # Lightning swaps one value after the other, and counts steps that it does not see here
        if not is_automatic and kind == "ddp":  # Lightning's ddp then sends buffers once, and replicas' go apart
            layers = ["layer norm" if layer == "norm" else layer for layer in layers]
        if "sparse" in extras:
            habits -= {"centers", "noise", "keeps", "halves", "scales"}
        changed = loop in GANS and habits & {"noise", "centers", "scales", "hooks"}
        if zeroes_in_place or accumulate > 1 or changed or loop in ("by turns", "untoggled") or "attacks" in habits:
            habits.discard("keeps")  # what is kept changes under ddp too
        case = Case(
            *(seed, kind, 2 if kind == "ddp" else rng.choice((2, 3)), tuple(layers), frozenset(extras), loop),
            *(frozenset(habits), optimizer, schedule, drops, accumulate, clip, precision),
            *(zeroes_in_place, swaps, validates),
        )
        if (kind != "ddp" and not case.resumes_exactly) or rng.random() < 0.4:
            return case
        calls = {"on_train_batch_end": BATCHES * EPOCHS // accumulate - 1, "on_train_epoch_end": 1}
        if validates:
            calls["on_validation_end"] = BATCHES // validates
        hook = rng.choice(list(calls))
        return replace(case, saves=(hook, rng.randrange(calls[hook])))

    @property
    def resumes_exactly(self) -> bool:
        """Under ddp, too? Gradients are in no checkpoint, be they zeros where a new run has none.

        Lightning saves before a plateau's step, keeps only rank 0's averages, in 32 bits, and loads 64-bit weights into
        a 32-bit model.
        """
        without = self.extras & {"unused", "used by turns", "used by some"}
        stays = self.zeroes_in_place and bool(without or self.loop == "freezing")
        averages = self.swaps and ("norm" in self.layers or self.precision in ("bf16-true", "16-true"))
        of_lightning = self.precision == "64-true" or self.schedule == "plateau" or averages
        return self.loop not in ("by turns", "untoggled") and not stays and not of_lightning

    def strategy(self) -> RingStrategy:
        draws = {"ddp": drawn.lossless, "lossy": drawn.lossy, "gossip": drawn.gossip}
        return RingStrategy(draws[self.kind](random.Random(self.seed + 1)))

    def trainer(self, strategy: Any, callbacks: list[Callback], folder: str) -> L.Trainer:
        options: dict[str, Any] = {"precision": self.precision}
        if self.precision == "scaled":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=4)
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        if self.clip:
            options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": self.clip}
        if self.validates:
            options["val_check_interval"] = self.validates
        return trainer_with(
            strategy,
            devices=self.size,
            max_epochs=EPOCHS,
            limit_train_batches=BATCHES,
            limit_val_batches=2 if self.validates else 0,
            num_sanity_val_steps=self.seed % 2,
            accumulate_grad_batches=self.accumulate,
            callbacks=[EMAWeightAveraging(decay=0.7), *callbacks] if self.swaps else callbacks,
            default_root_dir=folder,
            **options,
        )


def batches() -> DataLoader[Any]:
    """As many as needed: models draw what they train on."""
    return DataLoader(TensorDataset(torch.zeros(60, 1)), batch_size=1)


class Body(nn.Module):
    """Layers of 5 values each, one after another."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        makes: dict[str, Any] = {
            "tanh": nn.Tanh,
            "norm": lambda: nn.BatchNorm1d(5),
            "layer norm": lambda: nn.LayerNorm(5),
            "dropout": lambda: nn.Dropout(0.3),
        }
        layers = [makes.get(name, lambda: nn.Linear(5, 5))() for name in ("linear", *names)]
        for name, layer in zip(names, layers[1:], strict=True):
            if name == "turned":
                layer.weight = nn.Parameter(torch.randn(5, 5).t())
            elif name == "tied":
                layer.weight = layers[0].weight
        self.layers = nn.ModuleList(layers)
        self.names = ("", *names)

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in zip(self.names, self.layers, strict=True):
            x = x + layer(x).tanh() if name == "residual" else layer(x)
        return x


class Model(L.LightningModule):
    """Trains as its case says. `seen`: what its hooks saw, for comparison with another run."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(10 * case.seed + self.rank)  # rank 0's are trained
        self.body, self.head = Body(case.layers), nn.Linear(5, 3)
        self.parts = nn.ModuleDict()
        for extra in sorted(case.extras & {"unused", "used by turns", "used by some", "frozen"}):
            self.parts[extra] = nn.Linear(5, 3)
        if "scripted" in case.extras:
            self.parts["scripted"] = torch.jit.script(nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
        for extra in sorted(case.extras & {"embedding", "sparse"}):
            self.parts[extra] = nn.Embedding(7, 3, sparse=extra == "sparse")
        if "frozen" in case.extras:
            self.parts["frozen"].requires_grad_(False)
        if "scalar" in case.extras:
            self.scalar = nn.Parameter(torch.randn(()))
        if "double" in case.extras:
            self.double_ = nn.Parameter(torch.randn(3, dtype=torch.float64))
        if "skewed" in case.extras:
            self.skewed = nn.Parameter(torch.randn(6, 3)[::2].contiguous().as_strided((3, 3), (1, 3)))
        if "one memory" in case.extras:
            self.parts["one memory"] = nn.Linear(5, 3)
            self.parts["one memory"].weight.data = self.head.weight.data
        if "view" in case.extras:
            self.register_buffer("view", self.head.weight.data[1:])
        if "row" in case.extras:
            self.register_buffer("whole", torch.full((3, 2), float(self.rank)))
            self.register_buffer("row", self.whole[1])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.automatic_optimization = case.loop == "automatic"
        self.seen: list[float] = []
        self.shown: list[Tensor] = []  # the parameters at a validation's first batch
        self.kept: list[tuple[Tensor, Tensor]] = []
        if "hooks" in case.habits:
            self.head.weight.register_hook(lambda grad: grad * 0.9)
            self.head.bias.register_post_accumulate_grad_hook(_shrink)

    @property
    def mine(self) -> torch.Generator:
        return torch.Generator().manual_seed(int(self.count) * 1000 + 10 * self.case.seed + self.rank)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = self.head(self.body(x))
        for name, part in self.parts.items():
            if name in ("embedding", "sparse"):
                y = y + part(which)
            elif name in ("frozen", "one memory", "scripted") or (name == "used by turns" and self.count % 2):
                y = y + part(x)
            elif name == "used by some" and (int(self.count) + self.rank) % 3 == 0:
                y = y * part(x).sigmoid()
        if "scalar" in self.case.extras:
            y = y * self.scalar
        if "double" in self.case.extras:
            y = y + self.double_.to(y.dtype)
        if "skewed" in self.case.extras:
            y = y @ self.skewed
        return y

    def rows(self, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        generator, dtype = self.mine, self.head.weight.dtype
        x = torch.randn(count, 5, generator=generator).to(dtype) * 2 ** (self.rank + 0.5)
        which = torch.randint(0, 7, (count,), generator=generator)
        return x, which, (x[:, :3].sin() + 1) * (1 + self.rank)

    def loss(self, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, which, y = rows
        return F.smooth_l1_loss(self(x, which).to(y.dtype), y)

    def other_loss(self, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self(rows[0], rows[1]).float().abs().mean()

    # Loops

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.count += 1
        torch.manual_seed(int(self.count) * 100 + self.rank)
        return getattr(self, self.case.loop.replace(" ", "_"))(self.rows(), batch_idx)

    def automatic(self, rows: Any, batch_idx: int) -> Tensor | None:
        if "attacks" in self.case.habits:  # its inputs
            x = rows[0].clone().requires_grad_()
            self.loss((x, *rows[1:])).backward()
            rows = ((x + 0.1 * x.grad.sign()).detach(), *rows[1:])
        if self.case.mistake and self.count == BATCHES - 1:
            getattr(self, self.case.mistake.replace(" ", "_"))()
        return self.loss(rows)

    def steps_within_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.requires_grad:
                early = torch.optim.SGD([parameter], 0.1)
                parameter.register_post_accumulate_grad_hook(lambda _, early=early: early.step())

    def a_collective_on_one_rank(self) -> None:
        if self.rank == 1:
            dist.all_reduce(torch.zeros(1))

    def manual(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero(optimizer)
        self.manual_backward(self.loss(rows))
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def raw(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.zero(optimizer)
        self.manual_backward(self.loss(rows))
        optimizer.step()

    def closure(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=batch_idx % 2 == 0)

        def closure() -> Tensor:
            self.zero(optimizer)
            loss = self.loss(rows)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def accumulating(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero(optimizer)
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.other_loss(rows))
        self.manual_backward(self.loss(rows))
        optimizer.step()

    def by_turns(self, rows: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(rows))
        if batch_idx % 2:
            self.optimizers().step()
            self.zero(self.optimizers())

    def surgery(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero(optimizer)
        self.manual_backward(self.loss(rows))
        trained = [p for p in self.parameters() if p.grad is not None]
        kept = [p.grad.clone() if self.case.zeroes_in_place else p.grad for p in trained]
        self.zero(optimizer)
        self.manual_backward(self.other_loss(rows))
        for parameter, first in zip(trained, kept, strict=True):
            second = torch.zeros_like(first) if parameter.grad is None else parameter.grad
            product = (first * second).sum()
            parameter.grad = second + first - (product / first.square().sum().clamp(min=1e-6) * first) * (product < 0)
        optimizer.step()

    def skipping(self, rows: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero(optimizer)
        self.manual_backward(self.loss(rows))
        if batch_idx % 3 != 1:
            optimizer.step()

    def freezing(self, rows: Any, batch_idx: int) -> None:
        trained, rest = (self.body, self.head) if batch_idx % 2 else (self.head, self.body)
        trained.requires_grad_(True)
        rest.requires_grad_(False)
        self.manual(rows, batch_idx)

    def toggled(self, rows: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.loss, self.other_loss), strict=True):
            self.toggle_optimizer(optimizer)
            self.zero(optimizer)
            self.manual_backward(loss(rows))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def toggled_late(self, rows: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.loss, self.other_loss), strict=True):
            value = loss(rows)
            self.zero(optimizer)
            self.toggle_optimizer(optimizer)
            self.manual_backward(value)
            self.untoggle_optimizer(optimizer)
            optimizer.step()

    def untoggled(self, rows: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.loss, self.other_loss), strict=True):
            self.zero(optimizer)
            self.manual_backward(loss(rows))
            optimizer.step()

    def zero(self, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=not self.case.zeroes_in_place)

    # Hooks

    def on_after_backward(self) -> None:
        if "halves" in self.case.habits:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for i, grad in enumerate(p.grad for p in self.parameters()):
            if grad is None:
                continue
            if not grad.is_sparse:
                self.seen.append(float(grad.float().norm()))
            if "noise" in self.case.habits:
                shared = torch.Generator().manual_seed(100 * int(self.count) + i)
                grad += 0.01 * torch.randn(grad.shape, generator=shared).to(grad)
            if "centers" in self.case.habits and grad.dim() > 1:
                grad -= grad.mean(1, keepdim=True)
            if "scales" in self.case.habits:
                grad *= 0.3

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero(optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        drops = self.case.drops == "all" or (self.case.drops == "one" and self.rank == 1)
        if drops and batch_idx % 3 == 2:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, *_: Any) -> None:
        if "keeps" in self.case.habits:
            for grad, value in self.kept:
                assert torch.equal(grad, value), "a gradient that was kept has changed"
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.kept = [(grad, grad.clone()) for grad in gradients]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "decays" in self.case.habits and batch_idx % 3 == 1:
            with torch.no_grad():
                self.head.weight.mul_(0.99)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.shown.append(flat(self))
        loss = self.loss(self.rows())
        self.log("loss", loss.double(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        if self.case.loop in GANS:
            body = set(self.body.parameters())
            head = [p for p in self.parameters() if p not in body]
            return self.make(list(self.body.parameters())), self.make(head)
        optimizer = self.make(list(self.parameters()))
        if self.case.schedule == "steps":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.case.schedule == "plateau" and self.case.validates:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
        return optimizer

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.case.optimizer == "groups":
            groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]
            return torch.optim.SGD([group for group in groups if group["params"]], 0.01)
        return drawn.OPTIMIZERS[self.case.optimizer](parameters)


def _shrink(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad *= 0.8


def flat(module: nn.Module) -> Tensor:
    """All that has a mean, in a row of float64."""
    values = [t.detach().double().reshape(-1) for t in module.state_dict().values() if t.is_floating_point()]
    return torch.cat(values)


class Saves(Callback):
    """One checkpoint, at the case's moment."""

    def __init__(self, case: Case, path: str) -> None:
        self.path, self.case, self.calls, self.has_saved = path, case, 0, False
        if case.saves is not None:
            setattr(self, case.saves[0], self.called)

    def called(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert self.case.saves is not None
        if trainer.sanity_checking:
            return
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready % self.case.accumulate:
            return
        if self.calls == self.case.saves[1]:
            trainer.save_checkpoint(self.path)
            self.has_saved = True
        self.calls += 1


# The judge

AT_ONCE = 10
QUICK = {
    3,
    4,
    86,
    89,
    97,
    6,
    11,
    18,
    10,
    26,
}  # of ddp: untoggled, raw, toggled late, manual, keeps
DDP = "ddp_find_unused_parameters_true"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-case"), metafunc.config.getoption("--cases")
        worlds: dict[tuple[int, int | None], list[int]] = {}
        for seed in range(first, first + count):
            case = Case.draw(seed)
            alone = seed if case.mistake else None  # after an error nobody counts on torch's default group
            worlds.setdefault((case.size, alone), []).append(seed)
        chunks = []
        for (size, alone), seeds in worlds.items():
            seeds.sort(key=lambda seed: seed not in QUICK)
            cuts = sorted({0, *range(len(QUICK.intersection(seeds)), len(seeds), AT_ONCE), len(seeds)})
            for begin, end in itertools.pairwise(cuts):
                name = f"{seeds[begin]} to {seeds[end - 1]} on {size} ranks"
                chunks.append(
                    pytest.param(size, seeds[begin:end], id=name, marks=[pytest.mark.nightly] if begin or alone else [])
                )
        metafunc.parametrize(("size", "seeds"), chunks)


def test_whatever_users_do(ranks: Pool, tmp_path: Path, size: int, seeds: list[int]) -> None:
    ranks(size, _run, str(tmp_path), seeds)


def _run(folder: str, seeds: list[int]) -> None:
    for seed in seeds:
        case = Case.draw(seed)
        try:
            with torch.jit.optimized_execution(False):  # of the first model's steps it would learn for the second one's
                run(case, f"{folder}/{seed}")
        except BaseException as error:
            what = f"{case!r} with {case.strategy().algorithm!r}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def run(case: Case, folder: str) -> None:
    if case.mistake:
        with mock.patch.object(progress, "DOUBT_SECONDS", 2.0), pytest.raises(RuntimeError) as caught:
            fit(case, case.strategy(), folder=folder)
        check(re.search(MISTAKES[case.mistake], str(caught.value)), f"all that is said is {caught.value}")
        return
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
            check(model.seen == other, f"hooks saw {model.seen} and {other}")
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


def check(holds: Any, words: str) -> None:
    assert holds, words


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def check_same(value: Tensor, what: str) -> None:
    for rank, other in enumerate(gathered(value)):
        check(torch.equal(other, value), f"{what} differ, here and on rank {rank}")


def check_equal(one: L.Trainer, other: L.Trainer, what: str) -> None:
    """Parameters, buffers, the optimizers' states and steps of this rank, bit for bit."""
    states = []
    for trainer in (one, other):
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        state = {"step": trainer.global_step, "model": trainer.lightning_module.state_dict(), "optimizers": optimizers}
        states.append({keystr(path): value for path, value in tree_leaves_with_path(state)})
    check(states[0].keys() == states[1].keys(), f"{what}: other values")
    for path, a in states[0].items():
        b = states[1][path]
        check(torch.equal(a, b) if isinstance(a, Tensor) else a == b, f"{what} differ in {path}: {a} and {b}")


def parameters_of(model: L.LightningModule) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


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

"""Cases of the differential campaign: a random model, random habits of a user's, a strategy; all of it from one seed.

Each rank draws its data from its rank and from how many steps it has taken, so that a resumed run sees what the whole
one saw, and no two ranks ever see the same.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, fields
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import drawn
from ringstrategy import RingStrategy

LAYERS = ("linear", "tanh", "norm", "layer norm", "dropout", "turned", "tied", "residual")
EXTRAS = ("embedding", "sparse", "unused", "used by turns", "used by some", "frozen", "scalar", "double", "skewed")
SHARES = ("one memory", "view", "row")  # two parameters, or a parameter and a buffer, or two buffers
LOOPS = ("automatic", "manual", "raw", "closure", "accumulating", "by turns", "surgery", "skipping", "freezing")
GANS = ("toggled", "toggled late", "untoggled")
HABITS = ("noise", "halves", "centers", "keeps", "hooks", "scales", "freezes", "decays", "attacks")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "groups")
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
    swaps: str  # what is looked at: "", "average" (of parameters), "lightning"
    validates: int  # every so many batches; 0: never
    saves: tuple[str, int] | None  # in which hook, at which of its calls

    @staticmethod
    def draw(seed: int) -> Case:
        rng = random.Random(seed)
        kind = rng.choice(("ddp", "lossy", "gossip"))
        size = 2 if kind == "ddp" else rng.choice((2, 3))
        loop = rng.choice(("automatic",) * 8 + LOOPS[1:] + GANS)
        is_automatic = loop == "automatic"
        extras = {extra for extra in EXTRAS if rng.random() < 0.2}
        optimizer = rng.choice(OPTIMIZERS)
        precision = rng.choice(("32-true",) * 3 + ("64-true", "bf16-mixed", "bf16-true", "scaled"))
        accumulate = rng.choice((1, 1, 2, 3)) if is_automatic else 1
        clip = rng.choice(("", "", "norm", "value")) if is_automatic else ""
        if kind == "ddp":
            extras.discard("sparse")  # beside one, torch DDP (2.13, gloo) leaves these models' dense ones as they are
        if "sparse" in extras and (optimizer in ("adam", "adamw", "momentum") or clip or not is_automatic):
            extras.remove("sparse")  # torch has no such step
        if precision == "scaled" and (not is_automatic or extras & {"sparse", "double"}):
            precision = "bf16-mixed"  # a scaler wants a gradient for each optimizer, and no sparse ones
        if precision == "bf16-true":
            extras.discard("sparse")
        zeroes_in_place = rng.random() < 0.2
        habits = {habit for habit in HABITS if rng.random() < 0.2}
        layers = tuple(rng.choice(LAYERS) for _ in range(rng.randint(1, 4)))
        if not is_automatic and kind == "ddp":  # Lightning's ddp then sends buffers once, and replicas' go apart
            layers = tuple("layer norm" if layer == "norm" else layer for layer in layers)
        if "sparse" in extras:
            habits -= {"centers", "noise", "keeps", "halves", "scales"}
        changed = loop in GANS and habits & {"noise", "centers", "scales", "hooks"}
        if zeroes_in_place or accumulate > 1 or changed or loop in ("by turns", "untoggled") or "attacks" in habits:
            habits.discard("keeps")  # what is kept changes under ddp too
        validates = rng.choice((0, 1, 2, 3))
        case = Case(
            seed=seed,
            kind=kind,
            size=size,
            layers=layers,
            extras=frozenset(extras),
            loop=loop,
            habits=frozenset(habits),
            optimizer=optimizer,
            schedule=rng.choice(("", "steps", "plateau")) if is_automatic else "",
            drops=rng.choice(("", "", "all", "one")) if is_automatic else "",
            accumulate=accumulate,
            clip=clip,
            precision=precision,
            zeroes_in_place=zeroes_in_place,
            swaps=rng.choice(("", "", "average", "lightning")),
            validates=validates,
            saves=None,
        )
        changes: dict[str, Any] = {}
        later = random.Random(seed + 0.5)  # so that what was drawn before stays as it was
        stays = is_automatic and precision not in ("64-true", "bf16-true")  # whose conversion parts what shares memory
        shares = {share for share in SHARES if later.random() < 0.2 and stays}
        changes["extras"] = case.extras | shares
        if precision == "bf16-true" and optimizer in ("sgd", "groups"):  # others overflow in 16 bits with five of them
            changes["precision"] = "16-true"
        if shares and case.swaps == "lightning":
            changes["swaps"] = "average"  # Lightning swaps one value after the other
        if case.drops == "one" and kind != "gossip":
            changes["drops"] = "all"
        if case.swaps == "lightning" and loop in ("raw", "closure"):
            changes["swaps"] = "average"  # Lightning's counts steps that it does not see here
        if (kind == "ddp" or case.resumes_exactly) and rng.random() < 0.6:
            hooks = ("on_train_batch_end", "on_train_epoch_end", *(("on_validation_end",) if validates else ()))
            hook = rng.choice(hooks)
            counts = {"on_train_batch_end": BATCHES * EPOCHS // accumulate - 1, "on_train_epoch_end": 1}
            changes["saves"] = (hook, rng.randrange(counts.get(hook, BATCHES // max(validates, 1))))
        return Case(**{**{field.name: getattr(case, field.name) for field in fields(case)}, **changes})

    @property
    def resumes_exactly(self) -> bool:
        """Under ddp, too? Gradients are in no checkpoint, be they zeros where a new run has none.

        Lightning saves before a plateau's step, keeps only rank 0's averages, in 32 bits, and loads 64-bit weights into
        a 32-bit model.
        """
        without = self.extras & {"unused", "used by turns", "used by some"} or "freezes" in self.habits
        stays = self.zeroes_in_place and bool(without or self.loop == "freezing")
        averages = self.swaps == "lightning" and ("norm" in self.layers or self.precision in ("bf16-true", "16-true"))
        of_lightning = self.precision == "64-true" or self.schedule == "plateau" or averages
        return self.loop not in ("by turns", "untoggled") and not stays and not of_lightning

    def strategy(self) -> RingStrategy:
        draws = {"ddp": drawn.lossless, "lossy": drawn.lossy, "gossip": drawn.gossip}
        return RingStrategy(draws[self.kind](random.Random(self.seed + 1)))

    def trainer(self, strategy: Any, callbacks: list[Callback], folder: str) -> L.Trainer:
        options: dict[str, Any] = {}
        if self.precision == "scaled":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=4)
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        else:
            options["precision"] = self.precision
        if self.clip:
            options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": self.clip}
        if self.validates:
            options["val_check_interval"] = self.validates
        if self.swaps == "average":
            callbacks = [Average(random.Random(self.seed + 2)), *callbacks]
        elif self.swaps == "lightning":
            callbacks = [EMAWeightAveraging(decay=0.7), *callbacks]
        if "freezes" in self.habits:
            callbacks = [Freezes(), *callbacks]
        return L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=self.size,
            max_epochs=EPOCHS,
            limit_train_batches=BATCHES,
            limit_val_batches=2 if self.validates else 0,
            num_sanity_val_steps=self.seed % 2,
            accumulate_grad_batches=self.accumulate,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
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
            elif name in ("frozen", "one memory") or (name == "used by turns" and self.count % 2):
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
        return self.loss(rows)

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
        foreach = bool(self.case.seed % 3)
        match self.case.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, 0.05)
            case "momentum":
                return torch.optim.SGD(parameters, 0.02, momentum=0.9, nesterov=True, foreach=foreach)
            case "adam":
                return torch.optim.Adam(parameters, 0.01, foreach=foreach)
            case "adamw":
                return torch.optim.AdamW(parameters, 0.01, amsgrad=True, foreach=foreach)
            case "adagrad":
                return torch.optim.Adagrad(parameters, 0.02)
        groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]
        return torch.optim.SGD([group for group in groups if group["params"]], 0.01)


def _shrink(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad *= 0.8


def flat(module: nn.Module) -> Tensor:
    """All that has a mean, in a row of float64."""
    values = [t.detach().double().reshape(-1) for t in module.state_dict().values() if t.is_floating_point()]
    return torch.cat(values)


class Average(Callback):
    """Validates a moving average of the parameters."""

    def __init__(self, rng: random.Random) -> None:
        self.average: list[Tensor] = []
        self.raw: list[Tensor] = []
        start, end = rng.choice(
            (
                ("on_validation_start", "on_validation_end"),
                ("on_validation_epoch_start", "on_validation_epoch_end"),
                ("on_validation_start", "on_validation_epoch_end"),
            )
        )
        setattr(self, start, self.swap_in)
        setattr(self, end, self.swap_out)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        self.average = [a.lerp(n, 0.3) for a, n in zip(self.average, now, strict=True)] if self.average else now

    def swap_in(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.average:
            self.raw = [p.detach().clone() for p in pl_module.parameters()]
            for parameter, average in zip(pl_module.parameters(), self.average, strict=True):
                parameter.data.copy_(average)

    def swap_out(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for parameter, raw in zip(pl_module.parameters(), self.raw, strict=False):
            parameter.data.copy_(raw)
        self.raw = []

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Freezes(Callback):
    """The first layer, in the second epoch."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if pl_module.case.loop == "automatic":
            pl_module.body.layers[0].requires_grad_(trainer.current_epoch != 1)


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

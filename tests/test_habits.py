"""What users do beside the plain path: beside Lightning's `ddp`, or refused at the first moment with the cure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from on_ranks import on_ranks
from rank_files import rank_state
from test_campaign import check_equal
from test_session import MINUTE
from test_strategy import Lbfgs, Net, check_replicas, fit, gathered, normed, rows, same_everywhere, trainer_with
from torch import Tensor, nn

import ringstrategy as ring
from ringstrategy import AllReduce, Auto, BlockInt, Choco, Gossip, Identity, LocalSGD, Nesterov, PowerSGD, RingStrategy
from ringstrategy.algorithms.base import Algorithm
from ringstrategy.algorithms.gradients import synchronous
from ringstrategy.session import state
from ringstrategy.topologies import Complete, Star


def flat(module: nn.Module) -> Tensor:
    """All that has a mean: parameters and floating-point buffers, in a row."""
    return torch.cat([t.detach().reshape(-1) for t in module.state_dict().values() if t.is_floating_point()])


def mean_of(value: Tensor) -> Tensor:
    return torch.stack(gathered(value)).double().mean(0).to(value.dtype)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


# Habits that equal `ddp`, bit for bit


class Alternates(Net):
    """Trains one part, then the other: the gradients of the one that is frozen stay where they are, and as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noted: list[list[float]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        parts = [self.layers[0], self.layers[2]]
        trained, frozen = parts if batch_idx % 2 else parts[::-1]
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        trained.zero_grad()
        self.manual_backward(self.loss(batch))
        for grad, value in self.kept:
            assert torch.equal(grad, value)
        self.kept = [(p.grad, p.grad.clone()) for p in self.parameters() if p.grad is not None and batch_idx % 3]
        self.noted += [p.grad.flatten().tolist() for p in frozen.parameters() if p.grad is not None]
        self.optimizers().step()


class Adversarial(Net):
    """Attacks its inputs by a backward of its own, in training and, as saliency and adaptation do, in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def attack(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (Tensor.backward if batch_idx % 2 else torch.autograd.backward)(self.loss((x, batch[1])))
        assert x.grad is not None
        self.noted.append(float(x.grad.abs().max()))
        return (x + 0.1 * x.grad.sign()).detach(), batch[1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(self.attack(batch, batch_idx), batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(self.attack(batch, batch_idx), batch_idx)

    def val_dataloader(self) -> Any:
        return rows(24)


@dataclass(frozen=True)
class Habit:
    model: Callable[[], L.LightningModule]
    options: Callable[[], dict[str, Any]] = dict
    ddp: str = "ddp"
    bucket_mb: float = 1e-4


swa = L.pytorch.callbacks.StochasticWeightAveraging
DDP_UNUSED = "ddp_find_unused_parameters_true"
HABITS = {  # beside those that tests/test_campaign.py draws
    "alternates within a bucket": Habit(Alternates, ddp=DDP_UNUSED, bucket_mb=3e-4),
    "own backwards": Habit(Adversarial, lambda: {"inference_mode": False, "accumulate_grad_batches": 3}),
    "stochastic averages": Habit(normed, lambda: {"callbacks": [swa(0.01, swa_epoch_start=1)], "max_epochs": 3}),
}


@pytest.mark.parametrize("name", HABITS)
@on_ranks(2)
def test_habits_equal_ddp(name: str) -> None:
    habit = HABITS[name]
    ours = fit(RingStrategy(AllReduce(bucket_mb=habit.bucket_mb)), habit.model(), **habit.options())
    theirs = fit(habit.ddp, habit.model(), **habit.options())
    check_replicas(ours)
    check_equal(ours, theirs, "ring and ddp")
    mine, noted = (getattr(trainer.lightning_module, "noted", None) for trainer in (ours, theirs))
    assert mine == noted
    assert noted is None or len(noted) > 11
    moved = habit.model().state_dict()
    assert not any(torch.equal(moved[key], value) for key, value in theirs.lightning_module.named_parameters())


# Parameters that callbacks swap, where ranks have their own


class Ema(Callback):
    """Swaps a moving average in during validation: written back as it was kept, or swapped in both directions.

    With `lone`, on rank 0 alone; what others swap in are the parameters that are there.
    """

    def __init__(self, swaps: bool, lone: bool) -> None:
        self.swaps, self.lone = swaps, lone
        self.average = self.raw = torch.empty(0)  # the parameters, while the average is in
        self.last = torch.empty(0)  # this rank's parameters after its last batch
        self.seen: list[tuple[Tensor, Tensor]] = []  # what was validated, and the mean of the averages

    def put(self, module: nn.Module, values: Tensor) -> None:
        parameters = list(module.parameters())
        for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            parameter.data.copy_(part.view_as(parameter))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.last = flat(pl_module)
        weight = 1.0 if self.lone and trainer.global_rank else 0.3
        self.average = self.average.lerp(self.last, weight) if len(self.average) else self.last

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if len(self.average):
            self.raw = flat(pl_module)
            self.put(pl_module, self.average)

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if len(self.raw):
            self.seen.append((flat(pl_module), mean_of(self.average)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not len(self.raw):
            return
        if self.swaps:  # what is there now is the average
            self.average = flat(pl_module)
        self.put(pl_module, self.raw)
        self.raw = torch.empty(0)


@pytest.mark.parametrize(
    ("algorithm", "swaps"),
    [
        (Gossip(Star(), interval=3), False),
        (ring.PushSum(), True),
        (Choco(Star()), False),
        (LocalSGD(3, Nesterov()), False),
    ],
    ids=["gossip", "push_sum", "choco", "local_sgd"],
)
@on_ranks(3)
def test_a_moving_average_is_validated_as_the_mean_and_changes_nothing(algorithm: Algorithm, swaps: bool) -> None:
    """Nor does looking change what ranks train on. Of Lightning's own average see below."""

    def run(**options: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        ema = Ema(swaps, lone=algorithm.replicates)
        trainer = trainer_with(RingStrategy(algorithm), callbacks=[ema], **options)
        trainer.fit(Net(), rows(), rows(24))
        return torch.cat([ema.last, ema.average]), ema.seen

    plainly, _ = run(limit_val_batches=0)
    ended, seen = run(val_check_interval=2)
    assert not same_everywhere(plainly)
    assert torch.equal(ended, plainly)
    assert len(seen) > 4
    for shown, expected in seen:
        assert same_everywhere(shown)
        assert close(shown, expected)


class Sees(Callback):
    """What is in the model: at hooks of validation, and when training ends."""

    def __init__(self) -> None:
        self.validated: list[Tensor] = []
        self.after_batches: list[Tensor] = []  # where averages that were swapped in are out again
        self.at_the_end: list[Tensor] = []

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.validated.append(flat(pl_module).clone())

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.after_batches.append(flat(pl_module).clone())

    on_validation_end = on_validation_epoch_end

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.at_the_end.append(flat(pl_module))
        assert trainer.callbacks[0] is self, "users know their callbacks by their places"

    on_fit_end = on_train_end


class Distilled(Net):
    """A teacher that follows by hand, a frozen part that a hook changes, and one that nobody touches."""

    def __init__(self) -> None:
        super().__init__(normed().layers)
        self.teacher = nn.Linear(6, 3, bias=False).requires_grad_(False)
        self.touched = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.untouched = nn.Parameter(torch.linspace(0, 1, 1003) / 3, requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.own = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.own.ring_local = True

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.weight.lerp_(self.layers[0].weight[:3], 0.1)
        self.touched += self.global_rank + 1
        self.seen += self.global_rank
        self.own += self.global_rank + 1


@pytest.mark.parametrize("averages", [False, True])
@on_ranks(3)
def test_validation_and_checkpoints_show_the_mean_and_each_rank_resumes_its_own(averages: bool, tmp_path: Path) -> None:
    """Of what no optimizer steps too, and of Lightning's moving averages."""
    folder = str(tmp_path)

    def run(*saves: Callback, **options: Any) -> tuple[Distilled, Sees, EMAWeightAveraging]:
        model, sees, ema = Distilled(), Sees(), EMAWeightAveraging(decay=0.8)
        callbacks = [sees, *([ema] if averages else []), *saves]
        how: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(saves), "max_epochs": 3}
        trainer = trainer_with(RingStrategy(Gossip(Star(), interval=2)), **how)
        trainer.fit(model, rows(), rows(24), **options)
        assert type(trainer.callbacks) is list
        return model, sees, ema

    def save_at_once(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(f"{folder}/at_once.ckpt")
        trainer.should_stop = True

    model, sees, ema = run(ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False))
    untouched, state = Distilled().untouched, model.state_dict()
    sizes = {name: value.numel() for name, value in state.items() if value.is_floating_point()}
    for value in sees.validated + ([] if averages else sees.after_batches):
        parts = dict(zip(sizes, value.split(list(sizes.values())), strict=True))
        for name, part in parts.items():
            assert same_everywhere(part) == (name != "own" or not part.any()), name
        rounded = not torch.equal(parts["untouched"], untouched)
        assert not rounded or averages, "averaged over 3 ranks they would have been rounded"
    assert len(sees.validated) > 4
    assert [same_everywhere(value) for value in state.values()] == [name != "own" for name in state]
    for epoch in range(3):
        path = f"{folder}/epoch={epoch}.ckpt"
        saved = torch.load(path, weights_only=True)
        mine = rank_state(path, model.global_rank)["own"]["checkpoint"]
        raw = "current_model_state" if averages else "state_dict"
        assert torch.equal(saved[raw]["untouched"], untouched)
        assert not saved[raw]["seen"].any(), "a buffer: rank 0's"
        for key in {"state_dict", raw}:
            for name in sizes.keys() - {"own", "seen", "untouched"}:
                assert close(saved[key][name], mean_of(mine[key][name])), (key, name)
                assert not same_everywhere(mine[key][name]), (key, name)
    if not averages:
        assert all(torch.equal(seen, flat(model)) for seen in sees.at_the_end)
        return
    assert not same_everywhere(flat(ema._average_model.module)), "averages are each rank's own"
    run(LambdaCallback(on_train_start=save_at_once), ckpt_path=f"{folder}/epoch=1.ckpt")
    for path in ("at_once.ckpt", "epoch=2.ckpt"):  # before its first step; when it was over
        again, _, resumed = run(ckpt_path=f"{folder}/{path}")
        assert torch.equal(flat(resumed._average_model.module), flat(ema._average_model.module))
        assert torch.equal(flat(again), flat(model))


@on_ranks(3)
def test_what_callbacks_see_and_put_in_at_the_end_is_what_local_sgd_returns() -> None:
    """An exchange is under way when training ends."""

    def run(*callbacks: Callback) -> Net:
        algorithm = LocalSGD(4, Nesterov(0.4, 0.8), overlap=True)
        trainer = trainer_with(RingStrategy(algorithm), callbacks=list(callbacks), max_epochs=3)
        trainer.fit(model := normed(), rows(), rows(24))
        assert same_everywhere(flat(model))
        return model

    model = run(ema := EMAWeightAveraging(decay=0.8))
    average = flat(ema._average_model.module)
    assert not same_everywhere(average)
    assert close(flat(model), mean_of(average)), "it is not applied to averages of weights"
    forgets = LambdaCallback(on_train_end=lambda trainer, module: module.layers[1].num_batches_tracked.zero_())
    plain, counted = run(sees := Sees()), run(forgets)
    assert len(sees.at_the_end) == 2
    assert all(torch.equal(seen, flat(plain)) for seen in sees.at_the_end)
    assert all(map(torch.equal, plain.parameters(), counted.parameters())), "a buffer that is set keeps no step out"
    assert int(counted.layers[1].num_batches_tracked) == 0 < int(plain.layers[1].num_batches_tracked)


# Resuming


@dataclass(frozen=True)
class Settings:
    width: int = 8


class Particular(Net):
    """Saves its arguments and what else it likes, under names of its own; learning rates follow each rank's loss."""

    def __init__(self, settings: Settings, steps: range) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.begun: dict[str, Any] = {}
        self.saved: dict[int, dict[str, Any]] = {}

    def schedule(self) -> dict[str, Any]:
        scheduler = self.trainer.lr_scheduler_configs[0].scheduler
        return {**scheduler.state_dict(), "rate": float(scheduler.optimizer.param_groups[0]["lr"])}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["recent"] = deque([torch.ones(1), 2], maxlen=2)
        self.saved[self.current_epoch] = self.schedule()

    def on_train_start(self) -> None:
        self.begun = self.schedule()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        worse = 1.0 if self.trainer.current_epoch == 1 and self.global_rank % 2 == 0 else -float(self.current_epoch)
        self.log("own", worse, on_step=False, on_epoch=True, sync_dist=False)
        return super().training_step(batch, batch_idx)

    def state_dict(self) -> dict[str, Any]:  # without keyword arguments
        return {"renamed." + name: value for name, value in super().state_dict().items()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        return super().load_state_dict({name.removeprefix("renamed."): v for name, v in state.items()}, strict)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        numbers = {"scale": np.float32(0.5)}  # as some optimizers keep in their state
        optimizer.register_step_post_hook(lambda *_: optimizer.state[self.layers[0].weight].update(numbers))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


@on_ranks(3)
def test_a_checkpoint_may_hold_anything_and_each_rank_resumes_its_own(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def run(*callbacks: Callback, **options: Any) -> tuple[L.Trainer, Particular]:
        how: dict[str, Any] = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), "max_epochs": 4}
        trainer = trainer_with(RingStrategy(Gossip(Star())), **how)
        trainer.fit(model := Particular(Settings(), range(3)), rows(), **options)
        return trainer, model

    _, whole = run(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    how: dict[str, Any] = {"ckpt_path": f"{folder}/epoch=2.ckpt", "weights_only": False}
    saved = torch.load(how["ckpt_path"], weights_only=False)
    assert saved["hyper_parameters"] == {"settings": Settings(), "steps": range(3)}
    assert saved["recent"].maxlen == 2
    assert all(name.startswith("renamed.layers") for name in saved["state_dict"])
    trainer, again = run(**how)
    assert torch.equal(flat(again), flat(whole))
    assert again.begun == whole.saved[2]
    first, second, third = gathered(torch.tensor(again.begun["rate"], dtype=torch.float64))
    assert first == third < second == 0.05
    model = Particular(Settings(), range(3))
    trainer.validate(model, rows(), verbose=False, **how)
    assert torch.equal(flat(model), torch.cat([value.flatten() for value in saved["state_dict"].values()]))


def test_a_file_of_another_step_is_not_taken_and_one_of_another_save_is_an_error() -> None:
    """After an exception ranks may be a step apart."""
    right = {"save": "exception-a", "rank": 1, "world_size": 2, "step": 5}
    shared = {"world_size": 2, "algorithm": {"step": 5}, "files": "exception-a"}

    def load(**changes: Any) -> Any:
        files: Any = SimpleNamespace(load=lambda save, rank: {**right, **changes}, name=lambda save, rank: "its file")
        return state._load(state.Saved(files, shared), 1)

    assert load() == right
    assert load(step=4) is None
    with pytest.raises(ValueError, match="its file is the file of rank 1 of 2 of the save exception-b, and not of"):
        load(save="exception-b")
    for changes in ({"rank": 0}, {"world_size": 3}):
        with pytest.raises(ValueError, match=r"its file is the file of .*, and not of rank 1 of 2 of this one"):
            load(**changes)


# Layers that join and leave


class Changes(Net):
    """Gets layers, drawn by each rank, and loses some; the optimizer gets and loses them too.

    Args:
        plan: before which step it gets (True) or loses (False) the layer of which name.
        rank: it alone.
        late: only within the training step.
    """

    def __init__(self, plan: dict[int, tuple[str, bool]], rank: int | None = None, late: bool = False) -> None:
        super().__init__()
        self.plan, self.rank, self.late = plan, rank, late
        self.parts = nn.ModuleDict()
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)  # nobody averages these
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.at_first: dict[nn.Module, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            self.at_first.setdefault(part, part.weight.detach().clone())
        return super().forward(x) + sum(part(x) for part in self.parts.values())

    def change(self, late: bool) -> None:
        name, joins = self.plan.get(self.trainer.global_step, ("", False))
        if not name or late != self.late or self.rank not in (None, self.global_rank):
            return
        optimizer = self.optimizers().optimizer
        if name in self.parts:  # by another one, of the same name
            gone = set(self.parts.pop(name).parameters())
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p not in gone]
        if joins:
            torch.manual_seed(10 + self.global_rank)
            self.parts[name] = nn.Linear(6, 3)
            optimizer.add_param_group({"params": list(self.parts[name].parameters())})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(late=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.change(late=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def stay_together(trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
    for parameter in pl_module.parameters():
        assert all(torch.allclose(other, parameter, atol=1e-5) for other in gathered(parameter))


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(bucket_mb=1e-4),
        AllReduce(BlockInt(8), error_feedback=True, bucket_mb=1e-4),
        PowerSGD(bucket_mb=1e-4),
        Gossip(Complete(), overlap=False),
        Choco(Complete(), Identity(), overlap=False),
        Auto(),
    ],
    ids=["ring", "int8", "powersgd", "gossip", "choco", "auto"],
)
@on_ranks(3)
def test_layers_join_with_the_same_values_and_leave_and_nobody_waits_for_them(algorithm: Algorithm) -> None:
    late = set()  # buckets that were not launched while backward went on
    finish = synchronous._Pass.finish

    def finishing(exchange: synchronous._Pass) -> None:
        late.add(len(exchange.active) - exchange._launched)
        finish(exchange)

    model = Changes({0: ("a", True), 2: ("b", True), 4: ("a", True), 8: ("b", False)})
    together = LambdaCallback(on_train_batch_end=stay_together)
    trainer = trainer_with(RingStrategy(algorithm), callbacks=[together])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synchronous._Pass, "finish", finishing)
        trainer.fit(model, rows(), rows(12))
    check_replicas(trainer)
    assert late == (set() if algorithm.decentralized else {0})
    assert len(model.at_first) == 3
    for part, first in model.at_first.items():
        assert same_everywhere(first)
        assert not torch.equal(first, part.weight)
    assert torch.equal(model.table, torch.arange(5))


# What is refused while it trains


class BackwardItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class Frozen(Net):
    """On rank 1, from step 1 on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1:
            self.layers[0].weight.requires_grad_(self.global_rank != 1)


class Outside(Net):
    """Its optimizer also steps a loss's weight, which it does not register, besides one that is frozen."""

    local = False

    def configure_optimizers(self) -> Any:
        frozen, weight = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
        weight.ring_local = self.local
        self.beside = [frozen, weight]
        return torch.optim.SGD([{"params": [*self.parameters(), frozen]}, {"params": [weight]}], 0.1)


class Zero(Net):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import warns

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


PLAN = "^PlanMismatchError: .*rank 1 has "
ALONE = (
    PLAN + r"'parts\.a\.weight: \(3, 6\) torch\.float32, new' where rank 0 has nothing of that name"
    r"|^P.*: .*parameters that its model got or lost.*give all ranks the same layers"
)
JOINED = r"^RuntimeError: .*parts\.a\.weight joined .*this batch"
FROZEN = PLAN + r"'layers\.0\.weight: frozen at step 1' where rank 0 has 'layers\.0\.weight: trained"
OUTSIDE = r"^ValueError: optimizer 0, a SGD, steps in group 1 a parameter of shape \(1,\) .*: register it"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "backward": (lambda: fit("ring", BackwardItself()), r"^RuntimeError: .*self\.manual_backward\(loss\)"),
    "LBFGS": (lambda: fit("ring", Lbfgs()), "^ValueError: LBFGS decides .*use another optimizer, or devices=1"),
    "a parameter of no module": (lambda: fit("ring", Outside()), OUTSIDE),
    "a parameter of no module, gossip": (lambda: fit("gossip", Outside()), OUTSIDE),
    "ZeRO, gossip": (lambda: fit("gossip", Zero()), "^ValueError: ZeroRedundancyOptimizer exchanges .*AdamW, or use"),
    "monitor": (lambda: fit("ddp", Net(), callbacks=[ring.CommunicationMonitor()]), r"^ValueError: .*='ring'\)"),
    "grows late": (lambda: fit("ring", Changes({2: ("a", True)}, late=True)), JOINED),
    "frozen": (lambda: fit("ring", Frozen()), FROZEN),
    "SyncBatchNorm": (lambda: fit("ring", normed(nn.SyncBatchNorm)), r"^ValueError: .*layers\.1.*nn\.BatchNorm"),
    "grows alone": (lambda: fit(RingStrategy(timeout=MINUTE), Changes({2: ("a", True)}, 1)), ALONE),
}


@on_ranks(2)
def test_a_parameter_of_no_module_may_be_a_ranks_own_and_equal_gradients_be_stepped_in_shards() -> None:
    model = Outside()
    model.local = True
    fit("ring", model)
    fit("ring", Zero())


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011  all of them are of the table
        call()
    message = f"{caught.typename}: {caught.value}"
    assert re.search(words, message, re.DOTALL), message

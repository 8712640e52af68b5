"""What users do beside the plain path: beside Lightning's `ddp`, or refused at the first moment with the cure."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from pool import Pool
from rank_files import rank_state
from test_strategy import (
    Gan,
    Manual,
    Net,
    check_equal,
    check_replicas,
    fit,
    gathered,
    net,
    rows,
    run_script,
    same_everywhere,
    several_buckets,
    trainer_with,
    world,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ringstrategy import (
    AllReduce,
    Auto,
    BlockInt,
    Choco,
    Direct,
    Gossip,
    Identity,
    LocalSGD,
    Nesterov,
    PeerLostError,
    PlanMismatchError,
    PowerSGD,
    PushSum,
    RingStrategy,
    SmallExact,
    TopK,
)
from ringstrategy.algorithms.gradients import synchronous
from ringstrategy.topologies import Complete, Star
from ringstrategy.transport.connect import connect

pytestmark = pytest.mark.timeout(120)


def flat(module: nn.Module) -> Tensor:
    """All that has a mean: parameters and floating-point buffers, in a row."""
    return torch.cat([t.detach().reshape(-1) for t in module.state_dict().values() if t.is_floating_point()])


def mean_of(value: Tensor) -> Tensor:
    return torch.stack(gathered(value)).double().mean(0).to(value.dtype)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


# Parameters that callbacks swap, under gossip


class Ema(Callback):
    """Swaps a moving average in while `start` to `end`: written back as it was kept, or swapped in both directions."""

    def __init__(self, start: str = "on_validation_start", end: str = "on_validation_end", swaps: bool = False) -> None:
        self.average: list[Tensor] = []
        self.raw: list[Tensor] = []
        self.swaps = swaps
        setattr(self, start, self.swap_in)
        setattr(self, end, self.swap_out)
        self.seen: list[tuple[Tensor, Tensor]] = []  # what was validated, and the mean of the averages
        self.trained: list[tuple[Tensor, Tensor]] = []  # parameters before and after each validation
        self.active = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        self.average = [a.lerp(n, 0.3) for a, n in zip(self.average, now, strict=True)] if self.average else now

    @torch.no_grad()
    def swap_in(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.average or self.active:
            return
        self.active = True
        self.raw = [p.detach().clone() for p in pl_module.parameters()]
        for parameter, average in zip(pl_module.parameters(), self.average, strict=True):
            parameter.data.copy_(average)

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.average and self.active:
            everyone = [mean_of(average).reshape(-1) for average in self.average]
            shown = torch.cat([p.detach().reshape(-1) for p in pl_module.parameters()])
            self.seen.append((shown.clone(), torch.cat(everyone)))

    @torch.no_grad()
    def swap_out(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.active:
            return
        self.active = False
        if self.swaps:  # what is there now is the average
            self.average = [p.detach().clone() for p in pl_module.parameters()]
        for parameter, raw in zip(pl_module.parameters(), self.raw, strict=True):
            parameter.data.copy_(raw)


class SavesAfterValidation(Callback):
    """Among the callbacks of `on_validation_end`, as ModelCheckpoint is."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.means: list[Tensor] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/{len(self.means)}.ckpt")
            self.means.append(mean_of(flat(pl_module)))


def _ema(folder: str, algorithm: Any, start: str, end: str, swaps: bool) -> None:
    plainly, emas = [], []
    for validates in (False, True):
        ema, model = Ema(start, end, swaps), Net()
        saves = SavesAfterValidation(folder)
        options: dict[str, Any] = {"val_check_interval": 2} if validates else {"limit_val_batches": 0}
        trainer = trainer_with(RingStrategy(algorithm), callbacks=[ema, saves], **options)
        before_end = Remembers()
        trainer.callbacks.append(before_end)
        trainer.fit(model, rows(), rows(24))
        plainly.append(before_end.last)
        emas.append(torch.cat([a.reshape(-1) for a in ema.average]))
        if validates:
            assert len(ema.seen) > 4
            for shown, expected in ema.seen:
                assert same_everywhere(shown)
                assert close(shown, expected)
            assert len(saves.means) > 2
            for number, mean in enumerate(saves.means):
                saved = torch.load(f"{folder}/{number}.ckpt", weights_only=True)["state_dict"]
                assert close(torch.cat([v.reshape(-1) for v in saved.values()]), mean)
    # looking changes nothing, neither for training nor for the averages
    assert torch.equal(plainly[0], plainly[1])
    assert torch.equal(emas[0], emas[1])
    assert not same_everywhere(emas[0])


class Remembers(Callback):
    """This rank's parameters after its last batch."""

    last = torch.empty(0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.last = flat(pl_module).clone()


@pytest.mark.parametrize(
    ("algorithm", "swaps"),
    [
        (Gossip(Star(), interval=3), False),
        (Gossip(Star(), interval=3), True),
        (PushSum(), False),
        (Choco(Star()), True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("start", "end"),
    [("on_validation_start", "on_validation_end"), ("on_validation_epoch_start", "on_validation_epoch_end")],
)
def test_a_moving_average_is_validated_as_the_mean_and_changes_nothing(
    ranks: Pool, tmp_path: Path, algorithm: Any, start: str, end: str, swaps: bool
) -> None:
    ranks(3, _ema, str(tmp_path), algorithm, start, end, swaps)


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose parameters are y while training and x while evaluating: each mode is computed from the other."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.mode = "train"

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def eval(self) -> None:
        if self.mode == "train":
            self.mode = "eval"
            for p in self._parameters():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        if self.mode == "eval":
            self.mode = "train"
            for p in self._parameters():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for p in self._parameters():
            z = self.state[p].setdefault("z", p.clone())
            z.sub_(p.grad, alpha=0.1)
            p.lerp_(z, 0.2)
        return loss


class SwitchesModes(Net):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())

    def on_validation_start(self) -> None:
        self.trainer.optimizers[0].eval()

    def on_validation_end(self) -> None:
        self.trainer.optimizers[0].train()


def _switches() -> None:
    ends = []
    for options in ({"limit_val_batches": 0}, {"val_check_interval": 2}):
        model, last = SwitchesModes(), Remembers()
        trainer = trainer_with(RingStrategy(Gossip(Star())), callbacks=[last], **options)
        trainer.fit(model, rows(), rows(24))
        ends.append(last.last)
        assert same_everywhere(flat(model))
    assert torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6)  # to and fro rounds
    assert not same_everywhere(ends[0])


def test_an_optimizer_that_switches_modes_is_validated_and_goes_on(ranks: Pool) -> None:
    ranks(3, _switches)


class SeesMean(Callback):
    """What validation sees, at each of its hooks."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def _look(self, hook: str, pl_module: L.LightningModule) -> None:
        self.seen.setdefault(hook, []).append(flat(pl_module).clone())

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._look("batch", pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look("epoch end", pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look("end", pl_module)


class Distilled(Net):
    """A teacher that follows by hand, a frozen part that a hook changes, and one that nobody touches."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
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


def _everything(folder: str) -> None:
    model, sees = Distilled(), SeesMean()
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    untouched = model.untouched.detach().clone()
    trainer = trainer_with(RingStrategy(Gossip(Star())), callbacks=[sees, save], enable_checkpointing=True)
    trainer.fit(model, rows(), rows(24))
    names = list(model.state_dict())
    for hook, seen in sees.seen.items():
        assert len(seen) > 2, hook
        for value in seen:
            state = dict(zip(names, value.split([model.state_dict()[n].numel() for n in names]), strict=True))
            for name, part in state.items():
                assert same_everywhere(part) == (name != "own" or not part.any()), (hook, name)
            assert torch.equal(state["untouched"], untouched), "averaged over 3 ranks they would have been rounded"
    paths = sorted(Path(folder).glob("*.ckpt"))
    assert paths
    for path in paths:
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert torch.equal(saved["untouched"], untouched)
        own = rank_state(path, trainer.global_rank)["own"]
        mine = own["checkpoint"]["state_dict"]
        for name in ("touched", "teacher.weight", "seen"):
            assert close(saved[name], mean_of(mine[name])), name
            assert not same_everywhere(mine[name])
    for name, value in model.state_dict().items():
        assert same_everywhere(value) == (name != "own"), name


def test_what_no_optimizer_steps_is_seen_as_the_mean_too(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _everything, str(tmp_path))


def normed() -> Net:
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    return net(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _lightnings_ema(folder: str) -> None:
    def run(**options: Any) -> tuple[Net, SeesMean, EMAWeightAveraging]:
        model, sees, ema = normed(), SeesMean(), EMAWeightAveraging(decay=0.8)
        callbacks: list[Callback] = [ema, sees]
        path = options.pop("ckpt_path", None)
        if path is None:
            callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
        trainer = trainer_with(
            RingStrategy(Gossip(Star(), interval=2)), callbacks=callbacks, enable_checkpointing=path is None, **options
        )
        trainer.fit(model, rows(), rows(24), ckpt_path=path)
        return model, sees, ema

    model, sees, ema = run(max_epochs=4)
    assert not same_everywhere(flat(ema._average_model.module)), "averages are each rank's own"
    for seen in sees.seen["batch"]:
        assert same_everywhere(seen)
    assert same_everywhere(flat(model))
    for epoch in range(4):
        path = f"{folder}/epoch={epoch}.ckpt"
        saved = torch.load(path, weights_only=True)
        mine = rank_state(path, model.global_rank)["own"]["checkpoint"]
        for key in ("state_dict", "current_model_state"):
            for name, value in saved[key].items():
                if value.is_floating_point():
                    assert close(value, mean_of(mine[key][name])), (key, name)
                    assert not same_everywhere(mine[key][name]), (key, name)
    again, _, resumed = run(max_epochs=4, ckpt_path=f"{folder}/epoch=1.ckpt")
    assert torch.equal(flat(resumed._average_model.module), flat(ema._average_model.module))
    assert torch.equal(flat(again), flat(model))


def test_lightnings_moving_average_is_seen_as_the_mean_and_resumes_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, _lightnings_ema, str(tmp_path))


def _ema_of_local_sgd() -> None:
    """An exchange is under way when training ends, and must not be applied to the averages."""
    model, ema = normed(), EMAWeightAveraging(decay=0.8)
    algorithm = LocalSGD(4, Nesterov(0.4, 0.8), overlap=True)
    trainer = trainer_with(RingStrategy(algorithm), callbacks=[ema], max_epochs=3)
    trainer.fit(model, rows(), rows(24))
    average = flat(ema._average_model.module)
    assert not same_everywhere(average)
    assert close(flat(model), mean_of(average))


class Counts(Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, buffer in pl_module.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.zero_()


def _buffer_set_at_the_end() -> None:
    ends = []
    for callbacks in ([], [Counts()]):
        model = normed()
        algorithm = LocalSGD(4, Nesterov(0.4, 0.8), overlap=True, eager=True)
        trainer = trainer_with(RingStrategy(algorithm), callbacks=callbacks, max_epochs=3)
        trainer.fit(model, rows(), rows(24))
        ends.append(model)
    for one, other in zip(*(model.parameters() for model in ends), strict=True):
        assert torch.equal(one, other)
    assert all(int(value) == 0 for name, value in ends[1].named_buffers() if name.endswith("tracked"))


def test_a_buffer_that_is_set_at_the_end_keeps_no_step_out(ranks: Pool) -> None:
    ranks(3, _buffer_set_at_the_end)


def test_lightnings_moving_average_of_local_sgd_is_left_as_the_mean(ranks: Pool) -> None:
    ranks(3, _ema_of_local_sgd)


# Gradients that users keep


class Surgery(Net):
    """Two losses whose gradients are kept, as `how` says, and combined: PCGrad and its like."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how
        self.extra = nn.Linear(6, 3)  # only the second loss needs it
        self.previous: list[Tensor] = []
        self.turned: list[float] = []

    def keep(self) -> list[Tensor]:
        views = {
            "by reference": lambda g: g,
            "as views": lambda g: g.view(-1),
            "detached": lambda g: g.detach(),
            "as arrays": lambda g: g.numpy(),
            "without zero_grad": lambda g: g.clone(),
            "zeroed in place": lambda g: g.clone(),
        }
        return [views[self.how](p.grad) for p in self.layers.parameters()]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        kept = self.keep()
        if self.how == "zeroed in place":
            optimizer.zero_grad(set_to_none=False)
        elif self.how != "without zero_grad":
            optimizer.zero_grad()
        self.manual_backward((self(batch[0]) - self.extra(batch[0])).abs().mean())
        with torch.no_grad():
            for parameter, value in zip(self.layers.parameters(), kept, strict=True):
                first = torch.as_tensor(value).view_as(parameter)
                product = (first * parameter.grad).sum()
                self.turned.append(float(product))
                if product < 0:
                    parameter.grad += first - product / first.square().sum() * first
                else:
                    parameter.grad += first
            # a gradient of the step before, too
            if self.previous and self.how == "by reference":
                for parameter, value in zip(self.layers.parameters(), self.previous, strict=True):
                    parameter.grad.add_(value, alpha=0.1)
        self.previous = kept
        optimizer.step()


def _surgery(how: str) -> None:
    ours, theirs = (fit(strategy, Surgery(how)) for strategy in (several_buckets(), DDP_UNUSED))
    check_equal(ours, theirs)
    assert ours.lightning_module.turned == theirs.lightning_module.turned


DDP_UNUSED = "ddp_find_unused_parameters_true"
KEPT = ["by reference", "as views", "detached", "as arrays", "without zero_grad", "zeroed in place"]


@pytest.mark.parametrize("how", KEPT)
def test_gradients_that_are_kept_stay_as_they_are(ranks: Pool, how: str) -> None:
    ranks(2, _surgery, how)


class Alternates(Net):
    """Trains one part, then the other: the gradients of the one that is frozen stay where they are, and as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left: list[Tensor] = []
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
        self.left += [p.grad.clone() for p in frozen.parameters() if p.grad is not None]
        self.optimizers().step()


def _alternates(bucket_mb: float) -> None:
    ring = RingStrategy(AllReduce(bucket_mb=bucket_mb))
    ours, theirs = (fit(strategy, Alternates()) for strategy in (ring, DDP_UNUSED))
    check_equal(ours, theirs)
    left, expected = ours.lightning_module.left, theirs.lightning_module.left
    assert len(left) == len(expected) > 12
    assert all(torch.equal(mine, other) for mine, other in zip(left, expected, strict=True))


@pytest.mark.parametrize("bucket_mb", [25, 3e-4])  # all in one; the last of one part with the first of the other
def test_gradients_of_what_is_frozen_stay_as_they_are(ranks: Pool, bucket_mb: float) -> None:
    ranks(2, _alternates, bucket_mb)


class OwnMemory(Net):
    """Gradients live in one flat tensor of the user's, who clips them there."""

    def on_train_start(self) -> None:  # before, Lightning calls zero_grad
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters()))
        offset = 0
        for parameter in self.parameters():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.flat.zero_()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert same_everywhere(self.flat)
        assert self.flat.abs().max() > 0.1
        self.flat.clamp_(-0.1, 0.1)


def _own_memory() -> None:
    check_equal(fit(several_buckets(), OwnMemory()), fit("ddp", OwnMemory()))


def test_gradients_in_memory_of_the_users_get_the_means(ranks: Pool) -> None:
    ranks(2, _own_memory)


class WatchesMemory(Callback):
    """Where gradients live after each backward."""

    def __init__(self) -> None:
        self.pointers: set[tuple[int, ...]] = set()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.pointers.add(tuple(p.grad.data_ptr() for p in pl_module.parameters()))


def _stays(algorithm: Any) -> int:
    watch = WatchesMemory()
    check_replicas(fit(RingStrategy(algorithm), normed(), callbacks=[watch], gradient_clip_val=0.5))
    return len(watch.pointers)


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(bucket_mb=1e-4),
        AllReduce(BlockInt(8), Direct(), error_feedback=True),
        PowerSGD(),
    ],
    ids=str,
)
def test_nobody_keeps_gradients_so_they_stay_in_the_buckets(ranks: Pool, algorithm: Any) -> None:
    assert set(ranks(2, _stays, algorithm)) == {1}


# Backwards of the user's own


class Adversarial(Net):
    """Attacks its inputs by a backward of its own, in training and, as saliency and adaptation do, in validation."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.own = own
        self.steepest: list[float] = []

    def attack(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            loss = self.loss((x, batch[1]))
            if self.own == "loss.backward":
                loss.backward()
            else:
                torch.autograd.backward([loss])
        assert x.grad is not None
        self.steepest.append(float(x.grad.abs().max()))
        return (x + 0.1 * x.grad.sign()).detach(), batch[1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(self.attack(batch), batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(self.attack(batch), batch_idx)


def _adversarial(own: str, options: dict[str, Any]) -> None:
    models = []
    for strategy in (several_buckets(), "ddp"):
        trainer, model = trainer_with(strategy, inference_mode=False, **options), Adversarial(own)
        trainer.fit(model, rows(), rows(24))
        models.append((trainer, model))
    check_equal(models[0][0], models[1][0])
    assert models[0][1].steepest == models[1][1].steepest
    assert len(models[0][1].steepest) > 12


@pytest.mark.parametrize("own", ["loss.backward", "torch.autograd.backward"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_backwards_in_training_and_validation_steps_equal_ddp(ranks: Pool, own: str, options: dict[str, Any]) -> None:
    ranks(2, _adversarial, own, options)


class TogglesLate(Gan):
    """Toggles around `manual_backward` alone: the graph was made before."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noise, real = batch
        for optimizer in self.optimizers():
            fooled = F.softplus(-self.discriminator(self.generator(noise))).mean()
            caught = (
                F.softplus(-self.discriminator(real)).mean()
                + F.softplus(self.discriminator(self.generator(noise).detach())).mean()
            )
            optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(fooled if optimizer is self.optimizers()[0] else caught)
            self.untoggle_optimizer(optimizer)
            optimizer.step()


def _toggles_late() -> None:
    check_equal(fit(several_buckets(), TogglesLate()), fit(DDP_UNUSED, TogglesLate()))


def test_toggling_only_around_manual_backward_equals_ddp(ranks: Pool) -> None:
    ranks(2, _toggles_late)


class NeverSyncs(Manual):
    """Each backward only accumulates."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()


def _never_syncs() -> str:
    with pytest.raises(RuntimeError) as caught:
        fit("ring", NeverSyncs())
    return str(caught.value)


def test_stepping_what_only_accumulated_is_an_error(ranks: Pool) -> None:
    assert all("outside of that" in message for message in ranks(2, _never_syncs))


class Untoggled(Gan):
    """Nothing is toggled, so each loss gives the other network gradients too, which are thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.local = [torch.zeros_like(p) for p in self.discriminator.parameters()]
        self.stepped = [torch.zeros_like(p) for p in self.discriminator.parameters()]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noise, real = batch
        of_generator, of_discriminator = self.optimizers()
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(self.generator(noise))).mean())
        of_generator.step()

        of_discriminator.zero_grad()
        fakes = self.generator(noise).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fakes)).mean()
        parameters = list(self.discriminator.parameters())
        for total, own in zip(self.local, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
            total += own
        self.manual_backward(loss)
        for total, parameter in zip(self.stepped, parameters, strict=True):
            total += parameter.grad
        of_discriminator.step()


def _untoggled(strategy: Any) -> None:
    trainer = fit(strategy, Untoggled())
    check_replicas(trainer)
    model = trainer.lightning_module
    left = dict(trainer.strategy.algorithm.residuals())
    names = [f"discriminator.{name}" for name, _ in model.discriminator.named_parameters()]
    assert any(left[name].any() for name in names if name in left)
    for name, stepped, local in zip(names, model.stepped, model.local, strict=True):
        lacking = sum(gathered(left[name])) if name in left else 0
        assert (stepped + lacking - mean_of(local)).abs().max() < 1e-5 * local.abs().max() + 1e-6, name


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(BlockInt(2, block=16), error_feedback=True),
        AllReduce(TopK(2, block=16), Direct(), error_feedback=True),
    ],
    ids=str,
)
def test_a_gan_that_toggles_nothing_loses_nothing(ranks: Pool, algorithm: Any) -> None:
    ranks(3, _untoggled, RingStrategy(algorithm))


# Gossip and its optimizers


class Raw(Manual):
    """Steps the optimizer itself, not Lightning's; with or without a closure."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _raw(algorithm: Any) -> None:
    trainer = fit(RingStrategy(algorithm), Raw())
    model = trainer.lightning_module
    counts = trainer.strategy.algorithm.state_dict()["counts"]
    assert {count["mixings"] for count in counts.values()} == {12 if world() == 2 else 8}
    assert trainer.strategy.stats.bytes_sent
    assert same_everywhere(flat(model))


@pytest.mark.parametrize("algorithm", [Gossip(Complete(), overlap=False), Choco(Complete(), overlap=False)], ids=str)
def test_gossip_mixes_after_steps_of_raw_optimizers(ranks: Pool, algorithm: Any) -> None:
    ranks(3, _raw, algorithm)


def _raw_equals_ddp() -> None:
    """Nothing counts steps that Lightning does not make, so `check_equal` does not."""
    ours, theirs = (fit(strategy, Raw()).lightning_module for strategy in (several_buckets(), "ddp"))
    assert torch.equal(flat(ours), flat(theirs))
    assert same_everywhere(flat(ours))


def test_raw_optimizers_equal_ddp(ranks: Pool) -> None:
    ranks(2, _raw_equals_ddp)


class Drops(Net):
    """Rank 1 drops batch 1 of each epoch: its optimizer does not step. Something else steps besides."""

    def on_train_start(self) -> None:
        self.other = [nn.Parameter(torch.ones(1))]
        self.side = torch.optim.SGD(self.other, 0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.other[0].grad = torch.ones(1)
        self.side.step()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def _drops(folder: str, overlap: bool) -> None:
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    algorithm = Gossip(Star(), overlap=overlap)
    trainer = trainer_with(RingStrategy(algorithm), callbacks=[save], enable_checkpointing=True)
    trainer.fit(Drops(), rows(), rows(24))
    counts = trainer.strategy.algorithm.state_dict()["counts"]
    assert {count["steps"] for count in counts.values()} == {trainer.global_step}
    assert same_everywhere(flat(trainer.lightning_module))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_drops_a_step_goes_on_mixing(ranks: Pool, tmp_path: Path, overlap: bool) -> None:
    ranks(3, _drops, str(tmp_path), overlap)


# Resuming


def _before_the_first_step(folder: str, algorithm: Any) -> None:
    """A run is resumed and saved at once; what goes on from there ends as the one that was not interrupted."""
    options: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": True}
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fit(RingStrategy(copy.deepcopy(algorithm)), normed(), callbacks=[saver], **options)

    class SavesAtOnce(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.save_checkpoint(f"{folder}/at_once.ckpt")
            trainer.should_stop = True

    again = normed()
    trainer = trainer_with(RingStrategy(copy.deepcopy(algorithm)), max_epochs=3, callbacks=[SavesAtOnce()])
    trainer.fit(again, rows(), ckpt_path=f"{folder}/epoch=0.ckpt")
    for key in ("epoch=0.ckpt", "at_once.ckpt"):
        resumed = fit(RingStrategy(copy.deepcopy(algorithm)), normed(), ckpt_path=f"{folder}/{key}", max_epochs=3)
        assert torch.equal(flat(resumed.lightning_module), flat(whole.lightning_module)), key
        assert resumed.global_step == whole.global_step
    # a run that is over already
    finished = fit(RingStrategy(copy.deepcopy(algorithm)), normed(), ckpt_path=f"{folder}/epoch=2.ckpt", max_epochs=3)
    assert same_everywhere(flat(finished.lightning_module))
    assert torch.equal(flat(finished.lightning_module), flat(whole.lightning_module))


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(Star(), interval=3, overlap=2),
        Gossip(Star(), unequal_data=True, interval=2),
        PushSum(interval=2),
        Choco(Star(), BlockInt(4, block=24), interval=2),
    ],
    ids=str,
)
def test_saving_before_the_first_step_after_a_resume_loses_nothing(ranks: Pool, tmp_path: Path, algorithm: Any) -> None:
    ranks(3, _before_the_first_step, str(tmp_path), algorithm)


class NumpyState(torch.optim.SGD):
    """Keeps a numpy scalar in its state, as some optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        output = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scale"] = np.float32(0.5)
        return output


class WithNumpyState(Net):
    def configure_optimizers(self) -> Any:
        return NumpyState(self.parameters(), 0.05, momentum=0.9)


def _numpy_state(folder: str) -> None:
    def strategy() -> RingStrategy:
        return RingStrategy(Gossip(Star(), consensus=False))

    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fit(strategy(), WithNumpyState(), callbacks=[save], enable_checkpointing=True)
    trainer, model = trainer_with(strategy()), WithNumpyState()
    with pytest.raises(pickle.UnpicklingError):
        trainer.fit(model, rows(), ckpt_path=f"{folder}/epoch=0.ckpt", weights_only=True)
    trainer, model = trainer_with(strategy()), WithNumpyState()
    trainer.fit(model, rows(), ckpt_path=f"{folder}/epoch=0.ckpt", weights_only=False)
    assert torch.equal(flat(model), flat(whole.lightning_module))
    assert not same_everywhere(flat(model))


def test_who_trusts_a_checkpoint_gets_what_each_rank_had(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _numpy_state, str(tmp_path))


class Plateau(Net):
    """A scheduler that follows each rank's own loss: learning rates differ."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        worse = float(self.trainer.current_epoch) * (-1) ** self.global_rank  # for the even ranks
        self.log("own", worse, on_step=False, on_epoch=True, sync_dist=False)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


class Schedule(Callback):
    """What the scheduler knows when a checkpoint is saved, and when training starts."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []

    def _now(self, trainer: L.Trainer) -> dict[str, Any]:
        state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
        return {**state, "rate": float(trainer.optimizers[0].param_groups[0]["lr"])}

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.saved.append(self._now(trainer))

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.begun.append(self._now(trainer))


def _plateau(folder: str) -> float:
    schedule, save = Schedule(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 5, "enable_checkpointing": True}
    fit(RingStrategy(Gossip(Star())), Plateau(), callbacks=[save, schedule], **options)
    again = Schedule()
    fit(RingStrategy(Gossip(Star())), Plateau(), callbacks=[again], ckpt_path=f"{folder}/epoch=3.ckpt", max_epochs=5)
    assert again.begun == [schedule.saved[3]]
    return float(again.begun[0]["rate"])


def test_each_rank_resumes_its_own_scheduler(ranks: Pool, tmp_path: Path) -> None:
    rates = ranks(3, _plateau, str(tmp_path))
    assert rates[0] == rates[2] < rates[1] == 0.05


class PlainStateDict(Net):
    """Overrides `state_dict` without keyword arguments."""

    def state_dict(self) -> dict[str, Any]:
        return {"renamed." + name: value for name, value in super().state_dict().items()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        return super().load_state_dict({name.removeprefix("renamed."): v for name, v in state.items()}, strict)


def _plain_state_dict(folder: str) -> None:
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fit(RingStrategy(Gossip(Star())), PlainStateDict(), callbacks=[save], enable_checkpointing=True)
    again = fit(RingStrategy(Gossip(Star())), PlainStateDict(), ckpt_path=f"{folder}/epoch=0.ckpt")
    saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("renamed.layers") for name in saved)
    for one, other in zip(again.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_dict_of_the_users_own_is_saved_and_resumed(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _plain_state_dict, str(tmp_path))


class Many(Net):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(count))


def _saves_many(folder: str, count: int) -> float:
    class Times(Callback):
        seconds = 0.0

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            begin = time.process_time()
            trainer.save_checkpoint(f"{folder}/{count}.ckpt")
            self.seconds = time.process_time() - begin

    times = Times()
    trainer = trainer_with(RingStrategy(Gossip()), max_steps=1, num_sanity_val_steps=0, callbacks=[times])
    trainer.fit(Many(count), rows(8), rows(8))
    return times.seconds


@pytest.mark.slow
def test_a_checkpoint_takes_time_in_proportion_to_the_parameters(ranks: Pool, tmp_path: Path) -> None:
    few, many = (max(ranks(2, _saves_many, str(tmp_path), count)) for count in (1000, 10_000))
    assert 0 < many < 25 * few


# Parameters that nobody averages, and new ones


class WithWholeNumbers(Net):
    """Whole numbers and booleans among the parameters, frozen, one of them given to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)


def _whole_numbers(algorithm: Any) -> None:
    model = WithWholeNumbers()
    trainer = trainer_with(RingStrategy(algorithm))
    trainer.fit(model, rows(), rows(12))
    check_replicas(trainer)
    assert torch.equal(model.table, torch.arange(5))


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), AllReduce(BlockInt(8)), Gossip(Complete()), Choco(Complete())], ids=str
)
def test_whole_numbers_among_the_parameters_are_left_alone(ranks: Pool, algorithm: Any) -> None:
    ranks(2, _whole_numbers, algorithm)


class Grows(Net):
    """Gets a part of its own, drawn by each rank, when `when` says so; the optimizer gets it too."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.added: nn.Linear | None = None
        self.at_first: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        seen = super().forward(x)
        if self.added is None:
            return seen
        if not self.at_first:
            self.at_first = [p.detach().clone() for p in self.added.parameters()]
        return seen + self.added(x)

    def grow(self) -> None:
        generator = torch.Generator().manual_seed(self.global_rank)
        self.added = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.added.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizers().optimizer.add_param_group({"params": list(self.added.parameters())})

    def on_train_start(self) -> None:
        if self.when == "on_train_start":
            self.grow()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.when == "in mid-epoch" and self.trainer.global_step == 2:
            self.grow()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def _grows(algorithm: Any, when: str) -> None:
    trainer = fit(RingStrategy(algorithm), Grows(when))
    check_replicas(trainer)
    model = trainer.lightning_module
    for first, now in zip(model.at_first, model.added.parameters(), strict=True):
        assert same_everywhere(first)
        assert not torch.equal(first, now)


@pytest.mark.parametrize("when", ["on_train_start", "in mid-epoch"])
@pytest.mark.parametrize("algorithm", [AllReduce(), AllReduce(BlockInt(8)), Gossip(), Auto()], ids=str)
def test_parameters_that_join_begin_with_the_same_values(ranks: Pool, algorithm: Any, when: str) -> None:
    ranks(3, _grows, algorithm, when)


class GrowsAlone(Grows):
    def __init__(self, rank: int, has_buffers: bool) -> None:
        super().__init__("")
        self.rank = rank
        self.norm = nn.BatchNorm1d(6) if has_buffers else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2 and self.global_rank == self.rank:
            self.grow()


def _grows_alone(algorithm: Any, rank: int, has_buffers: bool) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises((PlanMismatchError, PeerLostError)) as caught:
        fit(RingStrategy(algorithm, timeout=timedelta(seconds=60)), GrowsAlone(rank, has_buffers))
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("algorithm", "rank", "has_buffers"),
    [
        (AllReduce(), 1, False),
        (AllReduce(), 0, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (AllReduce(), 1, True),
                (Gossip(), 0, False),
                (Gossip(Complete(), overlap=False), 1, True),
            )
        ),
    ],
    ids=str,
)
def test_a_parameter_that_only_one_rank_gets_is_named(
    ranks: Pool, algorithm: Any, rank: int, has_buffers: bool
) -> None:
    mismatch = "rank 1 has 'added.weight: (3, 6) torch.float32, new' where rank 0 has nothing of that name"
    change = "parameters that its model got or lost"
    for message, seconds in ranks(2, _grows_alone, algorithm, rank, has_buffers):
        assert mismatch in message or (change in message and "give all ranks the same layers" in message), message
        assert seconds < 20


class Replaces(Net):
    """Gets another head in mid-epoch, of the same name; or loses one that it does not need."""

    def __init__(self, deletes: bool) -> None:
        super().__init__()
        self.deletes = deletes
        self.extra = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.extra(x) if hasattr(self, "extra") else 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 2:
            return
        old = list(self.extra.parameters())
        if self.deletes:
            del self.extra
            new = []
        else:
            self.extra = nn.Linear(6, 3)
            new = list(self.extra.parameters())
        optimizer = self.optimizers().optimizer
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if all(p is not gone for gone in old)] + new

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class StayTogether(Callback):
    """After each batch all ranks have nearly the same parameters."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for parameter in pl_module.parameters():
            assert all(torch.allclose(other, parameter, atol=1e-5) for other in gathered(parameter))


def _replaces(algorithm: Any, deletes: bool) -> list[int]:
    late: list[int] = []  # buckets that were not launched while backward went on
    finish = synchronous._Pass.finish

    def finishing(exchange: synchronous._Pass) -> None:
        late.append(len(exchange.active) - exchange._launched)
        finish(exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synchronous._Pass, "finish", finishing)
        check_replicas(fit(RingStrategy(algorithm), Replaces(deletes), callbacks=[StayTogether()]))
    return late


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(bucket_mb=1e-4),
        AllReduce(BlockInt(8), error_feedback=True, bucket_mb=1e-4),
        PowerSGD(bucket_mb=1e-4),
        Gossip(Complete(), overlap=False),
        Choco(Complete(), Identity(), overlap=False),
    ],
    ids=str,
)
def test_layers_that_are_replaced_or_deleted_do_not_hold_others_up(ranks: Pool, algorithm: Any, deletes: bool) -> None:
    for late in ranks(2, _replaces, algorithm, deletes):
        assert set(late) == (set() if algorithm.decentralized else {0}), late


class GrowsTooLate(Grows):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2:
            self.grow()
        return super().training_step(batch, batch_idx)


def _grows_too_late() -> None:
    with pytest.raises(RuntimeError, match=r"added\.weight joined the model within this batch"):
        fit("ring", GrowsTooLate(""))


def test_stepping_what_joined_within_the_batch_is_an_error(ranks: Pool) -> None:
    ranks(2, _grows_too_late)


# Arguments that are the same on all ranks, although they do not look alike


class Marks:
    """A function that is an object: its `repr` holds an address."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        return name in self.names


def named(names: set[str], name: str, parameter: nn.Parameter) -> bool:
    return name in names


def codec_for(codecs: set[Any], name: str, parameter: nn.Parameter) -> Any:
    return BlockInt(8) if parameter.dim() > 1 else BlockInt(4)


def _alike() -> None:
    bias = "layers.0.bias"
    for algorithm in (
        AllReduce(local=partial(named, {bias, "other", "third"})),
        AllReduce(local=Marks(bias, "other", "third")),
        PowerSGD(local=Marks(bias)),
        Gossip(local=partial(named, {bias})),
        AllReduce(SmallExact(BlockInt(8), names={"a*", "b*", "c*", "d*", "e*"})),
        AllReduce(partial(codec_for, {BlockInt(8), BlockInt(4)})),
        Auto(local=Marks(bias)),
    ):
        model = Net()
        fit(RingStrategy(algorithm), model, max_epochs=1)
        local = "local=None" not in repr(algorithm)
        assert same_everywhere(model.layers[0].bias) != local, algorithm


ALIKE = """
import torch.distributed as dist
from test_habits import _alike

_alike()
"""


@pytest.mark.slow
def test_functions_and_sets_that_print_differently_are_the_same(tmp_path: Path) -> None:
    """Real processes, each with a hash seed of its own."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = run_script(tmp_path, ALIKE, *torchrun)
    assert done.returncode == 0, done.stderr


def _frozen_on_one() -> str:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].bias.requires_grad_(os.environ["LOCAL_RANK"] != "1")

        def on_train_start(self) -> None:
            self.layers[2].bias.requires_grad_(True)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 1:
                self.layers[0].weight.requires_grad_(self.global_rank != 1)

    with pytest.raises(PlanMismatchError) as first:
        fit("ring", Frozen())
    model = Frozen()
    model.layers[2].bias.requires_grad_(True)
    with pytest.raises(PlanMismatchError) as second:
        fit("ring", model)
    return f"{first.value}\n{second.value}"


def test_a_parameter_that_is_frozen_on_one_rank_is_named(ranks: Pool) -> None:
    for message in ranks(2, _frozen_on_one):
        first, second = message.splitlines()
        assert "rank 1 has nothing (is it frozen there?) where rank 0 has 'layers.2.bias: (3,)" in first, first
        assert "rank 1 has 'layers.0.weight: frozen at step 1' where rank 0 has 'layers.0.weight: trained" in second


# 16 bits


def _sixteen_bits(dtype: torch.dtype) -> tuple[float, float, float]:
    """How far parameters of about 1 are apart after mixing alone, and how far their mean has moved."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    peers = connect(torch.device("cpu"), timedelta(seconds=30))
    generator = torch.Generator().manual_seed(peers.rank)
    parameter = nn.Parameter((1 + torch.randn(2000, generator=generator) / 10).to(dtype))
    mean = mean_of(parameter.detach().float())
    algorithm = Gossip(overlap=False)
    algorithm.setup({"parameter": parameter}, peers)
    for _ in range(100):
        algorithm.after_step({parameter})
    value = parameter.detach().float()
    now = mean_of(value)
    algorithm.close()
    peers.close()
    return float((value - now).abs().max()), float((now - mean).abs().max()), float((now - mean).mean())


def test_in_16_bits_small_corrections_round_away(ranks: Pool) -> None:
    """Replicas agree to about a rounding and no better, and the mean moves by less than that: docs/design.md."""
    rounding = 2.0**-8  # of bfloat16 between 1 and 2
    apart, moved, _ = ranks(5, _sixteen_bits, torch.float32)[0]
    assert apart < 1e-6
    assert moved < 1e-6
    apart, moved, drift = ranks(5, _sixteen_bits, torch.bfloat16)[0]
    assert rounding / 4 < apart < 2 * rounding
    assert rounding / 20 < moved < 2 * rounding
    assert abs(drift) < rounding / 20  # in no direction


# Habits that only torch DDP knows


def test_a_strategy_object_serves_one_trainer() -> None:
    strategy = RingStrategy(AllReduce(BlockInt(8)))
    options: dict[str, Any] = {"devices": 2, "barebones": True}
    for accelerator in ("cpu", "auto"):
        L.Trainer(strategy=RingStrategy(strategy.algorithm), accelerator=accelerator, **options)
    L.Trainer(strategy=strategy, accelerator="cpu", **options)
    for accelerator in ("cpu", "auto"):
        with pytest.raises(ValueError, match="belongs to another Trainer already: make one for each"):
            L.Trainer(strategy=strategy, accelerator=accelerator, **options)
    with pytest.raises(Exception, match="accelerator set through both"):  # Lightning's own words stay
        L.Trainer(strategy=RingStrategy(accelerator=CPUAccelerator()), accelerator="cpu", **options)


class Unwraps(Net):
    """Reaches for what torch DDP adds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        getattr(self.trainer.strategy.model, self.name)
        return super().training_step(batch, batch_idx)


def _unwraps(name: str) -> str:
    with pytest.raises(AttributeError) as caught:
        fit("ring", Unwraps(name))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "cure"),
    [("no_sync", "trainer.strategy.block_backward_sync()"), ("module", "leave out .module"), ("else", "'else'")],
)
def test_what_only_a_wrapped_module_has_is_named_with_its_cure(ranks: Pool, name: str, cure: str) -> None:
    for message in ranks(2, _unwraps, name):
        assert message.startswith(f"'Unwraps' object has no attribute '{name}'")
        assert message.endswith(cure) or cure in message


# Buffers


class Normed(Net):
    """Notes the statistics that it validates with."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
        self.validated: list[Tensor] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(torch.cat([b.detach().double().reshape(-1) for b in self.buffers()]))


def _validates_with(broadcast: bool) -> list[bool]:
    """Rank 1 has two batches, rank 0 one."""
    model, rank = Normed(), int(os.environ["RANK"])
    data = rows(24, sampler=range(4 * (1 + rank)))
    trainer = trainer_with(
        RingStrategy(broadcast_buffers=broadcast), val_check_interval=2, use_distributed_sampler=False
    )
    trainer.fit(model, rows(48, sampler=range(24 * rank, 24 * (rank + 1))), data)
    first = model.validated[:: 1 + rank]
    return [same_everywhere(value) for value in first[1:]]  # the first is before any training


@pytest.mark.parametrize("broadcast", [True, False])
def test_ranks_validate_with_rank_0s_buffers(ranks: Pool, broadcast: bool) -> None:
    for same in ranks(2, _validates_with, broadcast):
        assert len(same) >= 4
        assert set(same) == {broadcast}


# What else lies in checkpoints and in models


@dataclass(frozen=True)
class Settings:
    width: int = 8


class WithSettings(Net):
    """Saves its arguments."""

    def __init__(self, settings: Settings, steps: range) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["recent"] = deque([torch.ones(1), 2], maxlen=2)


def _with_settings(folder: str) -> None:
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = trainer_with(RingStrategy(Gossip()), callbacks=[save], enable_checkpointing=True)
    trainer.fit(WithSettings(Settings(), range(3)), rows(), rows(24))
    saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=False)
    assert saved["hyper_parameters"]["settings"] == Settings()
    assert saved["hyper_parameters"]["steps"] == range(3)
    assert saved["recent"].maxlen == 2
    options: dict[str, Any] = {"ckpt_path": f"{folder}/epoch=0.ckpt", "weights_only": False}
    again = trainer_with(RingStrategy(Gossip()))
    again.fit(WithSettings(Settings(), range(3)), rows(), rows(24), **options)
    assert torch.equal(flat(again.lightning_module), flat(trainer.lightning_module))


def test_a_checkpoint_may_hold_anything(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _with_settings, str(tmp_path))


class Catches(Manual):
    """The first step fails, and goes on: the next one counts."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))

        def fails() -> Tensor:
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            optimizer.step(fails)
        optimizer.step()


def _catches() -> None:
    trainer = fit(RingStrategy(Gossip(Complete(), overlap=False)), Catches(), callbacks=[StayTogether()])
    counts = trainer.strategy.algorithm.state_dict()["counts"]
    assert {count["mixings"] for count in counts.values()} == {12}


def test_a_step_after_one_that_failed_is_mixed(ranks: Pool) -> None:
    ranks(2, _catches)


class OtherRate(Net):
    """Rank 1 has another learning rate, or another optimizer."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.other = other

    def configure_optimizers(self) -> Any:
        odd = self.global_rank == 1
        if self.other == "optimizer":
            return (torch.optim.Adam if odd else torch.optim.AdamW)(self.parameters(), 0.1)
        return torch.optim.SGD(self.parameters(), 0.1 * (1 + odd))


def _other_rate(strategy: Any, other: str) -> str:
    with pytest.raises(PlanMismatchError) as caught:
        fit(strategy, OtherRate(other))
    return str(caught.value)


@pytest.mark.parametrize(("other", "words"), [("optimizer", "optimizer 0, a Adam"), ("rate", "lr=0.2")])
@pytest.mark.parametrize("strategy", ["ring", "ring_auto"])
def test_optimizers_that_differ_are_named(ranks: Pool, strategy: str, other: str, words: str) -> None:
    for message in ranks(2, _other_rate, strategy, other):
        assert words in message.split("where rank 0 has")[0]


class OwnPlateau(Net):
    """The learning rate falls when the validation loss of this rank's own data does not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("own", float(self.current_epoch * (1 if self.global_rank == 1 else -1)))


class Halves(Net):
    """The learning rate falls with each epoch, and epochs of rank 1 are shorter."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _other_rate_later(habit: str) -> str:
    strategy = RingStrategy(AllReduce(), timeout=timedelta(seconds=40))
    mine = rows(12 if habit == "shorter" and os.environ["RANK"] == "1" else 24)
    trainer = trainer_with(strategy, max_epochs=-1, max_steps=20, use_distributed_sampler=False)
    with pytest.raises(PlanMismatchError) as caught:
        trainer.fit(Halves() if habit == "shorter" else OwnPlateau(), mine, mine if habit == "plateau" else None)
    return str(caught.value)


@pytest.mark.parametrize("habit", ["plateau", "shorter"])
def test_learning_rates_that_come_to_differ_are_named(ranks: Pool, habit: str) -> None:
    for message in ranks(2, _other_rate_later, habit):
        assert "rank 1 has 'optimizer 0, group 0: lr=" in message
        assert "where rank 0 has 'optimizer 0, group 0: lr=0.1'" in message
        assert "sync_dist=True" in message


def _frozen_under_gossip() -> str:
    model = Net()
    if os.environ["RANK"] == "1":
        model.layers[0].requires_grad_(False)
    trainer = trainer_with(RingStrategy(Gossip(), timeout=timedelta(seconds=40)), val_check_interval=2)
    with pytest.raises(PlanMismatchError) as caught:
        trainer.fit(model, rows(), rows(24))
    return str(caught.value)


def test_a_parameter_that_is_frozen_on_one_rank_is_named_under_gossip_too(ranks: Pool) -> None:
    for message in ranks(2, _frozen_under_gossip):
        assert "rank 1 has 'layers.0.weight: frozen' where rank 0 has 'layers.0.weight: trained'" in message

"""The strategy under real trainers, on real processes with different rows on each; Lightning's `ddp` is the oracle."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import LayerSync, MixedPrecision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner
from listening import listening
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ringstrategy
from ringstrategy import (
    AllReduce,
    BySize,
    Cast,
    CommunicationMonitor,
    Gossip,
    LocalSGD,
    Nesterov,
    RingStrategy,
    Stats,
)
from ringstrategy.algorithms import Algorithm

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(120)


class Net(L.LightningModule):
    """Born with other weights on every rank, so that rank 0's must be sent; remembers its last batch."""

    def __init__(self, layers: nn.Module | None = None, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)) if layers is None else layers
        self.lr = lr
        self.batch: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Blocks(nn.Sequential):
    """Has the `backbone` that BackboneFinetuning asks for."""


def net(*layers: nn.Module) -> Net:
    """As `Net`, but with `layers` drawn by this rank."""
    return Net(nn.Sequential(*layers))


def rows(count: int = 48, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].sin() + 1), **{"batch_size": 4, **options})


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def several_buckets() -> RingStrategy:
    return RingStrategy(AllReduce(bucket_mb=1e-4))


def trainer_with(strategy: Any, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 2, "devices": world()}
    return L.Trainer(strategy=strategy, accelerator="cpu", **{**quiet, **options})


def fit(strategy: Any, model: Any, *, data: Any = None, ckpt_path: str | None = None, **options: Any) -> L.Trainer:
    trainer = trainer_with(strategy, **options)
    trainer.fit(model, rows() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return everyone


def same_everywhere(tensor: Tensor) -> bool:
    return all(torch.equal(other, tensor) for other in gathered(tensor))


def check_replicas(trainer: L.Trainer) -> None:
    """It was our strategy on several processes, it sent something, and all ranks hold the same finite parameters."""
    strategy = trainer.strategy
    assert isinstance(strategy, RingStrategy)
    assert strategy.world_size == dist.get_world_size() > 1
    assert strategy.stats.steps > 0
    assert strategy.stats.bytes_sent is not None
    assert strategy.stats.bytes_sent > 0
    assert trainer.global_step > 0
    for name, parameter in trainer.lightning_module.named_parameters():
        assert parameter.isfinite().all(), name
        assert same_everywhere(parameter), f"{name} differs between ranks"


def check_equal(ours: L.Trainer, theirs: L.Trainer) -> None:
    """Every parameter and buffer of this rank, bit for bit; and `ours` has really been trained by us."""
    check_replicas(ours)
    assert not isinstance(theirs.strategy, RingStrategy)
    mine, reference = ours.lightning_module.state_dict(), theirs.lightning_module.state_dict()
    assert mine.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(mine[name], value), name


# Names


def _train_by_names() -> list[int]:
    sent = []
    for name in ("ring", "ring_fp16", "ring_bf16"):
        trainer = fit(name, Net())
        check_replicas(trainer)
        sent.append(trainer.strategy.stats.bytes_sent)
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_names_train_and_16_bit_ones_send_less(ranks: Pool, size: int) -> None:
    for full, half, brain in ranks(size, _train_by_names):
        assert half == brain < full


def test_trainers_do_not_share_an_algorithm() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "barebones": True}
    first, second = (L.Trainer(strategy="ring", **options).strategy for _ in range(2))
    assert isinstance(first, RingStrategy)
    assert isinstance(second, RingStrategy)
    assert first is not second
    assert first.algorithm is not second.algorithm
    algorithm = AllReduce(Cast("fp16"))
    first, second = RingStrategy(algorithm), RingStrategy(algorithm)
    assert len({id(algorithm), id(first.algorithm), id(second.algorithm)}) == 3
    assert repr(first.algorithm) == repr(algorithm)


def run_script(folder: Path, text: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may import this file, by `command` (default: this Python), as a user's shell would."""
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{text}")
    return subprocess.run(
        [*(command or (sys.executable,)), str(script)],
        env=shell(**environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def shell(**environment: str) -> dict[str, str]:
    """The environment of a shell in which no launcher has left anything."""
    launchers = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    return {k: v for k, v in os.environ.items() if k not in launchers} | {"OMP_NUM_THREADS": "1", **environment}


def said(output: str) -> list[Any]:
    """What the ranks printed as lines of JSON."""
    lines = (line for line in output.splitlines() if not line.startswith("[Gloo]"))  # torch 2.9 talks on stdout
    return [json.loads(line) for line in lines if line.startswith(("{", "["))]


SPAWN = """
import dataclasses, json, multiprocessing
from ringstrategy import RingStrategy
from test_strategy import Net, fit

if __name__ == "__main__":
    for name in ("ring_fp16_fork", "ring_auto_fork", "ring_spawn"):  # spawn last: fork wants a parent without threads
        trainer = fit(name, Net(), devices=2)
        assert not multiprocessing.active_children()
        if name == "ring_auto_fork":
            assert trainer.strategy.algorithm.chosen.bucket_mb == 25, "all sizes come to the same here"
            again = fit(RingStrategy(trainer.strategy.algorithm, start_method="fork"), Net(), devices=2)
            print(json.dumps([made.strategy.stats.probe_bytes_sent for made in (trainer, again)]))
            continue
        print(json.dumps(dataclasses.asdict(trainer.strategy.stats)))
"""


@pytest.mark.slow
def test_spawn_and_fork_bring_the_statistics_back(tmp_path: Path) -> None:
    done = run_script(tmp_path, SPAWN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ring_auto measured for") == 1
    assert done.stderr.count("ring_auto goes by what it measured before") == 1
    fork, (measured, kept), spawn = said(done.stdout)
    assert 0 < kept < measured / 2, "only what it takes to find out that all ranks have it, and to choose"
    assert measured < 100_000, "for a model of 692 bytes"
    for stats in (fork, spawn):
        assert stats["steps"] == 12
        assert stats["values_averaged"] == 12 * (6 * 17 + 17 + 17 * 3 + 3)
        assert stats["exposed_seconds"] > 0
    assert 0 < fork["bytes_sent"] < spawn["bytes_sent"]


# Automatic optimization


def _equals_ddp(options: dict[str, Any]) -> None:
    ours, theirs = fit(several_buckets(), Net(), **options), fit("ddp", Net(), **options)
    check_equal(ours, theirs)
    assert not same_everywhere(ours.lightning_module.batch[0]), "the ranks saw the same rows"
    assert len(ours.lightning_module.layers) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
    ids=str,
)
def test_two_ranks_equal_ddp_bit_for_bit(ranks: Pool, options: dict[str, Any]) -> None:
    ranks(2, _equals_ddp, options)


class SeesMeans(L.Callback):
    """Compares what users' hooks see with a mean that it takes itself."""

    def __init__(self) -> None:
        self.seen = 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Net)
        assert pl_module.batch is not None
        assert not same_everywhere(pl_module.batch[0])
        parameters = list(pl_module.parameters())
        alone = torch.autograd.grad(pl_module.loss(pl_module.batch), parameters)
        for parameter, own in zip(parameters, alone, strict=True):
            assert parameter.grad is not None
            assert same_everywhere(parameter.grad)
            assert not same_everywhere(own)
            assert torch.allclose(parameter.grad, torch.stack(gathered(own)).mean(0), rtol=1e-5, atol=1e-7)
        self.seen += 1

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            assert parameter.grad is not None
            assert same_everywhere(parameter.grad)


def _hooks_see_means() -> None:
    watch = SeesMeans()
    trainer = fit(several_buckets(), Net(), callbacks=[watch])
    check_replicas(trainer)
    assert watch.seen == trainer.global_step


@pytest.mark.parametrize("size", [2, 4])
def test_hooks_after_backward_see_averaged_gradients(ranks: Pool, size: int) -> None:
    ranks(size, _hooks_see_means)


class CountsBytes(L.Callback):
    def __init__(self) -> None:
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sent.append(trainer.strategy.stats.bytes_sent)


def _accumulate() -> list[int]:
    count = CountsBytes()
    trainer = fit("ring", Net(), accumulate_grad_batches=3, callbacks=[count], max_epochs=1)
    check_replicas(trainer)
    return count.sent


def test_accumulation_sends_nothing_until_the_last_micro_batch(ranks: Pool) -> None:
    for sent in ranks(2, _accumulate):
        before_first_step, first, before_second_step, second = sent[1], sent[2], sent[4], sent[5]
        assert len(sent) == 6
        assert before_second_step == first < second
        assert sent[0] == before_first_step < first


def _equals_plain_training() -> None:
    before = threading.active_count()

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            assert threading.active_count() == before
            assert not any(parameter._post_accumulate_grad_hooks for parameter in pl_module.parameters())

    for name, options in (("ring", {}), ("ring_fp16", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05})):
        # Lightning shuffles for every distributed strategy, also on one process
        ours = fit(name, Net(), callbacks=[Watch()], use_distributed_sampler=False, **options)
        theirs = fit("auto", Net(), **options)
        assert ours.world_size == 1
        assert isinstance(ours.strategy, RingStrategy)
        assert ours.strategy.stats == Stats(steps=ours.global_step), "nothing was sent or waited for"
        assert ours.global_step == theirs.global_step > 0
        for mine, reference in zip(
            ours.lightning_module.parameters(), theirs.lightning_module.parameters(), strict=True
        ):
            assert torch.equal(mine, reference)


def test_one_process_is_plain_training_bit_for_bit(ranks: Pool) -> None:
    ranks(1, _equals_plain_training)


def _counts_steps(kind: str) -> int:
    model = {"manual": Manual, "gan": Gan}.get(kind, Net)()
    options: dict[str, Any] = {"accumulate_grad_batches": 4} if kind == "accumulating" else {}
    trainer = fit("gossip" if kind == "gossip" else "ring", model, data=rows(48 * world()), **options)
    return trainer.strategy.stats.steps


@pytest.mark.parametrize(
    ("kind", "steps"), [("", 24), ("gossip", 24), ("accumulating", 6), ("manual", 24), ("gan", 48)]
)
def test_one_process_counts_the_steps_that_several_count(ranks: Pool, kind: str, steps: int) -> None:
    assert ranks(1, _counts_steps, kind) == [steps]
    assert ranks(2, _counts_steps, kind) == [steps] * 2


def _tells_of_one_process() -> list[list[str]]:
    trainer, model = trainer_with("ring"), Net()
    heard = []
    for loop in (trainer.validate, trainer.test, trainer.fit, trainer.fit):
        trainer.fit_loop.max_epochs = 1 + trainer.current_epoch
        with listening() as lines:
            loop(model, rows())
        heard.append([line for line in lines if "nothing is averaged" in line])
    return heard


def test_one_process_is_told_how_to_get_more(ranks: Pool) -> None:
    [[validated, tested, [line], again]] = ranks(1, _tells_of_one_process)
    assert validated == tested == again == []
    assert "devices=2" in line
    assert "torchrun" in line
    assert ranks(2, _tells_of_one_process) == [[[], [], [], []]] * 2


# Manual optimization


class Manual(Net):
    """Steps at every second batch; the first backward's mean is averaged again, as under ddp."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        assert same_everywhere(self.layers[0].weight.grad)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Gan(L.LightningModule):
    """Two networks, two optimizers, toggled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noise, real = batch
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        assert same_everywhere(self.generator[0].weight.grad)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        loss = F.softplus(-self.discriminator(real)).mean()
        loss = loss + F.softplus(self.discriminator(self.generator(noise).detach())).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(self.discriminator.parameters())


def _manual() -> None:
    check_equal(fit(several_buckets(), Manual()), fit("ddp", Manual()))


def _gan() -> None:
    before = Gan().state_dict()
    ours = fit(several_buckets(), Gan())
    check_equal(ours, fit("ddp_find_unused_parameters_true", Gan()))
    assert not any(torch.equal(before[name], value) for name, value in ours.lightning_module.state_dict().items())


def test_manual_optimization_equals_ddp(ranks: Pool) -> None:
    ranks(2, _manual)


def test_a_gan_with_toggled_optimizers_equals_ddp(ranks: Pool) -> None:
    ranks(2, _gan)


class BackwardItself(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


def _backward_itself() -> str:
    with pytest.raises(RuntimeError) as caught:
        fit("ring", BackwardItself())
    return str(caught.value)


def test_a_backward_of_ones_own_is_an_error_that_names_manual_backward(ranks: Pool) -> None:
    assert all("self.manual_backward(loss)" in message for message in ranks(2, _backward_itself))


# Precision


class Overflows(Net):
    """In batch 2 the loss is infinite, on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.history.append(self.layers[0].weight.detach().clone())
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss


def _overflow(name: str) -> None:
    def scaled() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000))

    ours = fit(name, Overflows(), plugins=[scaled()], max_epochs=1)
    check_replicas(ours)
    history = ours.lightning_module.history
    assert len(history) == 6
    for step, (before, after) in enumerate(pairwise(history)):
        assert torch.equal(before, after) == (step == 2)
    assert ours.precision_plugin.scaler.get_scale() == 2.0**7
    if name == "ring":
        check_equal(ours, fit("ddp", Overflows(), plugins=[scaled()], max_epochs=1))


@pytest.mark.parametrize("name", ["ring", "ring_fp16"])
def test_an_overflow_on_one_rank_makes_every_rank_skip_the_step(ranks: Pool, name: str) -> None:
    ranks(2, _overflow, name)


# Loops other than one fit


def _evaluate() -> None:
    ours, theirs = Net(), Net()
    for loop in ("validate", "test"):
        found, expected = (
            getattr(trainer_with(name), loop)(model, rows(), verbose=False)
            for name, model in (("ring", ours), ("ddp", theirs))
        )
        assert found == expected
        assert found[0]["loss"] > 0
    trainer = trainer_with("ring")
    predictions = trainer.predict(ours, rows())
    assert predictions is not None
    mine = torch.cat([torch.as_tensor(p) for p in predictions])
    everyone = torch.cat(gathered(mine))
    assert len(mine) == 48 // world()
    assert len(everyone.unique(dim=0)) == 48
    assert isinstance(trainer.strategy, RingStrategy)
    assert trainer.strategy.stats == Stats()


def test_validate_test_and_predict_without_fit(ranks: Pool) -> None:
    ranks(2, _evaluate)


def _fit_again(name: Any) -> L.Trainer:
    model = Net()
    trainer = fit(name, model)
    trainer.validate(model, rows(), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, rows())
    assert trainer.current_epoch == 4
    return fit("ddp" if name == "ddp" else several_buckets(), model)


def _second_fit() -> None:
    check_equal(_fit_again(several_buckets()), _fit_again("ddp"))


def _choose_again() -> list[int]:
    trainer = fit("ring_auto", Net())
    first = dataclasses.replace(trainer.strategy.stats)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(trainer.lightning_module, rows())
    check_replicas(trainer)
    second = trainer.strategy.stats
    assert second.steps == 2 * first.steps
    assert first.bytes_sent < second.bytes_sent < 3 * first.bytes_sent
    return [first.probe_bytes_sent, second.probe_bytes_sent - first.probe_bytes_sent]


def test_a_second_fit_goes_by_what_the_first_measured(ranks: Pool) -> None:
    for measured, kept in ranks(2, _choose_again):
        assert 0 < kept < measured / 2
        assert measured < 100_000, "for a model of 692 bytes"


def test_a_second_fit_and_a_new_trainer_go_on_averaging(ranks: Pool) -> None:
    ranks(2, _second_fit)


class RemembersStep(L.Callback):
    step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = trainer.strategy.algorithm.state_dict()["step"]


def _resume(folder: str) -> None:
    whole = fit("ring_bf16", Net(), max_epochs=4)
    save = ModelCheckpoint(folder, filename="half", save_top_k=-1)
    half = fit("ring_bf16", Net(), max_epochs=2, callbacks=[save], enable_checkpointing=True)
    check_replicas(half)
    path = save.best_model_path
    by_hand = f"{folder}/by_hand.ckpt"
    half.save_checkpoint(by_hand)
    assert whole.global_step == 2 * half.global_step == 24
    for saved in (path, by_hand):
        state = torch.load(saved, weights_only=True)
        shared = {"step": 12, "buckets": {}, "stepped": {}}
        expected = {
            "world_size": world(),
            "algorithm": shared,
            "residual_sum": {},
            "decentralized": False,
            "files": None,
        }
        assert state["ringstrategy"] == expected
        remember = RemembersStep()
        resumed = fit("ring_bf16", Net(), max_epochs=4, ckpt_path=saved, callbacks=[remember])
        check_replicas(resumed)
        assert remember.step == 12
        assert resumed.global_step == 24
        for mine, reference in zip(
            resumed.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True
        ):
            assert torch.equal(mine, reference)


def test_a_resumed_run_equals_the_uninterrupted_one(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _resume, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"half.ckpt", "by_hand.ckpt"}


# Tuners


class Sized(Net):
    """Its batch size can be found."""

    batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return rows(batch_size=self.batch_size)

    val_dataloader = train_dataloader  # the finder asks for both


def _find_batch_size() -> list[str]:
    said = []
    for name in ("ring", "ddp"):
        with pytest.raises(ValueError, match="not supported with distributed strategies") as tuned:
            Tuner(trainer_with(name)).scale_batch_size(Sized(), max_trials=1)
        said.append(str(tuned.value))
    assert said[0] == said[1], "Lightning's, before it asks any strategy"
    with pytest.raises(ValueError, match="BatchSizeFinder") as caught:
        trainer_with("ring", callbacks=[BatchSizeFinder(max_trials=1)]).fit(Sized())
    return [str(caught.value)]


@pytest.mark.parametrize("size", [1, 2])
def test_finding_a_batch_size_is_refused_with_the_cure(ranks: Pool, size: int) -> None:
    for said in ranks(size, _find_batch_size):
        assert "Trainer(strategy='auto', devices=1)" in said[0]


def _find_alone() -> int:
    trainer = L.Trainer(strategy="auto", accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    found = Tuner(trainer).scale_batch_size(Sized(), max_trials=2, steps_per_trial=1)
    assert isinstance(found, int)
    return found


def test_a_batch_size_is_found_as_the_cure_says(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ranks(1, _find_alone) == [4]


def _find_learning_rate(algorithm: Algorithm) -> float | None:
    """What it tries changes nothing, and the next fit is one as any other."""
    model, untuned = Net(), Net()
    trainer = trainer_with(RingStrategy(algorithm))
    found = Tuner(trainer).lr_find(model, rows(400), num_training=20)
    assert found is not None
    untuned.lr = model.lr
    trainer.fit(model, rows(), rows(24))
    fit(RingStrategy(algorithm), untuned)
    for one, other in zip(model.parameters(), untuned.parameters(), strict=True):
        assert torch.equal(one, other)
        assert same_everywhere(one)
    return found.suggestion()


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), Gossip(), LocalSGD(2, Nesterov(), overlap=1)], ids=["ring", "gossip", "local_sgd"]
)
def test_a_learning_rate_is_found(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = ranks(2, _find_learning_rate, algorithm)
    assert first == second is not None


# Callbacks


def _average_weights(kind: str) -> None:
    def callback() -> L.Callback:
        if kind == "swa":
            return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        return EMAWeightAveraging(decay=0.9)

    def normed() -> Net:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        return net(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    ours = fit(several_buckets(), normed(), callbacks=[callback()], max_epochs=3)
    check_equal(ours, fit("ddp", normed(), callbacks=[callback()], max_epochs=3))


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_of_weights_equal_those_under_ddp(ranks: Pool, kind: str) -> None:
    ranks(2, _average_weights, kind)


class Finetuned(Net):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.backbone = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)


def _finetune() -> None:
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=1.0, train_bn=True)
    start = Finetuned()
    model = Finetuned()
    trainer = fit("ring", model, callbacks=[unfreeze], max_epochs=3)
    check_replicas(trainer)
    assert same_everywhere(model.backbone[0].weight)
    first = gathered(start.backbone[0].weight)[0]
    assert not torch.equal(first, model.backbone[0].weight), "the backbone never learned"


def test_a_backbone_that_unfreezes_later_is_averaged(ranks: Pool) -> None:
    ranks(2, _finetune)


class Normed(Net):
    """Checks at each forward in training that batch-norm statistics are rank 0's."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
        self.synchronized: list[bool] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        norm = self.layers[1]
        self.synchronized.append(same_everywhere(norm.running_mean) and same_everywhere(norm.num_batches_tracked))
        return super().training_step(batch, batch_idx)


def _buffers() -> None:
    for options in ({}, {"accumulate_grad_batches": 2}):
        ours = fit(several_buckets(), Normed(), **options)
        theirs = fit("ddp", Normed(), **options)
        check_equal(ours, theirs)
        assert ours.lightning_module.synchronized == theirs.lightning_module.synchronized
        assert any(ours.lightning_module.synchronized[1:])
        assert not same_everywhere(ours.lightning_module.layers[1].running_mean)
    own = fit(RingStrategy(broadcast_buffers=False), Normed())
    check_replicas(own)
    assert not any(own.lightning_module.synchronized[1:])


def test_batch_norm_statistics_are_rank_zeros_as_under_ddp(ranks: Pool) -> None:
    ranks(2, _buffers)


class BatchNormed(Net):
    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 5), kind(5), nn.Linear(5, 3)))


class Marked(nn.BatchNorm1d):
    """What a user's own layer sync puts in."""


class Marks(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        return self._swap(model, Marked)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._swap(model, nn.BatchNorm1d)

    def _swap(self, model: nn.Module, kind: type[nn.BatchNorm1d]) -> nn.Module:
        model.layers[1].__class__ = kind
        return model


def _layer_sync() -> None:
    model, marked = BatchNormed(), []

    class Watch(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            marked.append(type(model.layers[1]))

    trainer = fit("ring", model, plugins=[Marks()], callbacks=[Watch()])
    check_replicas(trainer)
    assert marked == [Marked]
    assert type(model.layers[1]) is nn.BatchNorm1d


def test_a_layer_sync_is_put_in_and_taken_out(ranks: Pool) -> None:
    ranks(2, _layer_sync)


def _sync_batch_norm() -> list[str]:
    model, said = BatchNormed(), []
    trainer = trainer_with("ring", sync_batchnorm=True)
    trainer.validate(model, rows(), verbose=False)  # nothing is synchronized there
    with pytest.raises(ValueError, match="only on GPUs") as caught:
        trainer.fit(model, rows())
    said.append(str(caught.value))
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()), "it was taken out again"
    with pytest.raises(ValueError, match="only on GPUs") as caught:
        fit("ring", BatchNormed(nn.SyncBatchNorm))
    said.append(str(caught.value))
    with pytest.raises(ValueError, match="only work with GPU"):
        fit("ddp", BatchNormed(nn.SyncBatchNorm))  # DDP refuses them too
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_sync_batch_norm_on_a_cpu_is_refused_before_training(ranks: Pool, size: int) -> None:
    for flag, own in ranks(size, _sync_batch_norm):
        assert "leave out sync_batchnorm=True" in flag
        assert "layers.1" in own
        assert "nn.BatchNorm" in own


# What changes the graph


def _layers(compiled: bool) -> Net:
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    blocks: list[Any] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    if compiled:
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    return net(*blocks, nn.Linear(6, 3))


def _ignored_by_ddp() -> None:
    """Names that a module has told torch DDP to leave alone are neither sent at the start nor averaged."""

    def told() -> Net:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        module = net(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        module._ddp_params_and_buffers_to_ignore = ["layers.0.weight", "layers.1.running_mean"]
        return module

    ours, theirs = fit("ring", told()), fit("ddp", told())
    mine, reference = ours.lightning_module.state_dict(), theirs.lightning_module.state_dict()
    for name in ("layers.0.weight", "layers.1.running_mean"):
        assert not same_everywhere(mine[name])
        assert not same_everywhere(reference[name])
    assert same_everywhere(mine["layers.2.weight"])
    assert torch.equal(mine["layers.2.weight"], reference["layers.2.weight"])


def test_what_ddp_is_told_to_ignore_is_left_alone(ranks: Pool) -> None:
    ranks(2, _ignored_by_ddp)


def _local_and_clipped() -> None:
    module = net(nn.Linear(6, 3))
    module.layers[0].bias.ring_local = True
    with pytest.raises(ValueError, match=r"layers\.0\.bias"):
        fit("ring", module, gradient_clip_val=1.0)
    fit("ring", module, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert same_everywhere(module.layers[0].weight)
    assert not same_everywhere(module.layers[0].bias)


def test_local_parameters_refuse_clipping_by_norm(ranks: Pool) -> None:
    ranks(2, _local_and_clipped)


def _compile() -> None:
    plain = fit(several_buckets(), _layers(False), max_epochs=1)
    blocks = fit(several_buckets(), _layers(True), max_epochs=1)
    whole = fit(several_buckets(), torch.compile(_layers(False), backend="aot_eager"), max_epochs=1)
    for trainer in (blocks, whole):
        check_replicas(trainer)
        for mine, reference in zip(
            trainer.lightning_module.parameters(), plain.lightning_module.parameters(), strict=True
        ):
            assert torch.allclose(mine, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_and_a_compiled_module(ranks: Pool) -> None:
    ranks(2, _compile, limit=100)


class Checkpointed(Net):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers[0](x).tanh()
        return checkpoint(self.layers[2], inner, use_reentrant=self.use_reentrant)


def _activation_checkpointing() -> None:
    plain = fit(several_buckets(), Net())
    for use_reentrant in (True, False):
        trainer = fit(several_buckets(), Checkpointed(use_reentrant))
        check_replicas(trainer)
        for mine, reference in zip(
            trainer.lightning_module.parameters(), plain.lightning_module.parameters(), strict=True
        ):
            assert torch.equal(mine, reference)


def test_activation_checkpointing_of_both_kinds_changes_nothing(ranks: Pool) -> None:
    ranks(2, _activation_checkpointing)


class Sparse(Net):
    """Looks up rows of an embedding: other ones on each rank."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        super().__init__(nn.Sequential(nn.Embedding(97, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3)))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self((batch[0] * 1e4).long() % 97), batch[1])

    def on_after_backward(self) -> None:
        assert self.layers[0].weight.grad.is_sparse

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _sparse() -> None:
    check_equal(fit("ring", Sparse()), fit("ddp", Sparse()))


def test_sparse_embeddings_equal_ddp(ranks: Pool) -> None:
    ranks(2, _sparse)


# Statistics


def _monitor(folder: str) -> None:
    logger = CSVLogger(folder, name="", version="")
    trainer = fit("ring", Net(), logger=logger, callbacks=[CommunicationMonitor()], log_every_n_steps=1)
    check_replicas(trainer)
    with pytest.raises(ValueError, match="strategy='ring'"):
        fit("ddp", Net(), callbacks=[CommunicationMonitor()])


def test_the_monitor_logs_and_refuses_other_strategies(ranks: Pool, tmp_path: Path) -> None:
    ranks(2, _monitor, str(tmp_path))
    with open(tmp_path / "metrics.csv") as file:
        logged = list(csv.DictReader(file))
    assert len(logged) == 12
    assert [int(row["step"]) for row in logged] == list(range(12))
    for row in logged:
        for key in ("bytes_sent", "exposed_ms", "communication_ms"):
            assert float(row[f"communication/{key}"]) > 0, key


# Launchers


LAUNCHED = """
import json
import torch.distributed as dist
from test_strategy import Net, check_replicas, fit

trainer = fit("ring", Net(), **OPTIONS)
check_replicas(trainer)
environment = type(trainer.strategy.cluster_environment).__name__
record = [trainer.global_rank, trainer.node_rank, trainer.local_rank, trainer.world_size, environment]
open(f"rank{trainer.global_rank}.json", "w").write(json.dumps(record))
dist.barrier()  # gloo's threads may abort a process that ends right after a collective, if nobody disconnects
"""


def records(folder: Path) -> list[list[Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = run_script(tmp_path, LAUNCHED.replace("OPTIONS", "dict(devices=2)"), *torchrun)
    assert done.returncode == 0, done.stderr
    assert records(tmp_path) == [[0, 0, 0, 2, "TorchElasticEnvironment"], [1, 0, 1, 2, "TorchElasticEnvironment"]]


LEAVING = """
import atexit, json
import torch.distributed as dist
from test_strategy import Net, fit

atexit.register(lambda: print(json.dumps({"connected": dist.is_initialized()})))  # runs after what is registered later

class Failing(Net):
    def training_step(self, *args):
        raise ValueError("no")

for kind in KINDS:
    try:
        fit("ring", kind(), devices=1)
    except ValueError:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "connected"), [("Net", False), ("Net, Failing", True), ("Failing, Net", False)])
def test_a_process_disconnects_at_exit_unless_its_last_fit_failed(kinds: str, connected: bool, tmp_path: Path) -> None:
    done = run_script(tmp_path, LEAVING.replace("KINDS", f"({kinds},)"))
    assert said(done.stdout) == [{"connected": connected}], done.stderr


@pytest.mark.slow
def test_two_nodes_each_a_network_namespace_where_the_machine_allows_it(tmp_path: Path) -> None:
    """One command a host; the popen launcher starts the second process there."""
    from benchmarks import lab  # not above: scripts that import this module from another folder do not find it

    script = tmp_path / "script.py"
    text = LAUNCHED.replace("OPTIONS", "dict(devices=2, num_nodes=2)")
    script.write_text(f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(HERE)!r})\n{text}")
    command = ["env", "-u", "LOCAL_RANK", "-u", "RANK", "-u", "WORLD_SIZE", sys.executable, str(script)]
    with lab.Lab(2, lab.LOOPBACK if lab.missing() else lab.UNTHROTTLED) as net:
        for node in range(2):
            net.popen(node, command, {"OMP_NUM_THREADS": "1"})
        assert net.wait(grace=10) == [0, 0]
    assert [record[:4] for record in records(tmp_path)] == [[0, 0, 0, 4], [1, 0, 1, 4], [2, 1, 0, 4], [3, 1, 1, 4]]


def _slurm() -> None:
    rank, size = os.environ.pop("LOCAL_RANK"), os.environ.pop("WORLD_SIZE")
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": size,
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": size,
        "SLURM_PROCID": rank,
        "SLURM_NODEID": rank,
        "SLURM_LOCALID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    for name in ("RANK", "NODE_RANK", "MASTER_ADDR"):
        os.environ.pop(name)
    os.environ.update(variables)
    try:
        trainer = fit("ring", Net(), devices=1, num_nodes=int(size))
        assert isinstance(trainer.strategy, RingStrategy)
        assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
        assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (int(rank), 0, int(rank))
        check_replicas(trainer)
    finally:
        for name in variables:
            os.environ.pop(name, None)


def test_slurm_variables_lead_to_ranks(ranks: Pool) -> None:
    ranks(3, _slurm)


def _cli() -> None:
    prefix = "--trainer.strategy"
    algorithm = f"{prefix}.init_args.algorithm"
    cli = LightningCLI(
        Net,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=[
            f"{prefix}=ringstrategy.RingStrategy",
            f"{prefix}.init_args.broadcast_buffers=false",
            f"{algorithm}=ringstrategy.AllReduce",
            f"{algorithm}.init_args.bucket_mb=0.5",
            f"{algorithm}.init_args.codec=ringstrategy.Cast",
            f"{algorithm}.init_args.codec.init_args.dtype=torch.bfloat16",
            "--trainer.accelerator=cpu",
            f"--trainer.devices={world()}",
            "--trainer.max_epochs=1",
            "--trainer.logger=false",
            "--trainer.barebones=true",
        ],
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, RingStrategy)
    assert repr(strategy.algorithm) == repr(AllReduce(Cast("bfloat16"), bucket_mb=0.5))
    assert not strategy._broadcast_buffers
    cli.trainer.fit(cli.model, rows())
    check_replicas(cli.trainer)


def test_lightning_cli_builds_the_strategy_from_class_paths(ranks: Pool) -> None:
    ranks(2, _cli)


# The end


def _leaves_nothing() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    threads, processes = set(threading.enumerate()), children()
    trainer = trainer_with("ring")
    model = Net()
    during = CountsThreads()
    trainer.callbacks.append(during)
    trainer.fit(model, rows())
    check_replicas(trainer)
    assert during.names == {"ringstrategy-communication", "ringstrategy-watch"}
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert set(threading.enumerate()) == threads
    assert children() == processes
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    trainer.strategy.teardown()  # again
    model.loss(next(iter(rows()))).backward()  # the model is the user's own again


class CountsThreads(L.Callback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_start(self, *_: Any) -> None:
        self.names = {thread.name for thread in threading.enumerate() if thread.name.startswith("ringstrategy")}


def test_teardown_leaves_no_thread_no_hook_and_no_child(ranks: Pool) -> None:
    ranks(2, _leaves_nothing)


# These tests can fail


def _never_communicates(check: Callable[[], None]) -> None:
    honest = BySize.sum_
    BySize.sum_ = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    try:
        with pytest.raises(AssertionError):
            check()
    finally:
        BySize.sum_ = honest  # type: ignore[method-assign]


@pytest.mark.parametrize("check", [_train_by_names, _hooks_see_means, _manual, _gan, _second_fit, _slurm])
def test_a_strategy_that_never_communicates_is_found_out(ranks: Pool, check: Callable[[], None]) -> None:
    ranks(2, _never_communicates, check)


def test_the_package_under_test_is_the_checkout() -> None:
    assert Path(ringstrategy.__file__).parent == HERE.parent / "ringstrategy"

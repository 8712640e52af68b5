"""Local SGD with what users of a Trainer do: between agreements each rank trains as one process with its data would."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from pool import Pool
from test_strategy import Net, same_everywhere, trainer_with
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from ringstrategy import LocalSGD, RingStrategy

INTERVAL, EPOCHS = 3, 3  # an agreement at the end of each epoch


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)


class Unused(Adam):
    """A layer that no forward uses, and one that only rank 0's does."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found if dist.get_rank() else found + self.sometimes(x)


class TwoOptimizers(Net):
    """Which it steps itself, after one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.layers[0].parameters(), 0.02), torch.optim.SGD(self.layers[2].parameters(), 0.1)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


def _compiled() -> Any:
    return torch.compile(Adam(), backend="aot_eager")


def _scaled() -> dict[str, Any]:
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))}


HABITS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "none": (Adam, dict),
    "accumulation": (Adam, lambda: {"accumulate_grad_batches": 2}),
    "clipping by norm": (Adam, lambda: {"gradient_clip_val": 0.3}),
    "clipping by value": (Adam, lambda: {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "bf16": (Adam, lambda: {"precision": "bf16-mixed"}),
    "fp16 with a scaler": (Adam, _scaled),
    "compiled": (_compiled, dict),
    "unused parameters": (Unused, dict),
    "two optimizers": (TwoOptimizers, dict),
}


class Means(Callback):
    """What agreements of fp32 do, in a process whose Trainer knows of no other."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = parameters_to_vector(pl_module.parameters()).detach()
        dist.all_reduce(values)
        vector_to_parameters(values / dist.get_world_size(), pl_module.parameters())


def _rows(steps: int) -> DataLoader[Any]:
    """Of an epoch; others on each rank."""
    inputs = torch.randn(4 * steps, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].sin() + 1 + dist.get_rank()), batch_size=4)


def _habit(habit: str) -> tuple[float, float, bool, int]:
    make, options = HABITS[habit]
    ours, alone = make(), make()
    start = parameters_to_vector(alone.parameters()).detach()
    dist.broadcast(start, 0)
    vector_to_parameters(start.clone(), alone.parameters())
    batches = INTERVAL * options().get("accumulate_grad_batches", 1)
    trainers = [
        trainer_with(strategy, devices=devices, max_epochs=EPOCHS, use_distributed_sampler=False, **more, **options())
        for strategy, devices, more in (
            (RingStrategy(LocalSGD(INTERVAL)), dist.get_world_size(), {}),
            ("auto", 1, {"callbacks": [Means()]}),
        )
    ]
    for trainer, model in zip(trainers, (ours, alone), strict=True):
        trainer.fit(model, _rows(batches))
    ends = [parameters_to_vector(model.parameters()).detach() for model in (ours, alone)]
    assert isinstance(trainers[0].strategy, RingStrategy)
    difference = (ends[0] - ends[1]).abs().max()
    return float(difference), float((ends[1] - start).abs().max()), same_everywhere(ends[0]), trainers[0].global_step


def _habits(habits: list[str]) -> dict[str, tuple[float, float, bool, int]]:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    found = {habit: _habit(habit) for habit in habits}
    dist.barrier()
    return found


@pytest.mark.parametrize(
    "habits", [[habit for habit in HABITS if habit != "compiled"], pytest.param(["compiled"], marks=pytest.mark.slow)]
)
def test_ranks_train_as_single_processes_do_that_take_their_mean_at_times(ranks: Pool, habits: list[str]) -> None:
    for every_habit in ranks(3, _habits, habits):
        assert list(every_habit) == habits
        for habit, (difference, way, same, steps) in every_habit.items():
            assert difference < 1e-6, habit
            assert way > 0.01, habit
            assert same, habit
            assert steps == INTERVAL * EPOCHS * (2 if habit == "two optimizers" else 1), habit

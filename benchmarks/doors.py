"""One training step through each door: Fabric, Horovod's shape, torch DDP, FSDP2, beside what the Trainer drives.

python -m benchmarks doors --hosts 4 --rate 100mbit --rounds 5 --out outputs/doors.jsonl

"session" is what `Trainer(strategy=...)` drives. FSDP2 also gathers the parameters, exactly, so its bytes are more.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringstrategy
import ringstrategy.horovod as hvd
from benchmarks import harness, tasks
from benchmarks.contenders import DDP, Ours, TorchDDP, Training, flat
from benchmarks.tasks import Batches
from ringstrategy import AllReduce, BlockInt, Stats
from ringstrategy.names import STRATEGIES

CODED = "ring_int8"


class _Door(Training):
    """What another door wraps around the model."""

    def __init__(self, model: nn.Module, batches: Batches, stats: Stats | None, **how: Any) -> None:
        super().__init__(model, batches, **how)
        self._stats = stats

    def bytes_sent(self) -> int | None:
        return None if self._stats is None else self._stats.bytes_sent

    def result(self) -> list[Tensor]:
        whole = (getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in self.model.parameters())
        return [tensor.detach().clone() for tensor in whole]


class _Closing(_Door):
    """It ends what it began."""

    def __init__(self, model: nn.Module, batches: Batches, state: Any, **how: Any) -> None:
        super().__init__(model, batches, state.stats, **how)
        self._state = state

    def close(self) -> None:
        self._state.close()


def _algorithm() -> AllReduce:
    algorithm = STRATEGIES[CODED]()
    assert isinstance(algorithm, AllReduce)
    return algorithm


def _group(model: nn.Module, batches: Batches, **how: Any) -> Training:
    group = dist.new_group(backend=CODED)
    return _Door(DistributedDataParallel(model, process_group=group), batches, group.stats, **how)


def _hook(model: nn.Module, batches: Batches, **how: Any) -> Training:
    wrapped = DistributedDataParallel(model)
    state, hook = ringstrategy.ddp_hook(_algorithm().codec, module=wrapped)
    wrapped.register_comm_hook(state, hook)
    return _Closing(wrapped, batches, state, **how)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for part in (*model.children(), model):
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return model


def _fsdp_exact(model: nn.Module, batches: Batches, **how: Any) -> Training:
    return _Door(_shard(model, DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")), batches, None, **how)


def _fsdp_group(model: nn.Module, batches: Batches, **how: Any) -> Training:
    group = dist.new_group(backend=CODED)
    return _Door(_shard(model, DeviceMesh.from_group(group, "cpu")), batches, group.stats, **how)


def _fsdp_residuals(model: nn.Module, batches: Batches, **how: Any) -> Training:
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    residuals = ringstrategy.fsdp(_shard(model, mesh), BlockInt(8))
    return _Closing(model, batches, residuals, **how)


class _Horovod(_Door):
    """Horovod's optimizer."""

    def __init__(self, model: nn.Module, batches: Batches, **how: Any) -> None:
        super().__init__(model, batches, None, **how)
        hvd.init(timeout=harness.TIMEOUT)
        named = model.named_parameters()
        self.optimizer: Any = hvd.DistributedOptimizer(self.optimizer, named, compression=hvd.Compression.int8)
        self._stats = self.optimizer.session.stats

    def close(self) -> None:
        hvd.shutdown()


class _Fabric(_Door):
    """Fabric calls the backward."""

    def __init__(self, model: nn.Module, batches: Batches, **how: Any) -> None:
        super().__init__(model, batches, None, **how)
        size = dist.get_world_size()
        strategy = ringstrategy.RingFabricStrategy(_algorithm())
        self._fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[TorchElasticEnvironment()])
        self._fabric.launch()
        self.model, self.optimizer = self._fabric.setup(model, self.optimizer)
        self._strategy = strategy

    def bytes_sent(self) -> int | None:
        return self._strategy.stats.bytes_sent

    def run(self) -> None:
        for inputs, targets in self.batches:
            self._fabric.backward(self.loss(self.model(inputs), targets))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        self._strategy.teardown()


def _session(model: nn.Module, batches: Batches, **how: Any) -> Training:
    return Ours(model, batches, _algorithm(), **how)


DOORS: dict[str, Callable[..., Training]] = {
    DDP: TorchDDP,
    f"session {CODED}": _session,
    f"fabric {CODED}": _Fabric,
    f"horovod {CODED}": _Horovod,
    f"ddp in a group of {CODED}": _group,
    f"ddp with a hook of {CODED}": _hook,
    "fsdp2": _fsdp_exact,
    f"fsdp2 in a group of {CODED}": _fsdp_group,
    f"fsdp2 with residuals of {CODED}": _fsdp_residuals,
}


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    task = tasks.asked(options)
    initial, batches = task.model(0), task.batches(options.steps, 0)
    names = [DDP, *harness.chosen([name for name in DOORS if name != DDP], options.cases)]
    trainings = {name: DOORS[name](copy.deepcopy(initial), batches, loss=task.loss) for name in names}
    cases = []
    for name, training in trainings.items():
        training.take(options.steps)
        cases.append(training.case(name))
    harness.interleave(cases, options.rounds, options.warmup)
    start = flat(initial.parameters())
    truth = flat(cases[0].result()) - start
    for case in cases:
        result = case.result()
        case.identical = harness.identical_on_all_ranks(result)
        case.error = harness.max_over_ranks(harness.relative_error(flat(result) - start, truth))
    for training in trainings.values():
        training.close()
    if dist.get_rank() == 0:
        by_name = {case.name: case for case in cases}
        base = by_name.get(f"session {CODED}")
        notes = [
            f"{name}: {case.median / base.median:.3f} of the session's time"
            for name, case in by_name.items()
            if base is not None and CODED in name and case is not base
        ]
        harness.report("doors", task.described(initial), cases, options, notes)


def main(given: Sequence[str]) -> None:
    """The command."""
    # two rounds of warm-up: torch DDP lays its buckets out anew after the first step
    parser = harness.over_hosts("doors", __doc__, warmup=2)
    tasks.add_options(parser, steps=1)
    harness.run(parser, given, worker)

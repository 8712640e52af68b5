"""The other doors to `ring_int8`: Fabric, Horovod's shape, torch DDP, FSDP2. Cases of `training`, on demand.

FSDP2 also gathers the parameters, exactly, so its bytes are more.
"""

from __future__ import annotations

from collections.abc import Callable
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
from benchmarks import harness
from benchmarks.contenders import Training
from benchmarks.tasks import Batches
from ringstrategy import BlockInt

_NAME, _CODEC = "ring_int8", BlockInt(8)


class _Door(Training):
    """What another door wraps around the model; it ends what it began."""

    def __init__(self, model: nn.Module, batches: Batches, of: Any, **how: Any) -> None:
        super().__init__(model, batches, **how)
        self._of = of  # what has `stats`, and perhaps must be closed

    def must_send(self, hosts: int) -> float | None:
        return None

    def bytes_sent(self) -> int | None:
        return None if self._of is None else self._of.stats.bytes_sent

    def result(self) -> list[Tensor]:
        whole = (getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in self.model.parameters())
        return [tensor.detach().clone() for tensor in whole]

    def close(self) -> None:
        getattr(self._of, "close", lambda: None)()


def _group(model: nn.Module, batches: Batches, **how: Any) -> Training:
    group = dist.new_group(backend=_NAME)
    return _Door(DistributedDataParallel(model, process_group=group), batches, group, **how)


def _hook(model: nn.Module, batches: Batches, **how: Any) -> Training:
    wrapped = DistributedDataParallel(model)
    state, hook = ringstrategy.ddp_hook(_CODEC, module=wrapped)
    wrapped.register_comm_hook(state, hook)
    return _Door(wrapped, batches, state, **how)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for part in (*model.children(), model):
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return model


def _fsdp_exact(model: nn.Module, batches: Batches, **how: Any) -> Training:
    return _Door(_shard(model, DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")), batches, None, **how)


def _fsdp_group(model: nn.Module, batches: Batches, **how: Any) -> Training:
    group = dist.new_group(backend=_NAME)
    return _Door(_shard(model, DeviceMesh.from_group(group, "cpu")), batches, group, **how)


def _fsdp_residuals(model: nn.Module, batches: Batches, **how: Any) -> Training:
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    residuals = ringstrategy.fsdp(_shard(model, mesh), _CODEC)
    return _Door(model, batches, residuals, **how)


class _Horovod(_Door):
    """Horovod's optimizer."""

    def __init__(self, model: nn.Module, batches: Batches, **how: Any) -> None:
        super().__init__(model, batches, None, **how)
        hvd.init(timeout=harness.TIMEOUT)
        named = model.named_parameters()
        self.optimizer: Any = hvd.DistributedOptimizer(self.optimizer, named, compression=hvd.Compression.int8)
        self._of = self.optimizer.session

    def close(self) -> None:
        hvd.shutdown()


class _Fabric(_Door):
    """Fabric calls the backward."""

    def __init__(self, model: nn.Module, batches: Batches, **how: Any) -> None:
        super().__init__(model, batches, None, **how)
        size = dist.get_world_size()
        strategy = ringstrategy.RingFabricStrategy(ringstrategy.AllReduce(_CODEC))
        self._fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[TorchElasticEnvironment()])
        self._fabric.launch()
        self.model, self.optimizer = self._fabric.setup(model, self.optimizer)
        self._of = strategy

    def run(self) -> None:
        for inputs, targets in self.batches:
            self._fabric.backward(self.loss(self.model(inputs), targets))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        self._of.teardown()


DOORS: dict[str, Callable[..., Training]] = {
    "fabric": _Fabric,
    "horovod": _Horovod,
    "process group": _group,
    "comm hook": _hook,
    "fsdp2": _fsdp_exact,
    "fsdp2 group": _fsdp_group,
    "fsdp2 residuals": _fsdp_residuals,
}

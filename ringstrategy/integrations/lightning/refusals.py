"""What `RingStrategy` refuses, each with the cure: arguments, devices, and what of Lightning cannot work with it."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ringstrategy.algorithms.base import Algorithm, check_counts_steps
from ringstrategy.algorithms.gradients.allreduce import AllReduce
from ringstrategy.integrations.lightning.looks import callbacks
from ringstrategy.integrations.lightning.package import Package
from ringstrategy.integrations.lightning.register import START_METHODS

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_FROM_DDP = {
    "ddp_comm_hook": "here a codec does that, {name}(AllReduce(codec=...))",
    "ddp_comm_state": "here a codec does that, {name}(AllReduce(codec=...))",
    "ddp_comm_wrapper": "here a codec does that, {name}(AllReduce(codec=...))",
    "bucket_cap_mb": "here it is {name}(AllReduce(bucket_mb=...))",
    "gradient_as_bucket_view": "leave it out, gradients always are views of the buckets",
    "static_graph": "leave it out, nothing here depends on the graph",
    "model_averaging_period": "here it is {name}(LocalSGD(interval=...))",
}

_UNWRAPPED = {  # what only a module that torch DDP wraps has
    "no_sync": "accumulate under trainer.strategy.block_backward_sync() instead",
    "module": "leave out .module",
}


def algorithm_of(given: Algorithm | str | None) -> Algorithm:
    """A copy of it, or that of its name; None: exact all-reduce. TypeError or ValueError with the cure."""
    if isinstance(given, str):
        from ringstrategy.names import STRATEGIES, named  # which imports all algorithms

        for suffix, method in START_METHODS.items():
            plain = given.removesuffix(suffix)
            if plain != given and plain in STRATEGIES:
                raise ValueError(f"{given!r} is a Trainer's name: pass {plain!r}, and start_method={method!r}")
        given = named(given)
    if given is None:
        return AllReduce()
    if not isinstance(given, Algorithm):
        raise TypeError(
            f"algorithm is an Algorithm such as ringstrategy.AllReduce(), or a name, got {given!r}; a codec or a "
            "collective goes into it: AllReduce(codec=..., collective=...)"
        )
    return copy.deepcopy(given)


def check_arguments(timeout: object, broadcast_buffers: object) -> None:
    """TypeError or ValueError with the cure."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta such as timedelta(seconds=60), got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    if not isinstance(broadcast_buffers, bool):
        raise TypeError(f"broadcast_buffers is True or False, got {broadcast_buffers!r}")


def check_on_peer_loss(on_peer_loss: object, backend: str | None, start_method: str, algorithm: Algorithm) -> None:
    """ValueError for what cannot go on after a loss."""
    if on_peer_loss not in ("raise", "shrink", "wait"):
        raise ValueError(f"on_peer_loss is 'raise', 'shrink' or 'wait', got {on_peer_loss!r}")
    if on_peer_loss == "raise":
        return
    if backend == "nccl":
        raise ValueError(
            f"on_peer_loss={on_peer_loss!r} works over gloo, and over NCCL nobody has tried it: pass "
            "process_group_backend='gloo', which works for GPUs too, or on_peer_loss='raise'"
        )
    if start_method != "popen":
        raise ValueError(
            f"on_peer_loss={on_peer_loss!r} needs processes that outlive each other, and those that Lightning starts "
            f"with {start_method!r} end together: use start_method='popen', torchrun or Slurm, or on_peer_loss='raise'"
        )
    if algorithm.uneven == "join":
        raise ValueError(
            f"on_peer_loss={on_peer_loss!r} gives all ranks as many batches, and does not work "
            "with uneven='join': use uneven='error', or on_peer_loss='raise'"
        )
    if not algorithm.regroups:
        raise ValueError(
            f"on_peer_loss={on_peer_loss!r} goes on with what the other ranks have, and {type(algorithm).__name__} has "
            "a part of the optimizer's state on a single rank: use on_peer_loss='raise', and resume from a checkpoint"
        )
    if getattr(algorithm, "within_host", False):
        raise ValueError(
            f"on_peer_loss={on_peer_loss!r} lets ranks of a host go on with different parameters, and within_host=True "
            "needs the same: use within_host=False, or on_peer_loss='raise'"
        )


def check_for_fabric(algorithm: Algorithm) -> None:
    """ValueError for what needs a loop that knows its epochs and its last batch: Fabric's is the user's."""
    if algorithm.uneven == "join":
        raise ValueError(
            "uneven='join' needs to see each batch before the loop does, and Fabric's loop is yours: leave uneven at "
            "'error' and give all ranks the same number of batches, as the sampler of fabric.setup_dataloaders does, "
            "or train with a Trainer or a plain Session (docs/integrations.md#plain-torch-loop), which join"
        )
    check_counts_steps(algorithm, "Fabric's loop")


def unknown_arguments(unknown: Iterable[str], strategy: type) -> str:
    """What to write instead of arguments that this class of strategies does not take."""
    init: Callable[..., None] = strategy.__init__  # type: ignore[misc]
    own = [name for name in inspect.signature(init).parameters if name not in ("self", "unknown")]
    inner = [name for name in inspect.signature(AllReduce.__init__).parameters if name != "self"]
    hints = []
    for name in unknown:
        if name in inner:
            hints.append(f"{name!r} belongs to the algorithm: {strategy.__name__}(AllReduce({name}=...))")
        elif name in _FROM_DDP:
            hints.append(f"{name!r} is torch DDP's: {_FROM_DDP[name].format(name=strategy.__name__)}")
        else:
            close = difflib.get_close_matches(name, own, 1)
            hints.append(f"{name!r} is unknown" + (f", did you mean {close[0]!r}?" if close else ""))
    return f"{strategy.__name__}: {'; '.join(hints)}. It takes {', '.join(own)}"


def check_device(device: torch.device) -> None:
    """ValueError unless the package runs on it."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"ringstrategy runs on CPUs and CUDA GPUs, not on {device.type}: pass accelerator='cpu'")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError(
            "on GPUs ringstrategy needs triton, which torch's CUDA builds bring along, and it is not installed "
            "here: python -m pip install triton"
        )


def check_callbacks(trainer: Trainer, package: Package) -> None:
    """ValueError for a tuner that changes the batch size while several processes train."""
    if any(isinstance(callback, package.BatchSizeFinder) for callback in callbacks(trainer)):
        raise ValueError(
            "BatchSizeFinder works with one process and without a strategy for several: find the size in a run of "
            "its own with Trainer(strategy='auto', devices=1), and train with that size for each process"
        )


def check_module(module: Module, device: torch.device, layer_sync: object) -> None:
    """ValueError for synchronized batch norm on a CPU, where the first forward in training would fail."""
    names = [name for name, part in module.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    if names and device.type == "cpu":
        cure = "leave out sync_batchnorm=True" if layer_sync else "use nn.BatchNorm1d, 2d or 3d in their place"
        raise ValueError(
            f"SyncBatchNorm works only on GPUs, and here {names[0]} ({len(names)} in all) would train on a CPU: "
            f"{cure}, then each process takes the statistics of its own batches; or use a norm without any, such "
            "as nn.GroupNorm"
        )


def check_weight_averages(module: LightningModule, algorithm: Algorithm, package: Package) -> None:
    """ValueError for a callback that puts other weights into the model while others need those that are there."""
    if getattr(algorithm, "shares_memory", False):
        swapping = [each for each in callbacks(module.trainer) if isinstance(each, package.WeightAveraging)]
        if swapping:
            raise ValueError(
                f"{type(swapping[0]).__name__} exchanges the weights on each rank, and with "
                f"{type(algorithm).__name__} all ranks have the same ones in memory: use a strategy such as 'ring'"
            )
    normed = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())
    averages = any(isinstance(each, package.StochasticWeightAveraging) for each in callbacks(module.trainer))
    if normed and averages and getattr(algorithm, "overlap", False):
        raise ValueError(
            "StochasticWeightAveraging runs one more epoch with the averaged weights for batch norm, and an exchange "
            f"under way would be added to them: use {type(algorithm).__name__}(overlap=False)"
        )


def check_optimizers(optimizers: Iterable[Optimizer], world_size: int) -> None:
    """ValueError for LBFGS on several ranks."""
    if world_size > 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS decides from each rank's own loss how often to evaluate, so ranks would wait for each other "
            "for ever: use another optimizer, or devices=1"
        )


def add_cure(exception: BaseException, module: object) -> None:
    """To an AttributeError of a module that is used as if torch DDP wrapped it."""
    for name, cure in _UNWRAPPED.items():
        said = f"'{type(module).__name__}' object has no attribute '{name}'"
        if isinstance(exception, AttributeError) and str(exception) == said:
            exception.args = (f"{said}: RingStrategy does not wrap the module as torch DDP does, so {cure}",)

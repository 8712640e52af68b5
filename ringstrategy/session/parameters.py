"""What of a module travels."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module, Parameter

from ringstrategy.algorithms.memory import apart


def shared_parameters(module: Module) -> dict[str, Parameter]:
    """The parameters by name, except those that the module tells torch DDP to ignore."""
    ignored = _ignored(module)
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def shared_buffers(module: Module) -> list[Tensor]:
    """Likewise."""
    ignored = _ignored(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def buffers_apart(module: Module) -> list[Tensor]:
    """Those that lie in no parameter's memory, nor in that of another buffer: what may be averaged beside them."""
    return apart(shared_buffers(module), [*shared_parameters(module).values()])


def _ignored(module: Module) -> set[str]:
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def sparse_parameters(module: Module) -> frozenset[str]:
    """Names of the parameters whose gradients are sparse: weights of modules with `sparse=True`, such as Embedding."""
    weights: set[Parameter] = {
        parameter
        for part in module.modules()
        if getattr(part, "sparse", False) is True
        for parameter in part.parameters(recurse=False)
    }
    return frozenset(name for name, parameter in module.named_parameters() if parameter in weights)

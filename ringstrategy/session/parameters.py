"""What of a module travels, and when it has got more of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ringstrategy.algorithms.memory import apart, check_memory, check_width
from ringstrategy.kernels.sample import sample
from ringstrategy.transport.backend import backend_of


def shared_parameters(module: Module) -> dict[str, Parameter]:
    """The parameters by name, except those that the module tells torch DDP to ignore."""
    ignored = _ignored(module)
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def shared_buffers(module: Module) -> list[Tensor]:
    """Likewise."""
    ignored = _ignored(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def check_tensors(module: Module) -> None:
    """ValueError that names a parameter or a buffer that cannot be exchanged, and the cure."""
    ignored = _ignored(module)
    buffers = {f"buffer {name}": buffer for name, buffer in module.named_buffers() if name not in ignored}
    parameters = {f"parameter {name}": parameter for name, parameter in shared_parameters(module).items()}
    for what, tensor in (parameters | buffers).items():
        if is_lazy(tensor):
            continue
        check_memory(what, tensor)
        if tensor.requires_grad or backend_of(tensor.device.type) == "gloo":
            check_width(what, tensor)


def averaged_buffers(module: Module) -> list[Tensor]:
    """The statistics of batches: floating-point buffers that have the names of batch norm's."""
    return [buffer for name, buffer in _buffers_apart(module) if _has_statistics(name, buffer)]


def copied_buffers(module: Module) -> list[Tensor]:
    """All other buffers, such as masks, scales and counters, of which a mean would be none."""
    return [buffer for name, buffer in _buffers_apart(module) if not _has_statistics(name, buffer)]


def _has_statistics(name: str, buffer: Tensor) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var") and buffer.is_floating_point()


def _buffers_apart(module: Module) -> list[tuple[str, Tensor]]:
    """Those that lie in no parameter's memory, which has their values already, nor in that of another buffer."""
    ignored = _ignored(module)
    named = [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]
    there = {id(each) for each in apart([buffer for _, buffer in named], [*shared_parameters(module).values()])}
    return [(name, buffer) for name, buffer in named if id(buffer) in there]


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


def glance(module: Module, *, buffers: bool = True) -> list[Tensor]:
    """A few values of each parameter, and then of each buffer, to detect later whether they were replaced."""
    seen = (*shared_parameters(module).values(), *(shared_buffers(module) if buffers else ()))
    return [sample(tensor.detach()) for tensor in seen]


class NewParts:
    """Between its birth and `close`, of all modules of this process.

    Attributes:
        any: is there something new since `any_since` was last asked?
    """

    def __init__(self) -> None:
        self.any = True  # the model may have got some between set-up and now
        self._hooks = [
            register_module_parameter_registration_hook(self._notice),
            register_module_module_registration_hook(self._notice),
        ]

    def _notice(self, *_: Any) -> None:
        self.any = True

    def any_since(self) -> bool:
        """Since this was last asked."""
        found, self.any = self.any, False
        return found

    def close(self) -> None:
        """Look away."""
        for hook in self._hooks:
            hook.remove()

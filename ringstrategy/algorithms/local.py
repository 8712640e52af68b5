"""Parameters that stay each rank's own: never averaged, by mark or by choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

Local = Callable[[str, Parameter], bool]


def check_local(local: Local | None) -> None:
    """Raise a TypeError unless it can be asked."""
    if local is not None and not callable(local):
        raise TypeError(f"local is a function (name, parameter) -> bool, got {local!r}")


def split(parameters: Mapping[str, Parameter], local: Local | None) -> tuple[dict[str, Parameter], list[str]]:
    """The parameters to be averaged, and the names of the local ones."""
    shared, names = {}, []
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run one forward pass before training starts")
        if getattr(parameter, "ring_local", False) or (local is not None and local(name, parameter)):
            names.append(name)
        else:
            shared[name] = parameter
    return shared, names

"""What optimizers step, and what of them must be the same on all ranks where replicas are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_EXCHANGING = {  # of torch, and of apex
    "ZeroRedundancyOptimizer",
    "PostLocalSGDOptimizer",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
}


def stepped_by(optimizer: Optimizer) -> set[Parameter]:
    """Its parameters."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def check_registered(optimizers: Sequence[Optimizer], registered: Collection[Parameter]) -> None:
    """ValueError if one steps a parameter that is none of these, which nobody would average."""
    for place, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                stays = not parameter.requires_grad or getattr(parameter, "ring_local", False)
                if not stays and parameter not in registered:
                    raise ValueError(
                        f"optimizer {place}, a {type(optimizer).__name__}, steps in group {i} a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the module, so it would be averaged nowhere, and "
                        "replicas would drift apart: register it in the module that is trained (self.temperature = "
                        "nn.Parameter(...), or make the loss that has it a submodule); with Fabric set up all models "
                        "before the optimizer. If each rank is to have its own, set parameter.ring_local = True"
                    )


def check_alone(optimizers: Sequence[Optimizer]) -> None:
    """ValueError if one exchanges parameters or gradients itself, though each rank steps its own gradients."""
    for optimizer in optimizers:
        ours = {cls.__name__ for cls in type(optimizer).__mro__} & _EXCHANGING
        if ours:
            raise ValueError(
                f"{min(ours)} exchanges parameters or gradients within its step, for ranks with equal gradients, and "
                "here each rank steps its own: pass the optimizer that is in it, such as torch.optim.AdamW, or use a "
                "synchronous strategy such as 'ring'"
            )


def options(optimizers: Sequence[Optimizer], equal: Collection[Parameter]) -> Iterator[str]:
    """A line an option of a group that steps any of `equal`: what makes an optimizer step the same gradients alike.

    Those that its class has defaults for: what a user puts beside them does not count.
    """
    for place, optimizer, i, group in _groups(optimizers, equal):
        whose = f"optimizer {place}, a {type(optimizer).__name__}, group {i}"
        for name in sorted((getattr(optimizer, "defaults", None) or group).keys() & group.keys()):
            value = _rounded(group[name])
            if value is not None:
                yield f"{whose}: {name}={value}"


def rates(optimizers: Sequence[Optimizer], equal: Collection[Parameter]) -> Iterator[str]:
    """A line a group that steps any of `equal`: its learning rate, but not one on a GPU, for which it would wait."""
    for place, _, i, group in _groups(optimizers, equal):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and rate.numel() == 1 and rate.device.type == "cpu":
            rate = rate.item()
        if isinstance(rate, int | float):
            yield f"optimizer {place}, group {i}: lr={_rounded(rate)}"


def _groups(
    optimizers: Sequence[Optimizer], equal: Collection[Parameter]
) -> Iterator[tuple[int, Optimizer, int, dict[str, Any]]]:
    for place, optimizer in enumerate(optimizers if equal else ()):  # none is, where ranks train apart
        for i, group in enumerate(optimizer.param_groups):
            if any(parameter in equal for parameter in group["params"]):
                yield place, optimizer, i, group


def _rounded(value: Any) -> str | None:
    """With as many digits as machines with different mathematics libraries agree in; None if not a number or text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        parts = [_rounded(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return str(value) if isinstance(value, bool | int | str) else None

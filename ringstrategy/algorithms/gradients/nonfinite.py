"""What happens to a step whose mean gradients hold a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

CHOICES = ("propagate", "skip", "raise")


def check_choice(on_nonfinite: str) -> None:
    """Raise a ValueError unless it is one of `CHOICES`."""
    if on_nonfinite not in CHOICES:
        raise ValueError(
            "on_nonfinite is 'propagate' (gradients stay as they are), 'skip' (all ranks drop that step's gradients) "
            f"or 'raise', got {on_nonfinite!r}"
        )


def refuse_loss_scaler(on_nonfinite: str) -> None:
    """Under a loss scaler. ValueError if the scaler would not see the gradients that it looks for."""
    if on_nonfinite != "propagate":
        raise ValueError(
            f"on_nonfinite={on_nonfinite!r} hides from the loss scaler what tells it to lower the scale: leave it at "
            "'propagate', with which the scaler skips such steps on all ranks by itself, or train in bf16-mixed or "
            "32-bit precision"
        )


def are_finite(gradients: Collection[Tensor]) -> bool:
    """Is each element finite? One pass over the memory; on a GPU the host waits for the outcome."""
    values = [(each._values() if each.is_sparse else each).detach() for each in gradients]
    values = [each for each in values if each.numel()]
    # sums are many times faster; but finite values may overflow there, on CPUs of one type and not of another
    return _all_finite([each.sum() for each in values]) or _all_finite(values)


def _all_finite(values: list[Tensor]) -> bool:
    return bool(torch.isfinite(get_total_norm(values, float("inf"))))


def drop(parameters: Collection[Parameter]) -> None:
    """Leave them without gradients: torch's optimizers then pass them over, momentum and weight decay included."""
    for parameter in parameters:
        parameter.grad = None

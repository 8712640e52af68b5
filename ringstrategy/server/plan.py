"""What learners and their syncer have in common, as JSON: parts by name and options, and the model by its shapes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringstrategy import codecs
from ringstrategy._version import __version__
from ringstrategy.codecs.base import WIRE_FORMAT
from ringstrategy.server.merges import mean, radial_directional

Parts = Mapping[str, Callable[..., Any]]

PARTS: Parts = {
    **{name: getattr(codecs, name) for name in codecs.__all__ if name not in ("Codec", "derive_seed")},
    **{name: made for name, made in vars(torch.optim).items() if isinstance(made, type)},
    "mean": mean,
    "radial_directional": radial_directional,
}


def described(part: Any) -> Any:
    """Its name and options. TypeError unless it is a number, a frozen dataclass, a `partial` or a function."""
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    if isinstance(part, partial) and not part.args:
        return [part.func.__name__, {name: described(value) for name, value in part.keywords.items()}, "partial"]
    if is_dataclass(part) and not isinstance(part, type):
        options = {field.name: described(getattr(part, field.name)) for field in fields(part) if field.init}
        return [type(part).__name__, options]
    if callable(part) and hasattr(part, "__name__"):
        return [part.__name__]
    raise TypeError(f"{part!r} cannot be described by a name and options: pass functools.partial(torch.optim.SGD, ...)")


def built(description: Any, parts: Parts) -> Any:
    """What was described. ValueError if there is no such part here: nothing else is looked up or run."""
    if not isinstance(description, list):
        return description
    name, *options = description
    if name not in parts:
        raise ValueError(f"the syncer has no {name}: take a part of ringstrategy, or an optimizer of torch.optim")
    made = parts[name]
    if not options:
        return made
    given = {key: built(value, parts) for key, value in options[0].items()}
    return made(**given) if len(options) == 1 else partial(made, **given)


def planned(fragments: Sequence[Mapping[str, Tensor]], **parts: Any) -> dict[str, Any]:
    """What a learner says of itself when it joins.

    Args:
        fragments: parameters by name.
        parts: by what they are for.
    """
    return {
        "ringstrategy": __version__,
        "wire format": WIRE_FORMAT,
        **{what: described(part) for what, part in parts.items()},
        "fragments": [
            [[name, list(each.shape), described(each.dtype)] for name, each in fragment.items()]
            for fragment in fragments
        ],
    }


def sizes(plan: Mapping[str, Any]) -> list[int]:
    """Values of each fragment."""
    return [sum(torch.Size(shape).numel() for _, shape, _ in fragment) for fragment in plan["fragments"]]


def digest_of(plan: Mapping[str, Any]) -> str:
    """Equal for equal plans."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def difference(syncer: Mapping[str, Any], learner: Mapping[str, Any]) -> str | None:
    """What a learner has that its syncer has not, or the other way round; None: nothing."""
    for what in [*syncer, *(what for what in learner if what not in syncer)]:
        ours, theirs = syncer.get(what), learner.get(what)
        if ours != theirs and what != "fragments":
            return f"its {what} is {json.dumps(theirs)}, and the syncer's {json.dumps(ours)}"
    pairs = zip(syncer["fragments"], learner["fragments"], strict=False)
    for number, (our, their) in enumerate(pairs):
        for one, other in zip([*our, None], [*their, None], strict=False):
            if one != other:
                return f"its fragment {number} has {json.dumps(other)}, where the syncer's has {json.dumps(one)}"
    if len(syncer["fragments"]) != len(learner["fragments"]):
        return f"it has {len(learner['fragments'])} fragments, and the syncer {len(syncer['fragments'])}"
    return None

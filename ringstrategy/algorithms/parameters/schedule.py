"""When parameters are exchanged, and when what came of it is applied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch.nn import Parameter

Unit = Literal["step", "epoch"]
_NUMBERED = re.compile(r"^(?:.*?\.)?\d+(?=\.)")  # up to the first number: "model.layers.3"
_EMBEDDING = re.compile(r"embed|(^|[._])(emb|wte|wpe)([._]|$)")


@dataclass(frozen=True)
class Schedule:
    """One exchange begins every `interval` turns; what came of it is applied `late` turns after that.

    A place (p, P) is that of the p-th of P fragments, whose exchanges are spread over the interval.

    Args:
        interval: turns from one exchange to the next.
        overlap: True: apply the correction when the next exchange is due. False: wait for it at once. A number from 1
            to `interval`: apply it after so many turns. 1 is one turn, not True.
        unit: what a turn is: a "step" of the optimizer, or an "epoch".
        start: until this turn there is an exchange at each turn, for which ranks wait. Intervals are counted from here.
    """

    interval: int
    overlap: bool | int
    unit: Unit = "step"
    start: int = 0

    def __post_init__(self) -> None:
        interval, overlap = self.interval, self.overlap
        if type(interval) is not int or interval < 1:
            raise ValueError(f"interval is a whole number of steps or epochs, at least 1, got {interval!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit is 'step' or 'epoch', got {self.unit!r}")
        if not isinstance(overlap, int):
            raise TypeError(f"overlap is True, False, or after how many steps to apply what came, got {overlap!r}")
        if not isinstance(overlap, bool) and not 1 <= overlap <= interval:
            raise ValueError(
                f"overlap is after how many steps to apply what came: 1 to interval={interval}, got {overlap}"
            )

    @property
    def late(self) -> int:
        """Turns from the beginning of an exchange until its correction is applied; 0: at once."""
        return self.overlap * self.interval if isinstance(self.overlap, bool) else self.overlap

    def since(self, turn: int, place: tuple[int, int] = (0, 1)) -> int:
        """Turns since an exchange began, or would have; 0: one begins. Turns are counted from 1."""
        if turn <= self.start:
            return 0
        number, parts = place
        first = (number + 1) * self.interval // parts
        return (turn - self.start - first) % self.interval

    def waits(self, turn: int) -> bool:
        """Whether ranks wait for an exchange that begins at this turn."""
        return turn <= self.start or self.late == 0


def cut_fragments(parameters: Mapping[str, Parameter], count: int) -> list[dict[str, Parameter]]:
    """At most `count` fragments of whole layers, with about the same bytes; a function of names, shapes and dtypes.

    Layers go by their names: a numbered module ("layers.3") is one, any other module with parameters of its own is one.
    They are dealt out in order, each to the fragment that has least so far: so layers of one size are strided over the
    fragments. Embeddings are a fragment of their own, unless they are smaller than half of one. There are fewer
    fragments if there are fewer layers.
    """
    layers: dict[str, dict[str, Parameter]] = {}
    for name, parameter in parameters.items():
        layers.setdefault(_layer(name), {})[name] = parameter
    embeddings = {name: parameter for name, parameter in parameters.items() if _EMBEDDING.search(name.lower())}
    apart = 2 * count * _nbytes(embeddings) >= _nbytes(parameters) and len(embeddings) < len(parameters)
    if count > 1 and apart:
        layers = {
            layer: rest
            for layer, members in layers.items()
            if (rest := {name: value for name, value in members.items() if name not in embeddings})
        }
        return [embeddings, *_dealt(layers, count - 1)]
    return _dealt(layers, count)


def _dealt(layers: Mapping[str, Mapping[str, Parameter]], count: int) -> list[dict[str, Parameter]]:
    fragments: list[dict[str, Parameter]] = [{} for _ in range(min(count, len(layers)))]
    for members in layers.values():
        min(fragments, key=_nbytes).update(members)
    return fragments


def _layer(name: str) -> str:
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0]


def _nbytes(parameters: Mapping[str, Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())

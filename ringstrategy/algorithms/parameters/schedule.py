"""When parameters are exchanged, and when what came of it is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Unit = Literal["step", "epoch"]


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
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
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

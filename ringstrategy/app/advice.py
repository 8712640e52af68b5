"""Which of the predicted strategies to take, and the one screen that says so."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ringstrategy.app.accuracy import HARMLESS, TOLERABLE
from ringstrategy.cost.step import Prediction

WIDTH, HEIGHT = 80, 24  # characters and lines of a screen
APART = math.inf
MATERIAL = 1.2  # times as fast: less is worth no loss, and no surer than a prediction is
_CODE = 35  # characters of a line for what is pasted; longer code gets a line of its own


@dataclass(frozen=True)
class Row:
    """A strategy and the facts about it.

    Attributes:
        strategy: what to pass to Trainer, as code: `"ring_int8"`, quotes included, or `RingStrategy(...)`.
        prediction: of a training step.
        worst: per cent of the loss that its codec cost in our small tests (`ringstrategy.app.accuracy.worst`). `APART`
            if ranks train alone most of the time, which is another training.
        loss: the same in words.
        codec_gb_per_s: GB of float32 gradients that its codec encodes in a second; None: nothing is encoded.
        asked: somebody asked for this row, so it is shown.
        extra: bytes in each rank beside parameters, gradients and the optimizer's state. None: not known.
    """

    strategy: str
    prediction: Prediction
    worst: float
    loss: str
    codec_gb_per_s: float | None
    asked: bool = False
    extra: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.prediction.seconds


def recommended(rows: Sequence[Row]) -> Row:
    """The harmless strategy closest to fp32, unless another one is much faster. Of equal ones the first."""
    harmless = [row for row in rows if row.worst <= HARMLESS]
    fastest = min(row.seconds for row in harmless)
    return min((row for row in harmless if row.seconds <= MATERIAL * fastest), key=lambda row: row.worst)


def tempting(rows: Sequence[Row], chosen: Row) -> Row | None:
    """What loses up to `TOLERABLE` and is materially faster than the one chosen, if there is any."""
    fastest = min((row for row in rows if row.worst <= TOLERABLE), key=lambda row: row.seconds)
    return fastest if MATERIAL * fastest.seconds <= chosen.seconds else None


def apart(rows: Sequence[Row], chosen: Row) -> Row | None:
    """The fastest whose ranks train alone, if it is materially faster than the one chosen."""
    candidates = [row for row in rows if row.worst == APART and MATERIAL * row.seconds <= chosen.seconds]
    return min(candidates, key=lambda row: row.seconds, default=None)


def beaten(rows: Sequence[Row]) -> list[Row]:
    """The rows that another row beats: it is as fast and loses no more."""
    losers, fastest = [], math.inf
    for row in sorted(rows, key=lambda row: (row.worst, row.seconds)):
        if row.seconds >= fastest:
            losers.append(row)
        fastest = min(fastest, row.seconds)
    return losers


def screen(rows: Sequence[Row], setting: str, codecs: str, memory: str = "") -> str:
    """The answer, in `HEIGHT` lines of `WIDTH`.

    If rows must be left out, these are first those whose ranks train alone, then beaten ones, slowest first.

    Args:
        rows: what is compared, the baseline first.
        setting: what was asked, for the heading.
        codecs: where their speeds come from.
        memory: what a rank needs.
    """
    base, chosen = rows[0], recommended(rows)
    shown = sorted(rows, key=lambda row: row.seconds)
    losers = beaten(rows)
    dispensable = sorted(shown, key=lambda row: (row.worst == APART, row in losers))
    dispensable = [row for row in dispensable if not row.asked and row not in (base, chosen, apart(rows, chosen))]
    while True:
        lines = _lines(rows, shown, base, chosen, setting, codecs, memory)
        if len(lines) <= HEIGHT or not dispensable:
            return "\n".join(lines)
        shown.remove(dispensable.pop())


def _lines(
    rows: Sequence[Row], shown: Sequence[Row], base: Row, chosen: Row, setting: str, codecs: str, memory: str
) -> list[str]:
    others = sorted((row for row in rows if row not in shown), key=lambda row: row.seconds)
    names = [f"{row.strategy[1:-1]} {_times(base, row)}" for row in others if row.strategy.startswith('"')]
    return [
        *_wrapped(setting),
        *_wrapped(memory),
        *_wrapped(f"codec: GB/s {codecs}"),
        f"{'Trainer(strategy=...)':{_CODE}}" + _cells("s/step", "x ddp", "MB/host", "codec", "loss"),
        *(line for row in shown for line in _of_row(row, base)),
        "loss: a small GPT's on text rose by so much; above 1 % test it on your model.",
        *_wrapped(f"Other names, x ddp: {', '.join(names)}." if names else ""),
        *_advice(shown, base, chosen),
    ]


def _of_row(row: Row, base: Row) -> list[str]:
    figures = _cells(
        _short(row.seconds),
        _times(base, row),
        _short(1e-6 * row.prediction.bytes_across),
        "-" if row.codec_gb_per_s is None else _short(row.codec_gb_per_s),
        row.loss,
    )
    if len(row.strategy) > _CODE:
        return [row.strategy, " " * _CODE + figures]
    return [f"{row.strategy:{_CODE}}{figures}"]


def _advice(shown: Sequence[Row], base: Row, chosen: Row) -> list[str]:
    made_of = ", ".join(sorted(set(re.findall(r"[A-Z]\w+", chosen.strategy))))
    start = "  from ringstrategy import "
    if chosen is base:
        lines = [f"Recommended: plain ddp; nothing that keeps the loss is {MATERIAL:g} times as fast."]
    elif made_of:
        lines = ["Recommended:", *(start + part.rstrip(",") for part in _wrapped(made_of, WIDTH - len(start)))]
    else:
        lines = ["Recommended:", "  import ringstrategy"]
    lines.append(f"  strategy={chosen.strategy}")
    more = tempting(shown, chosen)
    if more is not None:
        lines.append(f"Faster still, at {more.loss} of the loss: the row with {_times(base, more)} x ddp.")
    seldom = apart(shown, chosen)
    if seldom is not None:
        lines.append(f"Another way to train (docs/local_sgd.md): {seldom.strategy}, {_times(base, seldom)} x ddp.")
    return lines


def _wrapped(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _times(base: Row, row: Row) -> str:
    return f"{base.seconds / row.seconds:.2f}"


def _cells(seconds: str, times: str, megabytes: str, codec: str, loss: str) -> str:
    return f"{seconds:>7} {times:>6} {megabytes:>8} {codec:>6}  {loss}"


def _short(number: float) -> str:
    """Three digits, or as many as are before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"

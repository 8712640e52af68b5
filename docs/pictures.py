"""Draw the pictures of README and docs/ as SVG: `python docs/pictures.py` writes docs/pictures/*.svg.

Everything that can be wrong comes from where it is right: bars from the measured rows, topologies from their classes,
the numbers of error feedback from a codec. The ring's messages are a formula here; a test holds them to what `Ring`
sends. The output depends on nothing else, so a test also holds the committed files to this code.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from ringstrategy import topologies
from ringstrategy.codecs import BlockInt

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
ROWS = ROOT / "benchmarks" / "results" / "training"

INK, MUTED, LINE, PAPER, FRAME = "#1b2733", "#55616e", "#8a95a1", "#ffffff", "#d5dbe2"
BLUE, SKY, ORANGE, SAND, GREEN, GREY, MIST = "#1f5fa8", "#d9e7f7", "#b4500f", "#fbe6d4", "#1e7145", "#c3c9d1", "#f1f3f6"
MINUS = "\N{MINUS SIGN}"
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
SMALLEST = 11  # font size


@dataclass
class Drawing:
    """An SVG of a fixed size on a white card, so that it reads alike on light and dark pages."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, inner: str = "", **attributes: Any) -> None:
        """One element; `stroke_width=2` becomes `stroke-width="2"`."""
        words = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{_number(value)}"'
            for name, value in attributes.items()
            if value is not None
        )
        self.parts.append(f"<{tag}{words}>{inner}</{tag}>" if inner else f"<{tag}{words}/>")

    def text(self, x: float, y: float, words: str, size: float = 13, **attributes: Any) -> None:
        """A line of text whose baseline is y."""
        assert size >= SMALLEST, words
        defaults = {"x": x, "y": y, "font_size": size, "fill": INK}
        self.add("text", escape(words), **{**defaults, **attributes})

    def middle(self, x: float, y: float, words: str, size: float = 13, **attributes: Any) -> None:
        """The same, centred on x."""
        self.text(x, y, words, size, text_anchor="middle", **attributes)

    def box(self, x: float, y: float, width: float, height: float, fill: str, **attributes: Any) -> None:
        """A rectangle with slightly round corners."""
        defaults = {"x": x, "y": y, "width": width, "height": height, "rx": 4, "fill": fill}
        self.add("rect", **{**defaults, **attributes})

    def line(self, points: Sequence[tuple[float, float]], stroke: str = LINE, **attributes: Any) -> None:
        """Straight from point to point."""
        way = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        self.add("path", **{"d": way, "fill": "none", "stroke": stroke, "stroke_width": 1.6, **attributes})

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = LINE, **attributes: Any) -> None:
        """The same, with a head at the end."""
        (x, y), (end_x, end_y) = points[-2:]
        length = math.hypot(end_x - x, end_y - y)
        along, across = ((end_x - x) / length, (end_y - y) / length), ((y - end_y) / length, (end_x - x) / length)
        foot = (end_x - 8 * along[0], end_y - 8 * along[1])
        wings = [(foot[0] + side * 4 * across[0], foot[1] + side * 4 * across[1]) for side in (1, -1)]
        self.line([*points[:-1], foot], stroke, **attributes)
        tip = " ".join(f"{_number(x)},{_number(y)}" for x, y in (wings[0], (end_x, end_y), wings[1]))
        self.add("polygon", points=tip, fill=stroke)

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" '
            f'fill="{PAPER}" stroke="{FRAME}"/>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", card, *self.parts, "</svg>"]) + "\n"


def _number(value: Any) -> Any:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


# The ring


@dataclass(frozen=True)
class Hop:
    """One message of the ring all-reduce.

    Attributes:
        step: 0 .. 2 (N-1) - 1; the first half is the reduce-scatter.
        summands: the ranks whose values are in it.
        encoded: by the sender; else it sends on the bytes that it got.
    """

    step: int
    sender: int
    receiver: int
    chunk: int
    summands: tuple[int, ...]
    encoded: bool


def ring_schedule(size: int) -> list[Hop]:
    """Who sends which chunk to whom, step by step."""
    everyone = tuple(range(size))
    hops = []
    for step in range(2 * (size - 1)):
        for rank in everyone:
            chunk = (rank - step) % size
            summands = tuple(sorted((chunk + i) % size for i in range(step + 1))) if step < size - 1 else everyone
            hops.append(Hop(step, rank, (rank + 1) % size, chunk, summands, encoded=step < size))
    return hops


def ring() -> Drawing:  # noqa: PLR0915
    """Both phases on four ranks: what each rank holds before a step, and what it sends in it."""
    size, cell, gap, left, step_height = 4, 36, 62, 104, 58
    card = size * cell
    right = left + size * card + (size - 1) * gap
    drawing = Drawing(right + 64, 662, "Ring all-reduce on four ranks: reduce-scatter, then all-gather")
    hops = ring_schedule(size)
    held: dict[tuple[int, int], tuple[int, ...]] = {(r, c): (r,) for r in range(size) for c in range(size)}

    def place(rank: int, chunk: int) -> float:
        return left + rank * (card + gap) + chunk * cell

    def heading(y: float, words: str, *more: str) -> None:
        drawing.text(24, y, words, 16, font_weight="bold")
        for number, line in enumerate(more):
            drawing.text(24, y + 21 + 18 * number, line, 12.5, fill=MUTED)

    def names(y: float) -> None:
        for rank in range(size):
            drawing.middle(place(rank, 2), y, f"rank {rank}", 13, font_weight="bold")

    def cells(y: float, gathering: bool) -> None:
        shades = ("#ffffff", "#e3edf8", "#bfd6ef", "#8fb8e2", BLUE)
        for (rank, chunk), summands in held.items():
            whole = len(summands) == size
            stale = gathering and not whole
            fill = MIST if stale else shades[len(summands) if whole or len(summands) > 1 else 0]
            drawing.box(place(rank, chunk), y, cell, 28, fill, stroke=LINE, rx=0)
            words = "sum" if whole else "" if stale else "".join(map(str, summands))
            color = PAPER if whole else INK
            drawing.middle(place(rank, chunk) + cell / 2, y + 18.5, words, 12, fill=color) if words else None

    def strip(y: float, step: int) -> None:
        gathering = step >= size - 1
        drawing.text(24, y + 19, f"step {step % (size - 1)}", 13)
        cells(y, gathering)
        now = [hop for hop in hops if hop.step == step]
        for hop in now:
            begin, end = place(hop.sender, 0) + card, place(hop.receiver, 0)
            attributes = {
                "class_": "hop",
                "data_step": step,
                "data_from": hop.sender,
                "data_to": hop.receiver,
                "data_chunk": hop.chunk,
                "data_summands": "".join(map(str, hop.summands)),
                "data_encoded": int(hop.encoded),
            }
            if hop.receiver:
                drawing.arrow([(begin + 5, y + 14), (end - 5, y + 14)], INK, **attributes)
                drawing.middle((begin + end) / 2, y + 7, f"chunk {hop.chunk}", 11)
            else:  # the ring closes: out at the right edge, in at the left
                drawing.arrow([(begin + 5, y + 14), (begin + 38, y + 14)], INK, **attributes)
                drawing.arrow([(end - 30, y + 14), (end - 5, y + 14)], INK)
                drawing.text(begin + 6, y + 7, f"chunk {hop.chunk}", 11)
            tags = [
                (hop.sender, "enc" if hop.encoded else "", ORANGE),
                (hop.receiver, "dec" if gathering else "add", GREEN),
            ]
            for rank, tag, color in tags:
                x = place(rank, hop.chunk)
                drawing.box(x + 1.5, y + 1.5, cell - 3, 25, "none", stroke=color, stroke_width=3, rx=1)
                if tag:
                    drawing.middle(x + cell / 2, y + 42, tag, 11, fill=color, font_weight="bold")
        for hop in now:
            arrived = hop.summands if gathering else tuple(sorted({*hop.summands, *held[hop.receiver, hop.chunk]}))
            held[hop.receiver, hop.chunk] = arrived

    heading(
        36,
        "Reduce-scatter",
        f"Each rank has chunks 0 to 3. In step s, rank r encodes its partial sum of chunk r {MINUS} s and sends it on;",
        "rank r + 1 decodes it and adds its own values. The digits in a cell are the ranks that it is the sum of.",
    )
    names(104)
    for step in range(size - 1):
        strip(116 + step_height * step, step)
    heading(
        332,
        "All-gather",
        "Rank r now has the whole sum of chunk r + 1. It encodes this sum once, and decodes its own bytes too.",
        "From step 1 on, ranks forward the bytes that they received. So all ranks decode the same bytes.",
    )
    names(400)
    for step in range(size - 1, 2 * (size - 1)):
        strip(412 + step_height * (step - size + 1), step)
    end = 412 + step_height * (size - 1)
    drawing.text(24, end + 19, "at the end", 13)
    cells(end, True)
    keys = ((ORANGE, "enc: the sender encodes"), (GREEN, "add: decode and add;  dec: decode"))
    for number, (color, words) in enumerate(keys):
        x = left + 250 * number
        drawing.box(x, end + 45, 16, 16, "none", stroke=color, stroke_width=3, rx=1)
        drawing.text(x + 24, end + 58, words, 12)
    drawing.text(left + 570, end + 58, "no enc: bytes are forwarded", 12)
    return drawing


# A bucket's way


def bucket() -> Drawing:  # noqa: PLR0915
    """The stations of a gradient bucket, and how they overlap with backward."""
    drawing = Drawing(956, 524, "A bucket's way from the gradient hook to the optimizer, and its overlap with backward")
    drawing.text(24, 36, "Stations", 16, font_weight="bold")
    stations = [
        ("gradient hook", "a gradient is final", SKY),
        ("pack", "cast, times 1/N", SKY),
        ("encode", "values to bytes", SAND),
        ("ring hops", "add at each rank", SAND),
        ("decode", "bytes to the mean", SAND),
        ("unpack", "mean to p.grad", SKY),
        ("optimizer", "clip, step", SKY),
    ]
    width, gap, top = 116, 16, 56
    for number, (name, words, fill) in enumerate(stations):
        x = 24 + number * (width + gap)
        stroke = BLUE if fill == SKY else ORANGE
        drawing.box(x, top, width, 54, fill, stroke=stroke)
        drawing.middle(x + width / 2, top + 23, name, 13, font_weight="bold")
        drawing.middle(x + width / 2, top + 41, words, 11, fill=MUTED)
        if number:
            drawing.arrow([(x - gap + 1, top + 27), (x - 1, top + 27)], INK)
    encode = 24 + 2 * (width + gap)
    drawing.box(encode, 146, width, 30, PAPER, stroke=ORANGE, stroke_dasharray="4 3")
    drawing.middle(encode + width / 2, 165, "residual", 12)
    drawing.arrow([(encode + 36, 110), (encode + 36, 145)], ORANGE)
    drawing.arrow([(encode + 80, 146), (encode + 80, 111)], ORANGE)
    drawing.text(encode + 130, 158, "With error feedback: every encode adds the residual of", 11.5, fill=MUTED)
    drawing.text(encode + 130, 173, "the last step, and leaves in it what it lost in this one.", 11.5, fill=MUTED)
    for x, fill, stroke, words in ((24, SKY, BLUE, "training thread"), (24, SAND, ORANGE, "communication worker")):
        y = 130 if fill == SKY else 152
        drawing.box(x, y, 16, 14, fill, stroke=stroke)
        drawing.text(x + 24, y + 11.5, words, 12)

    drawing.text(24, 226, "Overlap with backward", 16, font_weight="bold")
    drawing.text(252, 226, "four buckets, not to scale; buckets are sent in index order", 12.5, fill=MUTED)
    left, forward, chunk, transfer, unpack, step = 130, 66, 76, 84, 28, 60
    ready = [left + forward + chunk * (index + 1) for index in range(4)]
    ends: list[float] = []
    for index in range(4):
        ends.append(max(ready[index], ends[-1] if ends else 0) + transfer)
    y = 256

    def lane(row: float, first: str, second: str = "") -> None:
        drawing.text(24, row + (14 if second else 21), first, 12)
        drawing.text(24, row + 29, second, 12) if second else None

    def block(x: float, row: float, width: float, words: str, fill: str, stroke: str, **more: Any) -> None:
        drawing.box(x, row, width, 34, fill, stroke=stroke, rx=2, **more)
        drawing.middle(x + width / 2, row + 21, words, 12) if words else None

    def row_of_training(row: float, waits_from: float, waits_to: float) -> None:
        block(left, row, forward, "forward", SKY, BLUE)
        for index in range(4):
            begin = left + forward + chunk * index
            block(begin, row, chunk, f"fill {index}", SKY, BLUE)
        drawing.line([(waits_from + 2, row + 17), (waits_to - 2, row + 17)], MUTED, stroke_dasharray="3 4")
        block(waits_to, row, unpack, "", SKY, BLUE)
        block(waits_to + unpack, row, step, "step", SKY, BLUE)

    lane(y, "training", "thread")
    row_of_training(y, ready[-1], ends[-1])
    lane(y + 70, "worker", "and network")
    for index in range(4):
        begin = ends[index] - transfer
        block(begin, y + 70, transfer, f"bucket {index}", SAND, ORANGE)
        bend = [] if begin == ready[index] else [(ready[index], y + 52), (begin + 9, y + 52)]
        drawing.arrow([(ready[index], y + 35), *bend, (begin + 9 if bend else begin, y + 69)], INK)
    drawing.middle(left + forward + 2 * chunk, y - 6, "backward: gradients fill the buckets", 12)
    drawing.middle((ready[-1] + ends[-1]) / 2, y + 8, "exposed wait", 12)
    drawing.text(ends[-1] + 2, y + 50, "unpack", 12)

    y = 410
    drawing.text(24, y - 12, "Without overlap, all of the communication is exposed:", 12.5, fill=MUTED)
    lane(y, "training", "thread")
    row_of_training(y, ready[-1], ready[-1] + 4 * transfer)
    lane(y + 56, "worker", "and network")
    for index in range(4):
        block(ready[-1] + transfer * index, y + 56, transfer, f"bucket {index}", SAND, ORANGE)
    return drawing


# Error feedback


@dataclass(frozen=True)
class Fed:
    """One step of error feedback on a few values."""

    values: list[float]
    before: list[float]
    sent: list[float]
    after: list[float]


def feedback_steps() -> list[Fed]:
    """The same gradient three times through `BlockInt(2)`, which knows -s, 0 and s only."""
    codec, values = BlockInt(2), torch.tensor([1.0, 0.45, -0.3, 0.05])
    residual, steps = torch.zeros_like(values), []
    for _ in range(3):
        whole, before = values + residual, residual.tolist()
        wire, sent = torch.empty(codec.nbytes(len(whole), whole.dtype), dtype=torch.uint8), torch.empty_like(whole)
        codec.encode(whole, wire, lost=residual)
        codec.decode(wire, sent)
        steps.append(Fed(values.tolist(), before, sent.tolist(), residual.tolist()))
    return steps


def feedback() -> Drawing:
    """The loop, and its numbers for a codec of 2 bits."""
    drawing = Drawing(956, 478, "Error feedback: sent + new residual == values + residual")

    def station(x: float, y: float, width: float, name: str, words: str, fill: str, stroke: str) -> None:
        drawing.box(x, y, width, 54, fill, stroke=stroke)
        drawing.middle(x + width / 2, y + 23, name, 13, font_weight="bold")
        drawing.middle(x + width / 2, y + 41, words, 11, fill=MUTED)

    top = 32
    station(24, top, 150, "values", "gradient / N", SKY, BLUE)
    drawing.add("circle", cx=232, cy=top + 27, r=17, fill=PAPER, stroke=INK, stroke_width=1.6)
    drawing.middle(232, top + 33, "+", 18)
    station(320, top, 150, "encode", "values to bytes", SAND, ORANGE)
    station(620, top, 312, "sent", "what all ranks decode from the bytes", SKY, BLUE)
    drawing.arrow([(174, top + 27), (214, top + 27)], INK)
    drawing.arrow([(250, top + 27), (319, top + 27)], INK)
    drawing.arrow([(470, top + 27), (619, top + 27)], INK)
    drawing.middle(545, top + 19, "bytes", 12)
    station(320, 122, 150, "residual", "what encode lost", PAPER, ORANGE)
    drawing.arrow([(395, top + 54), (395, 121)], ORANGE)
    drawing.arrow([(320, 149), (232, 149), (232, top + 46)], ORANGE, stroke_dasharray="5 4")
    drawing.text(100, 154, "in the next step", 12)
    drawing.text(500, 154, "sent + new residual == values + old residual", 14, font_weight="bold")

    steps = feedback_steps()
    count = len(steps[0].values)
    drawing.text(24, 224, "The same gradient in three steps, through 2 bits (BlockInt(2))", 14, font_weight="bold")
    columns, table, row = [24, 204, 330, 456, 582, 708], 236, 25
    rows: list[tuple[str, list[list[float]], str]] = [
        ("values", [step.values for step in steps], PAPER),
        ("+ old residual", [step.before for step in steps], PAPER),
        ("sent", [step.sent for step in steps], SKY),
        ("new residual", [step.after for step in steps], SAND),
    ]
    width = 246
    for number in range(3):
        drawing.middle(170 + number * (width + 8) + width / 2, table + 17, f"step {number}", 12.5, font_weight="bold")
    for place, (name, each, fill) in enumerate(rows):
        y = table + row * (place + 1)
        drawing.text(columns[0], y + 17, name, 12.5)
        for number, numbers in enumerate(each):
            x = 170 + number * (width + 8)
            drawing.box(x, y + 1, width, row - 2, fill, stroke=FRAME, rx=0)
            for column, value in enumerate(numbers):
                _aligned(drawing, x + 54 + 58 * column, y + 17, value, rows[place][0], number)
    totals = [
        ("sum of what was sent", [sum(step.sent[i] for step in steps) for i in range(count)], SKY),
        ("sum of the gradients", [sum(step.values[i] for step in steps) for i in range(count)], PAPER),
        ("sent without feedback", [len(steps) * steps[0].sent[i] for i in range(count)], GREY),
    ]
    for place, (name, numbers, fill) in enumerate(totals):
        y = table + row * (6 + place) - 9
        drawing.text(24, y + 17, "After three steps:" if place == 0 else "", 12.5) if place == 0 else None
        drawing.text(170, y + 17, name, 12.5)
        drawing.box(342, y + 1, width, row - 2, fill, stroke=FRAME, rx=0)
        for column, value in enumerate(numbers):
            _aligned(drawing, 342 + 54 + 58 * column, y + 17, value, name, 3)
    return drawing


def _aligned(drawing: Drawing, x: float, y: float, value: float, row: str, step: int) -> None:
    words = f"{value:.2f}".replace("-0.00", "0.00").replace("-", MINUS)
    drawing.text(x, y, words, 12, text_anchor="end", data_row=row, data_step=step)


# Topologies


SHOWN: dict[str, topologies.Topology] = {
    "RingGraph()": topologies.RingGraph(),
    "Torus()": topologies.Torus(),
    "Hypercube()": topologies.Hypercube(),
    "Exponential()": topologies.Exponential(),
    "OnePeerExponential()": topologies.OnePeerExponential(),
    "RandomMatching(seed=1)": topologies.RandomMatching(seed=1),
    "Hierarchical(4)": topologies.Hierarchical(4),
    "Star()": topologies.Star(),
    "Complete()": topologies.Complete(),
}
RANKS = 8
_MOST_STEPS = 3
_STROKES = ((BLUE, None), (ORANGE, "7 4"), (GREEN, "2 3"))


def steps_shown(topology: topologies.Topology) -> int:
    """How many different steps are drawn."""
    return min(topology.period(RANKS), _MOST_STEPS)


def edges(topology: topologies.Topology, step: int) -> set[tuple[int, int]]:
    """(from, to) for each message of a step."""
    return {(source, rank) for rank in range(RANKS) for source in topology.weights(rank, RANKS, step) if source != rank}


def graphs() -> Drawing:
    """Every topology on eight ranks, from its own weights."""
    wide, high = 312, 312
    drawing = Drawing(3 * wide + 20, 3 * high + 66, "The topologies of ringstrategy on eight ranks")
    for number, (name, topology) in enumerate(SHOWN.items()):
        _graph(drawing, name, topology, 10 + number % 3 * wide + wide / 2, 16 + number // 3 * high)
    y = 3 * high + 42
    drawing.text(30, y, "If edges change from step to step:", 12.5)
    for step, (color, dashes) in enumerate(_STROKES):
        x = 290 + 120 * step
        drawing.line([(x, y - 4), (x + 40, y - 4)], color, stroke_width=2.4, stroke_dasharray=dashes)
        drawing.text(x + 48, y, f"step {step}", 12.5)
    drawing.arrow([(660, y - 4), (700, y - 4)], INK)
    drawing.text(708, y, "messages in one direction only", 12.5)
    return drawing


def _graph(drawing: Drawing, name: str, topology: topologies.Topology, x: float, y: float) -> None:
    drawing.middle(x, y + 22, name, 14, font_weight="bold")
    most, steps = topology.degree(RANKS), topology.steps_to_consensus(RANKS)
    drawing.middle(x, y + 41, f"at most {most} message{'s' * (most != 1)} a step", 11.5, fill=MUTED)
    drawing.middle(x, y + 57, f"differences shrink to 0.1 % in {steps} step{'s' * (steps != 1)}", 11.5, fill=MUTED)
    places = [(x + across, y + 186 + down) for across, down in _layout(topology)]
    if isinstance(topology, topologies.Hierarchical):
        for host in range(2):
            drawing.box(x - 130 + 136 * host, y + 98, 124, 184, MIST, stroke=FRAME)
            drawing.middle(x - 68 + 136 * host, y + 274, f"host {host}", 12, fill=MUTED)
    for step in reversed(range(steps_shown(topology))):
        messages = edges(topology, step)
        color, dashes = _STROKES[step]
        for source, target in sorted(messages):
            both = (target, source) in messages
            if both and source > target:
                continue  # drawn the other way round
            attributes: dict[str, Any] = {
                "stroke_width": 1.8,
                "stroke_dasharray": dashes,
                "class_": "edge",
                "data_topology": type(topology).__name__,
                "data_step": step,
                "data_from": source,
                "data_to": target,
                "data_both": int(both),
            }
            bow = _bow(topology, source, target)
            if bow:
                (begin, above), (end, _) = places[source], places[target]
                way = f"M{_number(begin)} {_number(above)}q{_number((end - begin) / 2)} {bow} {_number(end - begin)} 0"
                drawing.add("path", d=way, fill="none", stroke=color, **attributes)
            elif both:
                drawing.line([places[source], places[target]], color, **attributes)
            else:
                drawing.arrow(_shortened(places[source], places[target]), color, **attributes)
    for rank, (across, down) in enumerate(places):
        drawing.add("circle", cx=across, cy=down, r=11.5, fill=INK)
        drawing.middle(across, down + 4.2, str(rank), 12, fill=PAPER)


def _layout(topology: topologies.Topology) -> list[tuple[float, float]]:
    """Where ranks stand around the middle of their graph."""
    if isinstance(topology, topologies.Torus):
        return [(-96.0 + 64 * (rank % 4), -40.0 + 80 * (rank // 4)) for rank in range(RANKS)]
    if isinstance(topology, topologies.Hypercube):  # two squares, one behind the other
        bits = [(rank & 1, rank >> 1 & 1, rank >> 2) for rank in range(RANKS)]
        return [(-86.0 + 120 * x + 52 * z, 92.0 - 120 * y - 64 * z) for x, y, z in bits]
    if isinstance(topology, topologies.Hierarchical):  # ranks beside each other not quite, or edges would hide
        return [
            (-96.0 + 56 * (rank % 2) + 136 * (rank // 4), -56.0 + 26 * (rank % 2) + 76 * (rank // 2 % 2))
            for rank in range(RANKS)
        ]
    if isinstance(topology, topologies.Star):
        return [(0.0, 0.0), *_circle(RANKS - 1)]
    return _circle(RANKS)


def _circle(count: int) -> list[tuple[float, float]]:
    turns = [2 * math.pi * place / count for place in range(count)]
    return [(102 * math.sin(turn), -102 * math.cos(turn)) for turn in turns]


def _bow(topology: topologies.Topology, source: int, target: int) -> int:
    """How far an edge must bow out, down the page, so that it does not run through other ranks."""
    joins_ends = isinstance(topology, topologies.Torus) and abs(source - target) == 3
    return 0 if not joins_ends else 84 if source >= 4 else -84


def _shortened(begin: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """To the rim of the circle at its end."""
    part = 1 - 12 / math.dist(begin, end)
    return [begin, (begin[0] + part * (end[0] - begin[0]), begin[1] + part * (end[1] - begin[1]))]


# Step time


CASES = {  # as rows name them: as the chart does
    "ddp": "ddp",
    "ddp fp16 hook": "DDP, fp16 hook",
    "ddp powersgd rank 1": "DDP, PowerSGD hook",
    "ring_int8": "ring_int8",
    "ring_int4": "ring_int4",
    "gossip_int8": "gossip_int8",
}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
_MODEL = "MLP of 24.1 M parameters"


@dataclass(frozen=True)
class Bar:
    """One case on one network, over all runs that measured it.

    Attributes:
        seconds: of a step; the median of each run.
        ratios: how many times as fast as DDP in the same run.
        limits: the least seconds that the network and the computation allow.
    """

    case: str
    seconds: list[float]
    ratios: list[float]
    limits: list[float]


def measured(rate: str, case: str) -> Bar:
    """A case on four hosts, of all runs."""
    rows = [json.loads(line) for file in sorted(ROWS.glob("*.jsonl")) for line in file.read_text().splitlines()]
    wanted = {"case": case, "rate": rate, "hosts": 4, "processes": 1}
    rows = [{"processes": 1, **row} for row in rows]  # rows leave out what is usual
    rows = [row for row in rows if row["size"].startswith(_MODEL) and wanted.items() <= row.items()]
    return Bar(case, *([row[key] for row in rows] for key in ("seconds_median", "ratio", "limit_seconds")))


def bars(rate: str) -> list[Bar]:
    """One a case."""
    return [measured(rate, case) for case in CASES]


def interval(values: Iterable[float]) -> str:
    """Three digits, two behind the point at most: one number, or the least and the greatest if they differ."""
    words = list(dict.fromkeys(_digits(value) for value in sorted(values)))
    return words[0] if len(words) == 1 else f"{words[0]}\N{EN DASH}{words[-1]}"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 2 - max(0, math.floor(math.log10(value))))}f}"


def step_time() -> Drawing:
    """Seconds of a training step, a panel for each network."""
    width, left, panel, gap, row, top = 956, 174, 352, 34, 40, 86
    drawing = Drawing(width, top + row * len(CASES) + 92, "Seconds of a training step on four hosts, by strategy")
    drawing.text(
        24,
        34,
        "A training step of a 24 M MLP on four hosts, seconds (and speed-up over ddp)",
        14.5,
        font_weight="bold",
    )
    for number, (rate, words) in enumerate(RATES.items()):
        x, shown = left + number * (panel + gap), bars(rate)
        longest = max(statistics.median(bar.seconds) for bar in shown)
        scale = (panel - 118) / longest
        drawing.middle(x + panel / 2 - 40, 66, words, 14, font_weight="bold")
        for place, bar in enumerate(shown):
            y = top + row * place
            if number == 0:
                drawing.text(left - 12, y + 18, CASES[bar.case], 13, text_anchor="end")
            others, gossips = bar.case.startswith("ddp"), bar.case.startswith("gossip")
            fill = GREY if others else "#6fa0d6" if gossips else BLUE
            seconds, limit = statistics.median(bar.seconds), statistics.median(bar.limits)
            drawing.box(
                x,
                y,
                max(2.0, scale * seconds),
                26,
                fill,
                rx=1,
                class_="bar",
                data_case=bar.case,
                data_rate=rate,
                data_seconds=f"{seconds:.6f}",
            )
            reached = scale * limit
            drawing.line(
                [(x + reached, y - 4), (x + reached, y + 30)], INK, stroke_width=2.4, data_limit=f"{limit:.6f}"
            )
            end = x + max(scale * seconds, reached) + 8
            ratio = "" if bar.case == "ddp" else f"  ({interval(bar.ratios)}x)"
            drawing.text(end, y + 18, f"{interval(bar.seconds)}{ratio}", 12.5)
        drawing.line([(x, top - 8), (x, top + row * len(CASES) - 4)], LINE)
    y = top + row * len(CASES) + 22
    for x, fill, words in (
        (24, GREY, "torch DDP and its hooks"),
        (232, BLUE, "ring: averages gradients"),
        (440, "#6fa0d6", "gossip: averages parameters at each step"),
    ):
        drawing.box(x, y - 11, 22, 13, fill, rx=1)
        drawing.text(x + 30, y, words, 12)
    drawing.line([(766, y - 15), (766, y + 5)], INK, stroke_width=2.4)
    drawing.text(776, y, "limit of wire and compute", 12)
    notes = (
        "A bar is the median over runs; two numbers are the fastest and the slowest run. PowerSGD has rank 1, which",
        "raises the loss (docs/performance.md). The limit is the least time that network and computation allow.",
    )
    for number, words in enumerate(notes):
        drawing.text(24, y + 30 + 18 * number, words, 12, fill=MUTED)
    return drawing


# A timeline


RECORDED = ROOT / "docs" / "recorded" / "step.json"  # by examples/timeline.py
KINDS = {
    "pack": ("#b4500f", "pack, unpack"),
    "encode": (BLUE, "encode"),
    "send": ("#8e5bb5", "send"),
    "wait": (GREY, "wait"),
    "decode": (GREEN, "decode"),
}


@dataclass(frozen=True)
class Done:
    """A span of the recorded timeline, in milliseconds after the first."""

    rank: int
    thread: str
    name: str
    begin: float
    length: float

    @property
    def kind(self) -> str:
        """One of KINDS; "" for a whole exchange."""
        what = self.name.rpartition(": ")[2].split(" ")[0].replace("unpack", "pack")
        return what if what in KINDS else ""


def recorded() -> list[Done]:
    """All spans, in order."""
    events = json.loads(RECORDED.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["ts"]))
    first = min(event["ts"] for event in spans)
    return [
        Done(e["pid"], names[e["pid"], e["tid"]], e["name"], (e["ts"] - first) / 1000, e["dur"] / 1000) for e in spans
    ]


def timeline() -> Drawing:
    """A step of two ranks, as Perfetto shows it."""
    spans, width, left, row = recorded(), 956, 178, 62
    threads = list(dict.fromkeys((span.rank, span.thread) for span in spans))
    threads.sort(key=lambda thread: (thread[0], thread[1] != "MainThread"))
    drawing = Drawing(
        width, 116 + row * len(threads) + 50, "One training step of two ranks, from its recorded timeline"
    )
    drawing.text(24, 34, "One step of two ranks, as recorded: four buckets", 14.5, font_weight="bold")
    x = 24
    for fill, words in KINDS.values():
        drawing.box(x, 51, 18, 13, fill, rx=1)
        drawing.text(x + 25, 62, words, 12)
        x += 60 + 8 * len(words)
    longest = max(span.begin + span.length for span in spans)
    scale, top, bottom = (width - left - 34) / longest, 96, 96 + row * len(threads)
    for ms in range(0, int(longest) + 1, 5):
        at = left + scale * ms
        drawing.line([(at, top - 6), (at, bottom)], FRAME, stroke_width=1)
        drawing.middle(at, bottom + 18, f"{ms} ms" if ms else "0", 11.5, fill=MUTED)
    for number, thread in enumerate(threads):
        y = top + row * number
        drawing.text(24, y + 20, f"rank {thread[0]}", 13, font_weight="bold")
        drawing.text(24, y + 37, "training" if thread[1] == "MainThread" else "communication", 12, fill=MUTED)
        for span in (span for span in spans if (span.rank, span.thread) == thread):
            at, wide = left + scale * span.begin, max(0.6, scale * span.length)
            data = {"class_": "span", "data_rank": span.rank, "data_name": span.name, "data_ms": f"{span.length:.4f}"}
            if span.kind:
                drawing.box(at, y + 18, wide, 24, KINDS[span.kind][0], rx=0, **data)
            else:
                drawing.box(at, y + 2, wide, 14, SKY, rx=1, **data)
                label = span.name.rpartition(", in ")[2].partition(" of ")[0]
                if wide > 8 * len(label):
                    drawing.middle(at + wide / 2, y + 13, label, 11)
    note = "Between the bars of a training thread, backward goes on. Its communication thread exchanges meanwhile."
    drawing.text(24, bottom + 46, note, 12, fill=MUTED)
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "ring": ring,
    "bucket": bucket,
    "error_feedback": feedback,
    "topologies": graphs,
    "step_time": step_time,
    "timeline": timeline,
}


def main() -> None:
    """Write all."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()

"""The pictures of README and docs/: files are what docs/pictures.py draws, and show what the package does.

After a change to the rows, topologies or the pictures' code: `python docs/pictures.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from fakes import FakePeers, on_all_ranks
from torch import Tensor

from ringstrategy import topologies
from ringstrategy.codecs import Codec
from ringstrategy.collectives import Ring
from ringstrategy.collectives.base import Summand

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs" / "pictures.py")
assert _spec is not None
assert _spec.loader is not None
pictures = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = pictures  # dataclasses look their module up
_spec.loader.exec_module(pictures)

RATES = tuple(pictures.RATES)
NAMES = sorted(pictures.PICTURES)
SVG = "{http://www.w3.org/2000/svg}"


def committed(name: str) -> str:
    return (pictures.FOLDER / f"{name}.svg").read_text()


def elements(name: str, of_class: str) -> list[dict[str, str]]:
    found = [element.attrib for element in ElementTree.fromstring(committed(name)).iter()]
    return [attributes for attributes in found if attributes.get("class") == of_class]


def numbers(attributes: dict[str, str], *names: str) -> tuple[int, ...]:
    return tuple(int(attributes[f"data-{name}"]) for name in names)


def test_every_file_is_drawn_by_the_code() -> None:
    assert sorted(path.stem for path in pictures.FOLDER.glob("*")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_files_are_what_the_code_draws(name: str) -> None:
    assert committed(name) == pictures.PICTURES[name]().svg(), "run: python docs/pictures.py"


@pytest.mark.parametrize("name", NAMES)
def test_pictures_can_be_read(name: str) -> None:
    picture = ElementTree.fromstring(committed(name))
    card = picture.find(f"{SVG}rect")
    assert card is not None
    assert card.attrib["fill"] == "#ffffff"  # of its own, whatever the page's colours are
    assert picture.findtext(f"{SVG}title")
    sizes = [float(text.attrib["font-size"]) for text in picture.iter(f"{SVG}text")]
    assert len(sizes) > 10
    assert min(sizes) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_it_and_says_what_it_shows(name: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    alts = [alt for page in pages for alt in re.findall(rf"!\[([^\]]*)\]\([\w/]*/{name}\.svg\)", page.read_text())]
    assert alts
    assert all(len(alt.split()) > 5 for alt in alts)


@dataclass(frozen=True)
class Counting(Codec):
    """float64 as it is, but through encode and decode, which are counted."""

    done: Counter[str] = field(default_factory=Counter, compare=False)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 8 * numel

    def encode(
        self, values: Tensor, wire: Tensor, *, lost: Tensor | None = None, seed: int = 0, offset: int = 0
    ) -> None:
        self.done["encode"] += 1
        wire.view(torch.float64).copy_(values)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.done["add" if add else "decode"] += 1
        out.add_(wire.view(torch.float64)) if add else out.copy_(wire.view(torch.float64))


def test_the_ring_sends_what_is_drawn() -> None:
    """The value of rank r in chunk c is 2**(size * c + r), so a message tells its chunk and its summands."""
    size = 4
    sent = set()

    def one(peers: FakePeers) -> Counter[str]:
        codec, post, step = Counting(), peers.post, 0

        def noted(sends, recvs):
            nonlocal step
            ((receiver, wire),) = sends.items()
            bits = int(wire.clone().view(torch.float64).item())
            places = [place for place in range(size * size) if bits >> place & 1]
            (chunk,) = {place // size for place in places}
            summands = "".join(str(place % size) for place in places)
            encoded = int(codec.done["encode"] > step)
            sent.add((step, peers.rank, receiver, chunk, summands, encoded))
            step += 1
            return post(sends, recvs)

        peers.post = noted
        values = torch.tensor([2.0 ** (size * chunk + peers.rank) for chunk in range(size)], dtype=torch.float64)
        Ring().sum_(Summand(values, codec), peers)
        assert values.tolist() == [float((2**size - 1) << size * chunk) for chunk in range(size)]
        return codec.done

    done = on_all_ranks(size, one)
    drawn = [
        (*numbers(hop, "step", "from", "to", "chunk"), hop["data-summands"], int(hop["data-encoded"]))
        for hop in elements("ring", "hop")
    ]
    assert set(drawn) == sent
    assert len(drawn) == len(sent) == 2 * (size - 1) * size
    # as the tags say: added at each hop of the first phase, decoded at each of the second and by the owner
    assert all(each == {"encode": size, "add": size - 1, "decode": size} for each in done)


def test_topologies_have_the_edges_that_are_drawn() -> None:
    drawn: dict[str, set[tuple[int, int, int]]] = {}
    for edge in elements("topologies", "edge"):
        step, source, target, both = numbers(edge, "step", "from", "to", "both")
        ends = {(step, source, target), (step, target, source)} if both else {(step, source, target)}
        drawn.setdefault(edge["data-topology"], set()).update(ends)
    shown = {type(topology).__name__: topology for topology in pictures.SHOWN.values()}
    assert shown.keys() == set(topologies.__all__) - {"Topology", "FromGraph", "FromMatrix"}
    for name, topology in shown.items():
        steps = pictures.steps_shown(topology)
        assert steps == 3 or steps == topology.period(pictures.RANKS)
        real = set()
        for step in range(steps):
            for rank, source in topology.matrix(pictures.RANKS, step).nonzero().tolist():
                real |= {(step, source, rank)} - {(step, rank, rank)}
        assert drawn[name] == real, name


def test_bars_are_measured() -> None:
    known: dict[tuple[str, str], list[float]] = {}
    for file in (ROOT / "benchmarks" / "results" / "training").glob("mlp-4-*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            known.setdefault((row["rate"], row["case"]), []).append(row["seconds_median"])
    drawn = elements("step_time", "bar")
    assert {bar["data-case"] for bar in drawn} >= {"ddp", "ddp fp16 hook", "ring_int8", "ring_int4"}
    for bar in drawn:
        measured = known[bar["data-rate"], bar["data-case"]]
        assert min(measured) - 1e-6 <= float(bar["data-seconds"]) <= max(measured) + 1e-6
    widths = {(bar["data-rate"], float(bar["data-seconds"])): float(bar["width"]) for bar in drawn}
    for (rate, seconds), width in widths.items():
        longest = max(pair for pair in widths if pair[0] == rate)
        assert width == pytest.approx(widths[longest] * seconds / longest[1], abs=0.5)
    assert max(Counter(bar["data-rate"] for bar in drawn).values()) <= 8


def test_pages_have_the_figures_of_the_rows() -> None:
    cases = {
        "`ring_int8`": "ring_int8",
        "`ring_auto`": "ring_auto",
        "`ring_int4`": "ring_int4",
        "`ring_int2`": "ring_int2",
        "`ring_sign`": "ring_sign",
        "`AllReduce(BlockInt(4), Direct())`": "direct of BlockInt(4)",
        "`ring_powersgd` (rank 1)": "ring_powersgd",
        "`gossip_int8` at each step": "gossip_int8",
        "DDP's fp16 hook": "ddp fp16 hook",
        "PowerSGD as a DDP hook, rank 1": "ddp powersgd rank 1",
        "torch's post-local SGD, average every 4 steps": "post-local sgd every 4",
        "torch's post-local SGD, average every 16 steps": "post-local sgd every 16",
    }
    measured = {rate: {bar.case: pictures.interval(bar.ratios) for bar in pictures.bars(rate)} for rate in RATES}
    page = (ROOT / "docs" / "performance.md").read_text().split("\n## ")[1]
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", page, re.M)[1:]
    assert [name for name, *_ in table] == list(cases)
    for name, *figures in table:
        found = [pictures.interval(pictures.measured(rate, cases[name]).ratios) for rate in RATES]
        assert [figure.replace(" to ", "\N{EN DASH}") for figure in figures] == found, name
    readme = (ROOT / "README.md").read_text()
    for rate in RATES:
        assert f"{measured[rate]['ring_int8']} times" in readme


def test_feedback_loses_nothing_in_its_picture() -> None:
    steps = pictures.feedback_steps()
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        for value, before, sent, after in zip(step.values, step.before, step.sent, step.after, strict=True):
            assert sent + after == pytest.approx(value + before, abs=1e-6)
        assert following is None or following.before == step.after
    assert any(any(step.after) for step in steps)


def test_the_timeline_has_every_recorded_span() -> None:
    events = json.loads(pictures.RECORDED.read_text())
    spans = Counter((e["pid"], e["name"], f"{e['dur'] / 1000:.4f}") for e in events if e["ph"] == "X")
    drawn = Counter(
        (int(each["data-rank"]), each["data-name"], each["data-ms"]) for each in elements("timeline", "span")
    )
    assert drawn == spans
    for rank in range(2):
        for bucket in range(4):
            names = {name for of, name, _ in spans if of == rank and name.startswith(f"bucket {bucket}: ")}
            assert {f"bucket {bucket}: {what}" for what in ("pack", "unpack", f"encode chunk {rank} hop 0")} <= names


def test_numbers_are_intervals_where_runs_differ() -> None:
    assert pictures.interval([12.2]) == "12.2"
    assert pictures.interval([3.88, 4.777]) == "3.88\N{EN DASH}4.78"
    assert pictures.interval([1.811, 1.812]) == "1.81"
    assert pictures.interval([163.4]) == "163"
    assert pictures.interval([0.3247]) == "0.32"

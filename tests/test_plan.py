"""`ringstrategy-plan` answers which strategy to take: on one screen, the same each time, in code that can be pasted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import ringstrategy
from ringstrategy import BlockInt, Codec, Direct, RingStrategy
from ringstrategy.app import accuracy, advice, reference
from ringstrategy.app.advice import MATERIAL, Row, beaten, recommended, screen, tempting
from ringstrategy.app.plan import candidates, main, parse, plan
from ringstrategy.app.text import as_code
from ringstrategy.cost import CodecCost, Prediction, Work
from ringstrategy.names import STRATEGIES

DOCS = Path(__file__).parents[1] / "docs"
ACCURACY, PLANNING = ((DOCS / name).read_text() for name in ("accuracy.md", "planning.md"))
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
GIVEN = ["--parameters", "10M", "--hosts", "4", "--step-ms", "50"]
NAMES: dict[str, Any] = {name: getattr(ringstrategy, name) for name in ringstrategy.__all__}


def row(strategy: str, seconds: float, worst: float = 0.0) -> Row:
    return Row(strategy, Prediction(seconds, seconds, 1, 1), worst, f"{worst} %", None)


def predictions(arguments: list[str]) -> dict[str, Prediction]:
    return {row.strategy: row.prediction for row in plan(parse(arguments))[0]}


# What is predicted


def test_all_names_and_hierarchies_are_predicted() -> None:
    found = predictions([*GIVEN, "--rate", "100mbit", "--devices-per-host", "2", "--codec-gb-per-s", "10"])
    assert {f'"{name}"' for name in [*STRATEGIES, "ddp"]} - set(found) == {
        '"ring_powersgd"',
        *(f'"{name}"' for name in ("gossip", "gossip_exponential", "gossip_int8", "push_sum")),
    }
    apart, ring = found['"local_sgd"'], found['"ring"']
    assert apart.bytes_across == pytest.approx(ring.bytes_across / 16, rel=0.01)
    assert apart.seconds - ring.communication / 16 == pytest.approx(0.05, rel=0.1)
    assert 60 < ring.bytes_across / found['"diloco_int4"'].bytes_across < 130
    assert 240 < ring.bytes_across / found['"diloco_sign"'].bytes_across < 500
    assert found['"diloco_int4"'].seconds < found['"diloco"'].seconds < apart.seconds
    wire = 2 * 7 / 8 * 4e7 * 8 / (0.95 * 1e8)  # a flat ring leaves each host once, however many ranks it has
    assert found['"ring"'].communication == pytest.approx(wire, rel=0.05)
    assert found['"ring"'].seconds > found['"ring_int8"'].seconds > found['"ring_int4"'].seconds
    hierarchical = found["RingStrategy(AllReduce(Identity(), Hierarchical()))"].communication
    assert hierarchical == pytest.approx(wire * (2 * 3 / 4) / (2 * 7 / 8), rel=0.05)
    int8 = found["RingStrategy(AllReduce(BlockInt(8), Hierarchical()))"].seconds
    assert found['"ring_auto"'].seconds <= 1.001 * min(found['"ring"'].seconds, found['"ring_int8"'].seconds, int8)


def test_there_are_hierarchies_only_where_there_are_several_hosts_of_several_ranks() -> None:
    for layout in (["--hosts", "4"], ["--hosts", "1", "--devices-per-host", "4"]):
        found = predictions([*GIVEN, "--rate", "1gbit", *layout])
        assert len(found) > 10
        assert not [strategy for strategy in found if "Hierarchical" in strategy]


def test_what_is_shown_can_be_pasted() -> None:
    for name, algorithm in candidates(True).items():
        made = eval(name, NAMES) if "(" in name else name != "ddp" and StrategyRegistry.get(name)
        if made:
            assert isinstance(made, RingStrategy)
            assert repr(made.algorithm) == repr(algorithm)
    for part in (BlockInt(4, 64), Direct(segments=2), ringstrategy.Sign()):
        assert eval(as_code(part), NAMES) == part


# Where its figures come from


def test_the_codecs_speeds_are_shown_and_where_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Work(0.0, 1e-9)  # 4 GB/s
    monkeypatch.setattr("ringstrategy.app.plan.codec_cost", lambda *_: CodecCost(one, one, one, one))
    threads = torch.get_num_threads()
    for asked, words, speed in (
        ([], "one core of an AMD EPYC at 2.6 GHz with AVX-512; on GPUs add --codec-gb-per-s 1000 (an estimate)", 6.4),
        (["--codec-gb-per-s", "1000"], "as --codec-gb-per-s says", 1000),
        (["--measure-codecs"], "measured just now on", 4.0),
    ):
        main([*GIVEN, "--rate", "10Gbps", *asked])
        printed = capsys.readouterr().out
        assert words in " ".join(printed.split())
        [line] = [line for line in printed.splitlines() if line.startswith('"ring_int4"')]
        assert float(line.split()[4]) == speed
    torch.set_num_threads(threads)


def test_reference_speeds_and_losses_are_known_of_every_candidate() -> None:
    for algorithm in candidates(True).values():
        assert isinstance(algorithm.codec, Codec)
        key = algorithm.codec, algorithm.feeds_back(algorithm.codec)
        assert key in reference.CODECS, f"print its figures by python -m ringstrategy.app.reference: {key}"
        assert key in accuracy.TEXT, f"measure it by ringstrategy-train -m: {key}"


def test_losses_are_those_that_were_measured() -> None:
    rows = {}
    for line in ACCURACY.split("<!-- accuracy: begin")[1].split("<!-- accuracy: end")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        differences = [re.match(r"[+-]\d+\.\d(?= %)", cell) for cell in cells[1:3]]
        if all(differences):
            rows[cells[0]] = tuple(float(found[0]) for found in differences if found)
    words = {"ring": "exact", "ring_int8": "<=0.3 %", "ring_int4": "<=0.3 %"}
    words |= {"ring_int2": "0.5-0.9 %", "ring_sign": "3.4-3.7 %", "ring_topk": "7-17 %"}
    for name, algorithm in candidates(False).items():
        assert isinstance(algorithm.codec, Codec)
        found = accuracy.TEXT[algorithm.codec, algorithm.feeds_back(algorithm.codec)]
        row = "`BlockInt(4)`, `Direct`" if "(" in name else f"`{name}`"
        assert found == ((0, 0) if algorithm.codec.lossless else rows[row])
        assert name not in words or accuracy.in_words(algorithm.codec, False) == words[name]
    text = (RESULTS / "accuracy.md").read_text().split("## Every wire and knob")[1]
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| int8 |")][:2]  # AdamW, SGD, on text
    assert accuracy.TEXT[BlockInt(8), True] == tuple(round(float(line[4]), 1) for line in cells)
    assert accuracy.in_words(BlockInt(8), True) == "<=0.5 %"


# What it recommends


def test_nothing_lossier_is_recommended_unless_it_gains() -> None:
    ddp, fp16, int8 = row('"ddp"', 1.0), row("fp16", 0.55, 0.1), row("int8", 0.5, 0.2)
    assert recommended([ddp, fp16, int8]) is fp16, "int8 is faster, but not by enough"
    assert recommended([ddp, fp16, row("int8", 0.55 / MATERIAL / 1.01, 0.2)]).strategy == "int8"
    assert recommended([ddp, fp16, row("sign", 0.01, 3.7)]) is fp16, "however fast it is"
    nearly = row('"ring"', 0.9)
    assert recommended([ddp, nearly]) is ddp, "of two that lose nothing the first"
    assert recommended([ddp, row("int8", 1.01 / MATERIAL, 0.2)]) is ddp
    # what loses a little is named only if it gains
    fast = row("int2", 0.4, 0.9)
    assert tempting([int8, row("int2", 0.45, 0.9)], int8) is None
    assert tempting([int8, row("sign", 0.1, 3.7)], int8) is None
    assert tempting([int8, fast], int8) is fast
    # who is no faster and loses no less is beaten
    ring, fp8 = row("ring", 1.0), row("fp8", 0.5, 0.3)
    assert beaten([ddp, ring, int8, fp8, fast]) == [ring, fp8]


def test_the_best_are_shown_where_not_all_find_place() -> None:
    rows = [row('"ddp"', 9.0), *(row(f'"ring_int{i}"', 1 + i / 100 - i % 4 / 10, i % 4 / 10) for i in range(20))]
    lines = screen(rows, "setting", "codecs").splitlines()
    assert advice.HEIGHT - 2 <= len(lines) <= advice.HEIGHT
    assert any(line.startswith('"ddp"') for line in lines)
    assert any(f"strategy={recommended(rows).strategy}" in line for line in lines)
    left = {each for each in rows if not any(line.startswith(each.strategy) for line in lines)}
    assert 5 < len(left) == len(left & set(beaten(rows))), "only who is beaten"
    assert min(each.seconds for each in left) > max(each.seconds for each in set(beaten(rows)) - left - {rows[0]})


NETWORKS = {
    "24M --hosts 4 --rate 1gbit --step-ms 250 --cores 0.5": '"ring_int4"',
    "1M --hosts 4 --rate 25gbit --step-ms 50": '"ddp"',
    "7B --hosts 8 --rate 100gbit --step-ms 1000": '"ddp"',
    "7B --hosts 8 --rate 100gbit --step-ms 1000 --codec-gb-per-s 1000": '"ring_int4"',
    "350M --hosts 16 --devices-per-host 4 --rate 10gbit --step-ms 300": (
        "RingStrategy(AllReduce(Rotated(Gaussian(4)), Hierarchical(Direct())))"
    ),
    "24M --hosts 1 --rate 1gbit --step-ms 250": '"ddp"',
    "1.5B --hosts 24 --devices-per-host 2 --rate 12.5MB/s --step-ms 0.5 --cores 0.1": None,
}


@pytest.mark.parametrize(("network", "strategy"), NETWORKS.items(), ids=NETWORKS)
def test_the_answer_is_one_screen_with_one_recommendation(
    network: str, strategy: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--parameters", *network.split()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    [given] = [line.strip() for line in lines if line.startswith("  strategy=")]
    assert strategy is None or given == f"strategy={strategy}"
    assert any(line.startswith(given.removeprefix("strategy=")) for line in lines), "it has a row"
    imports = [line.strip() for line in lines if re.match("  (import|from) ", line)]
    exec("\n".join(imports), scope := {})
    assert given == 'strategy="ddp"' or "ringstrategy" in scope or isinstance(eval(given[9:], scope), RingStrategy)
    assert ("plain ddp" in "\n".join(lines)) == (given == 'strategy="ddp"')


def test_the_page_shows_what_the_command_prints_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = re.findall(r"```bash\nringstrategy-plan (.*)\n```\n\n```text\n(.*?)```", PLANNING, re.DOTALL)
    main(command.split())
    assert capsys.readouterr().out == shown


# What is asked


def test_rates_and_numbers_may_be_written_as_one_likes() -> None:
    for bits, spellings in {
        1e10: "10gbit|10Gbit|10 Gbit/s|10Gbps|10gbps|10Gb/s|1.25GB/s|1.25GBps|1.25 Gbytes/s",
        1e8: "100Mbits/s|12.5MB/s",
        1e11: "0.1tbit",
    }.items():
        for spelling in spellings.split("|"):
            asked = parse([*GIVEN, "--rate", spelling, "--inside-rate", spelling])
            assert asked.rate == asked.inside_rate == pytest.approx(bits), spelling
    for parameters in ("25e6", "25M", "0.025B", "25000000"):
        assert parse([*GIVEN, "--rate", "1gbit", "--parameters", parameters]).parameters == 25_000_000


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        *((f"--rate {rate}", "write it like") for rate in ("10", "0gbit", "10GiB/s")),
        *((f"--rate {rate}", "may be bits or bytes: write 10gbit or 10GB/s") for rate in ("10G", "10gb")),
        ("--parameters many", "write it like"),
        ("--hosts 0", "whole number >= 1"),
        ("--step-ms 0", "> 0"),
        ("--backward-part 2", "between 0 and 1"),
        ("--codec-gb-per-s 10 --measure-codecs", "not allowed with"),
    ],
)
def test_the_plan_says_what_is_wrong(wrong: str, cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*GIVEN, "--rate", "1gbit", *wrong.split()])
    assert cure in capsys.readouterr().err

"""`ringstrategy-plan` answers which strategy to take: on one screen, the same each time, in code that can be pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import ringstrategy
from ringstrategy import AllReduce, BlockInt, Codec, Direct, RingStrategy
from ringstrategy.app import accuracy, advice, reference
from ringstrategy.app.advice import MATERIAL, Row, beaten, recommended, screen, tempting
from ringstrategy.app.as_code import as_code
from ringstrategy.app.plan import candidates, main, parse, plan
from ringstrategy.cost import CodecCost, Prediction, Work
from ringstrategy.names import STRATEGIES

DOCS = Path(__file__).parents[1] / "docs"
ACCURACY, PLANNING = ((DOCS / name).read_text() for name in ("accuracy.md", "planning.md"))
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
GIVEN = ["--parameters", "10M", "--hosts", "4", "--step-ms", "50"]
SLOW = [*GIVEN, "--rate", "100mbit", "--devices-per-host", "2"]


def row(strategy: str, seconds: float, worst: float = 0.0) -> Row:
    return Row(strategy, Prediction(seconds, seconds, 1, 1), worst, f"{worst} %", None)


def predictions(arguments: list[str]) -> dict[str, Prediction]:
    return {row.strategy: row.prediction for row in plan(parse(arguments))[0]}


# What is predicted


def test_all_names_and_hierarchies_are_predicted() -> None:
    found = predictions([*SLOW, "--codec-gb-per-s", "10"])
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


@pytest.mark.parametrize("strategy", [f'"{name}"' if "(" not in name else name for name in candidates(True)])
def test_what_is_shown_can_be_pasted(strategy: str) -> None:
    made = eval(strategy, {name: getattr(ringstrategy, name) for name in ringstrategy.__all__})
    if strategy == '"ddp"':
        return
    if isinstance(made, str):
        made = StrategyRegistry.get(made)
    assert isinstance(made, RingStrategy)
    assert repr(made.algorithm) == repr(candidates(True)[strategy.strip('"')])


@pytest.mark.parametrize("part", [BlockInt(4, scale="minmax"), Direct(segments=2), ringstrategy.Sign()], ids=str)
def test_code_makes_what_it_was_made_from(part: Codec | Direct) -> None:
    assert eval(as_code(part), {name: getattr(ringstrategy, name) for name in ringstrategy.__all__}) == part


# The same answer each time


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process that computes for each core, and one more."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_the_answer_is_the_same_each_time_and_on_a_busy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    main(SLOW)
    answers.append(capsys.readouterr().out)
    with busy_cores():
        for _ in range(2):
            main(SLOW)
            answers.append(capsys.readouterr().out)
    assert "Recommended" in answers[0]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("asked", "words", "speed"),
    [
        ([], "one core of an AMD EPYC at 2.6 GHz with AVX-512; on GPUs add --codec-gb-per-s 1000 (an estimate)", 6.4),
        (["--codec-gb-per-s", "1000"], "as --codec-gb-per-s says", 1000),
        (["--measure-codecs"], "measured just now on", 4.0),
    ],
)
def test_the_codecs_speeds_are_shown_and_where_they_come_from(
    asked: list[str],
    words: str,
    speed: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Work(0.0, 1e-9)  # 4 GB/s
    monkeypatch.setattr("ringstrategy.app.plan.codec_cost", lambda *_, undisturbed: CodecCost(one, one, one, one))
    threads = torch.get_num_threads()
    main([*GIVEN, "--rate", "1gbit", *asked])
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert words in " ".join(printed.split())
    [line] = [line for line in printed.splitlines() if line.startswith('"ring_int4"')]
    assert float(line.split()[4]) == speed


def test_measured_speeds_are_of_this_machine() -> None:
    threads = torch.get_num_threads()
    [found] = [row for row in plan(parse([*GIVEN, "--rate", "1gbit", "--measure-codecs"]))[0] if "int8" in row.strategy]
    torch.set_num_threads(threads)
    assert found.codec_gb_per_s is not None
    assert 0.05 < found.codec_gb_per_s < 50
    assert found.codec_gb_per_s != round(found.codec_gb_per_s, 3), "no figure of the table"


def test_reference_speeds_and_losses_are_known_of_every_candidate() -> None:
    for algorithm in [*candidates(True).values(), AllReduce(BlockInt(8), error_feedback=True)]:
        assert isinstance(algorithm.codec, Codec)
        key = algorithm.codec, algorithm.feeds_back(algorithm.codec)
        assert key in reference.CODECS, f"print its figures by python -m ringstrategy.app.reference: {key}"
        assert key in accuracy.TEXT, f"measure it by python -m benchmarks accuracy: {key}"


def test_the_reference_command_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    reference.main()
    torch.set_num_threads(threads)
    first, *lines = capsys.readouterr().out.splitlines()
    scope = {**{name: getattr(ringstrategy, name) for name in ringstrategy.__all__}, **vars(reference)}
    exec(first, scope)
    table = eval("{" + "".join(lines) + "}", scope)
    assert table.keys() == reference.CODECS.keys()
    assert 1e-11 < scope["PACK_SECONDS"] < 1e-7
    for cost in table.values():
        assert 1e-11 < cost.encode.per_value < 1e-7
        assert 1e-11 < cost.add.per_value < 1e-7


# What it says of the loss


def test_losses_are_those_of_the_readme() -> None:
    rows = {}
    for line in ACCURACY.split("<!-- accuracy: begin")[1].split("<!-- accuracy: end")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        differences = [re.match(r"[+-]\d+\.\d(?= %)", cell) for cell in cells[1:3]]
        if all(differences):
            rows[cells[0]] = tuple(float(found[0]) for found in differences if found)
    for name, algorithm in candidates(False).items():
        assert isinstance(algorithm.codec, Codec)
        found = accuracy.TEXT[algorithm.codec, algorithm.feeds_back(algorithm.codec)]
        if algorithm.codec.lossless:
            assert found == (0, 0)
        else:
            assert found == rows["`BlockInt(4)`, `Direct`" if "(" in name else f"`{name}`"]


def test_the_loss_with_feedback_is_that_of_the_sweep() -> None:
    text = (RESULTS / "accuracy.md").read_text().split("## Every wire and knob")[1]
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| int8 |")][:2]  # AdamW, SGD, on text
    assert accuracy.TEXT[BlockInt(8), True] == tuple(round(float(line[4]), 1) for line in cells)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ring", "exact"),
        ("ring_int8", "<=0.3 %"),
        ("ring_int4", "<=0.3 %"),
        ("ring_int2", "0.5-0.9 %"),
        ("ring_sign", "3.4-3.7 %"),
        ("ring_topk", "7-17 %"),
    ],
)
def test_losses_in_words(name: str, words: str) -> None:
    codec = candidates(False)[name].codec
    assert isinstance(codec, Codec)
    assert accuracy.in_words(codec, False) == words
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


def test_what_loses_a_little_is_named_only_if_it_gains() -> None:
    chosen = row("int8", 0.5, 0.2)
    assert tempting([chosen, row("int2", 0.45, 0.9)], chosen) is None
    assert tempting([chosen, row("sign", 0.1, 3.7)], chosen) is None
    fast = row("int2", 0.4, 0.9)
    assert tempting([chosen, fast], chosen) is fast


def test_who_is_no_faster_and_loses_no_less_is_beaten() -> None:
    ddp, ring, int8, fp8, int2 = (
        row(name, seconds, worst)
        for name, seconds, worst in [
            ("ddp", 1.0, 0.0),
            ("ring", 1.0, 0.0),
            ("int8", 0.5, 0.2),
            ("fp8", 0.5, 0.3),
            ("int2", 0.4, 0.9),
        ]
    )
    assert beaten([ddp, ring, int8, fp8, int2]) == [ring, fp8]


@pytest.mark.parametrize("long", [False, True])
def test_the_best_are_shown_where_not_all_find_place(long: bool) -> None:
    code = "RingStrategy(AllReduce(Rotated(Gaussian(4)), Hierarchical(Direct())))" if long else '"ring_int{}"'
    rows = [row('"ddp"', 9.0)]
    rows += [row(code.replace("4", str(i)).format(i), 1 + i / 100 - i % 4 / 10, i % 4 / 10) for i in range(20)]
    text = screen(rows, "setting", "codecs")
    lines = text.splitlines()
    assert advice.HEIGHT - 2 <= len(lines) <= advice.HEIGHT
    assert max(map(len, lines)) <= advice.WIDTH
    assert any(line.startswith('"ddp"') for line in lines)
    assert f"strategy={recommended(rows).strategy}" in text
    left = {each for each in rows if not any(line.startswith(each.strategy) for line in lines)}
    assert 5 < len(left) == len(left & set(beaten(rows))), "only who is beaten"
    assert min(each.seconds for each in left) > max(each.seconds for each in set(beaten(rows)) - left - {rows[0]})
    assert long or all(re.search(rf"{each.strategy[1:-1]}\s\d", text) for each in left)


NETWORKS = [
    ("24M --hosts 4 --rate 1gbit --step-ms 250", '"ring_int4"'),
    ("24M --hosts 4 --rate 1gbit --step-ms 250 --cores 0.5", '"ring_int4"'),
    ("24M --hosts 4 --rate 100mbit --step-ms 250", '"ring_int4"'),
    ("1M --hosts 4 --rate 25gbit --step-ms 50", '"ddp"'),
    ("7B --hosts 8 --rate 100gbit --step-ms 1000", '"ddp"'),
    ("7B --hosts 8 --rate 100gbit --step-ms 1000 --codec-gb-per-s 1000", '"ring_int4"'),
    (
        "350M --hosts 16 --devices-per-host 4 --rate 10gbit --step-ms 300",
        "RingStrategy(AllReduce(Rotated(Gaussian(4)), Hierarchical(Direct())))",
    ),
    (
        "24M --hosts 16 --devices-per-host 4 --rate 100mbit --step-ms 300",
        "RingStrategy(AllReduce(Rotated(Gaussian(4)), Hierarchical(Direct())))",
    ),
    ("24M --hosts 1 --rate 1gbit --step-ms 250", '"ddp"'),
    ("1.5B --hosts 64 --devices-per-host 2 --rate 12.5MB/s --step-ms 0.5 --cores 0.1", None),
]


@pytest.mark.parametrize(("network", "strategy"), NETWORKS, ids=[network for network, _ in NETWORKS])
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


def test_the_readme_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = re.findall(r"```bash\nringstrategy-plan (.*)\n```\n\n```text\n(.*?)```", PLANNING, re.DOTALL)
    main(command.split())
    assert capsys.readouterr().out == shown


# What is asked


@pytest.mark.parametrize(
    ("spelling", "bits"),
    [
        ("10gbit", 1e10),
        ("10Gbit", 1e10),
        ("10 Gbit/s", 1e10),
        ("10Gbps", 1e10),
        ("10gbps", 1e10),
        ("10Gb/s", 1e10),
        ("100Mbits/s", 1e8),
        ("0.1tbit", 1e11),
        ("1.25GB/s", 1e10),
        ("12.5MB/s", 1e8),
        ("1.25GBps", 1e10),
        ("1.25 Gbytes/s", 1e10),
    ],
)
def test_rates_in_the_usual_spellings(spelling: str, bits: float) -> None:
    asked = parse([*GIVEN, "--rate", spelling, "--inside-rate", spelling])
    assert asked.rate == asked.inside_rate == pytest.approx(bits)


def test_the_rate_is_shown_in_bits_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GIVEN, "--rate", "10Gbps"])
    assert "10 Gbit/s (1250 MB/s)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("--rate 10", "write it like"),
        ("--rate 0gbit", "write it like"),
        ("--rate 10GiB/s", "write it like"),
        ("--rate fast", "write it like"),
        *((f"--rate {rate}", "may be bits or bytes: write 10gbit or 10GB/s") for rate in ("10G", "10gb", "10GB/S")),
        ("--rate 1.5MB", "write 1.5mbit or 1.5MB/s"),
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


@pytest.mark.parametrize("parameters", ["25e6", "25M", "0.025B", "25000000"])
def test_numbers_may_be_written_as_one_likes_and_nouns_agree(
    parameters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--parameters", parameters, "--hosts", "1", "--rate", "1gbit", "--step-ms", "250", "--cores", "1"])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("25 M parameters, 1 rank on 1 host of 1 Gbit/s (125 MB/s), 1 core a rank, 250 ms")

"""Minutes to a loss: steps from curves, seconds a step from another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import refusal

from benchmarks.harness import table_on
from benchmarks.long_race import lines, main, racers
from benchmarks.rows import Row, append, read

MADE: dict[str, Any] = {"device": "a CPU", "torch": "2", "commit": "abc", "hosts": 4}
SIZE = "byte GPT of 10.88 M parameters, batch 1"


def curve(case: str, seed: int, *losses: float | None, every: int = 100) -> Row:
    steps = [every * turn for turn in range(len(losses))]
    told = {"steps": steps, "seconds": [float(step) for step in steps], "losses": list(losses)}
    return Row(benchmark="loss by step", size=SIZE, case=case, seed=seed, curve=told, rate="loopback", **MADE)


def step(case: str, rate: str, seconds: float, sent: float | None = None, **other: Any) -> Row:
    made = {"size": "byte GPT of 10.9 M parameters, AdamW", **MADE, **other}
    return Row(benchmark="training", case=case, rate=rate, seconds_median=seconds, bytes_at_interface=sent, **made)


CURVES = [
    *(curve("ddp", 0, 5.0, 4.0, 3.0, 2.5), curve("ddp", 1, 5.0, 4.2, 3.2, 2.7)),
    *(curve("torchft diloco every 16", 0, 5.0, 4.0, 3.0, 2.5), curve("torchft diloco every 16", 1, 5.0, 4.2, 3.2, 2.7)),
    *(curve("diloco", 0, 5.0, 4.5, 3.3, 2.7), curve("diloco", 1, 5.0, 4.6, 3.36, 3.04)),
    *(curve("gossip", 0, 5.0, 4.9, 4.8, 4.7), curve("gossip", 1, 5.0, 4.9, 4.8, None)),
    curve("ring", 0, 5.0, 4.0, 3.0, 2.5),
    *(curve(case, seed, 5.0, 2.0, 1.0, 1.0) for case in ("ring_auto", "diloco every 64 after 128") for seed in (0, 1)),
]
STEPS = [
    step("gossip", "10mbit", 0.5),
    *(step("ddp", "100mbit", 6.0, 60e6), step("torchft diloco every 16", "100mbit", 3.0, 30e6)),
    *(step("diloco", "100mbit", 0.3, 2e6), step("ddp", "10mbit", 60.0, 60e6), step("diloco", "10mbit", 0.6, 2e6)),
]


def test_its_time_is_its_steps_times_the_seconds_of_one():
    found = {racer.case: racer for racer in racers(CURVES, STEPS, after=200)}
    assert list(found) == ["ddp", "torchft diloco every 16", "diloco", "gossip", "ring"], "the others have no price"
    assert [list(found[case].runs) for case in ("diloco", "ring")] == [[0, 1], [0]], "over the seeds that it has"
    assert [run.needed for run in found["ddp"].runs.values()] == pytest.approx([200.0, 200.0])
    assert found["ddp"].minutes("100mbit") == pytest.approx(20.0)
    ours = found["diloco"].runs.values()
    assert [run.excess for run in ours] == pytest.approx([0.1, 0.05])
    assert [run.needed for run in ours] == pytest.approx([250.0, 250.0])  # half way: 3.3 to 2.7, 3.36 to 3.04
    assert found["diloco"].minutes("100mbit") == pytest.approx(1.25)
    assert found["diloco"].megabytes == 2.0
    assert found["torchft diloco every 16"].minutes("10mbit") is None, "nobody measured it"
    assert [run.needed for run in found["gossip"].runs.values()] == [None, None]
    assert found["gossip"].minutes("10mbit") == pytest.approx(2.5), "of all its 300 steps"


def test_the_longest_curve_of_a_seed_counts():
    longer = [curve("gossip", 0, 5.0, 4.9, 4.8, 4.7, 3.0), curve("gossip", 1, 5.0, 4.9, 4.8, 4.7, 3.2)]
    for curves in ([*CURVES, *longer], [*longer, *CURVES]):
        [gossip] = [racer for racer in racers(curves, STEPS, after=200) if racer.case == "gossip"]
        assert [run.needed for run in gossip.runs.values()] == pytest.approx([400.0, 400.0])


def test_ratios_are_over_the_seeds_of_both():
    late = [*CURVES, curve("diloco late", 1, 5.0, 5.0, 5.0, 3.2), curve("ddp", 2, 5.0, 4.0, 3.0, 2.5)]
    late.append(curve("torchft diloco every 16", 2, 5.0, 4.0, 3.2, 2.8, 2.8, 3.0))
    steps = [*STEPS, step("diloco late", "100mbit", 1.0)]
    [line] = [line for line in lines(racers(late, steps, after=200), 200) if line.startswith("| `diloco late`")]
    assert "| 1 | 300 |" in line
    assert line.endswith("| 1.000 | 5.0 (2.00x) |"), "torchft took 10 minutes with seed 1, and longer with seed 2"


def test_the_timing_of_most_rounds_counts():
    better = replace(step("diloco", "100mbit", 0.9, 3e6), seconds=[0.8, 0.9, 1.0])
    for steps in ([*STEPS, better], [better, *STEPS]):
        [diloco] = [racer for racer in racers(CURVES, steps, after=200) if racer.case == "diloco"]
        assert diloco.seconds == {"10mbit": 0.6, "100mbit": 0.9}
        assert diloco.megabytes == 3.0


def test_the_table_compares_with_the_fastest_that_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append(CURVES, tmp_path / "curves.jsonl")
    alone = [step("compute alone", "100mbit", 0.2), step("compute alone, 16 in a row", "100mbit", 0.15)]
    append([*STEPS, *alone], tmp_path / "steps.jsonl")
    files = ["--curves", str(tmp_path / "curves.jsonl"), "--steps", str(tmp_path / "steps.jsonl")]
    main([*files, "--after", "200"])
    [heading, _, *table] = capsys.readouterr().out.splitlines()
    assert heading.endswith("| s a step, 10 Mbit/s | minutes | s a step, 100 Mbit/s | minutes |")
    assert table[0].endswith("| 60.00 | 60.000 | 200.0 (1.00x) | 6.000 | 20.0 (0.50x) |")
    assert "+7.5 % (+5.0 % to +10.0 %) | 250" in table[2]
    assert table[2].startswith("| `diloco` | 2 | 300 | ")
    assert table[4].startswith("| `ring` | 1 | 300 | ")
    assert table[2].endswith("| 2.00 | 0.600 | 2.5 (80.00x) | 0.300 | 1.2 (8.00x) |")
    assert table[3].endswith("| missed | - | 0.500 | > 2.5 | - | - |"), "300 steps at least"
    assert table[5].startswith(
        "| `compute alone` | 2 | 300 | +0.0 % (+0.0 % to +0.0 %) | 200 (200 to 200) | 0.00 | - | - |"
    )
    assert table[5].endswith("| 0.150 | 0.5 (20.00x) |")


def test_where_nobody_else_was_measured_there_are_no_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append(CURVES, tmp_path / "curves.jsonl")
    append([step("diloco", "10mbit", 0.6)], tmp_path / "steps.jsonl")
    main(["--curves", str(tmp_path / "curves.jsonl"), "--steps", str(tmp_path / "steps.jsonl"), "--after", "200"])
    assert "| 0.600 | 2.5 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("curves", "steps", "after", "words"),
    [
        (STEPS, STEPS, 200, "--curves"),
        (CURVES, CURVES, 200, "--steps"),
        (CURVES, STEPS, 150, "--after 150"),
        (CURVES[4:], STEPS, 200, "ddp is not there"),
        (CURVES, [step("ddp", "100mbit", 1.0, size="byte GPT of 10.9 M parameters")], 200, "--optimizer adamw"),
        ([*CURVES, replace(CURVES[0], seed=2, learning_rate=1.0)], STEPS, 200, "one learning rate"),
        (
            CURVES,
            [step("ddp", "100mbit", 1.0, hosts=8)],
            200,
            "on 4 ranks and 10.9 M parameters on 8",
        ),
        (CURVES, [step("ddp", "100mbit", 1.0, size="MLP of 24.1 M parameters, AdamW")], 200, "24.1 M"),
    ],
)
def test_what_does_not_fit_is_refused(
    curves: list[Row],
    steps: list[Row],
    after: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    append(curves, tmp_path / "curves.jsonl")
    append(steps, tmp_path / "steps.jsonl")
    files = ["--curves", str(tmp_path / "curves.jsonl"), "--steps", str(tmp_path / "steps.jsonl")]
    assert words in " ".join(refusal(["long_race", *files, f"--after={after}"], capsys).split())


def test_the_page_says_what_the_rows_say():
    root = Path(__file__).parents[1]
    results = root / "benchmarks" / "results" / "long-race"
    losses = [row for file in sorted(results.glob("losses-*.jsonl")) for row in read(file)]
    steps = [row for file in sorted(results.glob("seconds-*.jsonl")) for row in read(file)]
    table = "".join(f"{line}\n" for line in lines(racers(losses, steps, after=1088), 1088))
    assert table_on((root / "docs" / "local_sgd.md").read_text(), "long_race") == table

"""What measured rows are read as, and that every published number is what rows say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT

from benchmarks.rows import CAMPAIGN, Row, append, read, steps

RESULTS = ROOT / "benchmarks" / "results"


def row(case: str, seconds: float | list[float], **changed: Any) -> dict[str, Any]:
    times = seconds if isinstance(seconds, list) else [seconds]
    median = sorted(times)[len(times) // 2]
    made = {"benchmark": "collectives", "case": case, "baseline": "gloo fp32", "seconds_median": median}
    made |= {"seconds": times, "ratio": 10.0 / median, "bytes_sent": 1000, "bytes_at_interface": 1100, "error": 0.01}
    made |= {"ranks_identical": True, "limit_seconds": 0.9, "hosts": 4, "processes": 1, "rate": "100mbit"}
    made |= {"throughput": 0.956e8 / 8, "threads": 1, "cores": 2, "size": "96 MB of fp32", "device": "cpu"}
    return made | {"torch": "2.13.0", "commit": "0123456789abcdef"} | changed


def write(folder: Path, key: str, *rows: dict[str, Any]) -> None:
    file = folder / f"{key}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    made = {"command": f"python -m benchmarks {key}", "date": "2026-11-22", "processor": "Z80"}
    (folder / CAMPAIGN).write_text(json.dumps(steps(folder) | {key: made}))


def test_the_last_run_counts_and_ratios_stay_within_runs(tmp_path: Path) -> None:
    from benchmarks.report import frame

    write(tmp_path, "collectives/a", row("gloo fp32", 10.0), row("ring int8", 4.0), row("ring sign", 5.0))
    write(tmp_path, "collectives/b", row("gloo fp32", [6.0, 9.0]), row("ring int8", [3.0, 1.0]))
    (tmp_path / "collectives" / "c.jsonl").write_text(json.dumps(row("ring int8", 2.0)))
    rows = frame.load(tmp_path)
    assert list(rows.case) == ["gloo fp32", "ring int8", "ring sign"]
    assert list(rows.seconds_median) == [9.0, 3.0, 5.0], "no step has made the third file"
    assert list(rows.beside_peer) == [1.0, (2 + 9) / 2, 2.0], "each beside gloo of its own run"


# One folder of rows, in which something is lost at each kind of place


STEP: dict[str, Any] = {"benchmark": "training", "baseline": "ddp", "size": "byte GPT of 10.9 M parameters, batch 1"}
RACERS = ("ddp", "ddp fp16 hook", "ddp powersgd rank 1", "ddp powersgd rank 4", "ring_int8", "ring_sign")


def race(key: str, folder: Path, times: tuple[float | None, ...], **changed: Any) -> None:
    curve = {"steps": [0, 8], "seconds": [0.0, 4.0], "losses": [5.5, 2.4]}
    made = {"benchmark": "time to accuracy", "baseline": "ddp", "size": "byte GPT of 1.02 M parameters", "curve": curve}
    made |= {"target": 2.45, **changed}
    rows = [row(name, 1.0, **made, seconds_to_target=time) for name, time in zip(RACERS, times, strict=False)]
    write(folder, f"race/{key}", *rows)


def write_rows(folder: Path) -> None:
    ours = [row("ring identity", 10.01), row("ring int8", 2.5), row("ring int4", 1.4), row("direct int4", 1.3)]
    write(folder, "collectives/large", row("gloo fp32", 10.0), *ours)
    cases = {"gloo fp32": 10.0, "gloo fp16 tensor": 2.5, "ring identity": 12.5, "ring fp16": 8.0, "ring int8": 3.0}
    write(folder, "collectives/small", *(row(case, each, size="1 MB of fp32") for case, each in cases.items()))
    fast = {"rate": "none", "throughput": None, "limit_seconds": None}
    write(folder, "collectives/fast", row("gloo fp32", 10.0, **fast), row("ring int8", 20.0, **fast))
    for key, hook, name in (("near", 5.0, "ring_int8"), ("few-bits", 4.0, "ring_int4")):
        steps_of = (row("ddp", 10.0), row("ddp fp16 hook", hook), row(name, 8), row("post-local sgd every 4", 2.0))
        write(folder, f"training/{key}", *(each | STEP for each in steps_of))
    race("seed0", folder, (40.0, 20.0, 10.0, 12.0, 5.0, 2.0))
    race("seed1", folder, (10.0, 20.0, 6.0, 7.0, 2.0, None), seed=1)
    race("lost", folder, (*[4.0] * 4, None, None), target=2.0)  # none of ours was there,
    race("won", folder, (*[None] * 4, 9.0, None), target=1.9)  # none of the others,
    race("missed", folder, (None,) * 6, target=1.8)  # nobody
    race("some0", folder, (40.0, 20.0, 10.0, 12.0, 5.0), target=1.7)
    write(folder, "race/some1", *(row(name, 1.0, **SOME, seconds_to_target=4.0) for name in ("ddp", "ring_int8")))


SOME = {"benchmark": "time to accuracy", "baseline": "ddp", "size": "byte GPT of 1.02 M parameters", "target": 1.7}
SOME |= {"seed": 1, "curve": {"steps": [0, 8], "seconds": [0.0, 4.0], "losses": [5.5, 2.4]}}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from benchmarks.report import frame

    folder = tmp_path_factory.mktemp("results")
    write_rows(folder)
    return frame.load(folder)


def test_races_are_won_seed_by_seed(told: Any) -> None:
    from benchmarks.report import frame

    races = frame.races(told)

    def found(target: float) -> Any:
        return races[races.target == target].set_index("case")

    assert found(2.45).dense["ring_int8"] == 4.5, "beside the better of the two of each seed"
    assert found(2.45).powersgd["ring_int8"] == 2.5
    assert found(2.45).seconds_median["ring_sign"] == math.inf, "it missed the target once"
    assert found(2.45).ratio["ring_sign"] == found(2.45).dense["ring_sign"] == 0
    assert found(2.0).dense["ring_int8"] == 0
    assert found(1.9).dense["ring_int8"] == math.inf
    assert math.isnan(found(1.8).dense["ring_int8"]), "nobody was there"
    assert list(found(1.7).index) == ["ddp", "ring_int8"], "those that all seeds were run with"
    assert found(1.7).powersgd.isna().all()
    assert list(found(1.7).ratio) == pytest.approx([1, (8 + 1) / 2])


def test_where_we_lose_counts_every_loss_and_nothing_else(told: Any) -> None:
    from benchmarks.report import frame

    found = {each["setting"]: each for each in frame.losses(told).to_dict("records")}
    slow = found["1 MB of fp32, 4 hosts, 100 Mbit/s"]
    assert (slow["kind"], slow["lost"], slow["ours"], slow["beaten"]) == ("small tensors", 1, 3, True)
    assert slow["strongest"] == "`gloo fp16 tensor` 4.00x gloo fp32"
    assert slow["best"] == "`ring int8` 0.83x the strongest"
    fast = found["96 MB of fp32, 4 hosts, links without a throttle"]
    assert (fast["kind"], fast["lost"], fast["beaten"]) == ("fast links", 1, True)
    # the strongest is that of the same run and averages at each step: post-local SGD is none
    few = found["byte GPT 10.9 M, 4 hosts, 100 Mbit/s"]
    assert few["strongest"] == "`ddp fp16 hook` 2.00x ddp", "as the table shows it"
    assert few["best"] == "`ring_int8` 0.62x the strongest", "beside 5 s, of its own run"
    assert [each["beaten"] for setting, each in found.items() if "loss 2," in setting] == [True]
    assert len(found) == 8


# What is published


@pytest.mark.slow
def test_the_page_is_what_the_rows_say() -> None:
    from benchmarks.report import frame, page

    text = page.text(frame.load(RESULTS), "benchmarks")
    assert (ROOT / "docs" / "benchmarks.md").read_text() == text, "python -m benchmarks report"


def test_the_long_race_is_what_the_rows_say() -> None:
    from benchmarks.harness import table_on
    from benchmarks.long_race import lines, racers

    losses = [row for file in sorted(RESULTS.glob("long-race/losses-*.jsonl")) for row in read(file)]
    timed = [row for file in sorted(RESULTS.glob("long-race/seconds-*.jsonl")) for row in read(file)]
    table = "".join(f"{line}\n" for line in lines(racers(losses, timed, after=1088), 1088))
    assert table_on((ROOT / "docs" / "local_sgd.md").read_text(), "long_race") == table


# Minutes to a loss: steps from curves, seconds a step from another run


MADE: dict[str, Any] = {"device": "a CPU", "torch": "2", "commit": "abc", "hosts": 4}
SIZE = "byte GPT of 10.88 M parameters, batch 1"


def curve(case: str, seed: int, *losses: float | None, **other: Any) -> Row:
    counted = [100 * turn for turn in range(len(losses))]
    made = {"steps": counted, "seconds": [float(step) for step in counted], "losses": list(losses)}
    return Row(benchmark="loss by step", size=SIZE, case=case, seed=seed, curve=made, rate="loopback", **MADE, **other)


def step(case: str, rate: str, seconds: float, sent: float | None = None, **other: Any) -> Row:
    made = {"size": "byte GPT of 10.9 M parameters, AdamW", **MADE, **other}
    return Row(benchmark="training", case=case, rate=rate, seconds_median=seconds, bytes_at_interface=sent, **made)


CURVES = [
    *(curve("ddp", 0, 5.0, 4.0, 3.0, 2.5), curve("ddp", 1, 5.0, 4.2, 3.2, 2.7)),
    *(curve("torchft diloco every 16", 0, 5.0, 4.0, 3.0, 2.5), curve("torchft diloco every 16", 1, 5.0, 4.2, 3.2, 2.7)),
    *(curve("diloco", 0, 5.0, 4.5, 3.3, 2.7), curve("diloco", 1, 5.0, 4.6, 3.36, 3.04)),
    *(curve("gossip", 0, 5.0, 4.9, 4.8, 4.7), curve("gossip", 1, 5.0, 4.9, 4.8, None)),
    *(curve(case, seed, 5.0, 2.0, 1.0, 1.0) for case in ("ring_auto", "diloco every 64 after 128") for seed in (0, 1)),
]
STEPS = [
    *(step("gossip", "10mbit", 0.5), step("compute alone", "100mbit", 0.2)),
    *(step("ddp", "100mbit", 6.0, 60e6), step("torchft diloco every 16", "100mbit", 3.0, 30e6)),
    *(step("diloco", "100mbit", 0.3, 2e6), step("ddp", "10mbit", 60.0, 60e6), step("diloco", "10mbit", 0.6, 2e6)),
]


def test_a_long_race_is_steps_times_seconds_beside_the_fastest_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.long_race import main, racers

    append(CURVES, tmp_path / "curves")
    append(STEPS, tmp_path / "steps")
    main(["--curves", str(tmp_path / "curves"), "--steps", str(tmp_path / "steps"), "--after", "200"])
    table = {line.split("`")[1]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert {"ring_auto", "diloco every 64 after 128"}.isdisjoint(table), "they have no price"
    assert table["ddp"].endswith("| 60.00 | 60.000 | 200.0 (1.00x) | 6.000 | 20.0 (0.50x) |")
    # half way: 3.3 to 2.7, 3.36 to 3.04
    assert table["diloco"].startswith("| `diloco` | 2 | 300 | +7.5 % (+5.0 % to +10.0 %) | 250")
    assert table["diloco"].endswith("| 2.00 | 0.600 | 2.5 (80.00x) | 0.300 | 1.2 (8.00x) |")
    assert table["gossip"].endswith("| missed | - | 0.500 | > 2.5 | - | - |"), "300 steps at least"
    assert table["compute alone"].endswith("| 0.200 | 0.7 (15.00x) |")
    longer = [curve("gossip", seed, 5.0, 4.9, 4.8, 4.7, 3.0) for seed in (0, 1)]
    for curves in ([*CURVES, *longer], [*longer, *CURVES]):
        [gossip] = [found for found in racers(curves, STEPS, after=200) if found.case == "gossip"]
        assert None not in [run.needed for run in gossip.runs.values()], "the longest curve counts"

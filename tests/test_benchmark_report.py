"""What measured rows are read as, and that every published number is what rows say."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import ROOT, refusal

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
    from benchmarks.report import frame, markdown

    write(tmp_path, "collectives/a", row("gloo fp32", 10.0), row("ring int8", 4.0), row("ring sign", 5.0))
    write(tmp_path, "collectives/b", row("gloo fp32", [6.0, 9.0]), row("ring int8", [3.0, 1.0]))
    (tmp_path / "collectives" / "c.jsonl").write_text(json.dumps(row("ring int8", 2.0)))
    rows = frame.load(tmp_path)
    assert list(rows.case) == ["gloo fp32", "ring int8", "ring sign"]
    assert list(rows.seconds_median) == [9.0, 3.0, 5.0], "no step has made the third file"
    assert list(rows.beside_peer) == [1.0, (2 + 9) / 2, 2.0], "each beside gloo of its own run"
    assert markdown.sources(rows).count("python -m benchmarks collectives/") == 2


def scaling_row(case: str, hosts: int, seconds: float, mb: int = 1) -> dict[str, Any]:
    from benchmarks.report.frame import share

    sent = None if case.startswith("gloo") else share(case, hosts) * mb * 2**20
    return row(case, seconds, benchmark="scaling", size=f"{mb} MB of fp32", hosts=hosts, bytes_sent=sent)


def test_the_model_of_growth_finds_what_made_the_times(tmp_path: Path) -> None:
    from benchmarks import collectives
    from benchmarks.report import frame
    from ringstrategy import Direct, Ring

    for size in (2, 3, 8):
        assert frame.rounds("ring int8", size) == frame.rounds("gloo fp32", size) == 2 * (size - 1)
        assert frame.share("gossip, one mixing", size) == (1 if size == 2 else 2)
        for collective in (Ring(), Direct(), None):
            assert frame.share("ring int8", size) == collectives.link_share(collective, size, 1)
    alpha, beta, sizes = 3e-4, 8e-8, (2, 3, 4, 6, 8, 16)
    cases = ["gloo fp32", "ring identity", "direct int8", "gossip, one mixing"]
    made = []
    for mb, off, some in ((1, 1.0, sizes), (2, 1.2, sizes), (3, 1.0, sizes[:2])):
        for case, n in itertools.product(cases, some):
            model = alpha * frame.rounds(case, n) + beta * frame.share(case, n) * mb * 2**20
            made.append(scaling_row(case, n, (off if n == 4 else 1.0) * model, mb))
    for mb, some in ((4, (2, 4, 8, 16)), (5, (4, 8, 16))):
        seconds = {2: 1.0, 4: 1.5 * 0.8, 8: 1.75 * 1.1, 16: 100.0}
        made += [scaling_row("ring int8", n, seconds[n], mb) for n in some]
    write(tmp_path, "scaling/some", *made)
    found = frame.growth(frame.load(tmp_path)).set_index(["size", "case"])
    for case in cases:
        whole, off, few = (found.loc[f"{mb} MB of fp32", case] for mb in (1, 2, 3))
        assert (whole.alpha, whole.beta) == pytest.approx((alpha, beta), rel=1e-6), case
        assert whole.worst < 1e-9, case
        assert 0.05 < off.worst < 0.2, case
        assert math.isnan(few.alpha), f"{case}: too few to fit"
    assert found.growth["4 MB of fp32", "ring int8"] == pytest.approx(-0.2), "of the size farthest off"
    assert math.isnan(found.growth["5 MB of fp32", "ring int8"]), "8 beside 2, or nothing"


# One folder of rows, in which each target is met, missed or not measured somewhere


STEP: dict[str, Any] = {"benchmark": "training", "baseline": "ddp", "size": "MLP of 24.1 M parameters, batch 32 a rank"}
RACERS = ("ddp", "ddp fp16 hook", "ddp powersgd rank 1", "ddp powersgd rank 4")
RACERS = (*RACERS, "post-local sgd every 4", "post-local sgd every 16", "ring_int8", "ring_sign")


def racer(case: str, seconds: float | None, **changed: Any) -> dict[str, Any]:
    curve = {"steps": [0, 8], "seconds": [0.0, 4.0], "losses": [5.5, 2.4]}
    made = row(case, 1.0, benchmark="time to accuracy", baseline="ddp", size="byte GPT of 1.02 M parameters")
    del made["seconds"], made["seconds_median"]
    return made | {"target": 2.45, "seconds_to_target": seconds, "steps_to_target": seconds, "curve": curve} | changed


def race(key: str, folder: Path, times: tuple[float | None, ...], **changed: Any) -> None:
    write(folder, f"race/{key}", *(racer(name, time, **changed) for name, time in zip(RACERS, times, strict=True)))


def write_rows(folder: Path) -> None:
    from benchmarks.cpu import PARTS

    ours = [row("ring identity", 10.01), row("ring int8", 2.5), row("ring int4", 1.4), row("direct int4", 1.3)]
    write(folder, "collectives/large", row("gloo fp32", 10.0), *ours)
    differ = row("direct rotated sign", 0.1, ranks_identical=False, rate="1gbit")
    write(folder, "collectives/near", row("gloo fp32", 10.0, rate="1gbit"), differ)
    cases = {"gloo fp32": 10.0, "gloo fp16 tensor": 2.5, "ring identity": 12.5, "ring fp16": 8.0, "ring int8": 3.0}
    write(folder, "collectives/small", *(row(case, each, size="1 MB of fp32") for case, each in cases.items()))
    fast = {"rate": "none", "throughput": None, "limit_seconds": None}
    write(folder, "collectives/fast", row("gloo fp32", 10.0, **fast), row("ring int8", 20.0, **fast))
    # of targets, what a step of the one network reaches that of the other misses
    for rate, int8, auto, hidden in (("100mbit", 2.0, 1.02, 0.94), ("1gbit", 5.0, 1.1, 0.99)):
        steps_of = [row("compute alone, 7 in a row", 0.9, steps=7), row("gossip every 7", hidden, steps=7)]
        steps_of += [row("gossip every 7, no overlap", 3.0, steps=7), row("gossip every 4", 9.0)]
        times = {"ddp": 10.0, "compute alone": 1.0, "ring": 1.0, "ring_int8": int8, "ring_int8 with feedback": 1.5}
        steps_of += [row(case, each) for case, each in {**times, "ring_auto": auto, "ring of BlockInt(4)": 9.0}.items()]
        write(folder, f"training/{rate}", *(each | STEP | {"rate": rate} for each in steps_of))
    alone = (row(case, each) for case, each in {"ddp": 10.0, "ring": 1.0, "ring_auto": 0.1}.items())
    write(folder, "training/none", *(each | STEP | {"rate": "none"} for each in alone))
    two = (row("ddp", 10.0), row("ddp fp16 hook", 5.0), row("ring_int8", 2.0))
    write(folder, "training/two", *(each | STEP | {"rate": "1gbit", "hosts": 2} for each in two))
    gpt = {**STEP, "size": "byte GPT of 10.9 M parameters, batch 1"}
    for key, hook, name in (("near", 5.0, "ring_int8"), ("few-bits", 4.0, "ring_int4")):
        write(
            folder, f"training/{key}", *(e | gpt for e in (row("ddp", 10.0), row("ddp fp16 hook", hook), row(name, 8)))
        )
    write(folder, "training/rare", *(e | gpt for e in (row("ddp", 10.0), row("post-local sgd every 4", 2.0))))
    spent = {"cpu_seconds": dict(zip(PARTS, (0.03, 0.05, 0.008, 0.011, 0.007, 0.031), strict=True))}
    write(folder, "training/cpu", row("ring_int8", 5.0) | {**STEP, "size": "MLP", "rate": "1gbit", **spent})
    write(folder, "scaling/a", *(scaling_row("ring int8", n, each) for n, each in {2: 1.0, 4: 1.5, 8: 2.1}.items()))
    write(folder, "scaling/b", *(scaling_row("ring int8", n, 4.0, mb=64) for n in (2, 4)))  # of another size
    race("seed0", folder, (40.0, 20.0, 10.0, 12.0, 1.0, 15.0, 5.0, 2.0))
    race("seed1", folder, (10.0, 20.0, 6.0, 7.0, None, None, 2.0, None), seed=1)
    race("lost", folder, (*[4.0] * 6, None, None), target=2.0)  # none of ours was there,
    race("won", folder, (*[None] * 6, 9.0, None), target=1.9)  # none of the others,
    race("missed", folder, (None,) * 8, target=1.8)  # nobody


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    from benchmarks.report import frame, page, plots, targets

    folder = tmp_path_factory.mktemp("results")
    write_rows(folder)
    rows = frame.load(folder)
    plots.draw(rows, folder / "page")
    losses, text, tables = targets.losses(rows).to_dict("records"), page.text(rows, "page"), page.tables(rows)
    verdicts = [line.strip("| ").split(" | ") for line in tables["targets"].splitlines() if line.startswith("| ")][2:]
    return SimpleNamespace(folder=folder, rows=rows, verdicts=verdicts, losses=losses, text=text, tables=tables)


MET, MISSED, UNKNOWN = "met", "**MISSED**", "-"


VERDICTS = [
    (("100 Mbit/s", "fp32 ring beside gloo"), MISSED, "0.999x (`ring identity`)"),
    (("1 Gbit/s", "fp32 ring beside gloo"), UNKNOWN, "not measured yet"),
    (("100 Mbit/s", "int8 beside gloo"), MET, "4.00x (`ring int8`)"),
    (("100 Mbit/s", "int4 absmax"), MET, "7.69x (`direct int4`)"),
    (("1 Gbit/s", "sign, rotated"), UNKNOWN, "not measured yet"),  # its ranks differ
    (("100 Mbit/s", "time beyond"), MISSED, "1 of 3 names; the worst, +55.0 % (`ring_int8`)"),
    (("`gossip every 7`", "100 Mbit/s", "gossip at an interval"), MET, "0.957x"),  # every 4 was not to hide it
    (("1 Gbit/s", "gossip at an interval"), MISSED, "0.91x"),
    (("100 Mbit/s", "ring_auto"), MET, "0.980x"),
    (("1 Gbit/s", "ring_auto"), MISSED, "0.91x"),
    (("without a throttle", "ring_auto"), UNKNOWN, "not measured yet"),  # without all that it was allowed
    (("1 Gbit/s", "`ring_int8` beside DDP, 2 hosts"), MET, "5.00x (`ring_int8`)"),
    (("1 Gbit/s", "`ring_int8` beside DDP, 4 hosts"), MISSED, "2.00x (`ring_int8`)"),
    (("1 MB of fp32", "seconds per all-reduce"), MISSED, "+20.0 %"),  # and of 64 MB nothing
    # beside the better of the two of each seed
    (("loss 2.45, 2 seed(s)", "fp16 hook"), MET, "4.50x (`ring_int8`)"),
    (("loss 2.45, 2 seed(s)", "PowerSGD"), MET, "2.50x (`ring_int8`)"),
    # with seed 0 post-local SGD is there in 1 s, with seed 1 nobody of the others before 6 s
    (("loss 2.45, 2 seed(s)", "all others"), MET, "1.60x (`ring_int8`)"),
    (("loss 2,", "all others"), MISSED, "missed (`ring_int8`)"),
    (("loss 1.9,", "all others"), MET, "they miss it (`ring_int8`)"),
]


def test_targets_are_met_missed_or_not_measured(told: SimpleNamespace) -> None:
    for where, met, measured in VERDICTS:
        found = [said for target, _, place, *said in told.verdicts if all(e in f"{place}: {target}" for e in where)]
        assert found == [[measured, met]], where


def test_races_are_won_seed_by_seed(told: SimpleNamespace) -> None:
    from benchmarks.report import frame

    assert not [place for _, _, place, *_ in told.verdicts if "loss 1.8" in place], "nobody was there"
    found = frame.races(told.rows)
    found = found[found.target == 2.45].set_index("case")
    assert found.dense["ring_int8"] == 4.5
    assert found.seconds_median["ring_sign"] == math.inf, "it missed the target once"
    assert found.ratio["ring_sign"] == found.dense["ring_sign"] == 0
    assert set(found.seeds) == {2}


def test_what_only_some_seeds_were_run_with_is_said(tmp_path: Path) -> None:
    from benchmarks.report import frame

    race("seed0", tmp_path, (40.0, 20.0, 10.0, 12.0, 1.0, 15.0, 5.0, 2.0))
    write(tmp_path, "race/seed1", racer("ddp", 4.0, seed=1), racer("ring_int8", 3.0, seed=1))
    found = frame.races(frame.load(tmp_path))
    assert list(found.case) == ["ddp", "ring_int8"]
    assert found.lacking[0].startswith("Seed 1 was not run with `ddp fp16 hook`, `ddp powersgd rank 1`")
    assert found.powersgd.isna().all()
    assert list(found.ratio) == pytest.approx([1, (8 + 4 / 3) / 2])


def test_where_we_lose_counts_every_loss_and_nothing_else(told: SimpleNamespace) -> None:
    found = {each["setting"]: each for each in told.losses}
    words = ["the slowest", "strongest other", "the best of ours"]
    slow = found["1 MB of fp32, 4 hosts, 100 Mbit/s"]
    assert (slow["kind"], slow["lost"], slow["ours"], slow["beaten"]) == ("small tensors", 1, 3, True)
    assert [slow[word] for word in words] == [
        "`ring identity` 0.80x gloo fp32",
        "`gloo fp16 tensor` 4.00x gloo fp32",
        "`ring int8` 0.83x the strongest",
    ]
    fast = found["96 MB of fp32, 4 hosts, links without a throttle"]
    assert (fast["kind"], fast["lost"], fast["beaten"]) == ("fast links", 1, True)
    # the strongest is that of the same run and averages at each step: post-local SGD is none
    few = found["byte GPT 10.9 M, 4 hosts, 100 Mbit/s"]
    assert few["strongest other"] == "`ddp fp16 hook` 2.00x ddp", "as the table shows it"
    assert few["the best of ours"] == "`ring_int8` 0.62x the strongest", "beside 5 s, of its own run"
    assert {each["beaten"] for each in told.losses if "loss 2," in each["setting"]} == {True}
    assert len(found) == 12


def test_the_page_has_the_numbers(told: SimpleNamespace) -> None:
    text, tables = told.text, told.tables
    pictures = set(re.findall(r"\]\(page/([^)]+)\)", text))
    assert pictures == {path.name for path in (told.folder / "page").iterdir()}
    assert pictures == {"sizes.png", "training.png", "time_to_accuracy.png", "scaling.png"}
    for line in (
        "| int8 beside gloo in fp32 | at least 3.95x | 1 of 1 | - |",
        "0 of 2 | 96 MB of fp32, 4 hosts, 100 Mbit/s: 0.999x (`ring identity`); 1 Gbit/s: not measured yet |",
        "| fast links | 1 of 3 | 1 of 2 |",
        "| small tensors | 1 of 3 | 1 of 1 |",
        "| `ring_int8` | 3.500 s, 4.50x, 2.50x |",
        "| `ring_int8` | 30 | 50 | 8 | 11 | 7 | 31 | 137 |",
    ):
        assert line in text, line
    assert re.search(r"\| `gloo fp32` \|.* 10.00 s \|", text)
    assert re.search(r"\| `ring int8` \|.* 4.00x \(36 %\) \|", text)
    assert "was not run with" not in text
    said = "2.500 s | 2.500 s - 2.500 s | 4.00x gloo fp32 | 0.900 s | 36 % | 0.001 | 0.0011 | 1.0e-02 | yes"
    assert f"| ring int8 | {said} |" in tables["all-reduce"]
    source = "`python -m benchmarks collectives/large`, 2026-11-22, commit 0123456789, torch 2.13.0, Z80, 2 cores"
    assert source in tables["all-reduce"]
    assert "a raw TCP stream carried 95.6 % of the rate." in tables["all-reduce"]
    assert re.search(r"\| 0 \| ring_int8 \| 5.000 s \| 5 \|", tables["races"])
    assert "| +20.0 % | **MISSED** |" in tables["targets"]


def test_without_rows_the_page_says_what_is_missing(tmp_path: Path) -> None:
    from benchmarks.report import frame, page, plots

    rows = frame.load(tmp_path)
    text = page.text(rows, "pictures")
    assert text.count("Not measured yet: `python -m benchmarks ") == 12
    assert "![" not in text
    plots.draw(rows, tmp_path / "pictures")
    assert list((tmp_path / "pictures").iterdir()) == []


# What is published


@pytest.mark.slow
def test_the_pages_are_what_the_rows_say() -> None:
    from benchmarks.report import frame, page

    rows = frame.load(RESULTS)
    text, published = page.text(rows, "benchmarks"), ROOT / "docs" / "benchmarks.md"
    assert published.read_text() == text, "python -m benchmarks report"
    anchors = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", text, re.M)}
    assert set(re.findall(r"^\[[^]]+\]\(#([^)]+)\)", text, re.M)) == anchors
    for name, full in page.tables(rows).items():
        assert (RESULTS / "tables" / f"{name}.md").read_text() == full, f"{name}: python -m benchmarks report"


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


def curve(case: str, seed: int, *losses: float | None) -> Row:
    counted = [100 * turn for turn in range(len(losses))]
    made = {"steps": counted, "seconds": [float(step) for step in counted], "losses": list(losses)}
    return Row(benchmark="loss by step", size=SIZE, case=case, seed=seed, curve=made, rate="loopback", **MADE)


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


def racing(curves: list[Row] = CURVES, timed: list[Row] = STEPS) -> dict[str, Any]:
    from benchmarks.long_race import racers

    return {found.case: found for found in racers(curves, timed, after=200)}


def needed(found: Any) -> list[float | None]:
    return [run.needed for run in found.runs.values()]


def test_the_time_of_a_long_race_is_its_steps_times_the_seconds_of_one() -> None:
    found = racing()
    assert list(found) == ["ddp", "torchft diloco every 16", "diloco", "gossip", "ring"], "the others have no price"
    assert [list(found[case].runs) for case in ("diloco", "ring")] == [[0, 1], [0]], "over the seeds that it has"
    assert needed(found["ddp"]) == pytest.approx([200.0, 200.0])
    assert found["ddp"].minutes("100mbit") == pytest.approx(20.0)
    assert [run.excess for run in found["diloco"].runs.values()] == pytest.approx([0.1, 0.05])
    assert needed(found["diloco"]) == pytest.approx([250.0, 250.0])  # half way: 3.3 to 2.7, 3.36 to 3.04
    assert found["diloco"].minutes("100mbit") == pytest.approx(1.25)
    assert found["diloco"].megabytes == 2.0
    assert found["torchft diloco every 16"].minutes("10mbit") is None, "nobody measured it"
    assert needed(found["gossip"]) == [None, None]
    assert found["gossip"].minutes("10mbit") == pytest.approx(2.5), "of all its 300 steps"


def test_the_longest_curve_and_the_timing_of_most_rounds_count() -> None:
    longer = [curve("gossip", 0, 5.0, 4.9, 4.8, 4.7, 3.0), curve("gossip", 1, 5.0, 4.9, 4.8, 4.7, 3.2)]
    better = [replace(step("diloco", "100mbit", 0.9, 3e6), seconds=[0.8, 0.9, 1.0])]
    for curves, timed in (([*CURVES, *longer], [*STEPS, *better]), ([*longer, *CURVES], [*better, *STEPS])):
        found = racing(curves, timed)
        assert needed(found["gossip"]) == pytest.approx([400.0, 400.0])
        assert found["diloco"].seconds == {"10mbit": 0.6, "100mbit": 0.9}
        assert found["diloco"].megabytes == 3.0


def test_a_long_race_is_beside_the_fastest_that_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.long_race import main

    late = [*CURVES, curve("diloco late", 1, 5.0, 5.0, 5.0, 3.2), curve("ddp", 2, 5.0, 4.0, 3.0, 2.5)]
    late.append(curve("torchft diloco every 16", 2, 5.0, 4.0, 3.2, 2.8, 2.8, 3.0))
    alone = [step("compute alone", "100mbit", 0.2), step("compute alone, 16 in a row", "100mbit", 0.15)]
    files = ["--curves", str(tmp_path / "curves.jsonl"), "--steps", str(tmp_path / "steps.jsonl"), "--after", "200"]

    def printed(curves: list[Row], timed: list[Row]) -> dict[str, str]:
        for name, rows in (("curves", curves), ("steps", timed)):
            (tmp_path / f"{name}.jsonl").unlink(missing_ok=True)
            append(rows, tmp_path / f"{name}.jsonl")
        main(files)
        [_, _, *lines] = capsys.readouterr().out.splitlines()
        return {line.split("`")[1]: line for line in lines}

    table = printed(CURVES, [*STEPS, *alone])
    assert table["ddp"].endswith("| 60.00 | 60.000 | 200.0 (1.00x) | 6.000 | 20.0 (0.50x) |")
    assert table["diloco"].startswith("| `diloco` | 2 | 300 | +7.5 % (+5.0 % to +10.0 %) | 250")
    assert table["diloco"].endswith("| 2.00 | 0.600 | 2.5 (80.00x) | 0.300 | 1.2 (8.00x) |")
    assert table["gossip"].endswith("| missed | - | 0.500 | > 2.5 | - | - |"), "300 steps at least"
    assert table["compute alone"].endswith("| 0.150 | 0.5 (20.00x) |")
    table = printed(late, [*STEPS, step("diloco late", "100mbit", 1.0)])
    assert table["diloco late"].startswith("| `diloco late` | 1 | 300 |")
    assert table["diloco late"].endswith("| 1.000 | 5.0 (2.00x) |"), "torchft: 10 minutes with seed 1, longer with 2"
    assert "| 0.600 | 2.5 |" in printed(CURVES, [step("diloco", "10mbit", 0.6)])["diloco"], "nobody else, no ratio"


def test_curves_and_steps_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sized(size: str) -> list[Row]:
        return [step("ddp", "100mbit", 1.0, size=size)]

    for curves, timed, after, words in (
        (STEPS, STEPS, 200, "--curves"),
        (CURVES, CURVES, 200, "--steps"),
        (CURVES, STEPS, 150, "--after 150"),
        (CURVES[4:], STEPS, 200, "ddp is not there"),
        (CURVES, sized("byte GPT of 10.9 M parameters"), 200, "--optimizer adamw"),
        ([*CURVES, replace(CURVES[0], seed=2, learning_rate=1.0)], STEPS, 200, "one learning rate"),
        (CURVES, [step("ddp", "100mbit", 1.0, hosts=8)], 200, "on 4 ranks and 10.9 M parameters on 8"),
        (CURVES, sized("MLP of 24.1 M parameters, AdamW"), 200, "24.1 M"),
    ):
        files = [tmp_path / words / name for name in ("curves.jsonl", "steps.jsonl")]
        for rows, file in zip((curves, timed), files, strict=True):
            append(rows, file)
        said = refusal(["long_race", f"--curves={files[0]}", f"--steps={files[1]}", f"--after={after}"], capsys)
        assert words in " ".join(said.split())

"""The accuracy sweep trains, resumes and reports; what the numbers are, is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from benchmarks import accuracy
from benchmarks.report import accuracy as pages
from ringstrategy.algorithms.parameters.decentralized import Decentralized
from ringstrategy.names import STRATEGIES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

TINY = ["tasks=[digits]", "optimizers=[sgd]", "ranks=[2]", "steps=20", "limit=60"]


def sweep(out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run it in this process; all rows of the file."""
    with initialize_config_dir(str(BENCHMARKS), version_base="1.3"):
        accuracy.sweep(compose("accuracy", [*TINY, f"out={out}", *overrides]))
    return accuracy.read_rows(out)


@pytest.mark.slow
def test_trains_skips_what_is_done_and_keeps_what_fails(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "accuracy.jsonl"
    rows = sweep(out, "wires=[fp32,int4 rotated absmax]")
    assert [row["name"] for row in rows[:2]] == ["fp32, ring", "fp32, direct"]
    assert len(rows) == 2 + 4
    for row in rows:
        assert row["status"] == "finished", row
        assert row["replicas_identical"] is True
        assert [step for step, _ in row["curve"]] == [5, 10, 15, 20]
        assert row["curve"][-1][1] == row["val_loss"]
        assert 0 < row["val_accuracy"] < 1
        assert {"seconds", "cpu_seconds", "commit", "torch", "device", "settings"} <= set(row)
    # both ranks' share of 21386 gradients, four bytes each, and some control messages
    assert 4 * 21386 < rows[0]["bytes_sent_per_step"] < 4 * 21386 + 2000
    assert rows[2]["bytes_sent_per_step"] < rows[0]["bytes_sent_per_step"] / 6
    assert len({row["val_loss"] for row in rows}) > 2, "a wire does change what is learnt"
    assert {row["feedback"] for row in rows[2:]} == {False, True}

    assert sweep(out, "wires=[fp32]") == rows, "done before"
    failed = sweep(out, "wires=[fp32]", "~collectives.direct", "digits.model.classes=5")[len(rows) :]
    assert [row["status"] for row in failed] == ["failed"]
    assert "out of bounds" in failed[0]["error"]
    diverged = sweep(out, "wires=[fp32]", "~collectives.direct", "digits.rate.sgd=1e30")[len(rows) + 1 :]
    assert [row["status"] for row in diverged] == ["diverged"]
    assert json.loads(out.read_text().splitlines()[-1])["val_loss"] is None

    command = [sys.executable, "-m", "benchmarks", "report", f"--results={out.parent}", "--page=deep/page.md"]
    there = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, env=there, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = (out.parent / "accuracy.md").read_text()
    assert report.count("- failed: ") == report.count("- diverged: ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"], "Hydra leaves nothing behind"


@pytest.mark.slow
def test_gossip_beside_ddp(tmp_path: Path) -> None:
    rows = sweep(
        tmp_path / "accuracy.jsonl",
        *("stage=gossip", "wires=[ddp,gossip]", "seeds=[0]", "gossip.digits.skews=[1.0]"),
    )
    named = {row["name"]: row for row in rows}
    assert list(named) == ["ddp", "gossip", "gossip unequal data", "gossip interval 4"]
    for row in rows:
        assert row["status"] == "finished", row
        assert row["replicas_identical"] is True, "after the last mean"
        assert row["settings"]["data"]["skew"] == 1.0
        assert row["settings"]["data"]["batch_size"] == 32
        assert [step for step, _ in row["curve"]] == list(range(2, 21, 2))
    assert named["ddp"]["bytes_sent_per_step"] is None
    assert named["gossip"]["val_loss"] != pytest.approx(named["ddp"]["val_loss"], rel=1e-3)
    # all parameters to the only neighbour, without the means for ten validations
    assert 4 * 21386 < named["gossip"]["bytes_sent_per_step"] < 4 * 21386 + 100
    assert 21386 < named["gossip interval 4"]["bytes_sent_per_step"] < 21386 + 100
    pages.publish(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy.jsonl",
        "accuracy_gossip.md",
        "accuracy_gossip.png",
    ]


@pytest.mark.slow
def test_few_meetings_beside_ddp(tmp_path: Path) -> None:
    rows = sweep(
        tmp_path / "accuracy.jsonl",
        *("stage=seldom", "wires=[ddp,local_sgd every 4,diloco every 16]", "seeds=[0]"),
    )
    named = {row["name"]: row for row in rows}
    assert list(named) == ["ddp", "local_sgd every 4", "diloco every 16"]
    for row in rows:
        assert row["status"] == "finished", row
        assert row["replicas_identical"] is True, "after the last mean"
        assert [step for step, _ in row["curve"]] == list(range(2, 21, 2)), "validated again at the end, once in all"
    diloco = named["diloco every 16"]["curve"]
    assert len({loss for _, loss in diloco[:7]}) == 1, "until the first agreement all see the first weights"
    assert len({loss for _, loss in diloco[7:]}) == 2, "of the agreement, and of the mean at the end"
    # half of the parameters to each of two ranks, there and back, five times in 20 steps, then the mean
    assert 4 * 21386 / 4 < named["local_sgd every 4"]["bytes_sent_per_step"] < 4 * 21386 * 6 / 20 + 100


def made_up(name: str, loss: float | None, seed: int, **fields: Any) -> dict[str, Any]:
    return {
        **{"stage": "paired", "name": name, "task": "text", "optimizer": "sgd", "rate": 1.0, "seed": seed, "steps": 9},
        **{"codec": "C()", "collective": "Ring()", "feedback": False, "algorithm": name, "ranks": 4, "parameters": 7},
        **{"status": "finished" if loss else "diverged", "val_loss": loss, "val_accuracy": None, "bigram_loss": 2.4},
        **{"replicas_identical": True, "bytes_sent_per_step": 1000.0 + len(name), "settings": {"classes": 256}},
        **fields,
    }


def published(rows: list[dict[str, Any]], folder: Path) -> None:
    (folder / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages.publish(folder)


def test_report_judges_what_was_promised(tmp_path: Path) -> None:
    losses = {
        "ring": [2.000, 2.002],
        "ring_int8": [2.005, 2.007],  # 0.25 % more
        "ring_int4": [2.010, 2.012],  # 0.5 %
        "ring_int2": [2.030, 2.032],  # 1.5 %
        "control two": [2.200, 2.202],
        "control one": [2.001, 2.003],
        "ring_sign": [2.1, None],
    }
    rows = [made_up(name, loss, seed) for name, both in losses.items() for seed, loss in enumerate(both)]
    rows.append(made_up("ring_fp8", 2.0, 0, replicas_identical=False))
    rows.append({**made_up("ring_fp16", 2.0, 0), "status": "failed", "error": "Traceback\nValueError: no wire"})
    for field in ("val_loss", "parameters", "bytes_sent_per_step", "replicas_identical"):
        del rows[-1][field]
    published(rows, tmp_path)
    report = (tmp_path / "accuracy.md").read_text()
    lines = {line.split("`")[1]: line for line in report.splitlines() if line.startswith("| `")}
    assert lines["ring_int8"].endswith("| same as fp32: promise kept |")
    assert lines["ring_int4"].endswith("| worse: **promise broken** |")
    assert lines["ring_int2"].endswith("| worse: promise kept |")
    assert lines["control two"].endswith("| worse, as it must be |")
    assert lines["control one"].endswith("| **not told from fp32** |")
    assert "+10.00" in lines["control two"]
    assert "(1 failed)" in lines["ring_sign"]
    assert lines["ring_sign"].endswith("| failed |")
    assert lines["ring_fp8"].endswith("| failed |")
    assert "replicas differ" in report
    assert "ValueError: no wire" in report
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_report_of_gossip_pairs_with_its_own_ddp(tmp_path: Path) -> None:
    def gossip(name: str, loss: float | None, seed: int, ranks: int, skew: float | None) -> dict[str, Any]:
        settings = {"classes": 10, "data": {} if skew is None else {"skew": skew}}
        fields = {"stage": "gossip", "task": "digits", "ranks": ranks, "settings": settings}
        return made_up(name, loss, seed, **fields, curve=[[1, 3.0], [2, loss]])

    rows = [
        gossip(name, loss, seed, *world)
        for world, base in {(8, 1.0): 1.0, (8, None): 2.0, (4, None): 4.0}.items()
        for seed in (0, 1)
        for name, loss in {"ddp": base + seed, "gossip": 1.5 * (base + seed), "push_sum": None if seed else 9.0}.items()
    ]
    published([made_up("ring", 2.0, 0), *rows], tmp_path)
    report = (tmp_path / "accuracy_gossip.md").read_text()
    titles = [line for line in report.splitlines() if line.startswith("## ")]
    assert [title.split(": ")[0].split(", ", 2)[2] for title in titles[:-1]] == [
        *("4 ranks, equal data", "8 ranks, equal data", "8 ranks, skew 1")
    ]
    lines = [line for line in report.splitlines() if line.startswith("| `gossip`")]
    assert ["+50.00 ± 7.86 %" in line for line in lines] == [True, False, False]
    assert ["6.7500 ± 1.0607" in line for line in lines] == [True, False, False]
    assert all("+50.00 ± " in line for line in lines)
    assert report.count("(1 failed)") == report.count("- diverged: ") == 3
    assert "push_sum" not in (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "accuracy_gossip.png").stat().st_size > 10_000


def test_published_rows_are_still_the_same_cases() -> None:
    plain = [
        row
        for row in accuracy.read_rows(accuracy.RESULTS)
        if (row["stage"], row["name"]) in (("rates", "fp32"), ("paired", "ring"))
    ]
    with initialize_config_dir(str(BENCHMARKS), version_base="1.3"):
        known = {
            case.key
            for stage in ("rates", "paired")
            for case in accuracy.cases(compose("accuracy", [f"stage={stage}"]))
        }
    assert len(plain) == 32
    assert {row["key"] for row in plain} <= known


def test_gossip_takes_all_registered_names_and_goes_seed_by_seed() -> None:
    with initialize_config_dir(str(BENCHMARKS), version_base="1.3"):
        cases = accuracy.cases(compose("accuracy", ["stage=gossip"]))
    names = {case.name for case in cases}
    for name, make in STRATEGIES.items():
        assert (name in names) == isinstance(make(), Decentralized)
    assert [case.seed for case in cases] == sorted(case.seed for case in cases)
    digits = {
        (case.ranks, case.settings["data"]["batch_size"], case.settings["data"].get("skew"))
        for case in cases
        if case.task == "digits"
    }
    assert digits == {(ranks, 64 // ranks, skew) for ranks in (4, 8) for skew in (None, 1.0)}


def test_a_name_that_nobody_has_is_refused() -> None:
    with initialize_config_dir(str(BENCHMARKS), version_base="1.3"):
        cfg = compose("accuracy", ["stage=seldom", "seldom.digits.names=[ddp,diloco every 5]"])
        with pytest.raises(ValueError, match=r"'diloco every 5' is none of ddp, .*diloco every 16"):
            accuracy.cases(cfg)


@pytest.mark.parametrize("stage", ["rates", "factorial", "paired", "gossip", "seldom"])
def test_every_case_is_another(stage: str) -> None:
    with initialize_config_dir(str(BENCHMARKS), version_base="1.3"):
        cfg = compose("accuracy", [f"stage={stage}"])
        cases, again = accuracy.cases(cfg), accuracy.cases(cfg)
    assert len({case.key for case in cases}) == len(cases) > 10
    assert [case.key for case in cases] == [case.key for case in again]
    assert cases[0].task == "text"

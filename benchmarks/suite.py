"""The whole measuring campaign, a step at a time: what is done is not done again.

python benchmarks/suite.py --list
python benchmarks/suite.py                       # all that is left; document.py makes the page of it
python benchmarks/suite.py --only 'training/*'
python benchmarks/suite.py --short               # each family once, small: what `make bench` runs

A step is one command and has a file of rows of its own, which it replaces when it is run again. It is done as long as
its command is the one that made that file, even if the code has changed since, which --list says; --again repeats it.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import lab
from rich.console import Console
from rich.table import Table
from runs import CAMPAIGN, Row, records

_HERE = Path(__file__).resolve().parent
_RESULTS = _HERE / "results"
_SHORT_RESULTS = _HERE.parent / "outputs" / "bench"


@dataclass(frozen=True)
class Step:
    """One command; its rows go to `<key>.jsonl`."""

    key: str  # family, then what is special
    arguments: str  # script and what it is given
    minutes: float  # on two cores that nobody else uses

    @property
    def command(self) -> str:
        """As one types it."""
        return f"python benchmarks/{self.arguments}"


_READERS = ("document", "pictures", "races", "suite", "verdicts")  # that measure nothing

_FEW = '"gloo,=ring identity,int8,int4,int2,sign"'
_LAYOUT = '"gloo,=ring identity,=ring int8,=direct int8,=ring int4,hierarchical"'
# The 24 M MLP goes in parts: four ranks with all its cases at once do not fit into 24 GiB. In each are torch's own
# strongest, or ratios to them would be of other runs.
_STRONGEST = "fp16 hook,ddp powersgd rank 1"
_PARTS = {
    "near": f'"=ring,ring_int8,ring_auto,ring_fp,ring_bf16,{_STRONGEST}"',
    "few-bits": f'"ring_int4,ring_int2,ring_sign,ring_topk,of BlockInt,{_STRONGEST}"',
    "low-rank": f'"powersgd,post-local,{_STRONGEST}"',
    "gossip": f'"=gossip,=gossip_exponential,push_sum,{_STRONGEST}"',
    "choco": f'"=gossip_int8,{_STRONGEST}"',
}
_GOSSIPS = "gossip,gossip_exponential,gossip_int8"

Plan = Sequence[Step]


def campaign() -> Plan:
    """What the published page is made of."""
    return [
        *_collectives(),
        *_trainings(),
        *_decentralized(),
        *_races(),
        Step("scaling/100mbit", "scaling.py --rate 100mbit --sizes 2,3,4,6,8,12,16 --mb 16 --rounds 5", 12),
        Step("scaling/1gbit", "scaling.py --rate 1gbit --sizes 2,3,4,6,8 --mb 16 --rounds 9", 4),
        Step("prediction/2-1gbit", "prediction.py --hosts 2 --rate 1gbit --rounds 5", 2),  # a core each
        Step("prediction/4-100mbit", "prediction.py --hosts 4 --rate 100mbit --width 1024 --rounds 3", 3),
        Step("prediction/4-1gbit", "prediction.py --hosts 4 --rate 1gbit --rounds 5", 3),
        Step("prediction/8-100mbit", "prediction.py --hosts 8 --rate 100mbit --width 1024 --rounds 3", 5),
        Step("prediction/8-1gbit", "prediction.py --hosts 8 --rate 1gbit --width 1024 --rounds 5", 2),
        Step("codecs/values", "codecs.py --rounds 61", 3),
        Step("overhead/one-rank", "overhead.py --rounds 15", 5),
    ]


def short(rate: str | None = None) -> Plan:
    """Each family once, small enough for ten minutes; on another rate than the throttled ones if one is given."""
    slow, fast = rate or "100mbit", rate or "1gbit"
    return [
        Step("collectives/slow", f"collectives.py --hosts 4 --rate {slow} --mb 4 --rounds 2", 0.7),
        Step("collectives/fast", f"collectives.py --hosts 4 --rate {fast} --mb 0.0625,16 --rounds 3", 0.8),
        Step(
            "layouts/fast",
            f"collectives.py --hosts 2 --processes 2 --rate {fast} --mb 8 --rounds 3 --cases {_LAYOUT}",
            0.5,
        ),
        Step("training/slow", f"training.py --hosts 4 --rate {slow} --width 512 --steps 1 --rounds 2", 1.5),
        Step("training/fast", f"training.py --hosts 4 --rate {fast} --model cnn --width 128 --steps 1 --rounds 3", 0.8),
        Step(
            "overlap/fast",
            f"training.py --hosts 4 --rate {fast} --width 256 --rounds 2 --cases none --overlap-of gossip",
            0.5,
        ),
        Step("exchange/slow", f"training.py --hosts 4 --rate {slow} --width 256 --rounds 2 --exchanges", 0.4),
        Step(
            "race/fast",
            f"time_to_accuracy.py --hosts 4 --rate {fast} --target 3.2 --most-steps 48 --cases =ring_int8,ring_sign",
            0.8,
        ),
        Step("scaling/slow", f"scaling.py --rate {slow} --sizes 2,3,4 --mb 2 --rounds 2", 0.8),
        Step(
            "slow-rank/none",
            f"slow_rank.py --hosts 4 --rate {rate or 'none'} --steps 8 --rounds 1 --cases ring_int8,=gossip",
            0.4,
        ),
        *([Step("prediction/fast", "prediction.py --rate 1gbit --width 256 --rounds 2", 0.4)] if rate is None else []),
        Step("codecs/values", "codecs.py --rounds 3 --cases BlockInt,Sign", 0.3),
        Step("overhead/one-rank", "overhead.py --steps 60 --rounds 2 --models middle", 0.3),
    ]


def _collectives() -> Plan:
    few = f"--mb 96 --cases {_FEW}"
    layout = f"--mb 1,96 --cases {_LAYOUT}"
    layouts = ((2, "100mbit", 2, 4), (2, "1gbit", 7, 3), (4, "100mbit", 2, 6), (4, "1gbit", 7, 4))
    return [
        Step("collectives/4-100mbit", "collectives.py --hosts 4 --rate 100mbit --mb 0.0625,1,16,96 --rounds 3", 11),
        Step(
            "collectives/4-100mbit-256mb",
            f"collectives.py --hosts 4 --rate 100mbit --mb 256 --rounds 2 --cases {_FEW}",
            10,
        ),
        Step("collectives/4-1gbit", "collectives.py --hosts 4 --rate 1gbit --mb 0.0625,1,16,96 --rounds 9", 5),
        Step(
            "collectives/4-1gbit-256mb",
            f"collectives.py --hosts 4 --rate 1gbit --mb 256 --rounds 7 --cases {_FEW}",
            3,
        ),
        Step("collectives/4-none", "collectives.py --hosts 4 --rate none --mb 0.0625,1,16,96 --rounds 9", 4),
        Step("collectives/2-100mbit", f"collectives.py --hosts 2 --rate 100mbit --rounds 3 {few}", 4),
        Step("collectives/2-1gbit", f"collectives.py --hosts 2 --rate 1gbit --rounds 9 {few}", 2),
        Step("collectives/8-100mbit", f"collectives.py --hosts 8 --rate 100mbit --rounds 2 {few}", 6),
        Step("collectives/8-1gbit", f"collectives.py --hosts 8 --rate 1gbit --rounds 5 {few}", 4),
        *(
            Step(
                f"layouts/{hosts}x2-{rate}",
                f"collectives.py --hosts {hosts} --processes 2 --rate {rate} --rounds {rounds} {layout}",
                minutes,
            )
            for hosts, rate, rounds, minutes in layouts
        ),
    ]


def _trainings() -> Plan:
    steps = []
    for rate, how, mlp, gpt, cnn in (
        ("100mbit", "--steps 1 --rounds 3", 4.5, 6, 3),
        ("1gbit", "--steps 2 --rounds 9", 3, 5, 3),
    ):
        network = f"training.py --hosts 4 --rate {rate} {how}"
        for part, cases in _PARTS.items():
            steps.append(Step(f"training/mlp-4-{rate}-{part}", f"{network} --cases {cases}", mlp))
        steps.append(Step(f"training/gpt-4-{rate}", f"{network} --model gpt", gpt))
        steps.append(Step(f"training/cnn-4-{rate}", f"{network} --model cnn", cnn))
    unthrottled = f"training.py --hosts 4 --rate none --steps 2 --rounds 9 --cases {_PARTS['near']}"
    two = "training.py --hosts 2 --rate 1gbit --steps 2 --rounds 9"
    eight = "training.py --hosts 8 --rate 1gbit --steps 2 --rounds 5 --width 1024"
    return [
        *steps,
        Step("training/mlp-4-none-near", unthrottled, 3),
        Step("training/mlp-2-1gbit", f"{two} --cases {_PARTS['near']}", 4),
        Step("training/mlp-8-1gbit", f'{eight} --cases "=ring,ring_int8,ring_int4,ring_auto,=gossip,{_STRONGEST}"', 6),
    ]


def _decentralized() -> Plan:
    """Intervals that hide the exchange, one mixing alone, and a slow rank."""
    hidden = f"training.py --hosts 4 --cases none --overlap-of {_GOSSIPS} --warmup 1"
    alone = "training.py --width 1024 --rate 100mbit --rounds 5 --warmup 1 --exchanges"
    return [
        Step("overlap/100mbit", f"{hidden} --width 512 --rate 100mbit --steps 4 --rounds 11 --margin 3", 7),
        Step("overlap/1gbit", f"{hidden} --width 1024 --rate 1gbit --steps 16 --rounds 15 --margin 5", 7),
        Step("exchange/4-100mbit", f"{alone} --hosts 4", 3),
        Step("exchange/8-100mbit", f"{alone} --hosts 8", 4),
        Step("slow-rank/none", "slow_rank.py --hosts 4 --rate none --rounds 3", 7),
    ]


def _races() -> Plan:
    far = "=ring_int8,ring_auto,post-local,powersgd rank 4,=gossip_exponential every 4,gossip_int8 every 4 (1 late)"
    return [
        Step("race/100mbit-seed0", "time_to_accuracy.py --hosts 4 --rate 100mbit --seed 0", 16),
        *(
            Step(f"race/1gbit-seed{seed}", f"time_to_accuracy.py --hosts 4 --rate 1gbit --seed {seed}", 7)
            for seed in range(2)
        ),
        Step(
            "race/1gbit-far",
            f'time_to_accuracy.py --hosts 4 --rate 1gbit --target 2.25 --most-steps 1024 --cases "{far}"',
            10,
        ),
    ]


def run(step: Step, folder: Path) -> None:
    """Measure, replace the step's rows, remember; SystemExit if it fails, and then nothing has changed."""
    rows, fresh = folder / f"{step.key}.jsonl", folder / f"{step.key}.part"
    rows.parent.mkdir(parents=True, exist_ok=True)
    fresh.unlink(missing_ok=True)
    script, *arguments = shlex.split(step.arguments)
    begin, commit = time.monotonic(), harness.commit()
    command = [sys.executable, str(_HERE / script), *arguments, "--out", str(fresh)]
    done = subprocess.run(command, env={**os.environ, harness.COMMIT: commit}, check=False)
    if done.returncode != 0 or not fresh.exists():
        fresh.unlink(missing_ok=True)
        why = f"ended with {done.returncode}" if done.returncode != 0 else "wrote no rows"
        sys.exit(f"{step.key} {why}, and the campaign stops here: {step.command}")
    fresh.replace(rows)
    made = {
        "command": step.command,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - begin),
        "processor": _processor(),
    }
    _write(records(folder) | {step.key: made}, folder)


def _write(known: dict[str, Row], folder: Path) -> None:
    fresh = folder / f"{CAMPAIGN}.part"
    fresh.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    fresh.replace(folder / CAMPAIGN)


def is_done(step: Step, folder: Path) -> bool:
    """Whether this very command has made the rows that are there."""
    return records(folder).get(step.key, {}).get("command") == step.command and (folder / f"{step.key}.jsonl").exists()


def _code_changed(commit: str) -> bool:
    """Whether what is measured, or what measures, differs from then, or nobody knows what that was."""
    if commit.endswith("-dirty"):
        return True
    paths = (
        ":/ringstrategy",
        ":/triton_kernels",
        ":/benchmarks/*.py",
        *(f":(top,exclude)benchmarks/{name}.py" for name in _READERS),
    )
    command = ["git", "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(command, cwd=_HERE, stderr=subprocess.DEVNULL, check=False).returncode != 0


def _processor() -> str:
    """Its model, where the system tells."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    models = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    return ", ".join(sorted(models)) or platform.machine()


def main() -> None:
    """List, or run what is left."""
    parser = argparse.ArgumentParser(description="The measuring campaign, or its short form.")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--only", metavar="PATTERN", help="only steps whose key matches, like 'training/*-100mbit*'")
    parser.add_argument("--again", action="store_true", help="also steps that are done")
    parser.add_argument("--short", action="store_true", help="each family once, small, all of it anew, in ten minutes")
    parser.add_argument("--out", type=Path, help=f"folder of the rows; default: {_RESULTS}, --short {_SHORT_RESULTS}")
    options = parser.parse_args()
    folder = options.out or (_SHORT_RESULTS if options.short else _RESULTS)
    without = lab.missing()
    plan = short(lab.LOOPBACK if without else None) if options.short else campaign()
    steps = [step for step in plan if options.only is None or fnmatch.fnmatch(step.key, options.only)]
    if not steps:
        parser.error(f"--only {options.only!r}: no such step; the keys are {', '.join(step.key for step in plan)}")
    if options.list:
        _list(steps, folder)
        return
    if without and options.short:
        print(f"No lab here ({without}). So all of this runs over loopback, where nothing is throttled: it shows that")
        print("everything runs, and its times are information only, not the product's figures.", flush=True)
    elif without:
        parser.error(f"the campaign needs the lab: {without}")
    lab.exit_on_sigterm()
    left = [step for step in steps if options.short or options.again or not is_done(step, folder)]
    for number, step in enumerate(left, 1):
        minutes = sum(step.minutes for step in left[number - 1 :])
        print(f"[{number}/{len(left)}, {minutes:.0f} min left] {step.key}: {step.command}", flush=True)
        try:
            run(step, folder)
        except KeyboardInterrupt:
            sys.exit(130)
    print(f"all of {len(steps)} steps done, rows in {folder}; their page: python benchmarks/document.py", end="")
    print(f" --results {folder} --page {folder}/benchmarks.md" if folder != _RESULTS else "")


def _list(steps: Plan, folder: Path) -> None:
    known = records(folder)
    table = Table(title=f"rows in {folder}", title_justify="left")
    for heading in ("step", "state", "minutes", "command"):
        table.add_column(heading, no_wrap=heading != "command")
    for step in steps:
        made = known.get(step.key)
        if is_done(step, folder) and made is not None:
            changed = ", code changed since" if _code_changed(made["commit"]) else ""
            state, minutes = f"done {made['date']}, commit {made['commit'][:10]}{changed}", made["seconds"] / 60
        else:
            state, minutes = "left" if made is None else "left: its command has changed", step.minutes
        table.add_row(step.key, state, f"{minutes:.1f}", step.command)
    console = Console(width=200)
    console.print(table)
    left = [step for step in steps if not is_done(step, folder)]
    console.print(f"{len(left)} of {len(steps)} steps left, about {sum(step.minutes for step in left):.0f} minutes")


if __name__ == "__main__":
    main()

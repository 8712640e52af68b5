"""The whole measuring campaign, a step at a time: what is done is not done again.

python -m benchmarks campaign --list
python -m benchmarks campaign                    # all that is left; `python -m benchmarks report` makes the pages of it
python -m benchmarks campaign --only 'training/*'
python -m benchmarks campaign --short            # each family once, small: what `make bench` runs

campaign.yaml has the steps. A step is one command and has a file of rows of its own, which it replaces when it is run
again. It is done as long as its command is the one that made that file, even if the code has changed since its commit,
which --list says; --again repeats it.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from benchmarks import harness, lab
from benchmarks.rows import CAMPAIGN
from benchmarks.rows import steps as records

_HERE = Path(__file__).resolve().parent
_RESULTS = _HERE / "results"
_SHORT_RESULTS = _HERE.parent / "outputs" / "bench"


@dataclass(frozen=True)
class Step:
    """One command; its rows go to `<key>.jsonl`."""

    key: str  # family, then what is special
    arguments: str  # of `python -m benchmarks`
    minutes: float

    @property
    def command(self) -> str:
        """As one types it."""
        return f"python -m benchmarks {self.arguments}"

    def made(self, folder: Path) -> dict[str, Any] | None:
        """The record of this very command's run, if the rows that it made are there."""
        made = records(folder).get(self.key)
        if made is None or made["command"] != self.command:
            return None
        return made if (folder / f"{self.key}.jsonl").exists() else None


def steps(which: str, rate: str | None = None) -> list[Step]:
    """Of `campaign` or `short`; a given rate replaces the throttled ones, and predictions need one of those."""
    read = OmegaConf.load(_HERE / "campaign.yaml")
    assert isinstance(read, DictConfig)
    if rate is not None:
        read.rates = dict.fromkeys(read.rates, rate)
    made = [Step(key, step.command, step.minutes) for key, step in read[which].items()]
    return [step for step in made if rate is None or not step.key.startswith("prediction/")]


def run(step: Step, folder: Path) -> None:
    """Measure, replace the step's rows, remember; SystemExit if it fails, and then nothing has changed."""
    rows, fresh = folder / f"{step.key}.jsonl", folder / f"{step.key}.part"
    rows.parent.mkdir(parents=True, exist_ok=True)
    fresh.unlink(missing_ok=True)
    begin, commit = time.monotonic(), harness.commit()
    command = [sys.executable, "-m", "benchmarks", *shlex.split(step.arguments), "--out", str(fresh.resolve())]
    environment = {**os.environ, harness.COMMIT: commit}
    done = subprocess.run(command, env=environment, cwd=_HERE.parent, check=False)
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
        "processor": processor(),
    }
    known = records(folder) | {step.key: made}
    fresh = folder / f"{CAMPAIGN}.part"
    fresh.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    fresh.replace(folder / CAMPAIGN)


def processor() -> str:
    """Its model, where the system tells."""
    listed = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", listed.read_text(), re.M) if listed.exists() else []
    return ", ".join(sorted(set(models))) or platform.machine()


def main(given: Sequence[str]) -> None:
    """List, or run what is left."""
    parser = argparse.ArgumentParser("python -m benchmarks campaign", description="The campaign, or its short form.")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--only", metavar="PATTERN", help="only steps whose key matches, like 'training/*-100mbit*'")
    parser.add_argument("--again", action="store_true", help="also steps that are done")
    parser.add_argument("--short", action="store_true", help="each family once, small, all of it anew, in ten minutes")
    parser.add_argument("--out", type=Path, help=f"folder of the rows; default: {_RESULTS}, --short {_SHORT_RESULTS}")
    options = parser.parse_args(given)
    folder = options.out or (_SHORT_RESULTS if options.short else _RESULTS)
    without = lab.missing()
    plan = steps("short", lab.LOOPBACK if without else None) if options.short else steps("campaign")
    asked = [step for step in plan if options.only is None or fnmatch.fnmatch(step.key, options.only)]
    if not asked:
        parser.error(f"--only {options.only!r}: no such step; the keys are {', '.join(step.key for step in plan)}")
    if options.list:
        left = [step for step in asked if step.made(folder) is None]
        for step in asked:
            print(f"{step.key:32} {step.minutes:4.1f} min  {_state(step, folder)}\n    {step.command}")
        print(
            f"{len(left)} of {len(asked)} steps left, about {sum(step.minutes for step in left):.0f} minutes; {folder}"
        )
        return
    if without and options.short:
        print(f"No lab here ({without}). So all of this runs over loopback, where nothing is throttled: it shows that")
        print("everything runs, and its times are information only, not the product's figures.", flush=True)
    elif without:
        parser.error(f"the campaign needs the lab: {without}")
    lab.exit_on_sigterm()
    left = [step for step in asked if options.short or options.again or step.made(folder) is None]
    for number, step in enumerate(left, 1):
        minutes = sum(step.minutes for step in left[number - 1 :])
        print(f"[{number}/{len(left)}, {minutes:.0f} min left] {step.key}: {step.command}", flush=True)
        with harness.refusing(parser):
            run(step, folder)
    print(f"all of {len(asked)} steps done, rows in {folder}")


def _state(step: Step, folder: Path) -> str:
    made = step.made(folder)
    if made is None:
        return "left: its command has changed" if step.key in records(folder) else "left"
    return f"done {made['date']}, commit {made['commit'][:10]}"

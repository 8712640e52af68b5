"""Learners of Decoupled DiLoCo that are away a fifth of the time, beside undisturbed ones and beside DDP with restarts.

python -m benchmarks chaos --seeds 0,1,2
python -m benchmarks chaos --short       # a minute

All are real processes, forked from one that has imported everything: Trainers with the callback `Decoupled`, and
`ringstrategy-syncer`. A step lasts `--pace` seconds at least until its backward pass, so that two cores are enough for
eight learners. A seed says when SIGKILL ends a learner, and when it comes back with its own checkpoint and other data.
The syncer is killed twice. DDP has the same machines at the same times: if one is lost, all ranks are killed; when all
are there, they restart from the last checkpoint.

The two runs of learners are made beside each other, so that they have the same load of the machine; DDP's comes after.
Living seconds are those of a machine that is there, less the imports. No run can make more than living seconds / pace
steps. The loss is that of Theta on held-out text, beside the loss of the undisturbed run when all its learners together
had made as many steps. Every merge is recomputed from the event log and the pushes that the syncer kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

from benchmarks import campaign, harness, tasks
from benchmarks.machines import SYNCER, Machines, at_once
from benchmarks.oracle import recomputed, went_back
from benchmarks.paced import FRAGMENTS, MERGE, OUTER, Paced, warm_up
from benchmarks.rows import Row, append
from ringstrategy import BlockInt
from ringstrategy.algorithms.parameters.schedule import cut_fragments
from ringstrategy.server.folder import events
from ringstrategy.server.learner import blend_

_CASES = "undisturbed", "chaos", "ddp, restarts"
_HANGS = 30.0  # seconds of a life without a step


@torch.no_grad()
def _loss(model: Paced, held_out: tuple[Tensor, Tensor], values: Sequence[Tensor] = ()) -> float:
    """Of these fragments in the model, or of the model."""
    for fragment, part in zip(_cut(model), values, strict=False):
        blend_(fragment, part, 1.0)
    return float(tasks.cross_entropy(model(held_out[0]), held_out[1]))


def _cut(model: Paced) -> list[list[Parameter]]:
    return [list(each.values()) for each in cut_fragments(dict(model.named_parameters()), FRAGMENTS)]


class _Outcome:
    """Numbers of a run, from its files."""

    def __init__(self, run: Machines, held_out: tuple[Tensor, Tensor]) -> None:
        self.run, self._held_out = run, held_out
        notes = {
            rank: [json.loads(line) for line in (run.folder / f"notes{rank}").read_bytes().splitlines()]
            for rank in range(run.options.learners)
        }
        self.times = sorted(time for each in notes.values() for time, *_ in each)
        kept = sum(len({step for _, step, _ in each}) for each in notes.values())
        gaps, first = [], []
        for rank, begin, end in run.lives:
            if rank == SYNCER:
                continue
            steps = [time for time, *_ in notes[rank] if begin <= time <= end]
            gaps += [after - before for before, after in zip([begin, *steps], [*steps, end], strict=True)]
            first += [steps[0] - begin] if steps else []
        possible = run.living / run.options.pace
        self.told: dict[str, float] = {
            "steps": len(self.times),
            "not made twice": kept,
            "living seconds": round(run.living, 1),
            "of the possible": len(self.times) / possible,
            "away": 1 - run.living / run.options.seconds / run.options.learners,
            "kills": run.kills,
            "to the first step": sorted(first)[len(first) // 2] if first else run.options.seconds,
            "hangs": sum(gap >= _HANGS for gap in gaps),
            "longest gap": max(gaps),
        }
        if run.ddp:
            there = sum(end - begin for rank, begin, end in run.lives if rank == 0)
            self.told["all there"] = there / run.options.seconds
        else:
            self._of_syncer({(f, *use) for each in notes.values() for *_, uses in each for f, use in enumerate(uses)})
        self.told["loss"] = self.loss_after(len(self.times))

    def _of_syncer(self, used: set[tuple[int, str, int]]) -> None:
        path = self.run.folder / "theta"
        initial = [torch.cat([each.detach().flatten() for each in part]) for part in _cut(Paced(self.run.seed))]
        self._versions = recomputed(path, initial, BlockInt(8), MERGE, OUTER)
        self._events, missed = events(path), Counter[str]()
        for event in self._events:
            missed.update(event["not counted"])
        self.told |= {
            "merges": len(self._events),
            "pushes": sum(len(event["pushes"]) for event in self._events),
            "late": missed["late"],
            "repeated": missed["repeated"],
            "unknown": missed["unknown"],
            "went back": went_back(path, used),
            "syncer's lives": self.run.counts[SYNCER],
        }

    def loss_after(self, steps: int) -> float:
        """Of Theta, or of the newest checkpoint of DDP, when all together had made so many steps."""
        moment, model = [0.0, *self.times][min(steps, len(self.times))], Paced(self.run.seed)
        if not self.run.ddp:
            newest = [each[0] for each in self._versions]
            for event in self._events:
                if event["time"] <= moment:
                    newest[event["fragment"]] = self._versions[event["fragment"]][event["version"]]
            return _loss(model, self._held_out, newest)
        saved = max((self.run.folder / "ddp").glob("*.ckpt"), key=lambda file: int(file.stem), default=None)
        if saved is not None:
            model.load_state_dict(torch.load(saved, weights_only=False)["state_dict"])
        return _loss(model, self._held_out)


def _row(case: str, seed: int, options: argparse.Namespace, told: dict[str, float]) -> Row:
    size = f"byte GPT of {sum(each.numel() for each in Paced(0).parameters())} parameters, {options.pace:g} s a step"
    return Row(
        benchmark="chaos",
        case=case,
        baseline="undisturbed",
        size=f"{size}, {options.seconds:g} s, quorum {options.quorum}",
        hosts=options.learners,
        rate="loopback",
        threads=1,
        cores=os.cpu_count(),
        cpu=campaign.processor(),
        seed=seed,
        ratio=told["beside undisturbed"],
        hung=int(told["hangs"]),
        chaos={name: round(value, 4) for name, value in told.items()},
        **harness.made_with(),
    )


def _show(rows: Sequence[Row]) -> None:
    """A line a number, a column a run."""
    headings = (f"{row.case}, seed {row.seed}" for row in rows)
    table = Table("", *headings, title=f"{rows[0].hosts} learners, {rows[0].size}")
    for name in dict.fromkeys(name for row in rows for name in row.chaos):
        table.add_row(name, *(f"{row.chaos[name]:.4g}" if name in row.chaos else "-" for row in rows))
    Console(width=180).print(table)


def main(given: Sequence[str]) -> None:
    """Run all three for each seed, and print a row a run."""
    parser = harness.arguments("chaos", __doc__, rounds=None, cases=False)
    add = parser.add_argument
    add("--learners", type=int, default=8)
    add("--quorum", type=int, help="default: half of the learners")
    add("--seconds", type=float, default=120.0, help="of each run")
    add("--pace", type=float, default=0.25, help="seconds a step until its backward pass, at least")
    add("--period", type=float, default=40.0, help="seconds from a return of a learner to its next one, on average")
    add("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    add("--short", action="store_true", help="3 learners, 15 seconds a run")
    options = parser.parse_args(given)
    if options.short:
        options.learners, options.seconds, options.pace, options.period = 3, 15.0, 0.1, 8.0
    options.quorum = options.quorum or max(1, options.learners // 2)
    torch.set_num_threads(1)
    warm_up(options)
    held_out, rows = tasks.held_out_text(256), list[Row]()
    for seed in options.seeds:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            runs = at_once(_CASES[:2], seed, options, Path(folder)) + at_once(_CASES[2:], seed, options, Path(folder))
            outcomes = [_Outcome(run, held_out) for run in runs]
            for case, outcome in zip(_CASES, outcomes, strict=True):
                told = outcome.told
                told["undisturbed then"] = outcomes[0].loss_after(int(told["steps"]))
                told["beside undisturbed"] = told["of the possible"] / outcomes[0].told["of the possible"]
                told |= {"load before": load, "load after": os.getloadavg()[0]}
                rows.append(_row(case, seed, options, told))
    append(rows, options.out)
    _show(rows)
    sys.exit(any(row.hung or row.chaos.get("went back") for row in rows))

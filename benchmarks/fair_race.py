"""The loss of each contender at its best settings: AdamW and Muon inside, learning rate and outer step searched.

python -m benchmarks fair_race --rate loopback --optimizers adamw,muon --learning-rates 5e-4,1e-3 \\
    --outers 0.4/0.8,0.9/0.8 --cases "=ddp,=diloco_int4" --out outputs/race.jsonl
python -m benchmarks fair_race --read outputs/race.jsonl

Every contender is given the same settings: each optimizer with each learning rate, and with each outer step (learning
rate/momentum), if it has one. All start from the same weights of a seed, and see the same windows of text in the same
order, others on each rank. The loss is that on text of which nobody trains, with what validation would see: the exact
mean of ranks that have parameters of their own, or what they share. Nothing is timed.

The table has the settings of each contender with the least loss after the last step, the mean over seeds. If some
settings have more seeds than others, these are the finalists, of which it is the best: search with one seed, and run
with more what comes out best. Local SGD is looked at right after an agreement, gossip right before one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.cells import shown
from benchmarks.contenders import DDP, MakeOptimizer, Training, adamw, contenders, muon, outer_of
from benchmarks.rows import Row, append, read
from benchmarks.tasks import gpt, held_out_text
from benchmarks.time_to_accuracy import Curve, loss_of
from ringstrategy import Nesterov

BENCHMARK = "fair race"
_OPTIMIZERS = {"adamw": adamw, "muon": muon}
_HELD_OUT = 128  # windows, shared out among the ranks


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    task = gpt(options.width, options.layers, options.batch)
    held_out = tuple(side[dist.get_rank() :: dist.get_world_size()] for side in held_out_text(_HELD_OUT))
    for seed, optimizer, rate in itertools.product(options.seeds, options.optimizers, options.learning_rates):
        initial, batches = task.model(seed), task.batches(options.steps, seed)
        make: MakeOptimizer = partial(_OPTIMIZERS[optimizer], lr=rate)
        known = contenders(initial, batches, loss=task.loss, optimizer=make)
        for case in harness.chosen(known, options.cases):
            own = outer_of(case)
            for outer in [None] if own is None else options.outers or [own]:
                training = contenders(initial, batches, outer, loss=task.loss, optimizer=make)[case]()
                curve = _trained(training, options, held_out)
                row = Row(
                    benchmark=BENCHMARK,
                    case=case,
                    size=task.described(initial, digits=2),
                    optimizer=optimizer,
                    learning_rate=rate,
                    outer="" if outer is None else f"{outer.lr:g}/{outer.momentum:g}",
                    seed=seed,
                    most_steps=options.steps,
                    curve=asdict(curve),
                    ranks_identical=harness.identical_on_all_ranks(training.result()),
                    python=platform.python_version(),  # whose text this is
                    **harness.facts(options),
                )
                training.close()
                if dist.get_rank() == 0:
                    print(f"{case}, {optimizer} at {rate:g}, outer {row.outer or '-'}, seed {seed}: {_last(row):.4f}")
                    append([row], options.out)


def _trained(training: Training, options: argparse.Namespace, held_out: Sequence[Tensor]) -> Curve:
    """All steps, with a look every so many."""
    curve, batches = Curve([], [], []), training.batches
    for first in range(0, options.steps, options.every):
        training.batches = batches[first : first + options.every]
        training.run()
        with training.as_seen() as model:
            curve.take(first + options.every, math.nan, loss_of(model, *held_out))
    return curve


def _last(row: Row) -> float:
    loss = row.curve["losses"][-1]
    return math.inf if loss is None else loss


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table, as Markdown."""
    found: dict[tuple[str, str], dict[tuple[float | None, str], dict[int, float]]] = {}
    for row in rows:
        settings = found.setdefault((row.case, row.optimizer), {})
        settings.setdefault((row.learning_rate, row.outer), {})[row.seed] = _last(row)
    best = {who: _best(settings) for who, settings in found.items()}
    yield "| | inner | rate | outer | settings tried | seeds | loss | beside `ddp` | beside `ddp` with AdamW |"
    yield "|---|---|---|---|---|---|---|---|---|"
    by_loss = sorted(best.items(), key=lambda each: (each[0][1], statistics.mean(each[1][1].values())))
    for (case, optimizer), ((rate, outer), losses) in by_loss:
        cells = [
            f"`{case}`",
            {"adamw": "AdamW", "muon": "Muon"}[optimizer],
            f"{rate:g}",
            outer or "-",
            f"{len(found[case, optimizer])}",
            f"{len(losses)}",
            "diverged" if math.inf in losses.values() else f"{statistics.mean(losses.values()):.3f}",
            *(_beside(losses, best.get((DDP, inner))) for inner in (optimizer, "adamw")),
        ]
        yield f"| {' | '.join(cells)} |"


Best = tuple[tuple[float | None, str], dict[int, float]]


def _best(settings: dict[tuple[float | None, str], dict[int, float]]) -> Best:
    """Settings, and the loss by seed, of those that have most seeds."""
    most = max(len(losses) for losses in settings.values())
    finalists = [(setting, losses) for setting, losses in settings.items() if len(losses) == most]
    return min(finalists, key=lambda each: statistics.mean(each[1].values()))


def _beside(losses: dict[int, float], others: Best | None) -> str:
    """The mean over the seeds that both have, with the lowest and the highest."""
    beside = {} if others is None else others[1]
    ratios = [loss / beside[seed] - 1 for seed, loss in losses.items() if seed in beside]
    if not ratios or math.inf in ratios:
        return "-"
    mean, least, most = (shown(ratio, "{:+.1%}") for ratio in (statistics.mean(ratios), min(ratios), max(ratios)))
    return mean if min(ratios) == max(ratios) else f"{mean} ({least} to {most})"


def _outer(text: str) -> Nesterov:
    lr, _, momentum = text.partition("/")
    return Nesterov(float(lr), float(momentum or 0))


def _check(options: argparse.Namespace) -> None:
    if options.every < 1 or options.every % 64 or options.steps < 1 or options.steps % options.every:
        raise ValueError("--steps must be a multiple of --every, and that of 64, the longest interval")
    unknown = {*options.optimizers} - {*_OPTIMIZERS}
    if unknown:
        raise ValueError(f"--optimizers: {', '.join(_OPTIMIZERS)}; got {', '.join(sorted(unknown))}")
    if options.cases is None:
        raise ValueError('--cases: say who takes part, such as "=ddp,=diloco_int4"')
    gpt(options.width, options.layers)


def main(given: Sequence[str]) -> None:
    """The command."""
    parser = harness.over_hosts("fair_race", __doc__, rounds=None)
    add = parser.add_argument
    add("--optimizers", type=lambda text: text.split(","), default=["adamw"], help="inner: adamw, muon, or both")
    add("--learning-rates", type=lambda text: [float(each) for each in text.split(",")], default=[5e-4])
    add("--outers", type=lambda text: [_outer(each) for each in text.split(",")], help="default: a contender's own")
    add("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0])
    add("--steps", type=int, default=1024)
    add("--every", type=int, default=256, help="steps from one evaluation to the next")
    add("--batch", type=int, default=4, help="windows of 64 bytes a rank")
    add("--width", type=int, default=192)
    add("--layers", type=int, default=2)
    add("--read", type=Path, nargs="+", help="train nothing, but print the table of these rows")
    add("--write", type=Path, help="with --read: replace the table in this page")
    options = parser.parse_args(given)
    if options.read is None:
        harness.run(parser, given, worker, check=_check)
        return
    with harness.refusing(parser):
        rows = [row for file in options.read for row in read(file)]
        kinds = {(row.benchmark, row.size, row.most_steps, row.hosts * row.processes, row.python) for row in rows}
        if len(kinds) != 1:
            raise ValueError(f"--read: rows of one model, steps, ranks and text, got {len(kinds)} kinds of them")
        harness.show_or_write("".join(f"{line}\n" for line in lines(rows)), "fair_race", options.write)

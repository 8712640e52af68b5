"""Seconds to a target loss: a byte GPT trained on real text, averaged by our strategies, by torch DDP and its hooks.

python benchmarks/time_to_accuracy.py --hosts 4 --rate 1gbit --out outputs/time_to_accuracy.jsonl
python benchmarks/time_to_accuracy.py --hosts 4 --rate 100mbit --seed 1 --cases =ring_int8,ring_sign

The target counts as reached where a straight line between two evaluations crosses it: the last one above the target and
the first one at or below it. Nothing is smoothed. Evaluations are `--every` steps apart, on the same text of which
nobody trains; where ranks have parameters of their own, on their exact mean. Time is that of the training steps alone,
the slowest rank's, measured on this network; contenders take turns of `--every` steps, in rotated order, so that
whatever else the machine does hits all alike. A contender's first steps count, its setup does not; what `ring_auto`
tries, it tries within its time.

All contenders start from the same weights, see the same windows in the same order, others on each rank, and have the
same optimizer: AdamW at 5e-4. The PowerSGD hook compresses from the first step on: torch's default, a thousand
uncompressed ones, would end here before it began.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import harness
import torch
import torch.distributed as dist
from contenders import AT_INTERVALS, DDP, FP16_HOOK, PERIODS, POST_LOCAL, POWERSGD_HOOKS, Training, contenders
from harness import Case, Measured
from races import BENCHMARK
from rich.console import Console
from rich.table import Table
from tasks import cross_entropy, gpt, held_out_text
from torch import Tensor, nn

_BESIDE = (DDP, FP16_HOOK, POWERSGD_HOOKS[1])  # always, so that there are ratios to them in the same run
_DEFAULT = (
    POWERSGD_HOOKS[4],
    *POST_LOCAL.values(),
    "ring",
    "ring_int8",
    "ring_int4",
    "ring_int2",
    "ring_sign",
    "ring_powersgd",
    "ring_powersgd rank 4",
    "ring_auto",
    "gossip_exponential",
    *AT_INTERVALS,
)
_HELD_OUT = 128  # windows, shared out among the ranks


@dataclass
class Curve:
    """One entry an evaluation, the first before the first step."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of training so far
    losses: list[float | None] = field(default_factory=list)  # nats a byte; None: not finite

    def add(self, steps: int, seconds: float, loss: float) -> None:
        """One evaluation more."""
        self.steps.append(steps)
        self.seconds.append(seconds)
        self.losses.append(loss if math.isfinite(loss) else None)

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(loss for loss in self.losses if loss is not None)

    def reached(self, target: float) -> tuple[float, float] | None:
        """Steps and seconds at which a straight line between two evaluations first crosses the target; None: never."""
        for place, loss in enumerate(self.losses):
            if loss is None or loss > target:
                continue
            before = self.losses[place - 1]
            assert place > 0
            assert before is not None
            part = (before - target) / (before - loss)
            steps, seconds = self.steps[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
            return steps[0] + part * (steps[1] - steps[0]), seconds[0] + part * (seconds[1] - seconds[0])
        return None


@dataclass
class Row:
    """One line of the results file."""

    benchmark: str
    case: str
    baseline: str
    target: float  # nats a byte
    seconds_to_target: float | None  # None: not reached within `most_steps`
    steps_to_target: float | None
    best_loss: float
    ratio: (
        float | None
    )  # the baseline's seconds to the target over this case's, so 2 is twice as fast; None: one missed
    ratios: dict[str, float | None]  # likewise, to others of the same run
    curve: Curve
    bytes_sent: int | None  # by the rank that sent most, in all steps, counted at the transport; None: nobody counts
    bytes_at_interface: int | None  # by the host that sent most, headers included; None on loopback
    waited_seconds: float | None  # the training thread waited for exchanges, in all steps
    ranks_identical: bool
    compute_seconds: float  # of a step without any averaging, all ranks at once
    most_steps: int
    every: int
    learning_rate: float
    seed: int
    hosts: int
    processes: int
    rate: str
    throughput: float | None  # bytes a second of one raw TCP stream on the same links
    threads: int
    cores: int | None
    size: str
    device: str
    python: str  # whose text this is
    torch: str
    commit: str


class _Run:
    """One contender on its way to the target."""

    def __init__(self, name: str, training: Training, loss: float) -> None:
        self.name, self.training = name, training
        self.curve = Curve()
        self.curve.add(0, 0.0, loss)
        self.turns: list[Measured] = []

    def case(self) -> Case:
        """Its next turn."""
        made = self.training
        return Case(self.name, made.run, made.result, bytes_sent=made.bytes_sent, waited=made.waited)

    def take(self, turn: Measured, loss: float) -> None:
        """What a turn gave, and the loss after it."""
        self.turns.append(turn)
        [seconds] = turn.seconds
        steps = self.curve.steps[-1] + len(self.training.batches)
        self.curve.add(steps, self.curve.seconds[-1] + seconds, loss)

    def goes_on(self, options: argparse.Namespace) -> bool:
        """Not there yet, not diverged, and steps left."""
        loss = self.curve.losses[-1]
        return loss is not None and loss > options.target and self.curve.steps[-1] < options.most_steps


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    task = gpt(options.width, options.layers, options.batch)
    initial = task.model(options.seed)
    batches = task.batches(options.most_steps, options.seed)
    windows, following = (side[dist.get_rank() :: dist.get_world_size()] for side in held_out_text(_HELD_OUT))
    how = {"loss": task.loss, "optimizer": partial(torch.optim.AdamW, lr=options.learning_rate)}

    def loss_of(training: Training) -> float:
        with training.as_seen() as model:
            return _loss(model, windows, following)

    alone = Training(copy.deepcopy(initial), batches[: options.every], **how)
    start = loss_of(alone)
    if start <= options.target:
        sys.exit(
            f"--target {options.target:g}: before the first step the loss is {start:.4g} already; choose a lower one"
        )
    case = Case("alone", alone.run, alone.result, steps=options.every)
    compute = statistics.median(harness.interleave([case], rounds=3, warmup=1)["alone"].seconds)

    known = contenders(initial, batches, timedelta(seconds=options.timeout), **how)
    asked = _DEFAULT if options.cases is None else harness.chosen(known, options)
    runs = [_Run(name, make(), start) for name, make in known.items() if name in (*_BESIDE, *asked)]
    for turn in range(options.most_steps // options.every):
        going = [run for run in runs if run.goes_on(options)]
        for run in going:
            run.training.batches = batches[turn * options.every : (turn + 1) * options.every]
            assert options.every % run.training.interval == 0
        first = turn % max(1, len(going))
        measured = harness.interleave([run.case() for run in going[first:] + going[:first]], rounds=1, warmup=0)
        for run in going:
            run.take(measured[run.name], loss_of(run.training))

    revision = harness.commit()
    parameters = sum(parameter.numel() for parameter in initial.parameters())
    size = f"{task.kind} of {parameters / 1e6:.2f} M parameters, {task.batch}"
    rows = [_row(run, runs, size, compute, revision, options) for run in runs]
    for run in runs:
        run.training.close()
    if dist.get_rank() == 0:
        _report(rows, options)


@torch.no_grad()
def _loss(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    """Mean over all ranks' windows, on all ranks; NaN or an infinity on one of them is one on all."""
    total = torch.zeros(2, dtype=torch.float64)
    if len(windows):
        total += torch.tensor([cross_entropy(model(windows), following).item(), 1.0]).double() * following.numel()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _row(run: _Run, runs: Sequence[_Run], size: str, compute: float, revision: str, options: argparse.Namespace) -> Row:
    reached = {other.name: other.curve.reached(options.target) for other in runs}
    mine = reached[run.name]

    def times_as_fast_as(other: str) -> float | None:
        theirs = reached[other]
        return None if mine is None or theirs is None else theirs[1] / mine[1]

    def total(counts: Iterable[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(run.turns) else None

    return Row(
        benchmark=BENCHMARK,
        case=run.name,
        baseline=DDP,
        target=options.target,
        seconds_to_target=None if mine is None else mine[1],
        steps_to_target=None if mine is None else mine[0],
        best_loss=run.curve.best,
        ratio=times_as_fast_as(DDP),
        ratios={other: times_as_fast_as(other) for other in _BESIDE if other != DDP},
        curve=run.curve,
        bytes_sent=total(turn.bytes_sent for turn in run.turns),
        bytes_at_interface=total(turn.bytes_at_interface for turn in run.turns),
        waited_seconds=sum(sum(turn.waited) for turn in run.turns) if all(turn.waited for turn in run.turns) else None,
        ranks_identical=harness.identical_on_all_ranks(run.training.result()),
        compute_seconds=compute,
        most_steps=options.most_steps,
        every=options.every,
        learning_rate=options.learning_rate,
        seed=options.seed,
        hosts=options.hosts,
        processes=options.processes,
        rate=options.rate,
        throughput=harness.throughput(),
        threads=options.threads,
        cores=os.cpu_count(),
        size=size,
        device="cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        commit=revision,
    )


def _report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    first = rows[0]
    link = "" if first.throughput is None else f", a raw TCP stream carries {first.throughput / 1e6:.1f} MB/s"
    table = Table(
        title=f"{first.benchmark}: loss {first.target:g}, {first.size}, {first.hosts} hosts at {first.rate}{link}; "
        f"{first.threads} thread(s) a rank on {first.cores} cores; seed {first.seed}",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    headings = ("seconds", "steps", "s a step", "x ddp", "x fp16 hook", "x powersgd hook")
    for heading in (*headings, "waited s", "MB sent", "MB at nic", "best loss", "same bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.case,
            "missed" if row.seconds_to_target is None else f"{row.seconds_to_target:.2f}",
            f"> {row.curve.steps[-1]}" if row.steps_to_target is None else f"{row.steps_to_target:.0f}",
            f"{row.curve.seconds[-1] / row.curve.steps[-1]:.4f}",
            *(harness.shown(ratio, "{:.2f}") for ratio in (row.ratio, *row.ratios.values())),
            harness.shown(row.waited_seconds, "{:.2f}"),
            harness.shown(row.bytes_sent, "{:.1f}", 1e-6),
            harness.shown(row.bytes_at_interface, "{:.1f}", 1e-6),
            f"{row.best_loss:.4f}",
            "yes" if row.ranks_identical else "NO",
        )
    console = Console(width=180)
    console.print(table)
    console.print(
        f"compute alone: {first.compute_seconds:.4f} s a step. The loss is of {_HELD_OUT} held-out windows, every "
        f"{first.every} steps; time to the target by a straight line between two evaluations. MB: of all steps.",
        highlight=False,
    )
    for row in rows:
        if row.seconds_to_target is None:
            missed = "diverged" if row.curve.losses[-1] is None else "did not reach the target"
            console.print(
                f"{row.case} {missed}: best loss {row.best_loss:.4f} in {row.curve.steps[-1]} steps", highlight=False
            )
    harness.write(rows, options.out)


if __name__ == "__main__":
    parser = harness.arguments("Seconds to a target loss over throttled hosts.")
    parser.add_argument("--target", type=float, default=2.5, help="loss in nats a byte; the default is for 4 hosts")
    parser.add_argument("--most-steps", type=int, default=640, help="then a contender has missed the target")
    parser.add_argument("--every", type=int, default=16, help="steps from one evaluation, and turn, to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of data")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of AdamW")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="windows of 64 bytes a rank and step")
    parser.set_defaults(rounds=None, warmup=None)
    asked = parser.parse_args()
    if asked.rounds is not None or asked.warmup is not None:
        parser.error("--rounds and --warmup: each contender trains once, from its first step on; --seed repeats it")
    if asked.every < 1 or any(asked.every % period for period in PERIODS) or asked.most_steps % asked.every:
        parser.error(f"--every must be a multiple of post-local SGD's periods {PERIODS}, and divide --most-steps")
    try:
        gpt(asked.width, asked.layers, asked.batch)
    except ValueError as error:
        parser.error(str(error))
    harness.main(parser, worker)

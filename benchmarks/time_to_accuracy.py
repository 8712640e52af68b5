"""Seconds to a target loss: a byte GPT trained on real text, averaged by our strategies, by torch DDP and its hooks.

python -m benchmarks time_to_accuracy --hosts 4 --rate 1gbit --out outputs/time_to_accuracy.jsonl
python -m benchmarks time_to_accuracy --hosts 4 --rate 100mbit --seed 1 --cases =ring_int8,ring_sign
python -m benchmarks time_to_accuracy --hosts 4 --rate loopback --no-target --out outputs/curves.jsonl

The target counts as reached where a straight line between two evaluations crosses it: the last one above the target and
the first one at or below it. Nothing is smoothed. Evaluations are `--every` steps apart (whole intervals of those that
average at intervals), on the same text of which nobody trains; where ranks have parameters of their own, on what
validation would see: their exact mean, or the parameters that they share. Time is that of the training steps alone, the
slowest rank's, measured on this network; contenders take turns of as many steps, in rotated order, so that whatever
else the machine does hits all alike. A contender's first steps count, its setup does not; what `ring_auto` tries, it
tries within its time.

All contenders start from the same weights, see the same windows in the same order, others on each rank, and have the
same optimizer: AdamW at 5e-4. The PowerSGD hook compresses from the first step on: torch's default, a thousand
uncompressed ones, would end here before it began. Without a target all make all steps, and `long_race` can tell how
long that takes on other networks.

With `--pace` the last host has half the speed: a step begins its backward pass so many seconds after its begin at
least, and there twice as many, so that the cores of one machine are enough for all hosts. Cases that begin with
`decoupled` are learners of Decoupled DiLoCo, who do not wait for it. They take no turns, but train in one go for
`--most-steps` times `--pace`, and a merge needs all but one of them. Their loss is that of Theta, which is recomputed
from the log of their syncer, a process on the first host. Their steps are the mean of all ranks.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.contenders import AT_INTERVALS, DDP, FP16_HOOK, POST_LOCAL, POWERSGD_HOOKS, Training, adamw, contenders
from benchmarks.harness import Case
from benchmarks.learners import LEARNERS, fragments_of, learned, paced
from benchmarks.rows import Row
from benchmarks.tasks import Batches, cross_entropy, gpt, held_out_text
from ringstrategy.server.learner import blend_

BENCHMARK = "time to accuracy"
CURVES = "loss by step"  # its name without a target
HALF_SPEED = "half speed"  # its name where one host has that
_BESIDE = (DDP, FP16_HOOK, POWERSGD_HOOKS[1])  # with a target always, so that there are ratios in the same run
_DEFAULT = (
    POWERSGD_HOOKS[4],
    *POST_LOCAL.values(),
    *("ring", "ring_int8", "ring_int4", "ring_int2", "ring_sign", "ring_powersgd", "ring_powersgd rank 4"),
    *("ring_auto", "gossip_exponential", *AT_INTERVALS),
)
_HELD_OUT = 128  # windows, shared out among the ranks


@dataclass
class Curve:
    """One entry an evaluation, the first before the first step."""

    steps: list[float]
    seconds: list[float]  # of training so far
    losses: list[float | None]  # nats a byte; None: not finite

    def take(self, steps: float, seconds: float, loss: float) -> None:
        """Another evaluation."""
        self.steps.append(steps)
        self.seconds.append(seconds)
        self.losses.append(loss if math.isfinite(loss) else None)

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(loss for loss in self.losses if loss is not None)

    def reached(self, target: float) -> tuple[float, float] | None:
        """Steps and seconds at which a straight line between two evaluations first crosses the target; None: never."""
        points = pairwise(zip(self.steps, self.seconds, self.losses, strict=True))
        for (steps, seconds, before), (later_steps, later_seconds, loss) in points:
            if loss is not None and loss <= target:
                assert before is not None
                part = (before - target) / (before - loss)
                return steps + part * (later_steps - steps), seconds + part * (later_seconds - seconds)
        return None


class _Run:
    """One contender on its way to the target."""

    def __init__(self, name: str, training: Training, loss: float) -> None:
        self.name, self.training = name, training
        self.curve = Curve([0], [0.0], [loss])
        self.turns: list[Case] = []

    def turn(self, batches: Batches) -> Case:
        """Its next one, to be measured as a whole."""
        self.training.batches = batches
        assert len(batches) % self.training.interval == 0
        case = self.training.case(self.name)
        case.steps = 1
        self.turns.append(case)
        return case

    def take(self, loss: float) -> None:
        """The loss after its turn."""
        [seconds], steps = self.turns[-1].seconds, len(self.training.batches)
        self.curve.take(self.curve.steps[-1] + steps, self.curve.seconds[-1] + seconds, loss)

    def goes_on(self, options: argparse.Namespace) -> bool:
        """Not there yet, not diverged, and steps left."""
        loss = self.curve.losses[-1]
        return loss is not None and loss > options.target and self.curve.steps[-1] < options.most_steps


def worker(options: argparse.Namespace) -> None:
    """What runs in each process."""
    task = gpt(options.width, options.layers)
    initial = task.model(options.seed)
    batches = task.batches(options.most_steps, options.seed)
    windows, following = (side[dist.get_rank() :: dist.get_world_size()] for side in held_out_text(_HELD_OUT))
    slowest = dist.get_rank() // options.processes == options.hosts - 1
    loss = paced(initial, task.loss, options.pace * (1 + slowest)) if options.pace else task.loss
    how: dict[str, Any] = {"loss": loss, "optimizer": partial(adamw, lr=options.learning_rate)}

    def seen(training: Training) -> float:
        with training.as_seen() as model:
            return loss_of(model, windows, following)

    alone = Training(copy.deepcopy(initial), batches[: options.every], **how)
    start = seen(alone)
    if start <= options.target:
        sys.exit(
            f"--target {options.target:g}: before the first step the loss is {start:.4g} already; choose a lower one"
        )
    compute = alone.case("alone")
    harness.interleave([compute], rounds=3, warmup=1)

    known = contenders(initial, batches, **how)
    learners = list(LEARNERS) if options.pace else []
    asked = (*_DEFAULT, *learners) if options.cases is None else harness.chosen([*known, *learners], options.cases)
    if options.cases is None or math.isfinite(options.target):
        asked = *_BESIDE, *asked
    runs = [_Run(name, make(), start) for name, make in known.items() if name in asked]
    for run in runs:
        if options.every % run.training.interval:
            sys.exit(
                f"--every {options.every}: {run.name} averages every {run.training.interval} steps, and turns are "
                "whole intervals; choose a multiple"
            )
    _race(runs, batches, seen, options)
    aims = math.isfinite(options.target)
    benchmark = HALF_SPEED if options.pace else BENCHMARK if aims else CURVES
    shared = {
        "benchmark": benchmark,
        "baseline": DDP if aims else "",
        "target": options.target if aims else math.nan,
        "compute_seconds": compute.median,
        "most_steps": options.most_steps,
        "every": options.every,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "size": task.described(initial, digits=2) + (f", {options.pace:g} s a step" if options.pace else ""),
        "python": platform.python_version(),  # whose text this is
        **harness.facts(options),
    }
    told: list[tuple[str, Curve, dict[str, Any]]] = [(run.name, run.curve, _counted(run)) for run in runs]
    for run in runs:
        run.training.close()
    for name in learners:
        if name in asked:
            alone.model.load_state_dict(initial.state_dict())
            came = learned(name, alone.model, batches, **how, seconds=options.most_steps * options.pace)
            curve = Curve([0], [0.0], [start])
            for steps, seconds, theta in came.theta:
                for fragment, values in zip(fragments_of(alone.model), theta, strict=True):
                    blend_(list(fragment.values()), values, 1.0)
                curve.take(steps, seconds, seen(alone))
            told.append((name, curve, {"bytes_at_interface": came.at_interface}))
    reached = {name: curve.reached(options.target) for name, curve, _ in told}
    rows = [_row(name, curve, reached, {**counts, **shared}) for name, curve, counts in told]
    if dist.get_rank() == 0:
        what = f"{benchmark}: " + (f"loss {options.target:g}" if aims else f"{options.most_steps} steps")
        title = f"{what}, {rows[0].size}, {harness.network(options)}; seed {options.seed}"
        harness.publish(title, rows, options.out, [f"compute alone: {compute.median:.4f} s a step; MB: of all steps."])


def _race(
    runs: Sequence[_Run], batches: Batches, seen: Callable[[Training], float], options: argparse.Namespace
) -> None:
    """Turns of `--every` steps, in rotated order, until nobody goes on."""
    for turn, first in enumerate(range(0, options.most_steps, options.every)):
        going = [run for run in runs if run.goes_on(options)]
        if not going:
            break
        turns = [run.turn(batches[first : first + options.every]) for run in going]
        turn %= len(going)
        harness.interleave(turns[turn:] + turns[:turn], rounds=1, warmup=0)
        for run in going:
            run.take(seen(run.training))


@torch.no_grad()
def loss_of(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    """Mean over all ranks' windows, on all ranks; NaN or an infinity on one of them is one on all."""
    total = torch.zeros(2, dtype=torch.float64)
    if len(windows):
        total += torch.tensor([cross_entropy(model(windows), following).item(), 1.0]).double() * following.numel()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _counted(run: _Run) -> dict[str, Any]:
    """What was counted in all its turns."""

    def total(counts: Sequence[float | None]) -> float | None:
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None  # None: nobody counts

    return {
        "bytes_sent": total([turn.sent for turn in run.turns]),
        "bytes_at_interface": total([turn.at_interface for turn in run.turns]),
        "waited_seconds": total([turn.waited_seconds for turn in run.turns]),
        "ranks_identical": harness.identical_on_all_ranks(run.training.result()),
    }


def _row(name: str, curve: Curve, reached: Mapping[str, tuple[float, float] | None], shared: Mapping[str, Any]) -> Row:
    mine = reached[name]

    def times_as_fast_as(other: str) -> float | None:
        theirs = reached.get(other)
        return None if mine is None or theirs is None else theirs[1] / mine[1]

    return Row(
        case=name,
        steps_to_target=None if mine is None else mine[0],
        seconds_to_target=None if mine is None else mine[1],
        best_loss=curve.best,
        ratio=times_as_fast_as(DDP),
        ratios={other: times_as_fast_as(other) for other in _BESIDE if other in reached and other != DDP},
        curve=asdict(curve),
        **shared,
    )


def _check(options: argparse.Namespace) -> None:
    if options.every < 1 or options.most_steps < 1 or options.most_steps % options.every:
        raise ValueError(
            f"--most-steps {options.most_steps}: turns have --every {options.every} steps, so it must be a multiple"
        )
    if options.cases == "none" and not math.isfinite(options.target):
        raise ValueError("--no-target --cases none: then nobody trains; name some, such as --cases =ddp,=diloco")
    gpt(options.width, options.layers)


def main(given: Sequence[str]) -> None:
    """The command."""
    # no rounds: each contender trains once, from its first step on; --seed repeats it
    parser = harness.over_hosts("time_to_accuracy", __doc__, rounds=None)
    parser.add_argument("--target", type=float, default=2.5, help="loss in nats a byte; the default is for 4 hosts")
    to_the_end = "no target: all cases make --most-steps steps; ddp runs only if --cases names it"
    parser.add_argument("--no-target", dest="target", action="store_const", const=-math.inf, help=to_the_end)
    parser.add_argument("--most-steps", type=int, default=640, help="then a contender has missed the target")
    parser.add_argument("--every", type=int, default=16, help="steps from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of data")
    pace = "seconds from a step's begin to its backward pass, at least; twice as many on the last host"
    parser.add_argument("--pace", type=float, default=0.0, help=pace)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of AdamW")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    harness.run(parser, given, worker, check=_check)

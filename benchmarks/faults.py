"""Faults of all kinds at all moments: hangs, wrong means, torn checkpoints, processes that are left.

python -m benchmarks faults --faults 1000 --out outputs/faults.jsonl

Each fault is drawn by its number: what happens, to which ranks, at which step and place of the fit, with which
algorithm, `on_peer_loss` and launcher. It is judged beside a run of the same without a fault. One process computes the
means of `ring`, int8 and bfloat16 once more:

- hung: a rank that was spared, or a frozen one that goes on later, does not end by itself
- wrong: a rank has other bits after a step than without the fault; or, after a loss that the others survive, not the
  bits of the others (gossip: any), or not the mean over those that made the step, or not each sample of an epoch
- torn: with "raise", a new start from the last checkpoint does not begin with a save that had ended, does not get to
  the end, or has other bits (to its end, if it began with an epoch); with "shrink", not what the others had
- orphans: a process is left
- unnamed: with "raise", a rank that was spared does not end with the error of this fault, which says which rank was
  lost (during set-up: with any error; after cut connections: it may name a rank at either end)

Seconds are those from a strike to the end of the next step of all that train on: of survivors ("shrink"), or of the
ranks that torchrun has started again ("raise"). `--only "kill, torchrun"` draws such faults alone. `--first 417
--faults 1` repeats number 417. What the ranks of a fault that was not clean have noted is kept.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks import harness
from benchmarks.faulted import BATCH, EPOCHS, STEPS, Net, Plan, be_a_rank, samples
from benchmarks.ranks import Job, Program
from benchmarks.rows import Row

_END = EPOCHS * STEPS
_FREEZE_TIMEOUT = 4.0
_LONGEST_SECONDS = 0.4  # from the first step to a strike at the place "any"

_IN_BATCH = ("forward", "backward", "send", "optimizer", "batch end")
_AT_END = ("validation", "save", "epoch end")
_PLACES = ("set-up", "start", *_IN_BATCH, *_AT_END, "any")
_MET = tuple(place for place in _PLACES if place != "set-up")  # the ranks know each other
_OF_MODULE = tuple(place for place in _PLACES if place not in ("send", "save", "any"))  # in the main thread
FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {  # how often, and where
    "kill": (40, _PLACES),
    "kill all": (5, _PLACES),
    "exit": (9, _PLACES),
    "raise": (12, _OF_MODULE),
    "terminate": (12, _MET),
    "freeze": (7, _MET),
    "reset": (5, _MET),
    "stall": (5, _OF_MODULE),
    "nan": (5, ("backward",)),
}
_LOSSES = ("kill", "kill all", "exit", "freeze")
_KINDS = {"terminate": "SIGTERMException", "reset": "PeerLostError", "nan": "RuntimeError", "raise": "ValueError"}
_SURVIVABLE = ("kill", "exit", "raise", "freeze", "stall")
TOLERANCES = {"ring": 1e-5, "ring_int8, feedback": 2e-3, "direct bf16": 2e-3}  # of parameters, beside exact means
DRAWN = (*TOLERANCES, "powersgd", "gossip", "gossip at once")  # each of which gives the same bits again

Found = list[tuple[str, str]]  # kinds of what is wrong, and words


def draw(number: int, folder: Path) -> Plan:
    """One fault: the same for the same number."""
    rng = random.Random(f"0/{number}")  # as published numbers were drawn
    [fault] = rng.choices(list(FAULTS), [often for often, _ in FAULTS.values()])
    strategy = rng.choice(DRAWN if fault != "nan" else ["ring", "ring_int8, feedback"])
    [size] = rng.choices([2, 3, 4], [3, 5, 2])
    # one of two is no majority, unless the other one is proven dead
    shrinks = fault in _SURVIVABLE and (fault != "freeze" or size > 2) and rng.random() < 0.4
    launchers = ["environment"]
    if fault in ("kill", "kill all", "exit", "raise", "terminate"):
        launchers += ["lightning"] if shrinks else ["lightning", "spawn", "fork", "torchrun"]
    [launcher] = rng.choices(launchers, [30, *[1] * (len(launchers) - 1)])
    place = rng.choice([each for each in FAULTS[fault][1] if not shrinks or each != "set-up"])
    step = rng.randrange(_END) + (place == "batch end")
    if place in _AT_END:
        step = STEPS * rng.randrange(1, EPOCHS + 1)
    delay = {"any": rng.uniform(0, _LONGEST_SECONDS), "send": rng.randrange(6)}.get(place, rng.random())
    return Plan(
        folder=str(folder / str(number)),
        strategy=strategy,
        policy="shrink" if shrinks else "raise",
        size=size,
        timeout=_FREEZE_TIMEOUT if fault == "freeze" else 30.0,
        launcher=launcher,  # type: ignore[arg-type]
        fault=fault,
        place=place,
        step=step,
        delay=delay,
        victims=tuple(range(size)) if fault == "kill all" else (rng.randrange(size),),
    )


def named(plan: Plan) -> str:
    """What happens, how its ranks are started, and what the others do."""
    return f"{plan.fault}, {plan.launcher}, {plan.policy}"


class Start:
    """One start of all ranks, which have ended when it is made.

    Attributes:
        found: what hung, or was left.
        printed: by the ranks of a launcher.
        codes: exit codes.
    """

    def __init__(self, plan: Plan) -> None:
        self.found, self.printed, self.codes = Found(), "", list[int | None]()
        file = plan.write()
        if plan.launcher == "environment":
            self._run_ranks(plan)
        else:
            self._run_script(plan, file)

    def _run_ranks(self, plan: Plan) -> None:
        frozen = plan.victims if plan.fault == "freeze" else ()
        job = Job(Path(plan.folder), plan.size, be_a_rank, plan)

        def all_ended() -> bool:
            if not any(rank.is_alive() for number, rank in enumerate(job.ranks) if number not in frozen):
                for victim in frozen:  # again and again: it may freeze only now
                    job.signal(victim, signal.SIGCONT)
            return not any(rank.is_alive() for rank in job.ranks)

        try:
            job.until(all_ended, "all ranks ended")
        except AssertionError as error:
            self.found.append(("hung", f"in start {plan.attempt}: {error}"))
        job.close()
        self.codes = [rank.exitcode for rank in job.ranks]

    def _run_script(self, plan: Plan, file: Path) -> None:
        how = ["-m", "benchmarks.faulted", str(file)]
        if plan.launcher == "torchrun":
            how = [
                *("-m", "torch.distributed.run", "--max-restarts=1", "--monitor-interval=0.1"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={plan.size}", *how),
            ]
        root = str(Path(__file__).parents[1])
        program = Program(Path(plan.folder), [sys.executable, *how], PYTHONPATH=root)
        try:
            program.wait()
        except AssertionError as error:
            kind = "hung" if program.process.poll() is None else "orphans"
            self.found.append((kind, f"in start {plan.attempt}: {error}"))
        program.close()
        self.codes, self.printed = [program.process.returncode], program.printed + program.errors


class Judge:
    """What is wrong with a fault's outcome."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.seconds: dict[Plan, float] = {}  # to the next step of all that train on
        self._expected: dict[tuple[str, int], list[dict[int, str]]] = {}
        self._lock = threading.Lock()

    def undisturbed(self, strategy: str, size: int) -> list[dict[int, str]]:
        """Of each rank, the digest after each step without a fault."""
        with self._lock:
            if (strategy, size) not in self._expected:
                plan = Plan(str(self._scratch / f"undisturbed {strategy} {size}"), strategy, size=size)
                codes = Start(plan).codes
                found = [*wrong_means(plan, range(size)), *lost_samples(plan)] if not any(codes) else codes
                assert not found, f"{found}: see {plan.folder}"
                self._expected[strategy, size] = [
                    {note["step"]: note["digest"] for note in notes} for notes in plan.noted("step")
                ]
            return self._expected[strategy, size]

    def __call__(self, plan: Plan) -> Found:
        """Let it happen."""
        try:
            return self._found(plan)
        except Exception as error:  # the other faults are judged all the same
            return [("wrong", f"the judge fails: {error!r}")]

    def _found(self, plan: Plan) -> Found:
        expected = self.undisturbed(plan.strategy, plan.size)
        start = Start(plan)
        found = [*start.found]
        strikes = [note for notes in plan.noted("struck") for note in notes]
        if not strikes or any(note["cut"] == 0 for note in strikes):
            found.append(("wrong", "nothing has struck"))
        if plan.policy == "shrink":
            self._time(plan, plan)
            return found or of_survivors(plan) or torn_by_survivors(plan)
        again = replace(plan, attempt=1, fault="", victims=())
        found += [("unnamed", words) for words in unnamed(plan, start.printed)] + other_bits(plan, expected)
        if plan.launcher != "torchrun":
            found += Start(again).found
        elif any(again.noted("begin")):  # torchrun has started the ranks once more itself
            self._time(plan, again)
        elif any(start.codes):
            return [*found, ("torn", "torchrun does not start the ranks again")]
        return found + [("torn", words) for words in torn(plan, expected)]

    def _time(self, plan: Plan, after: Plan) -> None:
        """From the strike to the first step, on the slowest rank, that the others made without the victims."""
        struck = max((note["at"] for notes in plan.noted("struck") for note in notes), default=0.0)
        left = [steps for rank, steps in enumerate(after.noted("step")) if rank not in after.victims]
        most = plan.size - (plan.policy == "shrink")
        times = [[note["at"] for note in notes if note["size"] <= most] for notes in left]
        if all(times):
            self.seconds[plan] = max(first for first, *_ in times) - struck


def other_bits(plan: Plan, expected: list[dict[int, str]]) -> Found:
    """Until the fault."""
    return [
        ("wrong", f"rank {rank} has other bits at step {note['step']}")
        for rank, notes in enumerate(plan.noted("step"))
        for note in notes
        if note["digest"] != expected[rank].get(note["step"])
    ]


def unnamed(plan: Plan, printed: str) -> Iterator[str]:
    """What ranks that were spared say, if it is not what happened."""
    for rank, (errors, trained) in enumerate(zip(plan.noted("error"), plan.noted("trained"), strict=True)):
        error = errors[0] if errors else None
        if not _is_named(plan, rank, error, bool(trained), printed):
            yield f"rank {rank} ends with {error}"


def _is_named(plan: Plan, rank: int, error: dict[str, Any] | None, trained: bool, printed: str) -> bool:
    spawned = plan.launcher in ("spawn", "fork")  # whoever started them has the error
    if plan.fault == "stall":
        return trained and error is None
    if (rank in plan.victims and plan.fault in _LOSSES) or (trained and error is None):
        return True  # it has gone, or was through
    if plan.fault in (*_LOSSES, "raise") and rank not in plan.victims and plan.place != "set-up":
        if spawned:
            said = f"{printed} {error}".lower()
            return any(f"{who} {victim}" in said for who in ("rank", "process") for victim in plan.victims)
        if error is None:  # Lightning's launcher kills all others within 5 s of the first end, with or without a word
            return plan.launcher == "lightning" and plan.policy == "raise"
        return error["kind"] == "PeerLostError" and error["rank"] in plan.victims
    if spawned:
        return True
    return error is not None and (plan.place == "set-up" or error["kind"] == _KINDS.get(plan.fault, error["kind"]))


def torn(plan: Plan, expected: list[dict[int, str]]) -> Iterator[str]:
    """What the next start lacks."""
    again, has_trained = replace(plan, attempt=1), plan.noted("trained")
    # as a batch of an epoch begins, the save of the epoch before has ended
    saved = max((note["epoch"] * STEPS for notes in plan.noted("batch") for note in notes), default=0)
    saved = _END if all(has_trained) else saved
    for rank, begins in enumerate(again.noted("begin")):
        if not begins:
            if saved < _END:
                yield f"rank {rank} does not start again"
            continue
        begin, made, steps = begins[0]["step"], plan.noted("step")[rank], again.noted("step")[rank]
        if not _got_through(again, rank):
            yield f"rank {rank} does not get to the end again"
        if begin < saved:
            yield f"rank {rank} begins with step {begin}, but {saved} was saved"
        if plan.fault == "terminate" and made and made[-1]["step"] != begin and not has_trained[rank]:
            yield f"rank {rank} was stopped after step {made[-1]['step']}, begins with {begin}"
        digests = {note["step"]: note["digest"] for note in (*begins, *steps)}
        whole = begin % STEPS == 0  # else Lightning draws the epoch anew
        compared = [step for step in (digests if whole else [begin]) if step]
        for step in [step for step in compared if digests[step] != expected[rank].get(step)][:1]:
            yield f"rank {rank} has other bits at step {step}"
        if whole and max(digests) != _END:
            yield f"rank {rank} ended at step {max(digests)}"


def missed(plan: Plan) -> Found:
    """Victims that were not struck at their place and step: no more than their end was tried."""
    meant = (plan.place, plan.step if plan.place in (*_IN_BATCH, *_AT_END) else None)
    strikes = plan.noted("struck")
    return [
        ("missed", f"rank {victim} is struck as {strikes[victim]}")
        for victim in plan.victims
        if [(note["place"], note["step"] if meant[1] is not None else None) for note in strikes[victim]] != [meant]
    ]


def of_survivors(plan: Plan) -> Found:
    """How those that were spared have gone on."""
    found, gossips = Found(), plan.strategy.startswith("gossip")
    errors, trained = plan.noted("error"), plan.noted("trained")
    for rank in _spared(plan):
        said = errors[rank][0]["message"] if errors[rank] else ""
        if not trained[rank] or (said and not (gossips and "at the end of training" in said)):  # where it takes a mean
            found.append(("wrong", f"rank {rank} does not go on: {errors[rank][:1]}"))
    for rank in plan.victims if plan.fault == "freeze" else ():
        if not trained[rank] and not (errors[rank] and errors[rank][0]["kind"] == "LeftBehindError"):
            found.append(("unnamed", f"rank {rank}, frozen, wakes and ends with {errors[rank][:1]}"))
    # who averages parameters goes on without the batches that the lost rank drew and did not share
    behind = len(plan.victims) + 1 if gossips or plan.strategy == "local SGD" else 0
    return found or wrong_means(plan, _spared(plan)) + lost_samples(plan, behind)


def _spared(plan: Plan) -> list[int]:
    return [rank for rank in range(plan.size) if rank not in plan.victims or plan.fault == "stall"]


def torn_by_survivors(plan: Plan) -> Found:
    """What a new start of those that were spared lacks."""
    ended, gossips = _spared(plan), plan.strategy.startswith("gossip")
    again = replace(
        plan,
        attempt=1,
        fault="",
        victims=(),
        policy="raise",
        size=len(ended),
        epochs=2 * EPOCHS,
        launcher="environment",
    )
    found = Start(again).found
    had = [{note["step"]: note for note in plan.noted("step")[rank]} for rank in ended]
    # what an epoch's end has left undone after a loss, its checkpoint too, is dropped
    last = plan.step < _END - STEPS and plan.place != "any"
    for rank, begins in enumerate(again.noted("begin")):
        if not begins or begins[0]["step"] not in had[rank] or not _got_through(again, rank):
            found.append(("torn", f"rank {rank} does not start again: {begins}"))
            continue
        note, kept = begins[0], had[rank][begins[0]["step"]]
        if last and note["step"] != max(had[rank]):
            found.append(("torn", f"rank {rank} begins with step {note['step']} of {max(had[rank])}"))
        # one rank compresses nothing: its residuals wait for others
        what = "digest" if kept["size"] == note["size"] > 1 else "weights"
        if note[what] != kept[what] and not (gossips and what == "weights"):
            found.append(("torn", f"rank {rank} has not the {what} of step {note['step']}"))
    return found


def _got_through(plan: Plan, rank: int) -> bool:
    return bool(plan.noted("trained")[rank]) and not plan.noted("error")[rank]


def _made(plan: Plan) -> list[list[dict[str, Any]]]:
    """Of each step in which ranks trained: the batches of those that made it."""
    batches: dict[int, list[dict[str, Any]]] = {}
    for notes in plan.noted("batch"):
        for note in notes:
            batches.setdefault(note["step"], []).append(note)
    made = []
    for _, of_step in sorted(batches.items()):
        world = max(note["world"] for note in of_step)
        made.append([note for note in of_step if note["world"] == world])
    return made


def wrong_means(plan: Plan, ended: Sequence[int]) -> Found:
    """Whether ranks have the same bits, and the means that one process computes over the batches of each step."""
    if plan.strategy.startswith("gossip"):
        return []
    steps, trained = plan.noted("step"), plan.noted("trained")
    bits: dict[int, set[str]] = {-1: {str(trained[rank][0]["values"]) for rank in ended}}
    for note in (note for rank in ended for note in steps[rank] if plan.strategy != "local SGD"):
        bits.setdefault(note["step"], set()).add(note["weights"])
    found = [("wrong", f"other bits after step {step}") for step, of_step in sorted(bits.items()) if len(of_step) > 1]
    if plan.strategy not in TOLERANCES:
        return found
    model, data = Net(0), samples(plan.size)
    optimizer = model.configure_optimizers()
    for batches in _made(plan):
        optimizer.zero_grad()
        ranks, size = {batch["rank"] for batch in batches}, batches[0]["size"]
        if len(ranks) != size:
            found.append(("wrong", f"ranks {ranks} of {size} made step {batches[0]['step']}"))
        for batch in batches:
            x, y, _ = data[batch["samples"]]
            (model.loss(x, y) / size / plan.accumulate).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), trained[ended[0]][0]["values"], strict=True):
        if not torch.allclose(mine, torch.tensor(theirs), rtol=1e-4, atol=TOLERANCES[plan.strategy]):
            far = float((mine.detach() - torch.tensor(theirs)).abs().max())
            found.append(("wrong", f"parameters are {far:.1e} from those of exact means"))
    return found


def lost_samples(plan: Plan, behind: int = 0) -> Found:
    """Is each sample of each epoch trained on? In one epoch `behind` ranks that gossip may each leave out a batch."""
    drawn = Counter((note["epoch"], sample) for notes in _made(plan) for note in notes for sample in note["samples"])
    found, every = Found(), plan.size * STEPS * BATCH
    for epoch in range(EPOCHS):
        often = [times for (of, _), times in drawn.items() if of == epoch]
        if len(often) < every - behind * BATCH or sum(often) > every + plan.size:
            found.append(("wrong", f"{len(often)} of {every} samples of epoch {epoch} in {sum(often)} draws"))
        if len(often) < every:
            behind = 0
    return found


def _row(name: str, counts: dict[str, Any], seconds: list[float]) -> Row:
    wrong = {kind: counts.get(kind, 0) for kind in ("hung", "wrong", "torn", "orphans", "unnamed")}
    return Row(
        benchmark="faults",
        case=name,
        threads=1,
        cores=os.cpu_count(),
        faults=counts["faults"],
        seconds=seconds,
        seconds_median=statistics.median(seconds) if seconds else math.nan,
        **wrong,
        **harness.made_with(),
    )


def main(given: Sequence[str]) -> None:
    """Let the faults happen, and print a row for each kind of them."""
    parser = harness.arguments("faults", __doc__, rounds=None, cases=False)
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    only = "draw on until so many have this in 'what happens, launcher, on_peer_loss', as \"kill, torchrun\" has"
    parser.add_argument("--only", default="", metavar="WORDS", help=only)
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    options = parser.parse_args(given)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.faulted"])  # a start costs a fork
    scratch = Path(tempfile.mkdtemp(prefix="ringstrategy-faults-"))
    judge = Judge(scratch)
    drawn = (draw(number, scratch) for number in count(options.first))
    plans = list(islice((plan for plan in drawn if options.only in named(plan)), options.faults))
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, list[float]] = {}
    unclean = []
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = track(zip(plans, pool.map(judge, plans), strict=True), "faults", len(plans), transient=True)
        for plan, found in outcomes:
            kind = f"{plan.fault}, {plan.policy}"
            counts.setdefault(kind, Counter()).update(["faults", *{wrong for wrong, _ in found}])
            seconds.setdefault(kind, []).extend([judge.seconds[plan]] if plan in judge.seconds else [])
            if found:
                unclean.append(f"{plan}: {found}")
                print(unclean[-1], flush=True)
            else:
                shutil.rmtree(plan.folder)
    rows = [_row(name, dict(found), seconds[name]) for name, found in sorted(counts.items())]
    launchers = Counter(plan.launcher for plan in plans).most_common()
    notes = [f"launchers: {', '.join(f'{name} {often}' for name, often in launchers)}", *unclean]
    harness.publish(f"{len(plans)} faults, from number {options.first}", rows, options.out, notes)
    if unclean:
        sys.exit(f"{len(unclean)} faults were not clean: see {scratch}")
    shutil.rmtree(scratch)

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
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import track

from benchmarks import harness
from benchmarks.faulted import BATCH, STEPS, STRATEGIES, Net, Plan, be_a_rank, samples
from benchmarks.rows import Row

_EPOCHS = 3
_LIMIT_SECONDS = 90.0  # of one start
_ORPHAN_SECONDS = 10.0  # what a launcher leaves may take so long to end
_FREEZE_TIMEOUT = 4.0
_LONGEST_SECONDS = 0.4  # from the first step to a strike at the place "any"
_MARK = "RINGSTRATEGY_FAULT"  # in the environment of all that a launcher starts

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
_TOLERANCES = {"ring": 1e-5, "ring_int8, feedback": 2e-3, "direct bf16": 2e-3}  # of parameters, beside exact means

Launcher = Literal["environment", "lightning", "spawn", "fork", "torchrun"]
Notes = list[dict[str, Any]]  # of one rank, in order


@dataclass(frozen=True)
class Case:
    """One fault."""

    plan: Plan
    launcher: Launcher

    @property
    def name(self) -> str:
        """What happens, how its ranks were started, and what the others do."""
        return f"{self.plan.fault}, {self.launcher}, {self.plan.policy}"

    @classmethod
    def draw(cls, number: int, folder: Path, seed: int = 0) -> Case:
        """The same for the same number and seed."""
        draw = random.Random(f"{seed}/{number}")
        [fault] = draw.choices(list(FAULTS), [often for often, _ in FAULTS.values()])
        strategy = draw.choice(list(STRATEGIES) if fault != "nan" else ["ring", "ring_int8, feedback"])
        [size] = draw.choices([2, 3, 4], [3, 5, 2])
        # one of two is no majority, unless the other one is proven dead
        survivable = fault in _SURVIVABLE and (fault != "freeze" or size > 2)
        policy: Literal["raise", "shrink"] = "shrink" if survivable and draw.random() < 0.4 else "raise"
        launchers: list[Launcher] = ["environment"]
        if fault in ("kill", "kill all", "exit", "raise", "terminate"):
            launchers += ["lightning", "spawn", "fork", "torchrun"] if policy == "raise" else ["lightning"]
        [launcher] = draw.choices(launchers, [30, *[1] * (len(launchers) - 1)])
        place = draw.choice([each for each in FAULTS[fault][1] if policy == "raise" or each != "set-up"])
        step = draw.randrange(_EPOCHS * STEPS)
        if place in _AT_END:
            step = STEPS * draw.randrange(1, _EPOCHS + 1)
        elif place == "batch end":
            step += 1
        delay = {"any": draw.uniform(0, _LONGEST_SECONDS), "send": draw.randrange(6)}.get(place, draw.random())
        plan = Plan(
            folder=str(folder / str(number)),
            attempt=0,
            strategy=strategy,
            policy=policy,
            size=size,
            epochs=_EPOCHS,
            timeout=_FREEZE_TIMEOUT if fault == "freeze" else 30.0,
            start_method=launcher if launcher in ("spawn", "fork") else "popen",
            fault=fault,
            place=place,
            step=step,
            delay=delay,
            victims=tuple(range(size)) if fault == "kill all" else (draw.randrange(size),),
        )
        return cls(plan, launcher)


class Start:
    """The processes of one start, and what its ranks have noted when all have ended."""

    def __init__(self, plan: Plan, launcher: str) -> None:
        self._plan, self.hung = plan, False
        self._log = Path(plan.folder) / f"log{plan.attempt}"
        file = plan.write()
        with harness.reserved_port() as port:
            ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            if launcher == "environment":
                self._run_ranks(ranks)
            else:
                self._run_script(launcher, file, ranks)
        self.notes: list[Notes] = [harness.noted(plan.notes(rank)) for rank in range(plan.size)]

    def _run_ranks(self, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(target=_be_a_rank, args=(self._plan, rank, environment, self._log))
            for rank in range(self._plan.size)
        ]
        with _STARTING:
            for process in processes:
                process.start()
        frozen = self._plan.victims if self._plan.fault == "freeze" else ()
        spared = [process for rank, process in enumerate(processes) if rank not in frozen]
        self.hung |= not _all_end([process.is_alive for process in spared], _LIMIT_SECONDS)

        def wake() -> bool:
            for rank in frozen:  # again and again: it may freeze only now
                with suppress(ProcessLookupError):
                    os.kill(processes[rank].pid or 0, signal.SIGCONT)
            return any(process.is_alive() for process in processes)

        self.hung |= not _all_end([wake], _LIMIT_SECONDS)
        for process in processes:
            process.kill()
            process.join()
        self.codes = [process.exitcode for process in processes]
        self.orphans = 0  # of such processes each is waited for

    def _run_script(self, launcher: str, file: Path, environment: dict[str, str]) -> None:
        how = ["-m", "benchmarks.faulted", str(file)]
        if launcher == "torchrun":
            how = [
                *("-m", "torch.distributed.run", "--max-restarts=1", "--monitor-interval=0.1"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={self._plan.size}", *how),
            ]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *how],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **environment, _MARK: self._plan.folder},
                stdout=log,
                stderr=log,
            )
        self.hung |= not _all_end([lambda: process.poll() is None], _LIMIT_SECONDS)
        goes_on = self._plan.policy == "shrink"  # also without the process that has started the others
        _all_end([lambda: bool(_marked(self._plan.folder))], _LIMIT_SECONDS if goes_on else _ORPHAN_SECONDS)
        left = _marked(self._plan.folder)
        self.orphans = 0 if self.hung else len(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.codes = [process.wait()]

    def of(self, what: str) -> list[Notes]:
        """The notes of one kind, of each rank."""
        return [[note for note in notes if note["what"] == what] for notes in self.notes]

    @property
    def log(self) -> str:
        """What the launcher has printed."""
        return self._log.read_text()


_STARTING = threading.Lock()


def _be_a_rank(plan: Plan, rank: int, environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment, WORLD_SIZE=str(plan.size), LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    be_a_rank(plan)


def _all_end(live: Sequence[Callable[[], bool]], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(lives() for lives in live):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _marked(folder: str) -> list[int]:
    """Processes that a launcher has started for this folder, and that live."""
    mark, found = f"{_MARK}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and harness.is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


class Judge:
    """What is wrong with a fault's outcome: pairs of a kind and words."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.late = 0  # faults whose place did not come
        self.seconds: dict[Case, float] = {}  # to the next step of all that train on
        self._expected: dict[tuple[str, int], list[dict[int, str]]] = {}
        self._lock = threading.Lock()

    def undisturbed(self, strategy: str, size: int) -> list[dict[int, str]]:
        """Of each rank, the digest after each step without a fault."""
        with self._lock:
            if (strategy, size) not in self._expected:
                folder = self._scratch / f"undisturbed {strategy} {size}"
                start = Start(Plan(str(folder), 0, strategy, "raise", size, _EPOCHS), "environment")
                assert not any(start.codes), f"see {folder}"
                found = [*wrong_means(start, strategy, range(size), size), *lost_samples(start, size)]
                assert not found, f"{found}: see {folder}"
                self._expected[strategy, size] = [
                    {note["step"]: note["digest"] for note in notes} for notes in start.of("step")
                ]
            return self._expected[strategy, size]

    def __call__(self, case: Case) -> list[tuple[str, str]]:
        """Let it happen."""
        try:
            return self._found(case)
        except Exception as error:  # the other faults are judged all the same
            return [("wrong", f"the judge fails: {error!r}")]

    def _time(self, case: Case, start: Start, after: list[Notes]) -> None:
        """From the strike to the first step, on the slowest rank, that the others made without the victims."""
        struck = max((note["at"] for notes in start.of("struck") for note in notes), default=0.0)
        most = case.plan.size - (case.plan.policy == "shrink")
        steps = [[n["at"] for n in notes if n["what"] == "step" and n["size"] <= most] for notes in after]
        if all(steps):
            self.seconds[case] = max(times[0] for times in steps) - struck

    def _found(self, case: Case) -> list[tuple[str, str]]:
        expected = self.undisturbed(case.plan.strategy, case.plan.size)
        start = Start(case.plan, case.launcher)
        found = [("hung", "in the first start")] * start.hung + [("orphans", "in the first start")] * start.orphans
        strikes = [note for notes in start.of("struck") for note in notes]
        self.late += any(note["late"] for note in strikes)
        if not strikes or any(note["cut"] == 0 for note in strikes):
            found.append(("wrong", "nothing has struck"))
        if case.plan.policy == "shrink":
            self._time(case, start, [notes for rank, notes in enumerate(start.notes) if rank not in case.plan.victims])
            return found + (of_survivors(case, start) if not start.hung else [])
        found += [("unnamed", words) for words in unnamed(case, start)]
        found += other_bits(start, expected)
        if case.launcher == "torchrun":  # has started the ranks once more itself
            again = replace(case.plan, attempt=1, fault="")
            notes_again = [harness.noted(again.notes(rank)) for rank in range(again.size)]
            if any(notes_again):
                self._time(case, start, notes_again)
                return found + of_resumed(case, start.notes, notes_again, expected)
            return found + [("torn", "torchrun does not start the ranks again")] * any(start.codes)
        resumed = Start(replace(case.plan, attempt=1, fault="", victims=()), case.launcher)
        found += [("hung", "in the second start")] * resumed.hung
        found += [("orphans", "in the second start")] * resumed.orphans
        return found + of_resumed(case, start.notes, resumed.notes, expected)


def other_bits(start: Start, expected: list[dict[int, str]]) -> list[tuple[str, str]]:
    """Until the fault."""
    return [
        ("wrong", f"rank {rank} has other bits at step {note['step']}")
        for rank, notes in enumerate(start.of("step"))
        for note in notes
        if note["digest"] != expected[rank].get(note["step"])
    ]


def unnamed(case: Case, start: Start) -> list[str]:
    """What ranks that were spared say, if it is not what happened."""
    plan, found = case.plan, []
    spawned = case.launcher in ("spawn", "fork")  # whoever started them has the error
    for rank, (errors, trained) in enumerate(zip(start.of("error"), start.of("trained"), strict=True)):
        error = errors[0] if errors else None
        words = f"rank {rank} ends with {error}"
        if plan.fault == "stall":
            if error is not None or not trained:
                found.append(words)
        elif rank in plan.victims and plan.fault in _LOSSES:
            continue
        elif trained and error is None:
            continue  # it was through
        elif plan.fault in (*_LOSSES, "raise") and rank not in plan.victims and plan.place != "set-up":
            if spawned:
                said = f"{start.log} {error}".lower()
                if not any(f"{who} {victim}" in said for who in ("rank", "process") for victim in plan.victims):
                    found.append(words)
            elif error is None or error["kind"] != "PeerLostError" or error["rank"] not in plan.victims:
                found.append(words)
        elif not spawned and (error is None or not fits(plan, error["kind"])):
            found.append(words)
    return found


def fits(plan: Plan, kind: str) -> bool:
    """May a rank that lives end with an error of this kind?"""
    return plan.place == "set-up" or kind == _KINDS.get(plan.fault, kind)


def of_resumed(case: Case, before: list[Notes], after: list[Notes], expected: list[dict[int, str]]) -> list[Any]:
    """How the next start went on."""
    saved = max(  # as a batch of an epoch begins, the save of the epoch before has ended
        (note["epoch"] * STEPS for notes in before for note in notes if note["what"] == "batch"), default=0
    )
    if all(any(note["what"] == "trained" for note in notes) for notes in before):
        saved = _EPOCHS * STEPS
    found = []
    for rank, notes in enumerate(after):
        begins = [note for note in notes if note["what"] == "begin"]
        if begins and not _got_through(notes):
            found.append(("torn", f"rank {rank} does not get to the end again"))
        steps = {note["step"]: note["digest"] for note in notes if note["what"] in ("begin", "step")}
        if not begins:
            if saved < _EPOCHS * STEPS:
                found.append(("torn", f"rank {rank} does not start again"))
            continue
        begin = begins[0]["step"]
        if begin < saved:
            found.append(("torn", f"rank {rank} begins with step {begin}, but {saved} was saved"))
        if case.plan.fault == "terminate":
            last = [note for note in before[rank] if note["what"] == "step"][-1:]
            if last and last[0]["step"] != begin and not any(note["what"] == "trained" for note in before[rank]):
                found.append(("torn", f"rank {rank} was stopped after step {last[0]['step']}, begins with {begin}"))
        if begin % STEPS:  # Lightning draws such an epoch anew
            if begin in expected[rank] and steps[begin] != expected[rank][begin]:
                found.append(("torn", f"rank {rank} has not the bits of step {begin}"))
            continue
        differ = [step for step, digest in steps.items() if step and digest != expected[rank].get(step)]
        if differ:
            found.append(("torn", f"rank {rank} has other bits at step {differ[0]}"))
        if max(steps) != _EPOCHS * STEPS:
            found.append(("torn", f"rank {rank} ended at step {max(steps)}"))
    return found


def of_survivors(case: Case, start: Start) -> list[tuple[str, str]]:
    """How those that were spared have gone on, and what they have saved."""
    plan, found = case.plan, list[tuple[str, str]]()
    ended = [rank for rank in range(plan.size) if rank not in plan.victims or plan.fault == "stall"]
    errors, trained = start.of("error"), start.of("trained")
    for rank in ended:
        said = errors[rank][0]["message"] if errors[rank] else ""
        takes_mean = plan.strategy.startswith("gossip") and "at the end of training" in said
        if not trained[rank] or (errors[rank] and not takes_mean):
            found.append(("wrong", f"rank {rank} does not go on: {errors[rank][:1]}"))
    if plan.fault == "freeze":
        for rank in plan.victims:
            if not trained[rank] and not (errors[rank] and errors[rank][0]["kind"] == "LeftBehindError"):
                found.append(("unnamed", f"rank {rank}, frozen, wakes and ends with {errors[rank][:1]}"))
    if found:
        return found
    behind = len(plan.victims) + 1 if plan.strategy.startswith("gossip") else 0
    found += wrong_means(start, plan.strategy, ended, plan.size)
    found += lost_samples(start, plan.size, behind)
    again = replace(plan, attempt=1, fault="", victims=(), policy="raise", size=len(ended), epochs=2 * _EPOCHS)
    resumed = Start(again, "environment")
    found += [("hung", "in the second start")] * resumed.hung
    had = [{note["step"]: note for note in start.of("step")[rank]} for rank in ended]
    # what an epoch's end has left undone after a loss, its checkpoint too, is dropped
    last = plan.step < (_EPOCHS - 1) * STEPS and plan.place != "any"
    for rank, begins in enumerate(resumed.of("begin")):
        if not begins or begins[0]["step"] not in had[rank] or not _got_through(resumed.notes[rank]):
            found.append(("torn", f"rank {rank} does not start again: {begins}"))
            continue
        if last and begins[0]["step"] != max(had[rank]):
            found.append(("torn", f"rank {rank} begins with step {begins[0]['step']} of {max(had[rank])}"))
        note, kept = begins[0], had[rank][begins[0]["step"]]
        # one rank compresses nothing: its residuals wait for others
        what = "digest" if kept["size"] == note["size"] > 1 else "weights"
        if note[what] != kept[what] and not (plan.strategy.startswith("gossip") and what == "weights"):
            found.append(("torn", f"rank {rank} has not the {what} of step {note['step']}"))
    return found


def _got_through(notes: Notes) -> bool:
    return bool(notes[-1]["what"] == "trained")


def _made(start: Start) -> list[list[dict[str, Any]]]:
    """Of each step in which ranks trained: the batches of those that made it."""
    batches: dict[int, list[dict[str, Any]]] = {}
    for notes in start.of("batch"):
        for note in notes:
            batches.setdefault(note["step"], []).append(note)
    made = []
    for _, of_step in sorted(batches.items()):
        world = max(note["world"] for note in of_step)
        made.append([note for note in of_step if note["world"] == world])
    return made


def wrong_means(start: Start, strategy: str, ended: Sequence[int], size: int) -> list[tuple[str, str]]:
    """Do the ranks have the same bits, and the means that one process computes over the batches of each step?"""
    trained = [start.of("trained")[rank][0] for rank in ended]
    if strategy.startswith("gossip"):
        return []
    found = []
    steps = [{note["step"]: note["weights"] for note in start.of("step")[rank]} for rank in ended]
    for step in sorted(set().union(*steps)):
        if len({mine[step] for mine in steps if step in mine}) > 1:
            found.append(("wrong", f"other bits after step {step}"))
    if strategy not in _TOLERANCES:
        return found
    model, data = Net(0), samples(size)
    optimizer = model.configure_optimizers()
    for batches in _made(start):
        optimizer.zero_grad()
        if len(batches) != batches[0]["size"]:
            found.append(("wrong", f"{len(batches)} of {batches[0]['size']} ranks made step {batches[0]['step']}"))
        for batch in batches:
            x, y, _ = data[batch["samples"]]
            (model.loss(x, y) / len(batches)).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), trained[0]["values"], strict=True):
        if not torch.allclose(mine, torch.tensor(theirs), rtol=1e-4, atol=_TOLERANCES[strategy]):
            far = float((mine.detach() - torch.tensor(theirs)).abs().max())
            found.append(("wrong", f"parameters are {far:.1e} from those of exact means"))
    return found


def lost_samples(start: Start, size: int, behind: int = 0) -> list[tuple[str, str]]:
    """Is each sample of each epoch trained on? In one epoch `behind` ranks that gossip may each leave out a batch."""
    drawn = Counter((note["epoch"], sample) for notes in _made(start) for note in notes for sample in note["samples"])
    found, every = [], size * STEPS * BATCH
    for epoch in range(_EPOCHS):
        once = sum(of == epoch for of, _ in drawn)
        total = sum(often for (of, _), often in drawn.items() if of == epoch)
        if once < every - behind * BATCH or total > every + size:
            found.append(("wrong", f"{once} of {every} samples of epoch {epoch} in {total} draws"))
        if once < every:
            behind = 0
    return found


def _row(name: str, counts: dict[str, Any], seconds: list[float], seed: int) -> Row:
    wrong = {kind: counts.get(kind, 0) for kind in ("hung", "wrong", "torn", "orphans", "unnamed")}
    return Row(
        benchmark="faults",
        case=name,
        seed=seed,
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
    parser.add_argument("--seed", type=int, default=0, help="of all numbers")
    only = "draw on until so many have this in 'what happens, launcher, on_peer_loss', as \"kill, torchrun\" has"
    parser.add_argument("--only", default="", metavar="WORDS", help=only)
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    options = parser.parse_args(given)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.faulted"])  # a start costs a fork
    scratch = Path(tempfile.mkdtemp(prefix="ringstrategy-faults-"))
    judge = Judge(scratch)
    drawn = (Case.draw(number, scratch, options.seed) for number in count(options.first))
    cases = list(islice((case for case in drawn if options.only in case.name), options.faults))
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, list[float]] = {}
    unclean = []
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = track(zip(cases, pool.map(judge, cases), strict=True), "faults", len(cases), transient=True)
        for case, found in outcomes:
            kind = f"{case.plan.fault}, {case.plan.policy}"
            counts.setdefault(kind, Counter()).update(["faults", *{wrong for wrong, _ in found}])
            seconds.setdefault(kind, []).extend([judge.seconds[case]] if case in judge.seconds else [])
            if found:
                unclean.append(f"{case}: {found}")
                print(unclean[-1], flush=True)
            else:
                shutil.rmtree(case.plan.folder)
    rows = [_row(name, dict(found), seconds[name], options.seed) for name, found in sorted(counts.items())]
    launchers = Counter(case.launcher for case in cases)
    notes = [
        f"launchers: {', '.join(f'{name} {often}' for name, often in launchers.most_common())}",
        f"{judge.late} had not come to their place, and struck at the end of training",
        *unclean,
    ]
    harness.publish(f"{len(cases)} faults, from number {options.first}", rows, options.out, notes)
    if unclean:
        sys.exit(f"{len(unclean)} faults were not clean: see {scratch}")
    shutil.rmtree(scratch)
